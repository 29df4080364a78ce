"""Sections of options that `pipeline.config` puts together: what all are made of, Redis, prompts, rewards, trackers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

TEMPLATE_OWN = {"conversation", "chat_template", "tools", "tokenize", "add_generation_prompt", "continue_final_message"}
"Arguments of a chat template that are not the user's to give."


def _json_map(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError('it must be a JSON map, like {"enable_thinking": false}')
    if taken := TEMPLATE_OWN & value.keys():
        raise ValueError(f"it must not have {', '.join(sorted(taken))}")
    return text


Positive = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


def _web_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        raise ValueError("it must be http://HOST:PORT/PATH or https://..., without a user or password in it")
    return text


WebUrl = Annotated[str, AfterValidator(_web_url)]
JsonMap = Annotated[str, AfterValidator(_json_map)]
PathText = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
Fraction = Annotated[float, Field(gt=0, le=1)]


def option(default: Any, help: str, **limits: Any) -> Any:
    return Field(default=default, description=help, **limits)


class Words:
    """Marks a type whose flag takes several words; they reach the model as one text, quoted as for a shell."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Server(Section):
    """The embedded Redis"""

    redis_durability: Literal["process", "second", "always"] = option(
        "second", "what may be lost with the machine: all since the last flush, about a second, nothing"
    )


class Data(Section):
    """Prompts"""

    prompt_data: PathText | None = option(
        None, "JSONL or Parquet; several with commas, globs, PATH:WEIGHT, PATH@[FROM:TO] for some of the rows"
    )
    task: str | None = option(None, "prompts without a file: reasoning_gym:NAME, or module.function")
    input_key: str | None = option(
        None,
        "key of the prompt in a row, text or a list of chat messages; may have dots (default: the first there is of "
        "input, prompt, question, messages, problem)",
    )
    label_key: str | None = option(
        None,
        "key of the label (default: the first there is of label, answer, ground_truth, reward_model.ground_truth)",
    )
    metadata_key: str | None = option(
        None, "key of a map handed on to rewards and generate functions (default: metadata or extra_info)"
    )
    tool_key: str | None = option(None, "key of a list of tools for the chat template (default: tools)")
    rollout_shuffle: bool = option(False, "shuffle each epoch by --rollout-seed")
    num_epoch: Positive | None = option(None, "passes over the prompts; the smaller of steps and epochs ends the run")
    feed_low_water: Positive = option(512, "prompts kept waiting in the stream")


class Rewards(Section):
    """Generate functions, rewards and filters"""

    custom_generate_function_path: str | None = option(
        None, "agents, several turns, tools: async function that makes one sample, module.function"
    )
    rm_type: str | None = option(
        None,
        "built-in reward: math, gsm8k, deepscaler, dapo, gpqa, f1, ifeval, code, exact, positions, length, random, "
        "reasoning_gym, remote_rm; several with weights: math:0.9,length:0.1; row: what each row names",
    )
    custom_rm_path: str | None = option(None, "reward function, module.function; sync or async")
    reward_key: str | None = option(None, "the reward's place in the map that a reward function gives")
    rm_url: WebUrl | None = option(None, "remote_rm: where prompt, response and label are posted")
    rm_api_key: SecretStr | None = option(None, "remote_rm: the judge's bearer token; best given in the environment")
    rm_timeout: PositiveFloat = option(
        10.0,
        "seconds for one answer: of processor time where it is graded here, for one request to --rm-url; for a "
        "--custom-rm-path in a worker until it is killed",
    )
    rm_patience: PositiveFloat = option(
        600.0, "seconds an outage of --rm-url is sat out, or a worker waited for, before an answer is unscored"
    )
    rm_workers: Positive = option(2, "grading processes of a generator, or of a worker")
    rm_memory: Positive = option(512, "MiB that grading one answer may take")
    group_rm: bool = option(False, "the reward function scores a whole group at once")


class RunRewards(Section):
    """Generate functions, rewards and filters"""

    rm_place: Literal["generator", "worker"] = option(
        "generator", "where answers are scored; worker: by `millpond worker`, in processes that are killed if they hang"
    )
    rm_spares: int = option(
        16, "--rm-place worker: processes a worker starts besides while answers hang in its own", ge=0
    )
    dynamic_sampling_filter_path: str | None = option(None, "keep or drop a group where it is made, module.function")


class SampleFilter(Section):
    """Generate functions, rewards and filters"""

    rollout_sample_filter_path: str | None = option(None, "mark samples of the batch as removed, module.function")


class Tracking(Section):
    """Metrics out: each in a process of its own beside the trainer"""

    use_tensorboard: bool = option(False, "write event files for TensorBoard")
    tensorboard_dir: Path | None = option(None, "folder of the event files (default: tensorboard in the run's)")
    tb_project_name: str | None = option(None, "folder below --tensorboard-dir")
    tb_experiment_name: str | None = option(None, "folder below that")
    use_wandb: bool = option(False, "log to Weights & Biases; needs the extra millpond[wandb]")
    wandb_mode: Literal["online", "offline", "disabled"] = option("online", "offline: `wandb sync` uploads it later")
    wandb_dir: Path | None = option(None, "where W&B keeps its files (default: the run's folder)")
    wandb_key: SecretStr | None = option(None, "W&B's API key; best given in the environment")
    wandb_host: WebUrl | None = option(None, "W&B server of your own")
    wandb_team: str | None = option(None, "W&B team or user")
    wandb_project: str = option("millpond", "W&B project")
    wandb_group: str | None = option(None, "W&B group")
    wandb_run_id: str | None = option(None, "W&B id to go on with (default: one for this run's folder)")
    prometheus_port: int | None = option(
        None, "serve metrics for Prometheus; needs the extra millpond[prometheus]", ge=1, le=65535
    )
    prometheus_host: str = option("127.0.0.1", "address to serve on; there is no password, so beware of 0.0.0.0")


class Resume(Section):
    """Going on"""

    resume: bool = option(False, "go on with a run that was stopped")


class Takeover(Resume):
    """Going on"""

    take_over: bool = option(False, "replace a trainer that may still be alive, at once")
    wait: bool = option(False, "wait until the other trainer of this run is gone")


class Workers(Section):
    """Processes"""

    generators: Positive = option(1, "generator processes")
    max_restarts: int = option(5, "restarts of a killed process before the run ends", ge=0)
