"""One run, its faults, its healing, and the comparison of what was seen with what stands at the end."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from cast import Cast
from faults import KINDS, ready
from ledger import Ledger, compare
from plan import Fault
from processes import contiguous, eventually, steps
from rig import ones

from pipeline.audit import Audit, audit
from pipeline.server import EmbeddedServer


@dataclass
class Record:
    """What an episode tells."""

    faults: list[tuple[str, float]] = field(default_factory=list)
    "kind and monotonic time of each that was injected"
    recovery: list[tuple[str, float]] = field(default_factory=list)
    "kind, and seconds until a group that was begun and made after it was trained on"
    steps: int = 0
    prompts: int = 0
    discarded: int = 0
    "batches that belong to no history: of branches that were given up"
    made: int = 0
    "groups generated"


def play(folder: Path, plan: list[Fault], rows: int, pace: float, durability: Any = "second") -> Record:
    """The plan's faults, while the trainer takes `pace` seconds a step; then healing, to the end of the data, and the
    comparison."""
    record = Record()
    with EmbeddedServer(folder / "redis", durability) as server, Cast(folder, server, rows) as cast:
        (cast.seen / "pace").write_text(str(pace))
        for name in cast.commands:
            cast.play(name)
        eventually(cast.committed, "a first commit")
        for fault in plan:
            if not (_pass(cast, fault.after) and _ready(cast, fault)):
                break
            KINDS[fault.kind](cast, fault)
            record.faults.append((fault.kind, time.monotonic()))
            _audit(cast)
        cast.heal()
        (cast.seen / "pace").write_text("0")
        _to_the_end(cast)
        ends = _ends(cast, rows)
        chain = compare(Ledger.read(cast.seen), cast.out / "checkpoints", ends)
    _tell(record, Ledger.read(cast.seen), len(chain), rows)
    return record


def _pass(cast: Cast, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while cast.turn():
        if time.monotonic() >= end:
            return True
        time.sleep(0.02)
    return False


def _ready(cast: Cast, fault: Fault) -> bool:
    """Waits for whom the fault is meant to be up; False when the run ends meanwhile."""
    while not ready(cast, fault):
        if not _pass(cast, 0.02):
            return False
    return True


def _audit(cast: Cast) -> None:
    """At any moment nobody stands in two places, or where nobody should. What stands nowhere is named by the next
    trainer, so that is asked at the end only."""
    if "redis" in cast.busy:
        return
    found = audit(cast.broker)
    assert [*found.doubled, *found.beyond, *found.other] == [], found


def _to_the_end(cast: Cast) -> None:
    end = time.monotonic() + 120
    while cast.turn():
        assert time.monotonic() < end, f"not at its end:\n{_last_words(cast)}"
        time.sleep(0.1)
    for one in cast.playing.values():
        if "a resume is waited for" in one.said():  # it came when all was done
            one.kill(signal.SIGTERM)
        one.ends(0)


def _last_words(cast: Cast) -> str:
    return "\n".join(f"--- {name}\n{one.said()[-3000:]}" for name, one in cast.playing.items())


def _ends(cast: Cast, rows: int) -> dict[str, set[int]]:
    """Where each prompt ended, by Redis; all of the epoch have."""
    found: Audit = cast.audit()
    assert found.feed == rows
    standing = cast.broker.standing()
    ends = {name: ones(getattr(standing, name)) for name in ("committed", "dropped", "dead")}
    assert sum(map(len, ends.values())) == rows
    lines = steps(cast.out)
    contiguous(lines)
    assert sum(line["rollout/groups"] for line in lines) == len(ends["committed"])
    return ends


def _tell(record: Record, ledger: Ledger, steps: int, rows: int) -> None:
    record.steps, record.prompts, record.made = steps, rows, len(ledger.made)
    record.discarded = len(ledger.handed) - steps
    for kind, at in record.faults:
        after = (h.at for h in ledger.handed if any(ledger.made[m][0] > at for m in h.marks))
        if (first := min((t for t in after if t > at), default=None)) is not None:
            record.recovery.append((kind, first - at))


def table(records: list[Record]) -> list[dict[str, Any]]:
    """A row for each kind of fault."""
    times: dict[str, list[float]] = {}
    count: dict[str, int] = {}
    for record in records:
        for kind, _ in record.faults:
            count[kind] = count.get(kind, 0) + 1
        for kind, seconds in record.recovery:
            times.setdefault(kind, []).append(seconds)
    rows = []
    for kind, injected in sorted(count.items()):
        known = times.get(kind, [])
        spread = {"median": round(median(known), 2), "max": round(max(known), 2)} if known else {}
        rows.append({"kind": kind, "injected": injected, **spread})
    return rows
