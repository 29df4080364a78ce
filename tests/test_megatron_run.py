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
from fake_sglang import FakeSGLang, in_a_thread
from make import train_config
from processes import Parts, Stage, audited, contiguous, eventually, family, steps
from safetensors.torch import load_file, save_file
from test_megatron import installed, model
from test_ranks import RULES_OF_RUN, helpers, rows, trainer, weights

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


def test_two_ranks_that_share_tensors_send_engines_what_they_save(redis_url: str, tmp_path: Path) -> None:
    demo_model.make(tmp_path / "demo", 0)
    fake = FakeSGLang(context=64, vocab=22)
    with in_a_thread(fake), Parts(tmp_path, redis_url, rows(tmp_path, 24)) as parts:
        sent = ("--tensor-model-parallel-size", 2, "--lr", "1e-2", "--update-weight-transport", "distributed")
        train = trainer(parts, tmp_path / "demo", *MEGATRON, *sent)
        engines = ("--rm-type", "positions", "--engine", "sglang", "--engine-url", fake.url)
        for process in (train, *helpers(parts, tmp_path / "demo", *engines)):
            process.ends(0, seconds=180)
        assert parts.audit().places["committed"] == 24
        assert fake.weights == f"received {fake.label}"
        written = weights(parts.out / "weights" / f"{int(fake.label):08d}")
    assert len(fake.bodies("/update_weights_from_distributed")) >= 4
    assert fake.received.keys() == written.keys()
    assert all(torch.equal(fake.received[name], written[name]) for name in written)
    assert not all(torch.equal(tensor, written[name]) for name, tensor in weights(tmp_path / "demo").items())


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("most", "reached"), [(80, 0.35), pytest.param(180, 0.7, marks=pytest.mark.slow)])
def test_the_default_run_learns(tmp_path: Path, most: int, reached: float) -> None:
    """From random weights, on groups that are up to two versions old; by step 80 the reward is about 0.6, in the end
    0.9."""
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        ended = ("--num-rollout", most, "--out", out, "--device", "cpu")
        stage.millpond("run", "--train-backend", "megatron", *ended).ends(0, seconds=600)
        assert audited(stage, out)["committed"] == most * 32
    lines = steps(out)
    assert contiguous(lines) == most
    rewards = [line["rollout/raw_reward"] for line in lines]
    assert fmean(rewards[:5]) < 0.1
    assert fmean(rewards[-5:]) > reached
    assert max(line["rollout/fully_async/max_staleness"] for line in lines) >= 1


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
