"""Runs that can be made again: recorded, and deterministic ones. The options, and the rules of what goes together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.sections import Section, option

MODE = "--deterministic-mode"
THREADS = f"{MODE} with --torch-threads {{}}: threads add up in another order; use 1"


class Recording(Section):
    """Doing it again"""

    archive: bool = option(False, "keep what each step trains on, for millpond replay")
    archive_folder: Path | None = option(None, "where (default: archive in the run's folder)")
    debug_rollout_only: bool = option(False, "generate and archive, train nothing: the weights stay as they are")
    deterministic_mode: bool = option(False, "two runs give the same figures to the digit: lock-step, one generator")


def idle(config: Any) -> list[tuple[bool, str, tuple[str, ...]]]:
    """Rules as `modes.idle` has them. Options of training are recorded where nothing is trained: a replay has them."""
    if not isinstance(config, Recording):
        return []
    only: Any = config
    paced = config.debug_rollout_only or only.train_backend == "echo" or only.echo_train_seconds == 0
    return [
        (not (config.archive or config.debug_rollout_only), "--archive is off", ("archive_folder",)),
        (not paced, "it belongs to --train-backend echo and --debug-rollout-only", ("echo_train_seconds",)),
    ]


def refused(config: Any) -> Iterator[str]:
    """A sentence for each thing that cannot work."""
    if getattr(config, "debug_rollout_only", False) and config.update_weight_transport != "disk":
        yield "--debug-rollout-only has no new weights to send: leave --update-weight-transport out"
    if getattr(config, "debug_rollout_only", False) and config.lora_publish == "adapter":
        yield "--debug-rollout-only publishes --hf-checkpoint as it is, without adapters: leave --lora-publish out"
    if getattr(config, "debug_rollout_only", False) and config.load and not config.resume:
        yield f"--debug-rollout-only publishes --hf-checkpoint as it is: give {config.load} there, and leave --load out"
    if getattr(config, "deterministic_mode", False):
        yield from _timing(config)


def _timing(config: Any) -> Iterator[str]:
    """What timing would decide."""
    if config.fully_async and config.max_weight_staleness != 0:
        yield (
            f"{MODE} with --fully-async: which weights sample a token depends on timing; use --no-fully-async, or "
            "--max-weight-staleness 0"
        )
    if config.update_weights_interval > 1:
        yield (
            f"{MODE} with --update-weights-interval {config.update_weights_interval}: what is generated while a step "
            "trains depends on timing; use 1"
        )
    if getattr(config, "generators", 1) > 1:
        yield f"{MODE} with --generators {config.generators}: which of them takes a prompt depends on timing; use 1"
    if hasattr(config, "server_concurrency"):
        evaluated = config.n_samples_per_eval_prompt if config.eval_prompt_data is not None else 0
        yield from unfit(config, max(config.n_samples_per_prompt, evaluated))
    elif config.torch_threads > 1:
        yield THREADS.format(config.torch_threads)


def unfit(config: Any, n_samples: int) -> Iterator[str]:
    """Why a worker of these options cannot take part in a deterministic run."""
    if config.torch_threads > 1:
        yield THREADS.format(config.torch_threads)
    alone = "use --server-concurrency 1, which computes each request by itself"
    if config.server_concurrency == 1:
        return
    if config.server_concurrency < n_samples:
        yield (
            f"{MODE} with --server-concurrency {config.server_concurrency}: the {n_samples} samples of a group could "
            f"not begin together; raise it, or {alone}"
        )
    if config.custom_generate_function_path is not None:
        yield f"{MODE} with --custom-generate-function-path: when its requests come depends on timing; {alone}"


def warnings(config: Any) -> Iterator[str]:
    if config.deterministic_mode and "remote_rm" in (config.rm_type or ""):
        yield f"{MODE}: what --rm-url answers is not in Millpond's hand; the same answer must get the same reward"
