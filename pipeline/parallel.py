"""How Megatron cuts a model: the options, and the rules of what goes together."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from pipeline.errors import UsageError
from pipeline.sections import Positive, Section, option


class Parallel(Section):
    """Megatron"""

    tensor_model_parallel_size: Positive = option(1, "megatron: ranks that share each tensor of a layer")
    sequence_parallel: bool = option(
        False, "megatron: they share what lies between its tensors, too, by positions: less memory for the same steps"
    )
    pipeline_model_parallel_size: Positive = option(1, "megatron: ranks that share the layers, as stages in a row")


SEQUENCE = ("sequence_parallel",)

Rule = tuple[bool, str, tuple[str, ...]]


def idle(config: Any) -> list[Rule]:
    """Rules as `modes.idle` has them."""
    if not isinstance(config, Parallel):
        return []
    on = getattr(config, "train_backend", "") == "megatron"
    spread = "--train-backend megatron spreads the optimizer over the ranks that hold the same part of the model"
    return [
        (not on, "it belongs to --train-backend megatron", tuple(Parallel.model_fields)),
        (on, spread, ("data_parallel_sharding_strategy",)),
        (config.tensor_model_parallel_size == 1, "no tensor is shared (--tensor-model-parallel-size)", SEQUENCE),
    ]


def refused(config: Any) -> Iterator[str]:
    """A sentence for each thing that cannot work; `config` is a trainer's."""
    if config.train_backend != "megatron":
        return
    if find_spec("megatron") is None:
        yield "--train-backend megatron needs the package megatron-core: pip install 'millpond[megatron]'"
    if config.deterministic_mode:
        yield "--deterministic-mode with --train-backend megatron: its sums are not pinned; use --train-backend torch"
    if hasattr(config, "generators"):
        try:
            refuse_world(config, 1)
        except UsageError:
            yield "millpond run trains in one process; for models on several ranks start `torchrun ... millpond train`"


def refuse_world(config: Any, world: int) -> None:
    """UsageError where so many processes cannot be shared out."""
    tensor, stages = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    if world % (tensor * stages):
        raise UsageError(
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {stages} puts a model on "
            f"{tensor * stages} ranks, and there are {world}: start a multiple of that (torchrun --nproc-per-node N)"
        )
