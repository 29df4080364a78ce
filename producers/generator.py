"""A generator worker: lease, catch up with the weights, sample, score, filter, push.

Consumes prompts; waits for room, prompts and published weights; is unblocked by `wake` and by its own finished
samples; produces finished groups, each pushed exactly once or handed back. One reader, many prompts in flight.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from dataclasses import dataclass
from typing import Any

from pipeline.errors import WeightsError
from pipeline.leases import Lease, Pulse
from pipeline.room import lag
from pipeline.types import Policy
from producers.group import Progress
from producers.work import Worker

log = logging.getLogger(__name__)

IDLE = (1.0, 2.0)
"Seconds between looks of a worker that has nothing to do and hears nothing."
JITTER = 0.01
"Seconds over which woken workers spread."


@dataclass
class Job:
    """One lease being worked on."""

    lease: Lease
    progress: Progress
    task: asyncio.Task[None] | None = None


class Generator:
    """The worker's one event loop."""

    def __init__(self, worker: Worker, concurrency: int) -> None:
        self.worker = worker
        self.broker = worker.broker
        self.engine = worker.maker.engine
        self.rules = worker.rules
        self.concurrency = concurrency
        self.jobs: dict[str, Job] = {}
        self.poke = asyncio.Event()
        self.wakeful = True
        "something may have changed since a lease gave less than was wanted"
        self.loading: int | None = None
        self.policy: Policy | None = None
        self.weights = asyncio.Lock()
        self.began = self.turned = time.monotonic()
        self.lived = False
        "the run has been seen neither done nor failed"
        self.told = False
        "that a resume is waited for"
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # -- the loop

    async def run(self) -> None:
        """Until told to halt or the run ends; then all is handed back. Raises the first bug that any prompt met."""
        helpers = [asyncio.create_task(self._listen()), asyncio.create_task(self._turn())]
        for helper in helpers:
            helper.add_done_callback(self._notice)
        try:
            while not self.broker.stop.is_set() and not self.failed.done():
                if self.broker.suspect:
                    await self._adopt()
                await self._refill()
                await self._rest()
            if self.failed.done():
                self.failed.result()
        finally:
            for helper in helpers:
                helper.cancel()
            await self._hand_all_back()

    async def _refill(self) -> None:
        want = self._want()
        if want <= 0 or not self.wakeful:
            return
        leased = await self.broker.lease(want, self.spare)
        self.wakeful = not leased.why and leased.room > 0
        self.lived = self.lived or not leased.why
        if leased.why == "reaped":
            await self._reaped()
        if leased.leases and leased.version != self.engine.version:
            await self._catch_up()
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
        """Finished samples of groups that are not finished."""
        return sum(job.progress.finished for job in self.jobs.values())

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
        job = Job(lease, Progress(running=self.rules.n_samples_per_prompt))
        self.jobs[lease.entry] = job
        job.task = asyncio.create_task(self.worker.work(lease, job.progress, self.poke))
        job.task.add_done_callback(lambda task: self._ended(lease.entry, task))

    def _ended(self, entry: str, task: asyncio.Task[None]) -> None:
        self.jobs.pop(entry, None)
        self._notice(task)
        self.poke.set()

    def _notice(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() and not self.failed.done():
            self.failed.set_exception(task.exception())  # type: ignore[arg-type]
            self.poke.set()

    # -- weights

    async def _catch_up(self) -> None:
        """Load what is published; then cancel what can no longer be fresh enough."""
        async with self.weights:
            tries = 0
            while (policy := await self.broker.policy()) and policy.version != self.engine.version:
                if self.engine.version is not None and policy.version < self.engine.version:
                    return
                self.loading = policy.version
                await self.broker.heartbeat(self.info(), self.spare)
                try:
                    await self.engine.load(policy)
                except WeightsError:
                    newest = await self.broker.policy()
                    tries += newest is not None and newest.version == policy.version
                    if tries > 3:
                        raise
                    await asyncio.sleep(0.2)
                finally:
                    self.loading = None
            self.policy = policy
        await self._cancel_stale()

    async def _cancel_stale(self) -> None:
        limit, policy = self.rules.max_weight_staleness, self.policy
        if limit is None or policy is None:
            return
        late = [j for j in self.jobs.values() if (lag(j.progress.oldest, policy.version, policy.lineage) or 0) > limit]
        await self._abandon(late)
        await self.broker.hand_back([job.lease for job in late], "stale", "strike")

    # -- the worker among others

    def info(self) -> dict[str, Any]:
        """What people see of this worker."""
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "engine": type(self.engine).__name__,
            "version": self.engine.version,
            "loading": self.loading,
            "in_flight": len(self.jobs),
            "samples": sum(job.progress.running for job in list(self.jobs.values())),
            "tokens_per_sec": round(self.worker.tokens_per_sec(), 1),
        }

    def hear(self, pulse: Pulse) -> None:
        """What a heartbeat brought. A run that had ended before we came may be about to be resumed: wait for that."""
        if not pulse.known:
            self.wakeful = True
            self.poke.set()
            return
        ended = pulse.status in ("done", "failed")
        if ended and not (self.lived or self.told):
            self.told = True
            log.warning("the run is %s; a resume is waited for, %.0f s", pulse.status, self.broker.patience)
        self.lived = self.lived or not ended
        if ended and (self.lived or time.monotonic() - self.began > self.broker.patience):
            log.info("the run is %s", pulse.status)
            self.halt()

    def halt(self) -> None:
        """Hand all back and end, soon."""
        self.broker.stop.set()
        self.poke.set()

    async def _listen(self) -> None:
        async for word in self.broker.wakes():
            await asyncio.sleep(random.uniform(0, JITTER))
            if word == "version" and self.jobs:
                await self._catch_up()
            self.wakeful = True
            self.poke.set()

    async def _turn(self) -> None:
        while True:
            self.turned = time.monotonic()
            await asyncio.sleep(1)

    async def _adopt(self) -> None:
        """After an outage: work on what is ours and nobody works on; leave what is no longer ours."""
        self.broker.suspect = False
        await self.broker.register(self.info())
        mine = {lease.entry: lease for lease in await self.broker.mine()}
        await self._abandon([job for entry, job in self.jobs.items() if entry not in mine])
        found = [lease for entry, lease in mine.items() if entry not in self.jobs]
        if found:
            await self._catch_up()
        for lease in found:
            self._start(lease)
        self.wakeful = True

    async def _reaped(self) -> None:
        log.warning("this worker was declared dead; its prompts went to others, it registers anew")
        await self._abandon(list(self.jobs.values()))
        await self._adopt()

    async def _abandon(self, jobs: list[Job]) -> None:
        tasks = [job.task for job in jobs if job.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _hand_all_back(self) -> None:
        leases = [job.lease for job in self.jobs.values()]
        await self._abandon(list(self.jobs.values()))
        await self.broker.hand_back(leases, "shutdown")
        await self.broker.leave()
