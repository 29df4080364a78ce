"""Finding a run, for the commands that look at one: in a folder with its own Redis, or in a Redis by its name.

    millpond status                              the newest folder under runs/
    millpond status demo, --run demo             runs/demo
    millpond status some/folder, --out ...       that folder
    millpond status demo --redis-url redis://... the run of that name in that Redis

A stopped run's Redis is started for as long as the command looks, and changed by nothing but the commands that say so.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.broker import Broker
from pipeline.config import Connection, PositiveFloat, option
from pipeline.errors import UsageError
from pipeline.keys import Keys
from pipeline.log import mask
from pipeline.server import EmbeddedServer, locate

RUNS = Path("runs")
"Where runs have their folders, below the current one."


class Look(Connection):
    """Looking"""

    redis_patience: PositiveFloat = option(5.0, "seconds to wait for a Redis that is away before giving up")


@dataclass(frozen=True)
class Found:
    """A run, and a Redis that answers for it."""

    broker: Broker = field(repr=False)
    where: str
    "for people: the folder, or the URL without its password"
    folder: Path | None
    "the run's own folder on this machine"
    stopped: bool
    "its Redis did not run and was started for this look"

    @property
    def run(self) -> str:
        return self.broker.keys.run


@contextmanager
def found(look: Look, words: Sequence[str], start: bool = True) -> Iterator[Found]:
    """The run that flags and `words` (a folder or a name, at most one) mean. `start`: a stopped run's Redis, too.

    UsageError where there is no such run, with the names of those there are.
    """
    folder, name = _meant(look, words)
    if look.redis_url and not (folder and _data(folder).is_dir()):
        name = name or (settings(folder).get("run") or folder.name if folder else None)
        with _in_redis(look, look.redis_url, name, mask(look.redis_url), folder) as run:
            yield run
        return
    with _in_folder(look, folder_of(look, words), name if folder else None, start) as run:
        yield run


def folder_of(look: Look, words: Sequence[str]) -> Path:
    """The folder, for commands that read nothing else of a run."""
    folder, name = _meant(look, words)
    folder = folder or (RUNS / name if name else _newest())
    if not folder.is_dir():
        raise UsageError(f"there is no run in {folder}; {_local_names()}")
    return folder


def _meant(look: Look, words: Sequence[str]) -> tuple[Path | None, str | None]:
    """Folder and name, as far as they are given."""
    if len(words) > 1:
        raise UsageError(f"unexpected argument {words[1]!r}: one run, by its folder or its name")
    word = words[0] if words else None
    folder = Path(word) if word and Path(word).is_dir() else None if word else look.out
    return folder, word if word and not folder else look.run


@contextmanager
def _in_folder(look: Look, folder: Path, name: str | None, start: bool) -> Iterator[Found]:
    data, written = _data(folder), settings(folder)
    if not data.is_dir():
        if not (url := written.get("redis_url")):
            raise UsageError(f"{folder} has no Redis of its own ({data}): give --redis-url and --run; {_local_names()}")
        with _in_redis(look, url, name or written.get("run") or folder.name, mask(url), folder) as run:
            yield run
    elif url := locate(data):
        with _in_redis(look, url, name, str(folder), folder) as run:
            yield run
    elif not start:
        raise UsageError(
            f"the run in {folder} is stopped, and its Redis with it: `millpond run --resume --out {folder}` goes on "
            f"with it; to be rid of it, delete the folder"
        )
    else:
        with EmbeddedServer(data) as server, _in_redis(look, server.url, name, str(folder), folder, True) as run:
            yield run


@contextmanager
def _in_redis(
    look: Look, url: str, name: str | None, where: str, folder: Path | None, stopped: bool = False
) -> Iterator[Found]:
    with closing(Broker(url, Keys(name or "unknown"), "look", look.redis_patience)) as probe:
        run = name or _only(names(probe), where, folder)
        with closing(Broker(url, Keys(run), "look", look.redis_patience)) as broker:
            if not broker.exists():
                raise UsageError(f"there is no run {run} in {where}; {_listed(names(probe))}")
            yield Found(broker, where, folder, stopped)


def names(broker: Broker) -> list[str]:
    """All runs in a Redis."""
    keys = broker.patiently(lambda: list(broker.client.scan_iter(match="millpond:*:state", count=1000)))
    return sorted(m[1].decode() for key in keys if (m := re.fullmatch(rb"millpond:([\w.-]+):state", key)))


def _only(known: list[str], where: str, folder: Path | None) -> str:
    if folder and folder.name in known:
        return folder.name
    if len(known) != 1:
        raise UsageError(f"which run in {where}? Give --run; {_listed(known)}")
    return known[0]


def _listed(known: list[str]) -> str:
    return f"there are: {', '.join(known)}" if known else "it holds none"


def _data(folder: Path) -> Path:
    return folder / "redis"


def settings(folder: Path | None) -> dict[str, Any]:
    """What the run's folder says about where it lives; nothing where that cannot be read."""
    with suppress(OSError, ValueError):
        return tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")) if folder else {}
    return {}


def _local() -> list[Path]:
    """Folders under runs/ that look like a run's, newest first."""
    folders = [f for f in RUNS.glob("*") if _data(f).is_dir() or (f / "config.toml").is_file()]
    return sorted(folders, key=lambda f: f.stat().st_mtime, reverse=True)


def _local_names() -> str:
    known = sorted(f.name for f in _local())
    return f"in {RUNS}/ there are: {', '.join(known)}" if known else f"there is none in {RUNS}/"


def _newest() -> Path:
    if not (folders := _local()):
        raise UsageError(f"there is no run in {RUNS}/ here: give a run's folder, or --redis-url and --run")
    return folders[0]
