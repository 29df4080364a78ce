"""What a new run may begin with by --load, and that it stays so over a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import local_models
import pytest
import torch
from make import feed, loop_of, run
from rig import Rig
from safetensors.torch import load_file

from consumers.drain import Drain
from consumers.staleness import Limit
from pipeline.config import TrainConfig
from pipeline.errors import UsageError, WeightsError
from pipeline.ledger import Ledger
from pipeline.origin import weights_in
from trainer import checkpoint, cli, demo_model
from trainer.backends.torch import TorchBackend
from trainer.workshop import Workshop


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mine`, and `other`: of the same make with other weights."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("mine", "other")):
        demo_model.make(folder / name, seed)
    local_models.save("llama", folder / "llama")
    return folder


def backend(checkpoint: Path, **rules: Any) -> TorchBackend:
    return TorchBackend(TrainConfig(hf_checkpoint=checkpoint, device="cpu", **rules), True)


def saved(trained: TorchBackend, root: Path) -> Path:
    """A checkpoint after 400 steps of another run."""
    (root / ".trainer-1").mkdir(parents=True)
    ledger = Ledger(bytearray(b"\xff"), b"", b"", 8)
    found = checkpoint.Checkpoint(root / "00000400", 400, 7, ((5, 3),), 1, ledger)
    checkpoint.save(found, trained, Workshop(root, 1))
    return found.folder


def published(folder: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"weights/{version:08d}/model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def dies(drain: Drain, limit: Limit) -> None:
    """As a trainer that is killed, before its first step."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["a model's folder", "a checkpoint"])
@pytest.mark.parametrize("again", [{"resume": True}, {"auto_resume": True, "load": Path("gone by now")}])
def test_a_new_run_takes_weights_alone_and_goes_on_with_them(
    real: Rig, models: Path, tmp_path: Path, kind: str, again: dict[str, Any]
) -> None:
    """Steps, versions and prompts are its own: nothing of the checkpoint's ledger counts here."""
    start = models / "other" if kind == "a model's folder" else saved(backend(models / "other"), tmp_path / "old")
    original = load_file(models / "other" / "model.safetensors")
    out = tmp_path / "new"
    feed(real, 0, ends=True)
    rules = {"train_backend": "torch", "num_rollout": 3}
    first = loop_of(real, out, backend(models / "mine"), load=start, **rules)  # type: ignore[arg-type]
    first.rollout = dies
    with pytest.raises(KeyboardInterrupt):
        run(first)
    assert (first.now.step, first.now.version) == (0, 1)
    assert same(published(out, 1), original)
    assert not any(checkpoint.read(out / "checkpoints/00000000").ledger.committed)
    second = loop_of(real, out, backend(models / "mine"), take_over=True, **rules, **again)  # type: ignore[arg-type]
    run(second)
    assert same(published(out, second.now.version), original)


def test_without_load_nothing_is_saved_before_the_first_step(real: Rig, models: Path, tmp_path: Path) -> None:
    feed(real, 0, ends=True)
    run(loop_of(real, tmp_path, backend(models / "mine"), train_backend="torch", num_rollout=3))  # type: ignore[arg-type]
    assert checkpoint.newest(tmp_path / "checkpoints") is None


def test_a_model_of_another_make_is_refused(models: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--load .*llama: another make of model .* is \[48, 32\], and must be \[22, 64\]"
    ):
        backend(models / "mine").load_weights(models / "llama")


def test_adapters_go_on_from_adapters_alone(models: Path, tmp_path: Path) -> None:
    adapted = backend(models / "mine", lora_rank=2)
    with pytest.raises(UsageError, match="give it as --hf-checkpoint"):
        adapted.load_weights(models / "other")
    with pytest.raises(WeightsError, match="give the same --lora-"):
        adapted.load_weights(saved(backend(models / "mine"), tmp_path / "full") / "model")
    adapted.load_weights(saved(backend(models / "mine", lora_rank=2), tmp_path / "adapters") / "model")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "neither a checkpoint of Millpond nor a model"),
        (("00000020/state.json", "00000040/state.json"), "it holds checkpoints; give one of them, such as .*/00000040"),
        (("checkpoints/00000020/state.json",), "such as .*/checkpoints/00000020"),
        (("latest_checkpointed_iteration.txt",), "a Megatron checkpoint; --train-backend megatron takes it"),
        (("release/common.pt",), "a Megatron checkpoint; .* else convert it"),
        (("iter_0000010/mp_rank_00/model_optim_rng.pt",), "a Megatron checkpoint; .* else convert it"),
        ((".metadata", "__0_0.distcp"), "a Megatron checkpoint; .* else convert it"),
        (("adapter_config.json", "adapter_model.safetensors"), "adapters alone; merge them"),
    ],
)
def test_what_load_cannot_take_is_told_with_what_to_do(tmp_path: Path, files: tuple[str, ...], said: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    for backend in ("torch", "megatron"):
        with pytest.raises(UsageError, match=said):
            weights_in(tmp_path, backend)


@pytest.mark.parametrize(
    ("said", "folder"),
    [("10\n", "iter_0000010"), ("release", "release"), (None, ".")],
    ids=["by number", "release", "itself"],
)
def test_megatrons_own_checkpoint_is_found(tmp_path: Path, said: str | None, folder: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    for file in (".metadata", "common.pt"):
        (tmp_path / folder / file).touch()
    if said:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(said)
    assert weights_in(tmp_path, "megatron") == tmp_path / folder
    with pytest.raises(UsageError, match="--train-backend megatron takes it"):
        weights_in(tmp_path, "torch")


def test_a_mistake_is_told_before_anything_is_spent(models: Path, tmp_path: Path) -> None:
    at = ("--hf-checkpoint", str(models / "mine"), "--run", "x", "--redis-url", "unix:///nowhere", "--num-rollout", "1")
    with pytest.raises(UsageError, match="there is no such folder"):
        cli.main([*at, "--out", str(tmp_path / "out"), "--load", str(tmp_path / "nothing")])
    assert not (tmp_path / "out").exists()
