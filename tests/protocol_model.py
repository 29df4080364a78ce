"""What each verb must do to a run, written down a second time in plain Python, and a reader of what Redis holds."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from rig import Rig, ones, prompt_of

from pipeline.keys import GROUP
from pipeline.ledger import Ledger
from pipeline.replies import Lease
from pipeline.types import Prompt

CAP, BOUND, IN_FLIGHT, STRIKES = 4, 7, 5, 3


@dataclass
class Entry:
    """A stream entry; the name is Redis's to give, so it does not count in a comparison."""

    id: int
    attempt: int
    strikes: int
    owner: str | None = None
    alone: bool = False
    name: str = field(default="", compare=False)

    def __lt__(self, other: Entry) -> bool:
        return (self.id, self.attempt) < (other.id, other.attempt)


@dataclass
class State:
    """All of a run that decides anything."""

    feed: int = 0
    streams: dict[str, list[Entry]] = field(default_factory=lambda: {"retry": [], "fresh": []})
    refeed: set[int] = field(default_factory=set)
    queue: list[tuple[int, int]] = field(default_factory=list)
    "id and attempt of each group in the list"
    open: dict[int, tuple[int, int]] = field(default_factory=dict)
    "id -> attempt, strikes"
    unsettled: dict[int, int] = field(default_factory=dict)
    "id -> push number"
    committed: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    pushed: int = 0
    version: int = 0
    running: bool = True
    agreed: bool = True
    grouped: bool = True
    "both streams have their consumer group"
    workers: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    "workers whose last heartbeat is old"

    @property
    def pending(self) -> int:
        return sum(e.owner is not None for entries in self.streams.values() for e in entries)

    @property
    def popped(self) -> int:
        return self.pushed - len(self.queue)

    @property
    def done(self) -> set[int]:
        return self.committed | self.dropped | self.dead

    def places(self, id: int) -> int:
        """In how many places a prompt stands."""
        listed = sum(e.id == id for entries in self.streams.values() for e in entries)
        where = (self.refeed, self.open, self.committed, self.dropped, self.dead)
        return listed + sum(id in place for place in where)

    def copy(self) -> State:
        return deepcopy(self)

    def plain(self) -> State:
        """For comparison: what waits in a stream waits in any order."""
        other = self.copy()
        for entries in other.streams.values():
            entries.sort()
        return other

    def entry(self, lease: Lease, worker: str) -> Entry | None:
        """The lease's entry, if it is the worker's."""
        mine = (e for e in self.streams[lease.stream] if e.name == lease.entry and e.owner == worker)
        return next((e for e in mine if (e.id, e.attempt) == (lease.prompt.id, lease.prompt.attempt)), None)

    def of(self, worker: str) -> list[tuple[str, Entry]]:
        return [(stream, e) for stream, entries in self.streams.items() for e in entries if e.owner == worker]

    # -- what the verbs do

    def end_or_again(self, id: int, attempt: int, strikes: int, fault: str, alone: bool = False) -> None:
        if id in self.done:
            return
        strikes += fault in ("strike", "bury")
        if fault == "drop":
            self.dropped.add(id)
        elif fault == "bury" or (fault == "strike" and strikes >= STRIKES):
            self.dead.add(id)
        else:
            self.streams["retry"].append(Entry(id, attempt + 1, strikes, alone=alone))

    def remove(self, entry: Entry) -> None:
        for entries in self.streams.values():
            entries[:] = [e for e in entries if e is not entry]

    def lease(self, worker: str, want: int, alone: bool) -> list[Entry]:
        if worker not in self.workers or not (self.running and self.agreed and self.grouped):
            return []
        self.silent.discard(worker)
        most = min(want, BOUND - self.pending - len(self.unsettled), IN_FLIGHT - self.pending)
        again, fresh = ([e for e in self.streams[stream] if e.owner is None] for stream in ("retry", "fresh"))
        lone = [n for n, e in enumerate(again[: max(most, 0)]) if e.alone]
        free = [*(again[: lone[1 - alone]] if len(lone) > 1 - alone else again), *fresh]
        for entry in free[: max(most, 0)]:
            entry.owner = worker
        return free[: max(most, 0)]

    def push(self, lease: Lease, worker: str) -> str:
        entry, p = self.entry(lease, worker), lease.prompt
        if entry is None:
            same = p.id in self.committed or self.open.get(p.id, (0, 0))[0] == p.attempt
            return "pushed" if same else "lost"
        if p.id in self.done:
            self.remove(entry)
            return "lost"
        if not self.agreed or len(self.queue) >= CAP:
            return "full"
        self.remove(entry)
        self.pushed += 1
        self.queue.append((p.id, p.attempt))
        self.open[p.id] = (p.attempt, p.strikes)
        self.unsettled[p.id] = self.pushed
        return "pushed"

    def hand_back(self, lease: Lease, worker: str, fault: str) -> int:
        entry = self.entry(lease, worker)
        if entry is None:
            return 0
        self.remove(entry)
        self.end_or_again(entry.id, entry.attempt, entry.strikes, fault, entry.alone)
        return 1

    def reap(self) -> list[str]:
        gone = sorted(self.silent)
        for worker in gone:
            for _, entry in self.of(worker):
                self.remove(entry)
                alone = entry.alone or entry.strikes + 2 >= STRIKES
                self.end_or_again(entry.id, entry.attempt, entry.strikes, "strike", alone)
        self.workers -= self.silent
        self.silent = set()
        return gone

    def settle(self, id: int, fault: str | None) -> None:
        """Out of `open`; round again unless fault is None."""
        attempt, strikes = self.open.pop(id)
        self.unsettled.pop(id, None)
        if fault is not None:
            self.end_or_again(id, attempt, strikes, fault)

    def check(self, held: dict[int, Prompt]) -> tuple[list[int], list[int]]:
        """Ids lost, in the order of their push, and ids foreign."""
        ours = {i for i, p in held.items() if self.open.get(i, (0, 0))[0] == p.attempt}
        lost = [i for i, n in sorted(self.unsettled.items(), key=lambda x: x[1]) if n <= self.popped and i not in ours]
        for id in lost:
            self.settle(id, "none")
        return lost, [i for i in held if i not in ours]

    def reconcile(self, book: Ledger, version: int) -> None:
        held = {**book.taken, **book.published}
        self.running, self.agreed, self.grouped = True, True, True
        self.committed = ones(book.committed)
        self.dropped = (self.dropped | ones(book.dropped)) - self.committed - held.keys()
        self.dead = (self.dead | ones(book.dead)) - self.committed - held.keys()
        self.feed = max([self.feed, book.cursor, *(i + 1 for i in held)])
        self.version = max(self.version, version)
        for entries in self.streams.values():
            entries[:] = [e for e in entries if e.id not in held and e.id not in self.done]
        self.refeed -= held.keys() | self.done
        for id in list(self.open):
            if id in held:
                continue
            if id in self.done:
                self.settle(id, None)
            elif self.unsettled.get(id, -1) <= self.popped:
                self.settle(id, "none")
        for id, p in held.items():
            self.open[id] = (p.attempt, p.strikes)
            number = self.unsettled.pop(id, 0)
            if id in book.taken:
                self.unsettled[id] = number
        self.refeed |= {i for i in range(self.feed) if not self.places(i)}


def observe(rig: Rig) -> State:
    """What Redis holds, at one instant."""
    keys, pipe = rig.keys, rig.raw.pipeline(transaction=True)
    for name in ("feed", "weights:version", "config", "done:committed", "done:dropped", "done:dead"):
        pipe.get(keys[name])
    pipe.hgetall(keys["state"])
    pipe.hgetall(keys["open"])
    pipe.zrange(keys["unsettled"], 0, -1, withscores=True)
    pipe.smembers(keys["refeed"])
    pipe.lrange(keys["groups"], 0, -1)
    pipe.zrange(keys["workers"], 0, -1, withscores=True)
    for name in ("prompts:retry", "prompts"):
        pipe.xrange(keys[name])
        pipe.xpending_range(keys[name], GROUP, "-", "+", 10_000)
    r: list[Any] = pipe.execute(raise_on_error=False)
    streams, grouped = {}, True
    for n, stream in enumerate(("retry", "fresh")):
        entries, pending = r[12 + 2 * n : 14 + 2 * n]
        if isinstance(pending, Exception):
            pending, grouped = [], False
        owner = {e["message_id"]: e["consumer"].decode() for e in pending}
        streams[stream] = [
            Entry(int(f[b"id"]), int(f[b"attempt"]), int(f[b"strikes"]), owner.get(name), b"alone" in f, name.decode())
            for name, f in entries
        ]
        assert set(owner) <= {name for name, _ in entries}
    waiting = [prompt_of(m) for m in r[10]]
    return State(
        feed=int(r[0] or 0),
        streams=streams,
        refeed={int(i) for i in r[9]},
        queue=[(p.id, p.attempt) for p in waiting],
        open={int(i): _open(v) for i, v in r[7].items()},
        unsettled={int(i): int(n) for i, n in r[8]},
        committed=ones(r[3] or b""),
        dropped=ones(r[4] or b""),
        dead=ones(r[5] or b""),
        pushed=int(r[6].get(b"pushed", 0)),
        version=int(r[1] or 0),
        running=r[6].get(b"status") == b"running",
        agreed=r[2] is not None,
        grouped=grouped,
        workers={w.decode() for w, _ in r[11]},
        silent={w.decode() for w, heard in r[11] if not heard},
    )


def _open(value: bytes) -> tuple[int, int]:
    record = json.loads(value)
    return record["attempt"], record["strikes"]
