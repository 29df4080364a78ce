"""How a training step fits the devices: forward passes, ranks, memory. The options, and which of them go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pipeline import torchrun
from pipeline.sections import Positive, Section, option


class Fitting(Section):
    """Training: passes, ranks, memory"""

    use_dynamic_batch_size: bool = option(
        True, "fill forward passes up to --max-tokens-per-gpu; off: --micro-batch-size sequences each"
    )
    max_tokens_per_gpu: Positive = option(16384, "tokens in a forward pass, padding included")
    micro_batch_size: Positive = option(1, "sequences in a forward pass, without --use-dynamic-batch-size")
    balance_data: bool = option(True, "under torchrun: ranks get about as many tokens; off: as many samples, in turn")
    data_parallel_sharding_strategy: Literal["optim_grads_params", "no_shard"] = option(
        "optim_grads_params", "under torchrun: all is spread over the ranks (FSDP2), or each has it whole (DDP)"
    )
    gradient_checkpointing: bool = option(False, "work a layer out again in the backward pass instead of keeping it")
    bf16: bool | None = option(None, "passes in bfloat16, over weights in float32 (default: on a GPU)")


def idle(config: Any) -> list[tuple[bool, str, tuple[str, ...]]]:
    """Rules as `modes.idle` has them."""
    if not isinstance(config, Fitting):
        return []
    echo = getattr(config, "train_backend", "") == "echo"
    full = "forward passes are filled up to --max-tokens-per-gpu; add --no-use-dynamic-batch-size"
    counted = "without --use-dynamic-batch-size a forward pass has --micro-batch-size sequences"
    alone = "one process trains; it is for several, under torchrun"
    shared = ("balance_data", "data_parallel_sharding_strategy", "distributed_timeout_minutes")
    return [
        (config.use_dynamic_batch_size, full, ("micro_batch_size",)),
        (not config.use_dynamic_batch_size, counted, ("max_tokens_per_gpu",)),
        (torchrun.world() == 1, alone, shared),
        (echo, "--train-backend echo trains nothing", (*Fitting.model_fields, "global_batch_size")),
    ]


def refused(config: Any) -> Iterator[str]:
    """A sentence for each thing that cannot work; `config` is a trainer's, and in `millpond run` everybody's. Errors:
    UsageError for variables that torchrun would not have set."""
    if not hasattr(config, "generators"):
        return
    torchrun.rank()
    if torchrun.world() > 1:
        yield (
            f"{torchrun.SIZE}={torchrun.world()}: millpond run trains in one process; unset it, or start each stage by "
            "itself, with `torchrun ... millpond train`"
        )
