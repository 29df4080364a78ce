"""Adapters alone are trained: on models of several makes, with the bare model as the reference, published merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import local_models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from trainer_groups import random_groups

from pipeline.config import TrainConfig
from pipeline.errors import UsageError, WeightsError
from trainer.backends import lora
from trainer.backends.lora import adapted, own
from trainer.backends.sharded import named
from trainer.backends.torch import TorchBackend

KINDS = ("qwen3", "tied", "gpt2", "moe")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local_models.save_all(KINDS, tmp_path_factory.mktemp("models"))


def backend(checkpoint: Path, **rules: Any) -> TorchBackend:
    settings = {"lora_rank": 4, "lr": 1e-2, "device": "cpu"} | rules
    return TorchBackend(TrainConfig(hf_checkpoint=checkpoint, **settings), True)


def published(trained: TorchBackend, folder: Path) -> dict[str, Tensor]:
    folder.mkdir()
    trained.save_weights(folder)
    return load_file(folder / "model.safetensors")


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits.float()


IDS = torch.tensor([[3, 7, 11, 5, 2, 9], [4, 4, 19, 20, 8, 6]])


@pytest.mark.parametrize("kind", ["demo", *KINDS])
def test_only_adapters_move_and_what_is_published_is_the_model_with_them(
    models: Path, tmp_path: Path, kind: str
) -> None:
    trained = backend(models / kind)
    module = trained._model.module
    frozen = {name: tensor.clone() for name, tensor in named(module) if ".lora_" not in name}
    original = load_file(models / kind / "model.safetensors")
    before = published(trained, tmp_path / "before")
    assert before.keys() == original.keys()
    assert all(torch.equal(before[name], original[name]) for name in original)
    for step in range(2):
        trained.train(random_groups(3, 4, seed=step), step)
    after = published(trained, tmp_path / "after")
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in named(module) if name in frozen)
    moved = {name for name in original if not torch.equal(after[name], original[name])}
    assert len(moved) == len(adapted(module)) >= 8
    reloaded = local_models.load(tmp_path / "after")
    with torch.no_grad():
        own = trained._model.logits(IDS, torch.arange(IDS.numel()))
    assert torch.allclose(logits(reloaded, IDS).flatten(0, 1), own, atol=1e-4)
    assert not torch.allclose(logits(reloaded, IDS), logits(local_models.load(models / kind), IDS), atol=1e-3)


@pytest.mark.parametrize("kind", ["demo", "tied", "qwen3"])
def test_frozen_layers_keep_their_checkpoints_dtype_where_passes_are_in_it(
    models: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the memory, the same steps to the bit, the same weights published; a float32 checkpoint loses nothing."""
    local_models.load(models / kind).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    slim = backend(tmp_path / "half", bf16=True)
    dtypes = {name: tensor.dtype for name, tensor in named(slim._model.module)}
    layers = [name for name in dtypes if ".base_layer.weight" in name]
    assert len(layers) >= 8
    assert {dtypes[name] for name in layers} == {torch.bfloat16}
    rest = {
        dtype for name, dtype in dtypes.items() if name not in layers and not name.endswith((".bias", "head.weight"))
    }
    assert rest == {torch.float32}
    with monkeypatch.context() as patched:
        patched.setattr(lora, "slim", lambda module, dtype: None)
        wide = backend(tmp_path / "half", bf16=True)
    assert {tensor.dtype for _, tensor in named(wide._model.module)} == {torch.float32}
    for step in range(2):
        groups = random_groups(3, 4, seed=step)
        assert slim.train(groups, step) == wide.train(groups, step)
    found, expected = published(slim, tmp_path / "slim"), published(wide, tmp_path / "wide")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    whole = backend(models / kind, bf16=True)
    assert {tensor.dtype for _, tensor in named(whole._model.module)} == {torch.float32}


def test_adapters_are_those_of_peft(models: Path, tmp_path: Path) -> None:
    """Its own way of merging gives the weights that are published."""
    trained = backend(models / "demo", lora_alpha=3.0, lora_target_modules="q_proj, down_proj")
    trained.train(random_groups(3, 4), 0)
    sent = published(trained, tmp_path / "sent")
    places = {name.split(".")[-1] for name in adapted(trained._model.module)}
    assert places == {"q_proj", "down_proj"}
    for name, layer in adapted(trained._model.module).items():
        layer.merge()
        assert torch.allclose(layer.get_base_layer().weight, sent[f"{name}.weight"], atol=1e-7)


def test_what_is_rewarded_becomes_likelier(models: Path) -> None:
    groups = random_groups(4, 4)
    trained = backend(models / "demo", lr=5e-3, lora_rank=8)
    for step in range(30):
        figures = trained.train(groups, step)
    assert figures["train/pg_loss"] < -0.1  # 0 at first: advantages of a group add up to 0 over samples
    assert trained.train(groups, 30)["train/ppo_kl"] == 0


def test_the_reference_is_the_model_without_adapters_and_no_second_one(models: Path) -> None:
    rules = {"use_kl_loss": True, "kl_loss_type": "k1", "kl_coef": 0.01}
    trained = backend(models / "demo", **rules)
    apart = backend(models / "demo", **rules, ref_load=models / "demo")
    for step in range(3):
        groups = random_groups(3, 4, seed=step)
        one, two = trained.train(groups, step), apart.train(groups, step)
        assert one == pytest.approx(two, abs=1e-7)
        assert (abs(one["train/kl_loss"]) > 1e-5) == (step > 0)
    assert {p.requires_grad for n, p in trained._model.module.named_parameters() if ".lora_" in n} == {True}


def test_a_checkpoint_holds_adapters_and_what_the_optimizer_knows_of_them_and_resumes_to_the_bit(
    models: Path, tmp_path: Path
) -> None:
    first, second = backend(models / "demo"), backend(models / "demo", seed=77)
    for step in range(2):
        first.train(random_groups(3, 4, seed=step), step)
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved")
    names = set(load_file(tmp_path / "saved" / "state-00001.safetensors"))
    assert names - {"rng"} == {f"{k}.{name}" for k in ("model", "exp_avg", "exp_avg_sq") for name, _ in own_of(first)}
    second.load(tmp_path / "saved")
    groups = random_groups(3, 4, seed=9)
    assert first.train(groups, 2) == second.train(groups, 2)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(own_of(first), own_of(second), strict=True))


def own_of(trained: TorchBackend) -> list[tuple[str, Tensor]]:
    return list(own(trained._model.module))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["demo", "gpt2"])
def test_a_checkpoint_has_the_adapters_as_peft_loads_them(models: Path, tmp_path: Path, kind: str) -> None:
    from peft import PeftModel

    trained = backend(models / kind)
    trained.train(random_groups(3, 4), 0)
    (tmp_path / "saved").mkdir()
    trained.save(tmp_path / "saved")
    loaded = PeftModel.from_pretrained(local_models.load(models / kind), tmp_path / "saved/adapter")
    with torch.no_grad():
        own = trained._model.logits(IDS, torch.arange(IDS.numel()))
    assert torch.allclose(logits(loaded, IDS).flatten(0, 1), own, atol=1e-5)
    assert not torch.allclose(logits(local_models.load(models / kind), IDS).flatten(0, 1), own, atol=1e-3)


@pytest.mark.parametrize("rules", [{"lora_rank": 0}, {"lora_rank": 8}, {"lora_alpha": 32.0}])
def test_a_checkpoint_of_other_adapters_is_refused(models: Path, tmp_path: Path, rules: dict[str, Any]) -> None:
    (tmp_path / "saved").mkdir()
    backend(models / "demo").save(tmp_path / "saved")
    with pytest.raises(WeightsError, match="give the same --lora-"):
        backend(models / "demo", **rules).load(tmp_path / "saved")


@pytest.mark.parametrize(
    ("kind", "targets", "said"),
    [
        ("demo", "q_proj,c_attn", "no linear layer 'c_attn'; there are: down_proj, gate_proj, .*q_proj"),
        ("demo", "embed_tokens", "no linear layer 'embed_tokens'"),
        ("tied", "lm_head", "the head has the embeddings' weights"),
    ],
)
def test_layers_that_cannot_have_one_are_refused(models: Path, kind: str, targets: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        backend(models / kind, lora_target_modules=targets)


def test_a_head_of_its_own_may_have_one(models: Path, tmp_path: Path) -> None:
    trained = backend(models / "demo", lora_target_modules="lm_head")
    figures = trained.train(random_groups(3, 4), 0)
    assert figures["train/grad_norm"] > 0
    sent = published(trained, tmp_path / "sent")
    original = load_file(models / "demo" / "model.safetensors")
    assert [n for n in original if not torch.equal(sent[n], original[n])] == ["lm_head.weight"]
    assert np.isfinite(list(figures.values())).all()
