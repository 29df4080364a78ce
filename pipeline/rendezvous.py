"""Weights over a process group: what the trainer and the workers tell each other in Redis. The tensors go another way.

1. The publication carries a `Rendezvous`: where the trainer waits. Its folder is complete by then, for everybody else.
2. Each worker answers (key `weights:joins`) with those of its engines that can be reached from there.
3. The trainer says who takes part, and what will come in which order: the `Roster` (key `weights:roster`). It waits for
   answers no longer than `ANSWER`; who is not in the roster loads the folder.
4. Each member tells how it ended. One that fails ends it for all, and they load the folder.

A group's name is made for one publication of one trainer, and only the trainer that holds the run can write a roster:
one that was replaced finds nobody.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from pipeline.errors import MessageError

ANSWER = 5.0
"Seconds that a trainer waits for answers."
PATIENCE = 3 * ANSWER
"Seconds that a worker waits for the roster, its engines still at work."

Engines = dict[str, int]
"Engine's URL -> processes of it that join a group, one a GPU."


@dataclass(frozen=True)
class Rendezvous:
    """Where a trainer waits for those who take a version from it."""

    group: str
    "name of the process group; no other update's"
    host: str
    port: int
    backend: str
    "nccl | gloo"
    seconds: float
    "that the update may take, from the roster on"


class Piece(NamedTuple):
    """A tensor as the checkpoint has it."""

    name: str
    dtype: str
    "torch's name of it, without `torch.`"
    shape: tuple[int, ...]
    size: int
    "bytes"


@dataclass(frozen=True)
class Roster:
    """Who takes part, and what they are sent. The trainer is rank 0."""

    group: str
    world: int
    seats: dict[str, int]
    "`seat` of an engine -> its first rank"
    buckets: tuple[tuple[Piece, ...], ...]


def seat(worker: str, url: str) -> str:
    return f"{worker} {url}"


def seated(answers: dict[str, Engines]) -> tuple[dict[str, int], int]:
    """First ranks by seat, and the size of the world."""
    seats: dict[str, int] = {}
    world = 1
    for worker, engines in sorted(answers.items()):
        for url, ranks in sorted(engines.items()):
            seats[seat(worker, url)] = world
            world += ranks
    return seats, world


def packed(pieces: Iterable[Piece], limit: int) -> tuple[tuple[Piece, ...], ...]:
    """In order, at most `limit` bytes a bucket; a piece that is larger has its own."""
    buckets: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if not buckets or piece.size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(piece)
        room -= piece.size
    return tuple(map(tuple, buckets))


def write(value: Rendezvous | Roster | None) -> str:
    """As JSON; empty for none."""
    return json.dumps(asdict(value)) if value else ""


def rendezvous_of(text: str) -> Rendezvous | None:
    """MessageError, a ValueError, where it is none."""
    try:
        return Rendezvous(**json.loads(text)) if text else None
    except (ValueError, TypeError) as error:
        raise MessageError("weights.rendezvous", f"no rendezvous: {error}") from None


def roster_of(text: str) -> Roster | None:
    try:
        if not text:
            return None
        found = json.loads(text)
        buckets = tuple(tuple(Piece(n, d, tuple(s), b) for n, d, s, b in bucket) for bucket in found["buckets"])
        return Roster(found["group"], found["world"], found["seats"], buckets)
    except (ValueError, TypeError, KeyError) as error:
        raise MessageError("weights:roster", f"no roster: {error}") from None
