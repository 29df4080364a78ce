"""One RQ worker: takes one job at a time from one queue of the run and has a process of its own do it.

RQ's own workers import whatever function a job names, unpickle, fork, and put the password on a command line (spawn).
This one uses RQ's bookkeeping and none of that: a job is a name out of `pipeline.jobs.KINDS` and JSON arguments, its
callbacks are not called (deaf.py). What it has when it is killed is run again by another within about LIMIT seconds.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from redis.exceptions import RedisError
from rq import Queue, worker_registration
from rq.exceptions import DequeueTimeout
from rq.job import JobStatus
from rq.registry import clean_registries
from rq.serializers import JSONSerializer
from rq.utils import now
from rq.worker import BaseWorker

from pipeline.broker import Broker
from pipeline.errors import MillpondError, Stopped, UsageError
from pipeline.jobs import DIED, FAILED, LATE, REFUSED, Kind
from producers.deaf import Deaf, refusal
from producers.horse import Horse, HorseDied
from producers.jobs import Desk, Job

log = logging.getLogger(__name__)

LIMIT = 20
"Seconds without a sign of life after which a worker is dead and its job is another's."
EVERY = 3.0
"Seconds between signs."
GRACE = 15.0
"Seconds in which a job that runs may end once the worker is told to stop; then it is handed back."
BLOCK = 1
"Seconds that the one blocking pop waits."
TIDY = 5
"Seconds between looks for jobs of dead workers, by one worker of all."


class Hand(BaseWorker):  # type: ignore[misc]
    job_class = Deaf

    def __init__(self, broker: Broker, kind: Kind, name: str, job: Job, desk: Desk) -> None:
        """`broker` is for this hand alone; `broker.stop` is set when no more jobs are to be taken."""
        self.broker = broker
        self.kind = kind
        self.lasting = job.lasting
        self.desk = desk
        self.horse: Horse | None = None
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

    def run(self) -> None:
        """Until told to stop. UsageError where this worker cannot do such jobs, RedisDown past the patience."""
        try:
            if self.lasting:
                self._saddle(None)
            while not self.broker.stop.is_set():
                self.broker.patiently(self._turn)
        except Stopped:
            pass
        finally:
            if self.horse is not None:
                self.horse.end()
            with contextlib.suppress(RedisError):  # else its keys expire
                self.register_death()

    # -- signs of life

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """RQ's, under our limit."""
        super().heartbeat(LIMIT, pipeline)

    def get_heartbeat_ttl(self, job: Any, working_time: float = 0.0) -> int:
        return LIMIT

    def _sign(self) -> None:
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

    # -- one job

    def _turn(self) -> None:
        self._sign()
        if self.connection.set(f"rq:tidy:{self.queue.name}", self.name, nx=True, ex=TIDY):
            clean_registries(self.queue)
            worker_registration.clean_worker_registry(self.queue)
            self.queue.intermediate_queue.cleanup(self, self.queue)
        job = self._next()
        if job is not None:
            self._do(job)

    def _next(self) -> Any:
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

    def _do(self, job: Any) -> None:
        why = refusal(job, self.kind)
        if why:
            self._refuse(job, why)
            return
        job.retries_left = min(job.retries_left or 0, self.kind.retries)
        execution = self.prepare_execution(job)
        self.prepare_job_execution(job, remove_from_intermediate_queue=True)
        try:
            settle = self._asked(job, execution)
        finally:
            if not self.lasting and self.horse is not None:
                self.horse.end()
                self.horse = None
        job.ended_at = now()
        self.broker.patiently(settle)
        self.set_state("idle")

    def _asked(self, job: Any, execution: Any) -> Callable[[], None]:
        """What is to be written down of a job, once it has ended somehow."""
        try:
            if self.horse is None or not self.horse.alive:
                self._saddle(lambda: self._beat(job, execution))
            reply = self._reply(job, execution)
        except HorseDied as death:
            self._put_down()
            return partial(self._failed, job, execution, f"{DIED}: {death}")
        except TimeoutError as error:
            return partial(self._failed, job, execution, f"{LATE}: {error}", again=False)
        if reply is None:
            return partial(self._hand_back, job, execution)
        if "error" in reply:
            why = f"{FAILED}: {reply['error']}\n{reply['trace']}"
            return partial(self._failed, job, execution, why, again=False)
        return partial(self._succeeded, job, execution, reply["value"])

    def _reply(self, job: Any, execution: Any) -> dict[str, Any] | None:
        """What the process says of the job; None where it is to be handed back. TimeoutError where it took too long."""
        horse = self._ridden()
        horse.send({"arguments": job.kwargs})
        over, stopped = time.monotonic() + job.timeout, 0.0
        while (reply := horse.read(min(1.0, over - time.monotonic()))) is None:
            if time.monotonic() >= over:
                self._put_down()
                raise TimeoutError(f"not done in {job.timeout:g} s")
            if self.broker.stop.is_set():
                stopped = stopped or time.monotonic()
                if time.monotonic() - stopped >= GRACE:
                    self._put_down()
                    return None
            self._beat(job, execution)
        return reply

    def _saddle(self, beat: Callable[[], None] | None) -> None:
        """Starts the process and returns when it can take a job."""
        self.horse = Horse(self.desk, self.kind.name)
        while (first := self.horse.read(1.0)) is None:
            if self.broker.stop.is_set():
                raise Stopped("asked to stop while a process was starting")
            if beat:
                beat()
        if "refused" in first:
            raise UsageError(first["refused"])
        if "broken" in first:
            raise MillpondError(f"{first['broken']}\n{first['trace']}")

    def _ridden(self) -> Horse:
        if self.horse is None:
            raise RuntimeError("there is no process to do the job")
        return self.horse

    def _put_down(self) -> None:
        self._ridden().end()
        self.horse = None

    def _beat(self, job: Any, execution: Any) -> None:
        """That the job is being done. In an outage nothing is said: the job goes on, its end is written later."""
        if time.monotonic() - self.told >= EVERY:
            with contextlib.suppress(RedisError):
                self.maintain_heartbeats(job, execution)
                self._sign()

    # -- its end

    def _succeeded(self, job: Any, execution: Any, value: Any) -> None:
        job._result, job._status = value, JobStatus.FINISHED
        self.handle_job_success(job, self.queue, self.queue.started_job_registry, execution)

    def _failed(self, job: Any, execution: Any, why: str, again: bool = True) -> None:
        """Run again where that may help, else failed."""
        if not again:
            job.retries_left = 0
        log.warning("job %s: %s%s", job.id, why.splitlines()[0], "; it is run again" if job.retries_left else "")
        self.handle_job_failure(job, self.queue, exc_string=why, execution=execution)

    def _hand_back(self, job: Any, execution: Any) -> None:
        """To the front of the queue, as if nobody had begun it."""
        log.info("job %s is handed back", job.id)
        with self.connection.pipeline() as pipe:
            self.cleanup_execution(job, pipeline=pipe, execution=execution)
            self.queue._enqueue_job(job, pipeline=pipe, at_front=True)
            pipe.execute()

    # -- what is not ours

    def _refuse(self, job: Any, why: str) -> None:
        self.queue.intermediate_queue.remove(job.id)
        job.retries_left, job.failure_ttl, job.ended_at = 0, self.kind.kept, now()
        self.handle_job_failure(job, self.queue, exc_string=f"{REFUSED}: {why}")
        self._report(job.id, why)

    def _report(self, id: str, why: str) -> None:
        """In the log, and where `millpond inspect errors` finds it."""
        log.error("job %s is refused and was not run: %s", id, why)
        self.broker.note(self.name, f"job {id} refused: {why}")
