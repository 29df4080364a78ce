"""A step is the same however it is cut up, kept in memory or spread over ranks; and what bfloat16 leaves of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainer_groups import random_groups

from pipeline.config import TrainConfig
from trainer import demo_model
from trainer.backends.sharded import add_up, layers, named
from trainer.backends.torch import TorchBackend
from trainer.ranks import Ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "demo"
    demo_model.make(folder, 0)
    return folder


def backend(checkpoint: Path, **rules: Any) -> TorchBackend:
    return TorchBackend(TrainConfig(hf_checkpoint=checkpoint, device="cpu", **rules), True)


def weights(trained: TorchBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named(trained._model.module)}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


BY_GRADIENT = {"adam_eps": 1.0, "lr": 1.0}
"Adam's first step is then proportional to the gradient."

WAYS: dict[str, dict[str, Any]] = {
    "a sequence a pass": {"use_dynamic_batch_size": False},
    "five a pass": {"use_dynamic_batch_size": False, "micro_batch_size": 5},
    "gradient checkpointing": {"gradient_checkpointing": True, "max_tokens_per_gpu": 60},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mean", ["token", "sequence"])
def test_a_step_is_the_same_however_its_passes_are_made(checkpoint: Path, way: str, mean: str) -> None:
    groups = random_groups(6, 4)
    plain, other = (backend(checkpoint, loss_aggregation=mean, **BY_GRADIENT, **more) for more in ({}, WAYS[way]))
    one, again = plain.train(groups, 0), other.train(groups, 0)
    assert again == pytest.approx(one, abs=1e-6)
    assert one["train/grad_norm"] > 1e-3
    assert distance(weights(plain), weights(other)) < 1e-6


def test_with_gradient_checkpointing_layers_are_worked_out_again(checkpoint: Path) -> None:
    """Two passes: one that keeps the layers' inputs only, and the other for the gradient."""
    found = []
    for again in (False, True):
        trained, calls = backend(checkpoint, gradient_checkpointing=again), list[int]()
        for layer in layers(trained._model.module):
            layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        trained.train(random_groups(2, 4), 0)
        found.append(len(calls))
    assert found == [2, 4]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))


class ManyHeads(nn.Module):
    """Two blocks, which its longest list of modules is not."""

    def __init__(self, no_split: list[str] | None) -> None:
        super().__init__()
        self._no_split_modules = no_split
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(12))
        self.blocks = nn.ModuleList(Block() for _ in range(2))


@pytest.mark.parametrize("no_split", [["Block", "Linear"], ["Block"], ["Another"], None])
def test_a_models_blocks_are_what_it_says_must_not_be_split_or_what_weighs_most(
    no_split: list[str] | None,
) -> None:
    found = ManyHeads(no_split)
    expected = [*found.heads, *found.blocks] if no_split == ["Block", "Linear"] else [*found.blocks]
    assert layers(found) == expected


def test_steps_below_the_resolution_of_bfloat16_add_up_in_the_weights_behind(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    trained = backend(tmp_path / "half", bf16=True, lr=1e-6, adam_beta1=1e-9, adam_beta2=1e-9)
    before = weights(trained)
    groups = random_groups(2, 4)
    assert trained.train(groups, 0)["train/grad_norm"] > 0
    name = "model.norm.weight"  # ones, which bfloat16 has next to 0.996: 4,000 steps of 1e-6
    moved = (weights(trained)[name] - before[name]).abs()
    assert float(moved.max()) == pytest.approx(1e-6, rel=0.1)
    assert torch.equal(weights(trained)[name].bfloat16(), before[name].bfloat16())
    trained.train(groups, 1)
    assert float((weights(trained)[name] - before[name]).abs().max()) == pytest.approx(2e-6, rel=0.1)
    (tmp_path / "out").mkdir()
    trained.save_weights(tmp_path / "out")
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_passes_in_bfloat16_give_about_the_step_of_float32(checkpoint: Path) -> None:
    groups = random_groups(6, 4)
    norms = [backend(checkpoint, bf16=bf16).train(groups, 0)["train/grad_norm"] for bf16 in (True, False, None)]
    assert norms[0] != norms[1] == norms[2]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)


class Three(Ranks):
    """Three ranks that have the same."""

    def total(self, tensor: Tensor) -> Tensor:
        self.told += 1
        return 3 * tensor


@pytest.mark.parametrize(("bucket", "exchanges"), [(1, 4), (10, 3), (100, 2)])
def test_gradients_are_added_up_in_buckets_and_none_is_made_up(bucket: int, exchanges: int) -> None:
    used = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(4))]
    for n, parameter in enumerate(used):
        parameter.grad = torch.full_like(parameter, float(n + 1))
    unused, frozen = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3), requires_grad=False)
    ranks = Three()
    add_up([*used, unused, frozen], ranks, bucket)
    assert [p.grad.tolist() for p in used if p.grad is not None] == [[[3.0] * 3] * 2, [6.0] * 5, [9.0] * 4]
    assert unused.grad is frozen.grad is None
    assert ranks.told == exchanges
