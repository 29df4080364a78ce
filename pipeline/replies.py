"""What scripts answer, as records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import MessageError
from pipeline.rendezvous import rendezvous_of, write
from pipeline.scripts import Arg
from pipeline.types import Policy, Prompt


@dataclass(frozen=True)
class Standing:
    """Where every prompt stands, at one instant."""

    feed: int
    committed: bytes
    dropped: bytes
    dead: bytes
    waiting: list[int]
    "ids in the streams: waiting or leased"
    open: list[int]
    unsettled: dict[int, int]
    "id -> push number"
    refeed: list[int]
    popped: int
    "push number up to which groups have left the list"
    queued: int
    pending: int
    "how many of `waiting` are leased"

    def places(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """uint8 [feed]: in how many places each prompt stands; all ones when nothing is lost or doubled."""
        count = np.zeros(self.feed, dtype=np.uint8)
        for bits in (self.committed, self.dropped, self.dead):
            ones = np.unpackbits(np.frombuffer(bits, dtype=np.uint8))[: self.feed]
            count[: len(ones)] += ones
        for ids in (self.waiting, self.open, self.refeed):
            np.add.at(count, np.array([i for i in ids if i < self.feed], dtype=np.int64), 1)
        return count

    @classmethod
    def of(cls, r: Any) -> Standing:
        """From the reply of snapshot.lua."""
        pairs = [int(x) for x in r[6]]
        return cls(
            feed=int(r[0]),
            committed=r[1],
            dropped=r[2],
            dead=r[3],
            waiting=[int(x) for x in r[4]],
            open=[int(x) for x in r[5]],
            unsettled=dict(zip(pairs[::2], pairs[1::2], strict=True)),
            refeed=[int(x) for x in r[7]],
            popped=int(r[8]),
            queued=int(r[9]),
            pending=int(r[10]),
        )


@dataclass(frozen=True)
class Checked:
    """What `check` found, at one instant."""

    lost: list[int]
    foreign: list[int]
    "held by us, but not open in Redis under that attempt: not ours to train on"
    waiting: int
    "entries in both streams"
    queued: int
    refeed: int
    feed: int
    feed_total: int | None

    @property
    def exhausted(self) -> bool:
        """The feeder is done, and nothing waits, is in flight or queued."""
        fed = self.feed_total is not None and self.feed >= self.feed_total
        return fed and self.waiting == self.queued == self.refeed == 0

    @classmethod
    def of(cls, r: Any) -> Checked:
        """From the reply of check.lua, without the fence."""
        return cls(
            lost=[int(x) for x in r[0]],
            foreign=[int(x) for x in r[1]],
            waiting=int(r[2]),
            queued=int(r[3]),
            refeed=int(r[4]),
            feed=int(r[5]),
            feed_total=int(r[6]) if r[6] else None,
        )


def policy_of(raw: dict[bytes, bytes]) -> Policy | None:
    """The `weights` hash as a record; None where nothing was published."""
    if not raw:
        return None
    try:
        f = {k.decode(): v.decode() for k, v in raw.items()}
        lineage = tuple((int(a), int(b)) for a, b in (x.split(":") for x in f["lineage"].split()))
        where = f["path"], f["format"], f["digest"], int(f["step"]), float(f["time"])
        return Policy(int(f["version"]), *where, lineage, rendezvous_of(f.get("rendezvous", "")))
    except (KeyError, ValueError) as error:
        raise MessageError("weights", f"the key holds no publication ({type(error).__name__}: {error})") from None


def fields_of(policy: Policy) -> list[Arg]:
    """The `weights` hash of a record, flat, without the version."""
    restored = "" if policy.restored_from is None else policy.restored_from
    lineage = " ".join(f"{n}:{r}" for n, r in policy.lineage)
    values = (
        ("path", policy.path),
        ("format", policy.format),
        ("digest", policy.digest),
        ("step", policy.step),
        ("time", policy.time),
        ("lineage", lineage),
        ("restored_from", restored),
        ("rendezvous", write(policy.rendezvous)),
    )
    return [x for pair in values for x in pair]


def map_of(raw: bytes | str | None) -> dict[str, Any]:
    """A JSON object; empty where it is missing or something else."""
    try:
        value = json.loads(raw or b"{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def quarantined(message: bytes, problem: str) -> list[Arg]:
    """An entry of `quarantine`, flat."""
    digest = hashlib.sha256(message).hexdigest()
    return ["head", message[:4096], "length", len(message), "sha256", digest, "problem", problem[:500]]


@dataclass(frozen=True)
class Lease:
    """A prompt this worker holds until it pushes, drops or hands it back."""

    prompt: Prompt
    stream: str
    "retry or fresh"
    entry: str
    "stream id: the lease's identity; a prompt that went round again has another"
    alone: bool = False
    "its workers died, again and again: a worker has at most one of these at a time"


OTHER_CONFIG = "other config"
"Why nothing is leased where a trainer has written other settings than those that the worker has read."


@dataclass(frozen=True)
class Leased:
    """Answer to `lease`."""

    leases: list[Lease]
    version: int | None
    "current weight version, read at the same instant"
    room: int
    "groups that could still be leased"
    why: str
    "empty, or why there is nothing: status of the run, paused, reaped, ..."


@dataclass(frozen=True)
class Pulse:
    """Answer to `heartbeat`."""

    known: bool
    "False: declared dead; what was held belongs to others now"
    status: str
    paused: bool
    version: int | None


def pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def lease_of(stream: str, entry: bytes, raw: Mapping[bytes, bytes]) -> Lease:
    """MessageError where the entry is no prompt."""
    try:
        return _lease(stream, entry, {k.decode(): v.decode() for k, v in raw.items()})
    except (KeyError, ValueError) as error:
        raise MessageError(
            "prompts", f"entry {entry.decode()} is no prompt ({type(error).__name__}: {error})"
        ) from None


def _lease(stream: str, entry: bytes, fields: dict[str, str]) -> Lease:
    prompt = Prompt(int(fields["id"]), int(fields["attempt"]), int(fields["strikes"]), fields["prompt"])
    if min(prompt.id, prompt.attempt, prompt.strikes) < 0 or prompt.id >= 1 << 32:
        raise ValueError("a number that it cannot have")
    if [str(prompt.id), str(prompt.attempt)] != [fields["id"], fields["attempt"]]:  # scripts compare them as text
        raise ValueError("a number that is written in another way")
    return Lease(prompt, stream, entry.decode(), "alone" in fields)


def version_of(raw: bytes) -> int | None:
    return int(raw) if raw.isdigit() else None


def pulse_of(reply: list[bytes]) -> Pulse:
    """From the reply of heartbeat.lua."""
    if reply[0] == b"reaped":
        return Pulse(False, "", False, None)
    return Pulse(True, reply[1].decode(), bool(reply[2]), version_of(reply[3]))
