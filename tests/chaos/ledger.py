"""What the witnesses wrote, read as one ledger, and compared with the checkpoints and with Redis.

A step that was trained and is in no checkpoint when its trainer dies belongs to a discarded branch: the history of a
checkpoint is what its own trainer was handed since the checkpoint that it began from, and so on back to the beginning.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from plan import unlucky
from rig import ones


class Mark(NamedTuple):
    id: int
    attempt: int
    worker: str
    digest: str


@dataclass(frozen=True)
class Handed:
    """A batch that a trainer was given."""

    process: str
    "file of the process that says so; in the order of their starts"
    at: float
    epoch: int
    step: int
    version: int
    "published last"
    marks: list[Mark]
    oldest: list[int]
    "lowest version of each group"


@dataclass(frozen=True)
class Ledger:
    made: dict[Mark, tuple[float, list[int]]]
    "when, and which versions sampled it"
    handed: list[Handed]
    placed: dict[tuple[str, int], float]
    "(weights or checkpoints, number) -> when it was first put in place"

    @classmethod
    def read(cls, folder: Path) -> Ledger:
        ledger = cls({}, [], {})
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_bytes().split(b"\n")[:-1]:
                ledger._enter(path.stem, json.loads(line))
        return ledger

    def _enter(self, process: str, line: dict[str, Any]) -> None:
        if line["what"] == "made":
            self.made[Mark(*line["mark"])] = line["at"], line["versions"]
        elif line["what"] == "handed":
            marks = [Mark(*mark) for mark in line["marks"]]
            names = ("at", "epoch", "step", "version")
            self.handed.append(Handed(process, *(line[n] for n in names), marks, line["oldest"]))
        else:
            key = line["kind"], line["number"]
            self.placed[key] = min(line["at"], self.placed.get(key, line["at"]))

    def recovered(self, at: float) -> float | None:
        """When the first group that was made after `at` was handed to a trainer."""
        times = (h.at for h in self.handed if any(self.made.get(m, (0.0, []))[0] > at for m in h.marks))
        return min((time for time in times if time > at), default=None)

    def made_again(self, ids: Iterable[int], at: float) -> float | None:
        """When the last of these had been made again after `at`."""
        times: dict[int, float] = {}
        for mark, (time, _) in self.made.items():
            if time > at:
                times[mark.id] = min(time, times.get(mark.id, time))
        found = [times[id] for id in ids if id in times]
        return max(found, default=None)

    def history(self, checkpoints: Path) -> list[Handed]:
        """All batches that the newest checkpoint contains, step by step. Each checkpoint on the way holds exactly the
        prompts of its history."""
        saved = sorted(int(path.name) for path in checkpoints.iterdir() if path.name.isdigit())
        chain: list[Handed] = []
        step = saved[-1] if saved else 0
        while step:
            assert step in saved, f"a trainer began at step {step}, and there is no such checkpoint"
            epoch = json.loads((checkpoints / f"{step:08d}" / "state.json").read_text())["epoch"]
            process = max(h.process for h in self.handed if (h.epoch, h.step) == (epoch, step))
            own = [h for h in self.handed if h.process == process and h.epoch == epoch]
            chain = [h for h in own if h.step <= step] + chain
            step = own[0].step - 1
        taken = [h.step for h in chain]
        assert taken == list(range(1, len(chain) + 1)), f"steps of the history: {taken}"
        for step in saved:
            before = Counter(mark.id for h in chain[:step] for mark in h.marks)
            bits = ones((checkpoints / f"{step:08d}" / "committed.bits").read_bytes())
            assert sorted(bits) == sorted(before.elements()), f"checkpoint {step} and the ledger differ"
        return chain


def compare(ledger: Ledger, checkpoints: Path, ends: dict[str, set[int]], staleness: int | None) -> list[Handed]:
    """Raises where what was seen contradicts the checkpoints or `ends`: ids that stand in Redis under committed,
    dropped, dead. Answers the history."""
    chain = ledger.history(checkpoints)
    trained = [mark.id for h in chain for mark in h.marks]
    assert len(set(trained)) == len(trained), f"trained twice: {twice(trained)}"
    assert set(trained) == ends["committed"], f"{set(trained) ^ ends['committed']} differ from Redis"
    assert not ends["committed"] & ends["dropped"], "dropped and trained"
    assert not ends["committed"] & ends["dead"], "dead and trained"
    assert not ends["dropped"] & ends["dead"], "dropped and dead"
    assert all(map(unlucky, ends["dropped"])), "dropped without a reason"
    for h in ledger.handed:
        check_batch(ledger, h, staleness)
    for mark, (at, versions) in ledger.made.items():
        early = [v for v in versions if ledger.placed.get(("weights", v), at) >= at]
        assert not early, f"{mark} was sampled with versions that were not there: {early}"
    return chain


def check_batch(ledger: Ledger, h: Handed, staleness: int | None) -> None:
    """What a trainer was given, on whichever branch: really made, before it was handed over, fresh enough."""
    for mark, oldest in zip(h.marks, h.oldest, strict=True):
        assert mark in ledger.made, f"step {h.step}: nobody made {mark}"
        at, versions = ledger.made[mark]
        assert at < h.at, f"step {h.step}: {mark} was made later"
        assert max(versions) <= h.version, f"step {h.step}: {mark} is of version {versions} above {h.version}"
        assert not unlucky(mark.id), f"step {h.step}: {mark} was dropped"
        first = min(o.version for o in ledger.handed if (o.process, o.epoch) == (h.process, h.epoch))
        if staleness is not None and oldest >= first:  # of this trainer's own publications, one a step
            assert h.version - oldest <= staleness, f"step {h.step}: {mark} is too old: {oldest} at {h.version}"


def twice(ids: Iterable[int]) -> list[int]:
    return sorted(id for id, times in Counter(ids).items() if times > 1)
