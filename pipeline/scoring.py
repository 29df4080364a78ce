"""Rules of the reward options: what goes together."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config import GenerateConfig, RunConfig, WorkerConfig
from pipeline.sections import Rewards, RunRewards, Section


def idle(config: Section) -> list[tuple[bool, str, tuple[str, ...]]]:
    """Rules as `modes.idle` has them."""
    if not isinstance(config, Rewards):
        return []
    own, placed = config.custom_rm_path is not None, isinstance(config, RunRewards)
    by_worker = isinstance(config, WorkerConfig) or (isinstance(config, RunRewards) and config.rm_place == "worker")
    takes = "--custom-rm-path takes its place"
    free = "and without --rm-place worker it has no limits" if placed else "and has no limits here"
    return [
        (own, takes, ("rm_type", "rm_url", "rm_api_key", "rm_memory")),
        (own and not by_worker, f"{takes}, {free}", _LIMITS),
        (placed and not by_worker, "it belongs to --rm-place worker", ("rm_spares",)),
        (not own, "only a --custom-rm-path scores whole groups", ("group_rm",)),
    ]


_LIMITS = ("rm_timeout", "rm_patience", "rm_workers")


def refused(config: Section) -> Iterator[str]:
    if isinstance(config, GenerateConfig | RunConfig) and config.rm_type is None and config.custom_rm_path is None:
        yield "no reward: choose one with --rm-type or --custom-rm-path"
