"""Training adapters alone (LoRA): the options, and which of them go together."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from pipeline.sections import PositiveFloat, Section, option


class Lora(Section):
    """LoRA: adapters are trained, the model stays as it is"""

    lora_rank: int = option(0, "rank of the adapters; 0: all weights are trained", ge=0)
    lora_alpha: PositiveFloat = option(16.0, "adapters count alpha / rank times")
    lora_dropout: float = option(0.0, "above 0 the trainer's probabilities would be wrong: refused", ge=0)
    lora_target_modules: str = option(
        "all-linear",
        "linear layers that get one, with commas, such as q_proj,v_proj; all-linear: all but the head",
    )


def idle(config: Any) -> list[tuple[bool, str, tuple[str, ...]]]:
    """Rules as `modes.idle` has them."""
    if not isinstance(config, Lora):
        return []
    backend = getattr(config, "train_backend", "torch")
    rest = ("lora_alpha", "lora_dropout", "lora_target_modules")
    return [
        (config.lora_rank == 0, "without --lora-rank all weights are trained", rest),
        (backend != "torch", f"--train-backend {backend} has no adapters", ("lora_rank",)),
    ]


def refused(config: Lora) -> Iterator[str]:
    if config.lora_rank == 0:
        return
    if config.lora_dropout > 0:
        yield (
            f"--lora-dropout {config.lora_dropout}: with dropout the trainer's probabilities would be other ones than "
            "the sampler's; leave it out"
        )
    if find_spec("peft") is None:
        yield "--lora-rank needs the package peft: pip install 'millpond[lora]'"
