"""One hand of a worker: takes one job at a time, and has a process of its own do it, which it can kill."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from redis.exceptions import RedisError
from rq.utils import now

from pipeline.broker import Broker
from pipeline.errors import MillpondError, Stopped, UsageError
from pipeline.jobs import DIED, FAILED, LATE, Kind
from producers.claim import Claim
from producers.deaf import refusal
from producers.horse import Horse, HorseDied
from producers.jobs import Desk, Job
from producers.member import BLOCK, Member

log = logging.getLogger(__name__)

GRACE = 15.0
"Seconds in which a job that runs may end once the worker is told to stop; then it is handed back."
DEATHS = 5
"Processes that may be killed one after the other as they start."


class Hand(Member):
    def __init__(
        self, broker: Broker, kind: Kind, name: str, job: Job, desk: Desk, servers: tuple[str, ...] = ()
    ) -> None:
        """`broker.stop` is set when no more jobs are to be taken; `servers`: nobody else may use them meanwhile."""
        self.lasting = job.lasting
        self.desk = desk
        self.horse: Horse | None = None
        self.leaves_after: float | None = None
        "seconds without a job"
        self.grace = GRACE
        self.since = 0.0
        "monotonic time since when it does a job; 0: it does none"
        self.idle = time.monotonic()
        "since when it has done none"
        super().__init__(broker, kind, name)
        self.claim = Claim(broker, self.name, servers)
        self.waits_for = ""
        "who has our servers, as the log was told"

    def run(self) -> None:
        """Until told to stop. UsageError where this worker cannot do such jobs, RedisDown past the patience."""
        try:
            if self.lasting:
                self._first()
            while not self.broker.stop.is_set() and not self._superfluous():
                self.broker.patiently(self._turn)
        except Stopped:
            pass
        finally:
            self._put_down()
            with contextlib.suppress(RedisError):  # else its keys expire
                self.register_death()

    def _superfluous(self) -> bool:
        return self.leaves_after is not None and time.monotonic() - self.idle > self.leaves_after

    # -- one job

    def _turn(self) -> None:
        self.sign()
        self.tidy()
        if other := self.claim.other():
            self._wait_for(other)
            return
        try:
            job = self.take()
            if job is not None:
                self._at_work(job)
        finally:
            self.claim.let_go()

    def _at_work(self, job: Any) -> None:
        self.since = time.monotonic()
        try:
            self._do(job)
        finally:
            self.since, self.idle = 0.0, time.monotonic()

    def _wait_for(self, other: str) -> None:
        """Somebody else does jobs on our servers; what waits is theirs to take as well."""
        if self.waits_for != other:
            self.waits_for = other
            log.info("worker %s uses %s; jobs are taken when it does not", other, ", ".join(self.claim.urls))
        self.broker.stop.wait(BLOCK)

    def _do(self, job: Any) -> None:
        why = refusal(job, self.kind)
        if why:
            self.refuse(job, why)
            return
        job.retries_left = min(job.retries_left or 0, self.kind.retries)
        execution = self.prepare_execution(job)
        self.prepare_job_execution(job, remove_from_intermediate_queue=True)
        try:
            settle = self._asked(job, execution)
        finally:
            if not self.lasting:
                self._put_down()
        job.ended_at = now()
        self.broker.patiently(settle)
        self.set_state("idle")

    def _asked(self, job: Any, execution: Any) -> Callable[[], None]:
        """What is to be written down of a job, once it has ended somehow."""
        failed = partial(self.failed, job, execution)
        try:
            reply = self._reply(self._ridden(lambda: self._sign_of(job, execution)), job, execution)
        except HorseDied as death:
            self._put_down()
            return partial(failed, f"{DIED}: {death}", again=True)
        except TimeoutError as error:
            return partial(failed, f"{LATE}: {error}")
        except Stopped:
            return partial(self.hand_back, job, execution)
        except MillpondError as error:
            if self.lasting:  # it could do such jobs before
                raise
            return partial(failed, f"{FAILED}: {error}")
        if reply is None:
            return partial(self.drop, job, execution)
        if "error" in reply:
            return partial(failed, f"{FAILED}: {reply['error']}\n{reply['trace']}")
        return partial(self.succeeded, job, execution, reply["value"])

    def _reply(self, horse: Horse, job: Any, execution: Any) -> dict[str, Any] | None:
        """What the process says of the job; None where nobody waits for it any more. TimeoutError where it took too
        long, Stopped where it is to be handed back."""
        horse.send({"arguments": job.kwargs})
        over, stopped = time.monotonic() + job.timeout, 0.0
        while (reply := horse.read(min(1.0, over - time.monotonic()))) is None:
            horse.yields()
            if time.monotonic() >= over:
                self._put_down()
                raise TimeoutError(f"not done in {job.timeout:g} s")
            if self.broker.stop.is_set():
                stopped = stopped or time.monotonic()
                if time.monotonic() - stopped >= self.grace:
                    self._put_down()
                    raise Stopped("asked to stop")
            if not self._sign_of(job, execution):
                self._put_down()
                return None
        return reply

    def _sign_of(self, job: Any, execution: Any) -> bool:
        """That it is being done; False where nobody waits for it any more."""
        if not self.claim.kept():
            raise HorseDied(
                f"another worker uses {', '.join(self.claim.urls)} by now: this one was silent for too long"
            )
        return self.beat(job, execution)

    # -- its process

    def _first(self) -> None:
        """Ready before a job is taken, where the process is for many."""
        for left in reversed(range(DEATHS)):
            try:
                self._saddle(lambda: None)
                return
            except HorseDied as death:
                if not left:
                    raise
                log.warning(
                    "a process for %s was killed as it started (%s); it is started again", self.kind.queue, death
                )

    def _ridden(self, beat: Callable[[], object]) -> Horse:
        if self.horse is None or not self.horse.alive:
            self._put_down()
            return self._saddle(beat)
        return self.horse

    def _saddle(self, beat: Callable[[], object]) -> Horse:
        """Starts the process and returns when it can take a job."""
        horse = self.horse = Horse(self.desk, self.kind.name)
        while (first := horse.read(1.0)) is None:
            if self.broker.stop.is_set():
                raise Stopped("asked to stop while a process was starting")
            beat()
        if "refused" in first:
            raise UsageError(first["refused"])
        if "broken" in first:
            raise MillpondError(f"{first['broken']}\n{first['trace']}")
        return horse

    def _put_down(self) -> None:
        if self.horse is not None:
            self.horse.end()
            self.horse = None
