"""How new weights reach the engines: the options, and the rules of what goes together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pipeline.sections import Positive, PositiveFloat, Section, option


class Transport(Section):
    """Weights to the engines"""

    update_weight_transport: Literal["disk", "distributed"] = option(
        "disk", "disk: engines load each version's folder; distributed: SGLang servers have it from the trainer as well"
    )
    update_weight_host: str = option(
        "127.0.0.1", "distributed: address of this machine that engines reach the trainer at; there is no password"
    )
    update_weight_buffer_size: Positive = option(512 << 20, "distributed: bytes that are sent at once")
    update_weight_timeout: PositiveFloat = option(
        60.0, "distributed: seconds after which engines that are not done load the folder instead"
    )


def idle(config: Section) -> list[tuple[bool, str, tuple[str, ...]]]:
    """Rules as `modes.idle` has them."""
    off = isinstance(config, Transport) and config.update_weight_transport == "disk"
    names = tuple(name for name in Transport.model_fields if name != "update_weight_transport")
    return [(off, "it belongs to --update-weight-transport distributed", names)]


def refused(config: Any) -> Iterator[str]:
    """`config` is a trainer's, and in `millpond run` the engines' too."""
    if config.update_weight_transport == "disk":
        return
    what = "--update-weight-transport distributed"
    if config.train_backend == "echo":
        yield f"{what}: --train-backend echo has no weights to send; leave it out"
    engine = getattr(config, "engine", "sglang")
    if engine != "sglang":
        yield (
            f"{what}: --engine {engine} loads weights from their folder and from nowhere else; leave it out, or use "
            "--engine sglang"
        )
    if not config.update_weight_host or set(config.update_weight_host) <= set("0.:"):
        yield (
            f"--update-weight-host {config.update_weight_host!r} is no address that engines could connect to; give the "
            "one of this machine in the network that they share, such as 10.0.0.5"
        )
