"""Where a stage finds its run: the Redis it is given, or the embedded one of a run on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config import Connection
from pipeline.errors import UsageError
from pipeline.server import locate

RUNS = Path("runs")


@dataclass(frozen=True)
class Place:
    """Where the run lives."""

    url: str = field(repr=False)
    run: str
    folder: Path | None
    "the run's folder, where this process was told of one"


def folder_of(config: Connection) -> Path | None:
    """--out, or runs/NAME."""
    return config.out or (RUNS / config.run if config.run else None)


def join(config: Connection) -> Place:
    """UsageError where flags and environment name no run, or none that has a Redis now."""
    folder = folder_of(config)
    name = config.run or (folder.name if folder else None)
    if name is None:
        raise UsageError("which run? Give --run NAME, or its folder with --out")
    if config.redis_url:
        return Place(config.redis_url, name, config.out)
    url = locate(folder / "redis") if folder else None
    if url is None:
        raise UsageError(
            f"run {name} has no Redis on this machine now: give --redis-url (or MILLPOND_REDIS_URL), or start "
            "`millpond run` first"
        )
    return Place(url, name, folder)
