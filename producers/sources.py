"""Where prompts come from: a file, several files with weights, a reasoning-gym task, or something of the user's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Protocol

from pipeline import code
from pipeline.config import FeedConfig
from pipeline.errors import UsageError
from pipeline.prompts import Part, parts
from producers.checks import Checks
from producers.dataset import Dataset
from producers.gym import GYM, Gym
from producers.own_source import OwnSource
from producers.rows import RowKeys


class Source(Protocol):
    """Checked prompts, in an order that never changes."""

    @property
    def rows(self) -> int | None:
        """In an epoch; None: there is no end."""
        ...

    @property
    def digest(self) -> str:
        """Two sources with equal digests give the same records."""
        ...

    def records(self, places: Iterable[int]) -> list[str]:
        """The pristine records. Places go on from epoch to epoch: the row times the rows of an epoch, and the row."""
        ...


class Mix:
    """Several files one after the other; of each as many rows in an epoch as its weight says.

    Where that is not all of them, each epoch goes on where the one before stopped.
    """

    def __init__(self, files: list[tuple[Part, Dataset]]) -> None:
        self._parts = [_Slice(part, dataset) for part, dataset in files]
        self.rows = sum(part.count for part in self._parts)
        told = [[dataset.digest, part.start, part.stop, part.weight] for part, dataset in files]
        self.digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def records(self, places: Iterable[int]) -> list[str]:
        wanted: list[tuple[int, int]] = [self._find(place) for place in places]
        found: dict[tuple[int, int], str] = {}
        for number, part in enumerate(self._parts):
            rows = [row for owner, row in wanted if owner == number]
            found |= zip(((number, row) for row in rows), part.dataset.records(rows), strict=True)
        return [found[where] for where in wanted]

    def _find(self, place: int) -> tuple[int, int]:
        """Which part, and which row of its file."""
        epoch, left = divmod(place, self.rows)
        for number, part in enumerate(self._parts):
            if left < part.count:
                return number, part.rows[(epoch * part.count + left) % len(part.rows)]
            left -= part.count
        raise IndexError(place)


class _Slice:
    def __init__(self, part: Part, dataset: Dataset) -> None:
        self.dataset = dataset
        self.rows = range(len(dataset))[part.start : part.stop]
        if not self.rows:
            shown = ":".join("" if end is None else str(end) for end in (part.start, part.stop))
            raise UsageError(f"--prompt-data {part.path}@[{shown}]: no row of {len(dataset)} is in it")
        self.count = max(1, round(part.weight * len(self.rows)))


def open_source(config: FeedConfig) -> Source:
    """What the flags name, with every row checked; UsageError where they name nothing, or two things."""
    if (config.prompt_data is None) == (config.task is None):
        raise UsageError(
            "--prompt-data is missing: a file of prompts, or --task"
            if config.task is None
            else "--prompt-data and --task both say where prompts come from; give one"
        )
    keys = RowKeys(config.input_key, config.label_key, config.metadata_key, config.tool_key)
    if config.prompt_data is not None:
        return _files(parts(config.prompt_data), keys, Checks(config.rm_type))
    task = config.task or ""
    if task.startswith(GYM):
        if any(keys):
            raise UsageError(f"--task {task} has no keys to be named: leave out --input-key and its kin")
        return Gym(task, config.rollout_seed)
    return OwnSource(task, code.load(task, "--task")(config), keys, Checks(config.rm_type))


def _files(named: list[Part], keys: RowKeys, checks: Checks) -> Source:
    found = [(part, Dataset.open(part.path, keys, checks)) for part in named]
    checks.settle()
    return found[0][1] if len(found) == 1 and named[0].whole else Mix(found)
