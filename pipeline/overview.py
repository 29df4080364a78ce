"""A run at one instant, for people: what waits where, who works, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.types import Policy


@dataclass(frozen=True)
class Queues:
    """Prompts and groups, counted."""

    fresh: int
    "fresh prompts that wait"
    retry: int
    "prompts that wait for another round"
    in_flight: int
    "leased"
    refeed: int
    "to be fed again"
    queued: int
    "groups in the list"
    queued_bytes: int
    taken: int
    "popped by the trainer, not yet published upon"
    trained: int
    "published upon, in no checkpoint yet"
    open: int
    "pushed, not yet committed: queued, taken or trained"


@dataclass(frozen=True)
class Caps:
    """What bounds them; None where no trainer has said so yet."""

    queue: int | None
    "groups in the list"
    queue_bytes: int | None
    in_flight: int | None
    "groups leased at once: one more for each n samples that are finished and wait for their siblings"
    bound: int | None
    "groups leased or unsettled"
    room: int | None
    "groups that may still be leased"
    open: int | None
    "groups pushed and not committed: --save-interval batches and what `bound` allows"
    max_staleness: int | None


@dataclass(frozen=True)
class Trainer:
    name: str
    epoch: int
    seen: float | None
    "seconds since its last sign of life; None: it has left"
    alive: bool
    doing: str
    "as it says: training step 12, saving, waiting for groups, ..."
    doing_for: float | None
    "seconds"
    settings: str = ""
    "digest of its options, secrets left out"


@dataclass(frozen=True)
class Worker:
    name: str
    seen: float
    "seconds since its last heartbeat"
    alive: bool
    leased: int
    "prompts it holds, as Redis has it"
    info: dict[str, Any]
    "what it says of itself: see Generator.info"


@dataclass(frozen=True)
class Failure:
    """What a worker said when it ended with an error."""

    worker: str
    what: str
    age: float
    "seconds"


@dataclass(frozen=True)
class Prompts:
    """What became of prompts; reasons as the counters have them."""

    fed: int
    total: int | None
    "of the whole run; None: without end, or not known yet"
    committed: int
    dropped: int
    dead: int
    reasons: dict[str, dict[str, int]]
    "dropped, dead, recycled, strikes, ... -> reason -> times"


@dataclass(frozen=True)
class JobQueue:
    """Jobs of a kind, counted."""

    name: str
    "evals or rewards"
    waiting: int
    running: int
    failed: int
    "whose reasons are kept yet"
    workers: int
    "that gave a sign of life within 20 s; each does one job at a time"


@dataclass(frozen=True)
class Overview:
    status: str
    why: str
    paused: bool
    alarms: int
    "fatal errors that the trainer has not read"
    alarm: str
    "the first of them"
    failure: Failure | None
    "the newest under this trainer"
    refuses: str
    "Redis's answer to a write, where it takes none"
    feeder: bool | None
    "one is connected; None where we may not ask"
    full: bool
    "a group found no place in the list, and nothing was taken since"
    pushed: int
    "groups, ever"
    pushed_age: float | None
    "seconds since the last"
    queues: Queues
    caps: Caps
    policy: Policy | None
    policy_age: float | None
    "seconds since it was published; None where Redis forgot when"
    trainer: Trainer
    workers: list[Worker]
    prompts: Prompts
    jobs: list[JobQueue] = field(default_factory=list)
    held: bool = False
    "an evaluation has the engines"
    evals: dict[str, Any] = field(default_factory=dict)
    "as the trainer tells of them: steps `in_flight`, how many `ended`, and of those how many without metrics, by how"
