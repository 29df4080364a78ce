"""Jobs that must hold nobody up: evaluations, and rewards that are slow or can hang. RQ carries them.

Who needs one done puts it here by the name of its kind, with JSON arguments; `millpond worker` (producers/worker.py)
does it in a process that can be killed. A kind is an entry of KINDS here, and a function of the same name in
`producers.jobs.JOBS`: nothing else found in a queue is done, nor imported. All in Redis is JSON, never pickled.

    jobs = Jobs(url, keys, "trainer")
    id = jobs.put(EVAL, "20", {"version": 7}, timeout=1800)     # the same name again is the same job
    jobs.ended([id], seconds=1.0)                               # {id: Outcome}: what has ended by now
    jobs.forget([id])                                           # once it is read

A job that is killed is run again, `Kind.retries` times at most; one whose keys are gone is `lost`. So who waits looks
with a deadline of its own, and always gets an answer: `ended` tells of a lost one, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from redis.exceptions import RedisError

from pipeline.connect import connect
from pipeline.errors import UsageError
from pipeline.keys import Keys

LARGEST = 8 << 20
"Bytes of a job's arguments, and of its result, as JSON."
DIED, LATE, REFUSED, FAILED = "died", "late", "refused", "failed"
"First word of why a job failed: its process was killed; it took too long; no job of ours; its function raised."


@dataclass(frozen=True)
class Kind:
    """What jobs of a kind have in common."""

    name: str
    queue: str
    "of all queues of the run"
    retries: int
    "times a job is run again whose process or worker was killed"
    kept: int
    "seconds a result waits to be read; RQ's own 500 are too few for a trainer that is busy"

    @property
    def function(self) -> str:
        """What RQ's tools show; a label, which nobody imports."""
        return f"producers.jobs.{self.name}"


REWARD = Kind("reward", "rewards", retries=1, kept=3600)
EVAL = Kind("eval", "evals", retries=2, kept=7 * 24 * 3600)
KINDS = {kind.function: kind for kind in (REWARD, EVAL)}
QUEUES = tuple(kind.queue for kind in KINDS.values())


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    state: Literal["done", "failed", "lost"]
    value: Any = None
    "what its function gave"
    why: str = ""
    "DIED, LATE, REFUSED or FAILED and more; of FAILED the traceback"

    @property
    def what(self) -> str:
        """The first word of `why`."""
        return self.why.partition(":")[0]


class Jobs:
    """One run's jobs, for who puts and reads them. Errors of Redis pass through: `pipeline.outage.passing` tells which
    may pass, and nothing is put or read then."""

    def __init__(self, url: str, keys: Keys, name: str) -> None:
        self.keys = keys
        self.client = connect(url, f"{keys.prefix}{name}")

    def id(self, kind: Kind, name: str) -> str:
        return f"{self.keys.job_tag}{kind.name}-{name}"

    def put(self, kind: Kind, name: str, arguments: Mapping[str, Any], timeout: float, wait: float = 0.0) -> str:
        """The job's id. `name`: letters, digits, - and _, one job each; what is there already is left as it is.

        `timeout`: seconds it may take once it has begun; `wait`: after so many it is no longer begun (0: whenever).
        Both are rounded up to whole ones.
        """
        from rq import Retry

        queue = self._queue(kind)
        size = len(json.dumps(arguments))
        if size > LARGEST:
            raise UsageError(f"job {kind.name} {name}: {size} bytes of arguments, {LARGEST} are allowed")
        id = self.id(kind, name)
        if self.client.exists(queue.job_class.key_for(id)):
            return id
        queue.enqueue_call(
            kind.function,
            kwargs=dict(arguments),
            timeout=ceil(timeout),
            result_ttl=kind.kept,
            failure_ttl=kind.kept,
            ttl=ceil(wait) if wait else None,
            job_id=id,
            description=f"{kind.name} {name}",
            retry=Retry(max=kind.retries) if kind.retries else None,
        )
        return id

    def ended(self, ids: Sequence[str], seconds: float = 0.0) -> dict[str, Outcome]:
        """Those that have ended; waits up to `seconds`, below a socket's time-out, for the first."""
        from rq.job import Job
        from rq.results import Result

        if not ids:
            return {}
        streams: Any = {Result.get_key(id): "0-0" for id in ids}
        raw: Any = self.client.xread(streams, block=max(1, int(seconds * 1000)) if seconds else None)
        found = dict(raw)
        known = {id: found.get(Result.get_key(id).encode()) for id in ids}
        result = {id: _outcome(entries[-1]) for id, entries in known.items() if entries}
        waiting = [] if result else list(ids)  # who has died is looked for when all is quiet
        there = self._exist([Job.key_for(id) for id in waiting] + [Result.get_key(id) for id in waiting])
        for n, id in enumerate(waiting):
            if not there[n] and not there[n + len(waiting)]:
                result[id] = Outcome("lost", why="lost: Redis has it no more: it was not begun in time")
        return result

    def forget(self, ids: Sequence[str]) -> None:
        """Takes jobs out of Redis, all in one call; one that runs is run to its end for nobody."""
        from rq.job import Job
        from rq.results import Result

        pipe = self.client.pipeline(transaction=False)
        for id in ids:
            pipe.delete(Job.key_for(id), Result.get_key(id))
            queue = next(self._queue(k) for k in KINDS.values() if id.startswith(f"{self.keys.job_tag}{k.name}-"))
            pipe.lrem(queue.key, 1, id)
            pipe.zrem(queue.finished_job_registry.key, id)
            pipe.zrem(queue.failed_job_registry.key, id)
        pipe.execute()

    def workers(self, kind: Kind) -> int:
        """That are there for jobs of this kind."""
        from rq.worker_registration import WORKERS_BY_QUEUE_KEY

        known: Any = self.client.smembers(WORKERS_BY_QUEUE_KEY % self.keys.queue(kind.queue))
        return sum(self._exist([key.decode() for key in known]))

    def offer(self, kind: Kind, name: str, arguments: Mapping[str, Any], timeout: float) -> tuple[str, str]:
        """As `put` for who must not be held up by Redis: (id, "") or ("", why it could not be put)."""
        try:
            return self.put(kind, name, arguments, timeout), ""
        except RedisError as error:
            return "", f"{type(error).__name__}: {error}"

    def close(self) -> None:
        self.client.close()

    def _queue(self, kind: Kind) -> Any:
        from rq import Queue
        from rq.serializers import JSONSerializer

        return Queue(self.keys.queue(kind.queue), connection=self.client, serializer=JSONSerializer)

    def _exist(self, keys: Sequence[str]) -> list[int]:
        pipe = self.client.pipeline(transaction=False)
        for key in keys:
            pipe.exists(key)
        return pipe.execute()


def _outcome(entry: tuple[bytes, dict[bytes, bytes]]) -> Outcome:
    """Of an entry in a stream of results: RQ writes one only when a job is run no more."""
    from rq.results import Result
    from rq.serializers import JSONSerializer

    connection: Any = None
    result = Result.restore("", entry[0].decode(), entry[1], connection=connection, serializer=JSONSerializer)
    if result.type == Result.Type.SUCCESSFUL:
        return Outcome("done", result.return_value)
    return Outcome("failed", why=result.exc_string or FAILED)
