"""The megatron backend makes the steps of the torch backend, however the model is cut, and goes on from any cut."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_script import job
from safetensors.torch import load_file
from trainer_groups import random_groups

from pipeline.config import TrainConfig
from trainer import backends

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


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
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
