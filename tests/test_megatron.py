"""The megatron backend makes the steps of the torch backend, however the model is cut, and goes on from any cut."""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_script import job
from safetensors.torch import load_file
from test_ranks import torchrun
from trainer_groups import group, random_groups, sample, sequence

from pipeline.config import TrainConfig
from pipeline.errors import MillpondError, UsageError, WeightsError
from pipeline.origin import weights_in
from producers.checkpoint_weights import as_folder
from trainer import backends
from trainer.backends.base import Backend
from trainer.outline import saved

TESTS = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if find_spec("megatron") is None:
        why = "there is no megatron-core: pip install 'millpond[megatron]'"
        (pytest.fail if "MILLPOND_CI" in os.environ else pytest.skip)(why)


KINDS: dict[str, dict[str, Any]] = {
    "llama": {"pad_token_id": 0},
    "llama, longer": {"rope_type": "llama3", "factor": 8.0, "head_dim": 24},
    "qwen2": {"num_hidden_layers": 4},
    "qwen2, tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 24, "vocab_size": 23},
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def model(folder: Path, name: str, seed: int = 0) -> Path:
    """A tiny model whose biases and norms are not what they are made as."""
    from transformers import AutoConfig, AutoModelForCausalLM

    changes = dict(KINDS[name])
    rope: dict[str, Any] = {"rope_theta": 1e4, "rope_type": changes.pop("rope_type", "default")}
    if "factor" in changes:
        rope |= {**LLAMA3, "factor": changes.pop("factor")}
    settings = {
        "vocab_size": 22,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
        "pad_token_id": None,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name.partition(",")[0], **(settings | changes))
    found = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    found.save_pretrained(folder)
    return folder


RULES = {"global_batch_size": 5, "entropy_coef": 0.01, "max_tokens_per_gpu": 40, "weight_decay": 0.1}
FULL = {"kl_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1, "rollout_temperature": 0.7, "max_tokens_per_gpu": 24}


def lines(folder: Path) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((folder / "lines.json").read_text())
    return found


def same(one: Path, other: Path, close: float = 1e-4) -> None:
    """Figures and weights after three steps. A large epsilon made Adam's steps proportional to the gradient, at a
    learning rate of 0.1."""
    for mine, theirs in zip(lines(one), lines(other), strict=True):
        assert theirs == pytest.approx(mine, rel=close, abs=1e-6)
        assert mine["train/grad_norm"] > 1e-3
    a, b = (load_file(folder / "sent.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    assert max(float((a[name].float() - b[name].float()).abs().max()) for name in a) < close / 10
    written = load_file(other / "save_weights" / "model.safetensors")
    assert written.keys() == b.keys()
    assert all(torch.equal(written[name], b[name]) for name in b)


@pytest.mark.parametrize("name", KINDS)
def test_one_process_makes_the_steps_of_the_torch_backend(tmp_path: Path, name: str) -> None:
    rules = {**RULES, "hf_checkpoint": str(model(tmp_path / "model", name))}
    if name == "llama":
        rules |= {**FULL, "ref_load": str(model(tmp_path / "other", name, seed=1)), "gradient_checkpointing": True}
    job(rules, str(tmp_path / "torch"))
    job({**rules, "train_backend": "megatron"}, str(tmp_path / "megatron"))
    same(tmp_path / "torch", tmp_path / "megatron")


@pytest.mark.parametrize("kind", ["a model's folder", "a checkpoint"])
def test_a_new_run_may_begin_with_other_weights(tmp_path: Path, kind: str) -> None:
    rules = {"train_backend": "megatron", "device": "cpu", "adam_eps": 1.0, "lr": 0.1}

    def steps(name: str, seed: int, load: Path | None = None) -> list[dict[str, float]]:
        config = TrainConfig(hf_checkpoint=model(tmp_path / name, "qwen3", seed), **rules)
        trained, _ = backends.BUILDERS["megatron"](config, True)
        if load:
            trained.load_weights(load)
        (tmp_path / name / "state").mkdir(parents=True)
        trained.save(tmp_path / name / "state")
        found = [trained.train(random_groups(3, 4, seed=step), step) for step in range(2)]
        trained.close()
        return found

    expected = steps("other", 1)
    assert steps("mine", 0, tmp_path / ("other" if kind == "a model's folder" else "other/state")) == expected


def by_megatron_lm(trained: Backend, folder: Path) -> None:
    """A checkpoint of this model as Megatron-LM has it: a vocabulary filled up to 128, its settings as an object."""
    from megatron.core import dist_checkpointing

    from trainer.backends.megatron_shim import on
    from trainer.backends.megatron_state import Writer

    with on(torch.device("cpu")):
        tensors = trained._model.sharded_state_dict()  # type: ignore[attr-defined]
        assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in {t.key for t in tensors.values()}
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            full = torch.zeros(128, tensors[name].data.shape[1])
            full[: len(tensors[name].data)] = tensors[name].data
            shapes = {"local_shape": full.shape, "global_shape": full.shape}
            tensors[name] = replace(tensors[name], data=full, **shapes)
        (folder / "iter_0000010").mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("10")
        content = {"model": tensors, "args": Namespace(lr=1.0), "iteration": 10, "checkpoint_version": 3.0}
        dist_checkpointing.save(content, folder / "iter_0000010", sharded_strategy=Writer("torch_dist", 1))


def test_a_new_run_may_begin_with_a_checkpoint_of_megatron_lm(tmp_path: Path) -> None:
    def built(name: str, seed: int) -> Backend:
        config = TrainConfig(
            hf_checkpoint=model(tmp_path / name, "qwen3", seed), train_backend="megatron", device="cpu"
        )
        return backends.BUILDERS["megatron"](config, True)[0]

    other = built("other", 1)
    by_megatron_lm(other, tmp_path / "lm")
    expected = other.train(random_groups(3, 4, seed=0), 0)
    other.close()
    mine = built("mine", 0)
    mine.load_weights(weights_in(tmp_path / "lm", "megatron"))
    assert mine.train(random_groups(3, 4, seed=0), 0) == expected
    mine.close()


TENSOR, STAGES = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
POSITIONS = {**TENSOR, "sequence_parallel": True}
CUTS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "tensors": ("llama", {**TENSOR, **FULL}),
        "tensors, words left over": ("qwen3", TENSOR),
        "tensors, positions": ("llama", {**POSITIONS, "gradient_checkpointing": True}),
        "layers": ("qwen2", STAGES),
        "layers, tied": ("qwen2, tied", {**STAGES, **FULL}),
    },
    4: {
        "tensors, replicas": ("llama", {**TENSOR, **FULL, "gradient_checkpointing": True}),
        "tensors, positions, layers": ("qwen3", {**POSITIONS, **STAGES}),
    },
}


@pytest.mark.parametrize("ranks", CUTS)
def test_a_model_that_is_cut_makes_the_steps_of_the_torch_backend(tmp_path: Path, ranks: int) -> None:
    """And what it has learned is gone on with by one process."""
    jobs: list[dict[str, Any]] = []
    for cut, (name, changes) in CUTS[ranks].items():
        rules = {**RULES, **changes, "hf_checkpoint": str(model(tmp_path / cut / "model", name))}
        if "kl_coef" in rules:
            rules["ref_load"] = str(model(tmp_path / cut / "other", name, seed=1))
        jobs.append({"rules": {**rules, "train_backend": "megatron"}, "out": str(tmp_path / cut / "cut")})
    done = torchrun(TESTS / "megatron_script.py", json.dumps(jobs), ranks=ranks)
    assert done.returncode == 0, done.stderr[-5000:]
    for each in jobs:
        folder = Path(each["out"]).parent
        whole = {name: value for name, value in each["rules"].items() if name not in {*POSITIONS, *STAGES}}
        torch_rules = {**whole, "train_backend": "torch"}
        job(torch_rules, str(folder / "torch"))
        same(folder / "torch", folder / "cut")
        job(torch_rules, str(folder / "torch on"), str(folder / "torch" / "save"), steps=(1,))
        job(whole, str(folder / "on"), str(folder / "cut" / "save"), steps=(1,))
        same(folder / "torch on", folder / "on")


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Any]:
    """A backend by its changes to the rules; there is one at a time, and none after the test."""
    open_ones: list[Backend] = []

    def made(name: str = "qwen3", **changes: Any) -> Backend:
        folder = tmp_path / "model"
        checkpoint = folder if folder.exists() else model(folder, name)
        rules = {"train_backend": "megatron", "hf_checkpoint": checkpoint, "lr": 1e-2, "device": "cpu", **changes}
        while open_ones:
            open_ones.pop().close()
        open_ones.append(backends.build(TrainConfig(**rules), True))
        return open_ones[-1]

    yield made
    while open_ones:
        open_ones.pop().close()


def weights(backend: Backend) -> dict[str, torch.Tensor]:
    return {piece.name: tensor.clone() for piece, tensor in zip(backend.outline(), backend.pieces(), strict=True)}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_checkpoint_goes_in_and_out_bit_by_bit(trained: Any, tmp_path: Path, bf16: bool) -> None:
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(model(tmp_path / "model", "qwen2, tied"))
    made.to(torch.bfloat16 if bf16 else torch.float32).save_pretrained(tmp_path / "model")
    backend = trained(bf16=bf16)
    (tmp_path / "out").mkdir()
    backend.save_weights(tmp_path / "out")
    before, after = (load_file(tmp_path / where / "model.safetensors") for where in ("model", "out"))
    assert equal(before, after)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16 if bf16 else torch.float32}
    assert sorted(backend.outline()) == sorted(saved(tmp_path / "out"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert equal(loaded.state_dict(), made.state_dict())


def test_with_bfloat16_weights_small_steps_are_not_lost(trained: Any) -> None:
    """A step of 1e-4 is less than what bfloat16 tells apart at 1; the float32 weights add them up."""
    backend = trained(bf16=True, lr=1e-4, adam_beta1=0.1)
    before = weights(backend)["model.norm.weight"]
    for step in range(60):
        backend.train(random_groups(2, 4), step)
    assert float((weights(backend)["model.norm.weight"] - before).abs().max()) > 2e-3


def test_nothing_to_learn_moves_no_weight_by_a_bit(trained: Any) -> None:
    backend = trained(weight_decay=0.1)
    backend.train(random_groups(2, 4), 0)  # from here on Adam has momentum
    before = weights(backend)
    q = sequence([3, 4], [5, 6])
    figures = backend.train([group(0, *(sample(i, 0.5, q) for i in range(3)))], 1)
    assert equal(before, weights(backend))
    assert figures["train/entropy"] > 1
    assert figures["train/grad_norm"] == figures["train/skipped"] == 0


def test_a_loss_that_is_not_finite_is_skipped_and_leaves_nothing_behind(trained: Any) -> None:
    backend = trained()
    backend.train(random_groups(2, 4), 0)
    before = weights(backend)
    broken = [group(0, *(sample(i, float(i), sequence([3, 4], [5, 6], logprob=math.nan)) for i in range(2)))]
    assert backend.train(broken, 1)["train/skipped"] == 1
    assert equal(before, weights(backend))
    assert backend.train(random_groups(2, 4), 2)["train/skipped"] == 0
    backend.train(broken, 3)
    backend.train(broken, 4)
    with pytest.raises(MillpondError, match="3 times in a row"):
        backend.train(broken, 5)


def test_a_restored_trainer_makes_the_same_next_step_with_its_own_settings(trained: Any, tmp_path: Path) -> None:
    backend = trained(lr_warmup_iters=10, global_batch_size=6)
    (tmp_path / "begun").mkdir()
    backend.save(tmp_path / "begun")  # before there is anything that an optimizer knows
    first = [backend.train(random_groups(4, 4, seed=step), step) for step in range(2)]
    (tmp_path / "saved").mkdir()
    backend.save(tmp_path / "saved")
    then = backend.train(random_groups(4, 4, seed=9), 2)
    after = weights(backend)
    backend.load(tmp_path / "saved")
    assert backend.train(random_groups(4, 4, seed=9), 2) == then
    assert equal(weights(backend), after)
    backend.load(tmp_path / "begun")
    assert [backend.train(random_groups(4, 4, seed=step), step) for step in range(2)] == first
    other = trained(lr_warmup_iters=20, global_batch_size=6)
    other.load(tmp_path / "saved")
    assert other.train(random_groups(4, 4, seed=9), 2)["train/lr"] == pytest.approx(then["train/lr"] / 2)


def test_a_state_that_is_missing_damaged_or_of_another_backend_is_refused(trained: Any, tmp_path: Path) -> None:
    backend = trained()
    for name in ("saved", "empty", "torch"):
        (tmp_path / name).mkdir()
    with pytest.raises(WeightsError, match="no training state"):
        backend.load(tmp_path / "empty")
    backend.save(tmp_path / "saved")
    (tmp_path / "torch" / "state.json").write_text('{"updates": 0, "tensors": {}}')
    with pytest.raises(WeightsError, match="of --train-backend torch"):
        backend.load(tmp_path / "torch")
    (tmp_path / "saved" / "__0_0.distcp").write_bytes(b"junk")
    with pytest.raises(WeightsError, match="of another model, or damaged"):
        backend.load(tmp_path / "saved")


@pytest.mark.parametrize("bf16", [False, True])
def test_a_checkpoint_is_a_models_folder_for_who_evaluates_it(
    tmp_path: Path, bf16: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the backend would have published it, whatever the model it was begun with, and wherever it is done."""
    rules = {"train_backend": "megatron", "device": "cpu", "lr": 0.1, "bf16": bf16}
    begun = model(tmp_path / "model", "qwen3")
    trained, _ = backends.BUILDERS["megatron"](TrainConfig(hf_checkpoint=begun, **rules), True)
    trained.train(random_groups(3, 4, seed=1), 0)
    for name in ("point/model", "published"):
        (tmp_path / name).mkdir(parents=True)
    trained.save(tmp_path / "point/model")
    trained.save_weights(tmp_path / "published")
    trained.close()
    capfd.readouterr()
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with as_folder(tmp_path / "point", begun) as folder:
        assert capfd.readouterr() == ("", "")  # a table or JSON comes after it
        found, wanted = (load_file(at / "model.safetensors") for at in (folder, tmp_path / "published"))
        assert (folder / "config.json").is_file()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    first = load_file(begun / "model.safetensors")
    assert not all(torch.equal(found[name], first[name]) for name in first)


def test_what_is_wrong_with_a_checkpoint_to_be_evaluated_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "point/model").mkdir(parents=True)
    (tmp_path / "point/model/state.json").write_text(json.dumps({"megatron": "0.1", "updates": 1}))
    with (
        pytest.raises(UsageError, match=r"^\S*point: \S*point/model: a training state of another model, or damaged"),
        as_folder(tmp_path / "point", model(tmp_path / "model", "qwen3")),
    ):
        pass
