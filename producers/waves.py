"""A generator of a deterministic run: whole waves, each begun together, each ended in order.

The same request gives the same tokens only up to rounding, which depends on what it is batched with. So prompts are
held until there are as many as there is room for (or the data has ended), all their requests wait in the paused engine,
and it is let go; groups are pushed, dropped and handed back as they were leased. Nothing then depends on timing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from redis.exceptions import RedisError

from pipeline.config import GenerateConfig
from pipeline.errors import UsageError
from pipeline.recording import MODE, unfit
from pipeline.replies import Lease, Leased
from producers.engines.base import Engine
from producers.generator import Generator
from producers.work import Worker

log = logging.getLogger(__name__)

LEAVES = 45.0
"Seconds in which a worker that died is found dead."


class Waves(Generator):
    """Leases as ever; begins when a wave is whole."""

    def __init__(self, worker: Worker, concurrency: int) -> None:
        super().__init__(worker, concurrency)
        self.held: list[Lease] = []
        "leased, and not begun"
        self.room = 1
        "groups that could still be leased, as the last lease said; until then there may be more"

    async def _refill(self) -> None:
        if self.jobs:
            return
        await super()._refill()
        if self.held and (self._want() <= 0 or self.room <= 0 or await self._ended_data()):
            await self._begin()

    def _want(self) -> int:
        most = max(1, self.concurrency // self.rules.n_samples_per_prompt)
        return min(most, self.rules.in_flight) - len(self.held)

    def _admit(self, leased: Leased) -> None:
        if not leased.why:
            self.room = leased.room
        super()._admit(leased)

    def _start(self, lease: Lease) -> None:
        if lease not in self.held:
            self.held.append(lease)

    async def _adopt(self) -> None:
        self.held.clear()  # all that is ours is told of
        self.room = 1
        await super()._adopt()

    async def _ended_data(self) -> bool:
        """Whether no other prompt will come."""
        keys, ask = self.broker.keys, self.broker.client
        total: Any
        fed: Any
        try:
            total, fed = await ask.hget(keys["state"], "feed_total"), await ask.get(keys["feed"])
            left = await self.broker.script("waiting") + await ask.scard(keys["refeed"])
        except RedisError:  # the next lease waits it out
            return False
        return bool(total) and int(fed or 0) >= int(total) and not left

    async def _begin(self) -> None:
        wave, self.held = sorted(self.held, key=lambda lease: lease.prompt.id), []
        await self._catch_up()
        gate = self.concurrency > 1
        if gate:
            await self.engine.pause()
        before: asyncio.Task[None] | None = None
        for lease in wave:
            before = self._work(lease, before)
        while gate and any(job.progress.unsent > 0 for job in self.jobs.values()):  # noqa: ASYNC110
            await asyncio.sleep(0)  # they are under way to the engine, and meet nothing that waits
        if gate:
            await self.engine.resume()


async def check(engine: Engine, config: GenerateConfig, worker: Worker, patience: float = LEAVES) -> None:
    """UsageError where this worker would make a deterministic run another one. The engine has started; a worker that
    died is waited for until it counts as dead."""
    why = [*unfit(config, worker.rules.n_samples_per_prompt)]
    if varies := await engine.varies():
        why.append(f"{MODE}: {varies}")
    if not why and (others := await _others(worker, patience)):
        why.append(f"{MODE}: {', '.join(others)} works on this run already; one generator at a time may")
    if why:
        raise UsageError("\n".join(why))


async def _others(worker: Worker, patience: float) -> list[str]:
    """Other workers that are registered, and have not left within a while."""
    broker, until, told = worker.broker, time.monotonic() + patience, False
    while True:
        names: Any = await broker.patiently(lambda: broker.client.zrange(broker.keys["workers"], 0, -1))
        others = [name.decode() for name in names if name.decode() != broker.worker]
        if not others or broker.stop.is_set() or time.monotonic() > until:
            return others
        if not told:
            log.warning("%s works on this run, or has died; waiting until it is gone", ", ".join(others))
        told = True
        await asyncio.sleep(0.5)
