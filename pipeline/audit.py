"""`millpond audit`: each prompt fed stands in exactly one place; proved by id, from Redis alone, on a live run.

The proof is one transaction, so nothing moves while it is taken. `counters` decide nothing: a difference is a hint.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import show
from pipeline.broker import Broker
from pipeline.config import option
from pipeline.find import Look, found
from pipeline.flags import arguments
from pipeline.replies import Standing
from pipeline.scripts import load

SECOND_LOOK = 0.5
"Seconds: a restore finds out what is missing in one step and names it in the next; what is still missing then is lost."
LISTED = 20
"Ids that are listed for people; --json has them all."


class AuditLook(Look):
    """Proves that each prompt stands in exactly one place, or exits 1 and names it: millpond audit [FOLDER or NAME]."""

    json_: bool = option(False, "one JSON document instead of text")


@dataclass(frozen=True)
class Audit:
    """What was found."""

    feed: int
    places: dict[str, int]
    "prompts in each place; they add up to `feed` when nothing is wrong"
    missing: list[int]
    "ids that were fed and stand nowhere"
    doubled: dict[int, list[str]]
    "ids that stand in more than one place, or twice in one: where"
    beyond: dict[int, list[str]]
    "ids that were never fed: where"
    other: list[str]
    "sentences about what contradicts itself"
    hints: list[str]
    "counters that differ; no violation"

    @property
    def holds(self) -> bool:
        return not (self.missing or self.doubled or self.beyond or self.other)


def audit(broker: Broker) -> Audit:
    """Looks, and where something is missing looks again."""
    first = _look(broker)
    if not first.missing:
        return first
    time.sleep(SECOND_LOOK)
    second = _look(broker)
    return replace(second, missing=sorted(set(first.missing) & set(second.missing)))


def _look(broker: Broker) -> Audit:
    def ask() -> list[Any]:
        pipe = broker.client.pipeline(transaction=True)
        for name in ("snapshot", "leased"):
            script = load(name)
            pipe.execute_command("EVAL", script.text, *script.call(broker.keys))
        pipe.hget(broker.keys["state"], "pushed")
        pipe.hgetall(broker.keys["counters"])
        return pipe.execute()

    snapshot, leases, pushed, counters = broker.patiently(ask)
    return examine(
        Standing.of(snapshot),
        [int(lease[4]) for lease in leases if lease[4]],
        int(pushed or 0),
        {show.text(k): int(v) for k, v in counters.items()},
    )


def examine(s: Standing, leased: list[int], pushed: int, counters: Mapping[str, int]) -> Audit:
    """The verdict on one instant; `leased`: ids in flight, `pushed`: the newest push number."""
    where = {name: np.array(list(ids), dtype=np.int64) for name, ids in _places(s, leased).items()}
    every = np.concatenate(list(where.values()))
    times = np.bincount(every[(every >= 0) & (every < s.feed)], minlength=s.feed)
    return Audit(
        feed=s.feed,
        places={name: len(ids) for name, ids in where.items()},
        missing=[int(i) for i in np.flatnonzero(times == 0)],
        doubled=_whereabouts(where, np.flatnonzero(times > 1)),
        beyond=_whereabouts(where, every[(every < 0) | (every >= s.feed)]),
        other=list(_contradictions(s, leased, pushed)),
        hints=list(_hints(s, counters)),
    )


def _places(s: Standing, leased: list[int]) -> dict[str, Iterable[int]]:
    waiting = Counter(s.waiting)
    waiting.subtract(leased)
    opened: dict[str, list[int]] = {"queued": [], "taken": [], "trained": []}
    for id in s.open:
        push = s.unsettled.get(id)
        opened["trained" if push is None else "queued" if push > s.popped else "taken"].append(id)
    return {
        "waiting": waiting.elements(),
        "in flight": leased,
        **opened,
        "committed": _ones(s.committed),
        "dropped": _ones(s.dropped),
        "dead": _ones(s.dead),
        "to be fed again": s.refeed,
    }


def _ones(bits: bytes) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(bits, dtype=np.uint8)))


def _whereabouts(where: Mapping[str, NDArray[np.int64]], ids: NDArray[np.int64]) -> dict[int, list[str]]:
    result: dict[int, list[str]] = defaultdict(list)
    for name, there in where.items():
        for id in there[np.isin(there, ids)]:
            result[int(id)].append(name)
    return dict(sorted(result.items()))


def _contradictions(s: Standing, leased: list[int], pushed: int) -> Iterable[str]:
    if loose := sorted(set(s.unsettled) - set(s.open)):
        yield f"unsettled and not open: {_ids(loose)}"
    if early := sorted(id for id, push in s.unsettled.items() if push > pushed):
        yield f"unsettled under push numbers above {pushed}, the newest: {_ids(early)}"
    queued = sum(push > s.popped for push in s.unsettled.values())
    if queued > s.queued:
        yield f"{queued} ids count as queued, and the list is {s.queued} groups long"
    if s.pending > len(leased):
        yield f"leases of entries that no longer exist, which take up room: {s.pending - len(leased)}"


def _hints(s: Standing, counters: Mapping[str, int]) -> Iterable[str]:
    def total(kind: str) -> int:
        return sum(n for name, n in counters.items() if name.startswith(kind))

    for name, counted, true in (
        ("fed", counters.get("fed", 0), s.feed),
        ("committed", counters.get("committed", 0), len(_ones(s.committed))),
        ("dropped", total("dropped:"), len(_ones(s.dropped))),
        ("dead", total("dead:"), len(_ones(s.dead))),
    ):
        if counted != true:
            yield f"{name}: {true}, and the counter says {counted} (no violation; a restore or a cut log does that)"


def _ids(ids: Iterable[int]) -> str:
    listed = list(ids)
    return ", ".join(map(str, listed[:LISTED])) + (f" and {len(listed) - LISTED} more" if len(listed) > LISTED else "")


def report(result: Audit) -> None:
    """For people."""
    show.pairs([(name, str(n)) for name, n in result.places.items()] + [("fed", str(result.feed))])
    show.line()
    if result.missing:
        show.line(f"missing, they stand nowhere: {_ids(result.missing)}")
    for word, found_there in (("doubled", result.doubled), ("never fed", result.beyond)):
        for id, places in list(found_there.items())[:LISTED]:
            show.line(f"{word}: prompt {id} stands in: {', '.join(places)}")
        if len(found_there) > LISTED:
            show.line(f"{word}: {len(found_there) - LISTED} more")
    for sentence in result.other:
        show.line(f"wrong: {sentence}")
    for sentence in result.hints:
        show.line(f"hint: {sentence}")
    if result.holds:
        show.line(f"conserved: each of {result.feed} prompts stands in exactly one place")


def main(argv: list[str]) -> int:
    look, words = arguments(AuditLook, argv, "millpond audit")
    with found(look, words) as run:
        result = audit(run.broker)
        if look.json_:
            show.document({"run": run.run, "holds": result.holds, **asdict(result)})
        else:
            show.line(f"run {run.run} in {run.where}\n")
            report(result)
    return 0 if result.holds else 1
