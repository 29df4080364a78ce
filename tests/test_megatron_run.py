"""Whole runs with the megatron backend, as their user starts them; and what cannot be trained so is told."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
import torch
from make import train_config
from processes import Parts, Stage, contiguous, eventually, family, steps
from safetensors.torch import load_file, save_file
from test_megatron import installed, model
from test_ranks import RULES_OF_RUN, helpers, rows, trainer

from pipeline.config import RunConfig, TrainConfig
from pipeline.errors import UsageError
from pipeline.modes import check
from trainer import backends, demo_model

__all__ = ["installed"]

MEGATRON = ("--train-backend", "megatron", "--num-epoch", "1", "--save-interval", "3")


def test_a_run_on_two_ranks_that_are_killed_goes_on_on_one(redis_url: str, tmp_path: Path) -> None:
    demo_model.make(tmp_path / "demo", 0)
    with Parts(tmp_path, redis_url, rows(tmp_path, 40)) as parts:
        first = trainer(parts, tmp_path / "demo", *MEGATRON, "--tensor-model-parallel-size", 2)
        others = helpers(parts, tmp_path / "demo")
        eventually(lambda: len(steps(parts.out)) >= 4, "four steps", seconds=180)
        for pid in family(first.process.pid):
            os.kill(pid, signal.SIGKILL)
        first.wait()
        assert (parts.out / "checkpoints" / "00000003" / "model" / "metadata.json").is_file()
        second = parts.millpond(
            *("train", "--run", parts.run, "--out", parts.out, "--hf-checkpoint", tmp_path / "demo", "--device", "cpu"),
            *("--rm-type", "positions", *RULES_OF_RUN, "--fully-async", "--max-weight-staleness", "2", *MEGATRON),
            *("--resume", "--take-over"),
            MILLPOND_REDIS_URL=parts.url,
        )
        for process in (second, *others):
            process.ends(0, seconds=120)
        assert parts.audit().places["committed"] == 40
        assert contiguous(steps(parts.out)) == 10
    assert sum(line["train/grad_norm"] > 0 for line in steps(parts.out)) >= 1


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_default_run_learns(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        stage.millpond("run", "--train-backend", "megatron", "--out", out, "--device", "cpu").ends(0, seconds=600)
    rewards = [line["rollout/raw_reward"] for line in steps(out)]
    assert fmean(rewards[:5]) < 0.3
    assert fmean(rewards[-5:]) > 0.7


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "model_type gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act gelu, not silu"),
        ({"attention_bias": True}, "attention_bias true"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "of type yarn"),
        ({"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}, "sliding-window"),
    ],
)
def test_a_model_that_it_could_not_train_exactly_is_refused_by_what_it_has(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    file = model(tmp_path / "model", "qwen3") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UsageError, match=rf"--hf-checkpoint .*trains Llama, Qwen2, Qwen2.5 and Qwen3.* has .*{said}"):
        backends.build(configured(tmp_path / "model"), True)


def configured(folder: Path, **changes: object) -> TrainConfig:
    return TrainConfig.model_validate(
        {"train_backend": "megatron", "hf_checkpoint": folder, "device": "cpu", "num_rollout": 1} | changes
    )


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("qwen3", {"tensor_model_parallel_size": 4}, "--tensor-model-parallel-size 4: the model's 2 KV heads"),
        ("qwen2", {"pipeline_model_parallel_size": 3}, "--pipeline-model-parallel-size 3: the model's 4 layers"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, name: str, changes: dict[str, int], said: str
) -> None:
    from transformers import AutoConfig

    from trainer.backends.megatron_config import refuse_sizes

    config = AutoConfig.from_pretrained(model(tmp_path / "model", name))
    found = configured(tmp_path / "model", **changes)
    with pytest.raises(UsageError, match=said):
        refuse_sizes(config, found.tensor_model_parallel_size, found.pipeline_model_parallel_size)


def test_processes_that_cannot_be_shared_out_are_refused_before_they_meet(tmp_path: Path) -> None:
    said = r"--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2 puts a model on 4 ranks, and there are 1"
    with pytest.raises(UsageError, match=said):
        backends.build(configured(tmp_path, tensor_model_parallel_size=2, pipeline_model_parallel_size=2), True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"there has model\.norm\.weight \(1 are missing\)"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), r"no place for extra \(1 are too many\)"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(9, 32)}), r"lm_head\.weight has another shape"),
    ],
    ids=["too few", "too many", "another shape"],
)
def test_a_checkpoint_that_is_not_what_its_configuration_says_is_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], said: str
) -> None:
    file = model(tmp_path / "model", "qwen3") / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(UsageError, match=said):
        backends.build(configured(tmp_path / "model"), True)


def refusal(config: TrainConfig | RunConfig) -> str:
    with pytest.raises(UsageError) as caught:
        check(config)
    return str(caught.value)


def test_flags_that_do_nothing_are_refused_and_so_is_what_one_process_cannot_do() -> None:
    assert "--tensor-model-parallel-size does nothing here: it belongs to --train-backend megatron" in refusal(
        train_config(train_backend="torch", tensor_model_parallel_size=2)
    )
    assert "--sequence-parallel does nothing here: no tensor is shared (--tensor-model-parallel-size)" in refusal(
        train_config(train_backend="megatron", sequence_parallel=True)
    )
    assert "--data-parallel-sharding-strategy does nothing here" in refusal(
        train_config(train_backend="megatron", data_parallel_sharding_strategy="no_shard")
    )
    assert "--lora-rank does nothing here" in refusal(train_config(train_backend="megatron", lora_rank=4))
    assert "its sums are not pinned" in refusal(
        train_config(train_backend="megatron", deterministic_mode=True, fully_async=False)
    )
    run = RunConfig(train_backend="megatron", pipeline_model_parallel_size=2, rm_type="random", num_rollout=1)
    assert "millpond run trains in one process" in refusal(run)
