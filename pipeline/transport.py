"""How new weights reach the engines: the options, and the rules of what goes together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pipeline.sections import Positive, PositiveFloat, Section, option


class Transport(Section):
    """Weights to the engines"""

    lora_publish: Literal["merged", "adapter"] = option(
        "merged", "--lora-rank: engines load the model with its adapters merged, or the adapters alone beside the model"
    )
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


ROUTER = (
    "behind a router requests would name adapters that some of its servers do not have yet; leave the router out, or "
    "publish merged weights"
)
TRANSPORT = "update_weight_transport"


def idle(config: Section) -> list[tuple[bool, str, tuple[str, ...]]]:
    """Rules as `modes.idle` has them."""
    if not isinstance(config, Transport):
        return []
    adapters, sglang = config.lora_publish == "adapter", getattr(config, "engine", "") == "sglang"
    names = tuple(name for name in Transport.model_fields if name.startswith("update_weight_") and name != TRANSPORT)
    return [
        (config.update_weight_transport == "disk", "it belongs to --update-weight-transport distributed", names),
        (getattr(config, "lora_rank", 0) == 0, "without --lora-rank there are no adapters", ("lora_publish",)),
        (adapters and sglang, "under --lora-publish adapter no request meets an update", ("pause_generation_mode",)),
    ]


def refused(config: Any) -> Iterator[str]:
    """`config` is a trainer's, and in `millpond run` the engines' too."""
    if config.lora_publish == "adapter" and getattr(config, "engine_router_url", None):
        yield f"--engine-router-url with --lora-publish adapter: {ROUTER}"
    if config.update_weight_transport == "disk":
        return
    what = "--update-weight-transport distributed"
    if config.lora_publish == "adapter":
        yield (
            f"{what} with --lora-publish adapter: adapters are small and go by their folder; leave "
            "--update-weight-transport out, or publish merged weights"
        )
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
