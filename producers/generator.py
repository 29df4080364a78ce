"""A generator worker: lease, catch up with the weights, sample, score, filter, push.

Consumes prompts; waits for room, prompts and published weights; is unblocked by `wake` and by its own finished
samples; produces finished groups, each pushed exactly once or handed back. One reader, many prompts in flight.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any

from pipeline.replies import OTHER_CONFIG, Lease, Leased, Pulse
from pipeline.room import given_up, lag
from pipeline.types import HF, PEFT
from producers.catch_up import CatchUp
from producers.group import Progress
from producers.tasks import cancel
from producers.work import Job, Worker

log = logging.getLogger(__name__)

IDLE = (1.0, 2.0)
"Seconds between looks of a worker that has nothing to do and hears nothing."
JITTER = 0.01
"Seconds over which woken workers spread."


class Generator:
    """The worker's one event loop."""

    def __init__(self, worker: Worker, concurrency: int) -> None:
        self.worker = worker
        self.broker = worker.broker
        self.engine = worker.maker.engine
        self.rules = worker.rules
        self.concurrency = concurrency
        self.jobs: dict[Lease, Job] = {}
        self.poke = asyncio.Event()
        self.wakeful = True
        "something may have changed since a lease gave less than was wanted"
        form = PEFT if self.rules.adapter_rank else HF
        self.weights = CatchUp(self.broker, self.engine, lambda: self.broker.heartbeat(self.info(), self.spare), form)
        self.began = self.turned = time.monotonic()
        self.ready = True
        "False while the engine starts"
        self.lived = False
        "the run has been seen neither done nor failed"
        self.told = False
        "that a resume is waited for"
        self.over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        "told to halt, or that the run's settings are others now (True), or the first bug that was met"

    # -- the loop

    async def run(self) -> bool:
        """Until told to halt or the run ends; then all is handed back. Raises the first bug that any prompt met. True
        where the run has other settings than these by now: who goes on begins anew with them."""
        parts = [asyncio.create_task(part) for part in (self._serve(), self._listen(), self._turn())]
        for part in parts:
            part.add_done_callback(self._notice)
        try:
            return await self.over
        finally:
            await cancel(parts)
            await self._hand_all_back()

    async def _serve(self) -> None:
        while not self.broker.stop.is_set():
            if self.broker.suspect:
                await self._adopt()
            await self._refill()
            await self._rest()
        self.halt()

    async def _refill(self) -> None:
        want = self._want()
        if want <= 0 or not self.wakeful or time.monotonic() < self.worker.down:
            return
        self.wakeful = False  # before the call: what is announced meanwhile must count
        leased = await self.broker.lease(want, self.spare, any(lease.alone for lease in self.jobs))
        self.wakeful = self.wakeful or (not leased.why and leased.room > 0)
        self.lived = self.lived or not leased.why
        if leased.why == "reaped":
            self._dead()
        if leased.why == OTHER_CONFIG:
            self._end(True)
        if leased.why == "evaluation":
            await self._catch_up()  # which waits for its version on our engines
        if leased.leases and leased.version != self.engine.version:
            await self._catch_up()
        self._admit(leased)

    def _admit(self, leased: Leased) -> None:
        for lease in leased.leases:
            self._start(lease)

    async def _rest(self) -> None:
        """Until a sample finishes, something is announced, or a while has passed."""
        try:
            async with asyncio.timeout(random.uniform(*IDLE)):
                await self.poke.wait()
        except TimeoutError:
            self.wakeful = True
        self.poke.clear()

    @property
    def spare(self) -> int:
        """Finished samples of groups that are not finished, for which others may be leased; any thread may ask."""
        if self.rules.rollout_submission_granularity == "group":
            return 0
        return sum(job.progress.finished for job in list(self.jobs.values()))

    def _want(self) -> int:
        """Groups this worker could start: by samples, or by whole groups; unfinished groups are bounded either way."""
        n = self.rules.n_samples_per_prompt
        most = max(1, self.concurrency // n)
        if self.rules.rollout_submission_granularity == "group":
            return most - len(self.jobs)
        running = sum(job.progress.running for job in self.jobs.values())
        by_sample = (self.concurrency - running) // n if self.jobs else most
        return min(by_sample, 2 * most - len(self.jobs))

    # -- one prompt

    def _start(self, lease: Lease) -> None:
        if lease not in self.jobs:  # else its stream's consumer group was lost and made anew, and gave it to us again
            self._work(lease)

    def _work(self, lease: Lease, after: asyncio.Task[None] | None = None) -> asyncio.Task[None]:
        """`after`: what must have ended before this may."""
        job = Job(lease, Progress(*[self.rules.n_samples_per_prompt] * 2))
        self.jobs[lease] = job
        job.task = asyncio.create_task(self.worker.work(lease, job.progress, self.poke, after))
        job.task.add_done_callback(lambda task: self._ended(lease, task))
        return job.task

    def _ended(self, lease: Lease, task: asyncio.Task[None]) -> None:
        del self.jobs[lease]
        self._notice(task)
        self.poke.set()

    def _notice(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self.fail(error)

    # -- weights

    async def _catch_up(self) -> None:
        """Load what is published; then cancel what can no longer be fresh enough."""
        policy, limit = await self.weights(), self.rules.max_weight_staleness
        if limit is None or policy is None:
            return
        now = policy.version, policy.lineage
        late = [j for j in self.jobs.values() if (lag(j.progress.oldest, *now) or 0) > limit]
        blameless = [j.lease for j in late if given_up(j.progress.oldest, *now)]
        await _abandon(late)
        await self.broker.hand_back(blameless, "given_up_branch")
        await self.broker.hand_back([j.lease for j in late if j.lease not in blameless], "stale", self.worker.unused)

    # -- the worker among others

    def info(self) -> dict[str, Any]:
        """What people see of this worker."""
        return {
            **self.worker.info(self.weights, None if self.ready else self.began),
            "in_flight": len(self.jobs),
            "samples": sum(job.progress.running for job in list(self.jobs.values())),
        }

    def hear(self, pulse: Pulse) -> None:
        """What a heartbeat brought. A run that had ended before we came may be about to be resumed: wait for that."""
        if not pulse.known:
            self._dead()
            return
        if self.jobs and self.weights.loading is None and (pulse.version or 0) > (self.engine.version or 0):
            self._missed()
        ended = pulse.status in ("done", "failed")
        if ended and not (self.lived or self.told):
            self.told = True
            log.warning("the run is %s; a resume is waited for, %.0f s", pulse.status, self.broker.patience)
        self.lived = self.lived or not ended
        if ended and (self.lived or time.monotonic() - self.began > self.broker.patience):
            log.info("the run is %s", pulse.status)
            self.halt()

    def _missed(self) -> None:
        self.broker.suspect = True
        self.poke.set()

    def _dead(self) -> None:
        log.warning("this worker was declared dead; its prompts went to others, it registers anew")
        self._missed()

    def fail(self, error: BaseException) -> None:
        if not self.over.done():
            self.over.set_exception(error)

    def halt(self) -> None:
        """Hand all back and end, soon."""
        self.broker.stop.set()
        self._end(False)

    def _end(self, changed: bool) -> None:
        if not self.over.done():
            self.over.set_result(changed)

    async def _listen(self) -> None:
        async for word in self.broker.wakes():
            await asyncio.sleep(random.uniform(0, JITTER))
            if word in ("version", "subscribed") and (self.jobs or self.worker.joins):
                await self._catch_up()
            self.wakeful = True
            self.poke.set()

    async def _turn(self) -> None:
        while True:
            self.turned = time.monotonic()
            await asyncio.sleep(1)

    async def _adopt(self) -> None:
        """After something was missed: work on what is ours and nobody works on; leave what is no longer ours."""
        self.broker.suspect = False
        await self.broker.register(self.info())
        before = set(self.jobs)
        mine = dict.fromkeys(await self.broker.mine())
        await _abandon([job for lease, job in self.jobs.items() if lease not in mine])
        if mine:
            await self._catch_up()
        for lease in mine:
            if lease not in before:
                self._start(lease)
        self.wakeful = True

    async def _hand_all_back(self) -> None:
        """What Redis says we hold, a lease whose reply never came included."""
        await _abandon(list(self.jobs.values()))
        while not await self.broker.leave():
            await self.broker.hand_back(await self.broker.mine(), "shutdown")


async def _abandon(jobs: list[Job]) -> None:
    await cancel([job.task for job in jobs if job.task])
