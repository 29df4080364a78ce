"""One model a role, put together from sections; each field is a flag, a TOML key and a MILLPOND_* variable.

Precedence: flag, environment, file, default. `pipeline.flags` turns a role into a command line; `pipeline.modes` holds
the rules of what goes together. Section docstrings are the headings of `--help`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import SecretStr

from pipeline.algorithms import Algorithm, Optimizing
from pipeline.evaluation import EvalEngine, EvalSets, Evaluation
from pipeline.fitting import Fitting
from pipeline.lora import Lora
from pipeline.parallel import Parallel
from pipeline.recording import Recording
from pipeline.refused import Refused
from pipeline.sections import (
    Data,
    Fraction,
    JsonMap,
    Positive,
    PositiveFloat,
    Rewards,
    RunRewards,
    SampleFilter,
    Section,
    Server,
    Takeover,
    Tracking,
    Workers,
    option,
)
from pipeline.transport import Transport
from pipeline.urls import EngineUrl, EngineUrls, RedisUrl

__all__ = ["Data", "Fraction", "Positive", "PositiveFloat", "Rewards", "Section", "Tracking", "option"]


class Connection(Section):
    """Where the run lives"""

    run: str | None = option(None, "name of the run; keys in Redis and the default folder follow from it")
    out: Path | None = option(None, "the run's folder (default runs/NAME)")
    redis_url: RedisUrl | None = option(
        None, "Redis to use instead of the embedded one: redis://, rediss:// or unix://"
    )
    redis_patience: PositiveFloat = option(300.0, "seconds to wait for a Redis that is away before giving up")


class Rollout(Section):
    """Rollout: what all workers and the trainer agree on"""

    rollout_batch_size: Positive = option(32, "groups in a training step")
    n_samples_per_prompt: Positive = option(8, "answers in a group")
    rollout_max_response_len: Positive = option(1024, "tokens an answer may have")
    rollout_max_prompt_len: Positive | None = option(None, "longer prompts are dropped, once, under a reason")
    rollout_temperature: PositiveFloat = option(1.0, "sampling temperature")
    rollout_top_p: Fraction = option(1.0, "below 1 the trainer's probabilities would be wrong: refused")
    rollout_top_k: int = option(-1, "other than -1 the trainer's probabilities would be wrong: refused", ge=-1)
    rollout_seed: int = option(42, "seed of shuffling and of all samplers", ge=0)
    rollout_group_timeout: PositiveFloat = option(1800.0, "seconds from lease to push before a group is handed back")
    max_prompt_attempts: Positive = option(5, "strikes (the prompt's own faults) after which it is dead-lettered")
    apply_chat_template: bool = option(False, "render prompts with the tokenizer's chat template")
    apply_chat_template_kwargs: JsonMap | None = option(None, "what the template is given besides, a JSON map")


class Async(Section):
    """Asynchrony"""

    fully_async: bool = option(False, "generate while training; without it the run is lock-step and on-policy")
    max_weight_staleness: int | None = option(None, "publications a group may be old when trained on", ge=0)
    update_weights_interval: Positive = option(1, "training steps between publications")
    async_max_concurrent_samples: Positive | None = option(
        None, "samples in flight over all workers (default: --rollout-batch-size groups)"
    )
    async_data_buffer_capacity_factor: PositiveFloat = option(2.0, "cap of the group list, in batches")
    queue_capacity: Positive | None = option(None, "cap of the group list, in groups (overrides the factor)")
    queue_max_bytes: Positive = option(1 << 30, "cap of the group list, in bytes")
    max_group_bytes: Positive = option(64 << 20, "a larger group is refused and its prompt dead-lettered")
    rollout_submission_granularity: Literal["sample", "group"] = option(
        "sample", "refill as soon as any n samples have finished, or only when whole groups have"
    )
    async_unused_samples_handler: Literal["retry", "drop"] = option("retry", "what becomes of stale and aborted groups")
    pause_generation_mode: Literal["retract", "in_place", "abort"] = option(
        "retract", "requests in flight at a weight update: cache recomputed, or kept"
    )


class Engines(Section):
    """Engine"""

    engine: Literal["local", "sglang", "echo"] = option(
        "local", "local: torch in the generator; sglang: servers that run already; echo: no model, for tests"
    )
    engine_url: EngineUrls | None = option(None, "sglang: URLs of this worker's own engines, with commas between")
    engine_router_url: EngineUrl | None = option(None, "sglang: router before the engines, for requests only")
    engine_api_key: SecretStr | None = option(None, "sglang: API key of the engines; best given in the environment")
    engine_timeout: PositiveFloat = option(1800.0, "sglang: seconds one sample may take")
    hf_checkpoint: Path | None = option(None, "model and tokenizer folder in the Hugging Face layout")
    server_concurrency: Positive = option(256, "samples in flight in one engine")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    torch_threads: Positive = option(1, "threads torch computes with in one process")
    echo_latency: str = option("0", "echo: seconds a sample takes: a number, or lognormal:MEDIAN:SIGMA")
    echo_response_len: Positive = option(8, "echo: tokens in an answer")
    echo_failure_rate: float = option(0.0, "echo: share of samples that fail", ge=0, le=1)
    echo_abort_rate: float = option(0.0, "echo: share of samples that abort", ge=0, le=1)


class Training(Optimizing, Algorithm, Fitting, Lora):
    """Training"""

    num_rollout: Positive | None = option(None, "training steps; the smaller of steps and epochs ends the run")
    global_batch_size: Positive | None = option(None, "samples in an optimizer step (default: the whole batch)")
    train_backend: Literal["torch", "megatron", "echo"] = option(
        "torch", "torch: any model; megatron: Llama and Qwen, by tensors and layers; echo: trains nothing, for tests"
    )
    echo_train_seconds: float = option(0.0, "echo: seconds a training step takes", ge=0)
    seed: int = option(1234, "seed of the trainer", ge=0)
    save_interval: int = option(20, "steps between checkpoints; 0: none, groups are committed when published", ge=0)
    save_keep: Positive = option(2, "checkpoints kept")
    load: Path | None = option(
        None, "a new run: weights to begin with, a model's folder or a checkpoint; --resume: a checkpoint to go back to"
    )
    drop_last: bool = option(False, "do not train on the last batch if it is smaller than the others")
    distributed_timeout_minutes: PositiveFloat = option(10.0, "under torchrun: minutes one exchange may take")
    starve_timeout: PositiveFloat = option(600.0, "seconds without a group before the run ends")
    rollout_function_path: str | None = option(None, "takes the place of the drain, module.function; lock-step only")


class FeedConfig(Connection, Data):
    """Feeds prompts from a file to a run."""

    rollout_seed: int = option(42, "seed of shuffling and of tasks", ge=0)
    rm_type: str | None = option(None, "the run's reward, if it is built in: rows are checked for what it needs")


class GenerateConfig(Connection, Engines, Rewards, RunRewards):
    """Generates and scores answers. Needs the Redis, the run's name and an engine; the rest comes with the run."""


class EvalWork(EvalSets, EvalEngine, Engines, Rewards):
    """Who evaluates"""


class WorkerConfig(GenerateConfig, EvalWork):
    """Does jobs of a run: evaluations, and rewards that are slow or can hang. Needs what a generator needs."""

    worker_jobs: Literal["all", "evals", "rewards"] = option("all", "which jobs this worker takes")


class TrainConfig(
    Connection,
    Rollout,
    Async,
    Rewards,
    RunRewards,
    SampleFilter,
    Training,
    Evaluation,
    Recording,
    Parallel,
    Transport,
    Tracking,
    Refused,
    Takeover,
):
    """Trains on finished groups and publishes the weights. Writes down what all workers must agree on."""

    hf_checkpoint: Path | None = option(None, "model and tokenizer folder in the Hugging Face layout")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    torch_threads: Positive = option(1, "threads torch computes with in one process")
    num_epoch: Positive | None = option(None, "passes over the prompts; the feeder counts them")
    auto_resume: bool = option(False, "--resume where the run was begun, else begin it; for what starts trainers again")

    @property
    def goes_on(self) -> bool:
        return self.resume or self.auto_resume


class RunConfig(
    Connection,
    Server,
    Data,
    Rollout,
    Async,
    Rewards,
    RunRewards,
    SampleFilter,
    Engines,
    Training,
    Evaluation,
    EvalEngine,
    Recording,
    Parallel,
    Transport,
    Tracking,
    Refused,
    Takeover,
    Workers,
):
    """Runs it all on this machine: a Redis, a feeder, generators and a trainer."""

    fully_async: bool = option(True, "generate while training; --no-fully-async: lock-step and on-policy")
    max_weight_staleness: int | None = option(2, "publications a group may be old when trained on", ge=0)


ROLES: dict[str, type[Section]] = {
    "run": RunConfig,
    "feed": FeedConfig,
    "generate": GenerateConfig,
    "worker": WorkerConfig,
    "train": TrainConfig,
}
