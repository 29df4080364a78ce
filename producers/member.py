"""What a worker of jobs is to RQ: registered, alive, and how a job of it ends. RQ's own bookkeeping, and no more of RQ.

RQ's own workers import whatever function a job names, unpickle, fork, and put the password on a command line (spawn).
Here a job is a name out of `pipeline.jobs.KINDS` and JSON arguments; its callbacks are not heard (deaf.py).
What a worker has when it is killed is run again by another within about LIMIT seconds, `Kind.retries` times; so is what
it had taken and not begun.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

from redis.exceptions import RedisError
from rq import Queue, worker_registration
from rq.exceptions import DequeueTimeout
from rq.intermediate_queue import IntermediateQueue
from rq.job import JobStatus
from rq.registry import clean_registries
from rq.serializers import JSONSerializer
from rq.utils import now
from rq.worker import BaseWorker

from pipeline.broker import Broker
from pipeline.jobs import REFUSED, Kind
from producers.deaf import Deaf

log = logging.getLogger(__name__)

LIMIT = 20
"Seconds without a sign of life after which a worker is dead and its job is another's."
EVERY = 3.0
"Seconds between signs."
BLOCK = 2
"Seconds that the one blocking pop waits."
TIDY = 5
"Seconds between looks for jobs of dead workers, by one worker of all."


class Taken(IntermediateQueue):  # type: ignore[misc]
    """Jobs that a worker has popped and not begun, which takes it no time: RQ gives a minute."""

    def should_be_cleaned_up(self, job_id: str) -> bool:
        seen = self.get_first_seen(job_id)
        return seen is not None and now() - seen > timedelta(seconds=LIMIT)

    def remove(self, job_id: str) -> None:
        """It may be taken again."""
        super().remove(job_id)
        self.connection.delete(self.get_first_seen_key(job_id))


class Member(BaseWorker):  # type: ignore[misc]
    """One RQ worker, for one thread."""

    job_class = Deaf

    def __init__(self, broker: Broker, kind: Kind, name: str) -> None:
        """`broker` is for this worker alone."""
        self.broker = broker
        self.kind = kind
        self.told = 0.0
        "monotonic time of the last sign of life"
        super().__init__(
            [broker.keys.queue(kind.queue)],
            name=f"{broker.keys.prefix}{name}",
            connection=broker.client,
            worker_ttl=LIMIT,
            serializer=JSONSerializer,
        )
        self.queue = self.queues[0]
        self.birth_date = now()

    # -- signs of life

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """RQ's, under our limit."""
        super().heartbeat(LIMIT, pipeline)

    def get_heartbeat_ttl(self, job: Any, working_time: float = 0.0) -> int:
        return LIMIT

    def sign(self) -> None:
        """Registers as well: Redis may have come back without us."""
        if time.monotonic() - self.told < EVERY:
            return
        self.last_heartbeat = now()
        with self.connection.pipeline() as pipe:
            worker_registration.register(self, pipe)
            pipe.hset(self.key, mapping={**self.serialize(), "state": self.get_state()})
            self.heartbeat(pipeline=pipe)
            pipe.execute()
        self.told = time.monotonic()

    def tidy(self) -> None:
        """What dead workers had, again or failed: RQ's own way of it, which a killed worker locks for 15 minutes."""
        if self.connection.set(f"rq:tidy:{self.queue.name}", self.name, nx=True, ex=TIDY):
            try:
                clean_registries(self.queue)
                worker_registration.clean_worker_registry(self.queue)
                Taken(self.queue.key, self.connection).cleanup(self, self.queue)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                log.error(
                    "what dead workers had in %s cannot be read: somebody else wrote there: %s", self.queue, error
                )

    def beat(self, job: Any, execution: Any) -> bool:
        """That the job is being done; False where nobody waits for it any more. In an outage nothing is said: the job
        goes on, and its end is written later."""
        if time.monotonic() - self.told < EVERY:
            return True
        try:
            self.maintain_heartbeats(job, execution)
            self.sign()
            return bool(self.connection.exists(job.key))
        except RedisError:
            return True

    # -- one job

    def take(self) -> Any:
        """The next job; None where there is none, or none of ours."""
        try:
            found = Queue.dequeue_any([self.queue], BLOCK, self.connection, job_class=Deaf, serializer=JSONSerializer)
        except DequeueTimeout:
            return None
        except RedisError:
            raise
        except Exception as error:
            id = getattr(error, "job_id", None)
            if id is None:
                raise
            self.queue.intermediate_queue.remove(id)
            self._report(id, f"what Redis holds as a job cannot be read: {error}")
            return None
        return found[0] if found else None

    # -- its end

    def succeeded(self, job: Any, execution: Any, value: Any) -> None:
        job._result, job._status = value, JobStatus.FINISHED
        self.handle_job_success(job, self.queue, self.queue.started_job_registry, execution)

    def failed(self, job: Any, execution: Any, why: str, again: bool = False) -> None:
        """Run again where that may help, else failed."""
        if not again:
            job.retries_left = 0
        log.warning("job %s: %s%s", job.id, why.splitlines()[0], "; it is run again" if job.retries_left else "")
        self.handle_job_failure(job, self.queue, exc_string=why, execution=execution)

    def hand_back(self, job: Any, execution: Any) -> None:
        """To the front of the queue, as if nobody had begun it."""
        log.info("job %s is handed back", job.id)
        with self.connection.pipeline() as pipe:
            self.cleanup_execution(job, pipeline=pipe, execution=execution)
            self.queue._enqueue_job(job, pipeline=pipe, at_front=True)
            pipe.execute()

    def drop(self, job: Any, execution: Any) -> None:
        """Nobody waits for it."""
        log.info("job %s is stopped: nobody waits for it", job.id)
        with self.connection.pipeline() as pipe:
            self.cleanup_execution(job, pipeline=pipe, execution=execution)
            pipe.execute()

    # -- what is not ours

    def refuse(self, job: Any, why: str) -> None:
        self.queue.intermediate_queue.remove(job.id)
        job.retries_left, job.failure_ttl, job.ended_at = 0, self.kind.kept, now()
        self.handle_job_failure(job, self.queue, exc_string=f"{REFUSED}: {why}")
        self._report(job.id, why)

    def _report(self, id: str, why: str) -> None:
        """In the log, and where `millpond inspect errors` finds it."""
        log.error("job %s is refused and was not run: %s", id, why)
        self.broker.note(self.name, f"job {id} refused: {why}")
