"""Published weights: what is read, and what is refused without harm."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from local_models import check, load, plain_logits, policy, request, running, save
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import WeightsError
from pipeline.types import Policy
from producers.engines.local_weights import read

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def edited(source: Path, target: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy of `source` with other tensors."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("kind", ["qwen3", "tied", "moe"])
def test_after_an_update_the_new_weights_sample_under_every_name_they_are_saved(kind: str, models: Path) -> None:
    """Tied tensors are stored once; experts are stored one by one and run fused."""
    old, new, each = save(kind, models / kind), save(kind, models / f"{kind}-new", seed=1), request(1, 5, 20)

    async def main() -> None:
        async with running(old) as engine:
            assert engine.version is None
            await engine.load(policy(7, new))
            done = await engine.generate(each)
            assert [span.version for span in done.versions] == [7]
            check(plain_logits(load(new), each, done), each, done)

    asyncio.run(main())


def test_shards_are_read_together(models: Path, tmp_path: Path) -> None:
    source = save("qwen3", models / "qwen3")
    tensors = sorted(load_file(source / "model.safetensors").items())
    save_file(dict(tensors[::2]), tmp_path / "model-00001-of-00002.safetensors")
    save_file(dict(tensors[1::2]), tmp_path / "model-00002-of-00002.safetensors")
    assert read(tmp_path, load(source).state_dict()).keys() == dict(tensors).keys()


def test_weights_of_another_dtype_are_cast_to_the_models(models: Path, tmp_path: Path) -> None:
    source, each = save("qwen3", models / "qwen3"), request(1, 5, 10)
    half = edited(source, tmp_path / "half", lambda t: t.update({k: v.to(torch.bfloat16) for k, v in t.items()}))

    async def main() -> None:
        async with running(source) as engine:
            await engine.load(policy(1, half))
            done = await engine.generate(each)
            check(plain_logits(load(half).float(), each, done), each, done)

    asyncio.run(main())


def test_refused_weights_leave_the_old_ones_serving(models: Path, tmp_path: Path) -> None:
    source, each = save("qwen3", models / "qwen3"), request(1, 5, 10)
    norm = "model.norm.weight"
    refused = {
        "no \\*.safetensors there": tmp_path / "vanished",
        "missing: model.norm.weight": edited(source, tmp_path / "a", lambda t: t.pop(norm)),
        "unexpected keys: surplus": edited(source, tmp_path / "b", lambda t: t.update(surplus=torch.ones(1))),
        "norm.weight has the shape \\[3\\]": edited(source, tmp_path / "c", lambda t: t.update({norm: torch.ones(3)})),
        "garbled.*safetensors: ": tmp_path / "garbled",
    }
    (tmp_path / "garbled").mkdir()
    (tmp_path / "garbled" / "model.safetensors").write_bytes(b"not tensors")

    async def main() -> None:
        async with running(source) as engine:
            await engine.load(policy(4, source))
            for why, folder in refused.items():
                with pytest.raises(WeightsError, match=why):
                    await engine.load(policy(5, folder))
            with pytest.raises(WeightsError, match="names no weights"):
                await engine.load(Policy(5, "", "hf", "", 0, 0.0))
            done = await engine.generate(each)
            assert [span.version for span in done.versions] == [4]
            check(plain_logits(load(source), each, done), each, done)

    asyncio.run(main())


def test_an_older_version_is_never_loaded_and_the_same_again_is(models: Path) -> None:
    source, other = save("qwen3", models / "qwen3"), save("qwen3", models / "qwen3-new", seed=1)

    async def main() -> None:
        async with running(source) as engine:
            await engine.load(policy(4, source))
            with pytest.raises(WeightsError, match="never goes back to version 3"):
                await engine.load(policy(3, source))
            await engine.load(policy(4, other))
            assert engine.version == 4
            done = await engine.generate(request(1, 5, 10))
            check(plain_logits(load(other), request(1, 5, 10), done), request(1, 5, 10), done)

    asyncio.run(main())


def test_tied_tensors_may_be_stored_twice_but_must_agree(models: Path, tmp_path: Path) -> None:
    source = save("tied", models / "tied")
    name, twin = "model.embed_tokens.weight", "lm_head.weight"
    twice = edited(source, tmp_path / "a", lambda t: t.update({twin: t[name].clone()}))
    differ = edited(source, tmp_path / "b", lambda t: t.update({twin: t[name] + 1}))
    head_only = edited(source, tmp_path / "c", lambda t: t.update({twin: t.pop(name)}))
    state = load(source).state_dict()
    assert np.array_equal(read(twice, state)[twin], read(source, state)[name])
    assert np.array_equal(read(head_only, state)[twin], read(source, state)[name])
    with pytest.raises(WeightsError, match="are tied in the model but differ"):
        read(differ, state)
