"""The test's own eyes inside the processes of a run, which load it as they load a user's functions.

Each process writes what it sees into a file of its own, a line at a time with O_APPEND, so that what it wrote before it
was killed is there; Redis and the product's own books are not asked.

made      a generator has finished a group and is about to push it
handed    the trainer was given a batch to train on
placed    a folder of weights or a checkpoint is about to get its name
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plan import unlucky

if TYPE_CHECKING:
    from pipeline.types import Group
    from producers.filters import Verdict
    from producers.rewards.base import RewardInput

FOLDER = Path(os.environ["WITNESS"])
_real = time.time
_path = FOLDER / f"{time.monotonic_ns():020d}-{os.getpid()}.jsonl"
_file = os.open(_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def note(what: str, **facts: Any) -> None:
    line = {"what": what, "at": time.monotonic(), "pid": os.getpid(), **facts}
    os.write(_file, json.dumps(line).encode() + b"\n")


def score(given: RewardInput) -> float:
    """A reward that only this prompt and sample have."""
    return given.prompt_id * 8.0 + given.index


def made(group: Group) -> Verdict:
    """A dynamic filter."""
    from producers.filters import Verdict

    note("made", mark=mark(group), versions=sorted(v or 0 for v in group.versions))
    return Verdict(not unlucky(group.prompt.id), "unlucky")


def handed(groups: list[Group]) -> list[Group]:
    """A sample filter. Which step and epoch it is only the trainer knows: its loop is found among the callers."""
    frame: Any = sys._getframe(1)
    while type(loop := frame.f_locals.get("self")).__name__ != "Loop":
        frame = frame.f_back
    marks, versions = [mark(group) for group in groups], [min(v or 0 for v in group.versions) for group in groups]
    now, epoch = loop.now, loop.broker.epoch
    note("handed", step=now.step + 1, epoch=epoch, version=now.version, marks=marks, oldest=versions)
    time.sleep(_setting("pace"))
    return groups


def mark(group: Group) -> tuple[int, int, str, str]:
    """Prompt, attempt, worker, and a digest of all that was sampled and scored."""
    total = hashlib.sha256(repr(group.seconds).encode())
    for sample in group.samples:
        total.update(repr((sample.index, sample.reward, sample.text)).encode())
        for sequence in sample.sequences:
            total.update(sequence.tokens.tobytes() + sequence.logprobs.tobytes() + repr(sequence.versions).encode())
    return group.prompt.id, group.prompt.attempt, group.worker, total.hexdigest()[:16]


def _setting(name: str) -> float:
    """What the test has written into a file for all processes; 0 without."""
    try:
        return float((FOLDER / name).read_text())
    except (OSError, ValueError):
        return 0.0


def _clock() -> float:
    """This machine's clock, which jumps when the test says so."""
    return _real() + _setting(f"clock-{os.getpid()}")


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if event == "os.rename":
        found = re.fullmatch(r".*/(weights|checkpoints)/(\d+)", str(args[1]))
        if found:
            note("placed", kind=found[1], number=int(found[2]))


time.time = _clock
sys.addaudithook(_watch)
