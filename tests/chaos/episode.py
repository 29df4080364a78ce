"""One run, its faults, its healing, and the comparison of what was seen with what stands at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ledger import Ledger, compare
from plan import Fault
from processes import contiguous, steps
from rig import ones
from scene import Scene

LONGEST = 100.0
"Seconds of faults, whatever the plan says."
LIMIT = 240.0
"Seconds from the healing to the end of the run."


@dataclass
class Record:
    """What an episode tells."""

    faults: list[tuple[str, float]] = field(default_factory=list)
    "kind and monotonic time of each that was injected"
    held: list[tuple[str, float, list[int]]] = field(default_factory=list)
    "of a killed worker: what to call it, when, and the prompts that it held"
    recovery: list[tuple[str, float]] = field(default_factory=list)
    "kind, and seconds until a group that was made after it was handed to a trainer"
    alone: bool = False
    "each fault was recovered from before the next: then, and only then, recovery is that of its kind"
    survived: bool = False
    steps: int = 0
    prompts: int = 0
    discarded: int = 0
    "batches that belong to no history: of branches that were given up"
    made: int = 0
    "groups generated"


def play(scene: Scene, plan: list[Fault], record: Record | None = None) -> Record:
    """The plan's faults; then healing, to the end of the run, and the comparison. `record` is filled in as it goes."""
    record = Record() if record is None else record
    record.alone = scene.setting.alone
    (scene.seen / "pace").write_text(str(scene.setting.pace))
    scene.begin()
    end = time.monotonic() + LONGEST
    for fault in plan:
        if time.monotonic() > end or not (_pass(scene, fault.after) and _ready(scene, fault)):
            break
        held, at = scene.held(fault), time.monotonic()
        record.faults.append((fault.kind, at))
        record.held += [(f"{fault.kind}: what it held is made again", at, held)] * bool(held)
        scene.inflict(fault)
        _audit(scene)
        if scene.setting.alone and not _recover(scene, at):
            break
    scene.heal()
    (scene.seen / "pace").write_text("0")
    end = time.monotonic() + LIMIT
    while scene.going():
        assert time.monotonic() < end, f"not at its end:\n{scene.words()}"
        time.sleep(0.1)
    ledger, ends = Ledger.read(scene.seen), _ends(scene)
    chain = compare(ledger, scene.out / "checkpoints", ends, scene.setting.staleness)
    _tell(record, ledger, len(chain), sum(map(len, ends.values())))
    record.survived = True
    return record


def _pass(scene: Scene, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while scene.going():
        if time.monotonic() >= end:
            return True
        time.sleep(0.02)
    return False


def _ready(scene: Scene, fault: Fault) -> bool:
    """Waits for whom the fault is meant to be up; False when the run ends meanwhile."""
    while not scene.ready(fault):
        if not _pass(scene, 0.02):
            return False
    return True


def _recover(scene: Scene, at: float) -> bool:
    """Waits until all is well; False when the run ends meanwhile."""
    end = time.monotonic() + LIMIT
    while scene.troubles.busy or Ledger.read(scene.seen).recovered(at) is None:
        assert time.monotonic() < end, f"no recovery:\n{scene.words()}"
        if not _pass(scene, 0.2):
            return False
    return True


def _audit(scene: Scene) -> None:
    """At any moment nobody stands in two places, or where nobody should. What stands nowhere is named by the next
    trainer, so that is asked at the end only."""
    found = scene.audit()
    assert found is None or [*found.doubled, *found.beyond, *found.other] == [], found


def _ends(scene: Scene) -> dict[str, set[int]]:
    """Where prompts ended, by Redis; all of an epoch have."""
    rows = scene.setting.rows
    found, standing = scene.finish()
    assert found.holds, found
    ends = {name: ones(getattr(standing, name)) for name in ("committed", "dropped", "dead")}
    ended = sum(map(len, ends.values()))
    assert rows is None or found.feed == rows == ended, f"{found.feed} were fed and {ended} ended of {rows}"
    lines = steps(scene.out)
    contiguous(lines)
    groups = sum(line["rollout/groups"] for line in lines)
    assert groups == len(ends["committed"]), f"{groups} groups in metrics.jsonl, {len(ends['committed'])} committed"
    return ends


def _tell(record: Record, ledger: Ledger, steps: int, prompts: int) -> None:
    record.steps, record.prompts, record.made = steps, prompts, len(ledger.made)
    record.discarded = len(ledger.handed) - steps
    ends = [(kind, at, ledger.recovered(at)) for kind, at in record.faults]
    ends += [(kind, at, ledger.made_again(ids, at)) for kind, at, ids in record.held]
    record.recovery = [(kind, end - at) for kind, at, end in ends if end is not None]
