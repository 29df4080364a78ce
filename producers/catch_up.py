"""An engine's weights kept those that are published."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from pipeline.errors import WeightsError
from pipeline.leases import WorkerBroker
from pipeline.types import Policy
from producers.engines.base import Engine
from producers.party import Receiver, seated

TRIES = 4
"Failed loads of one version, while no newer one is published, after which it counts as broken."
PAUSE = 0.2
"Seconds between them."


class CatchUp:
    """One load at a time, never of a lower version."""

    def __init__(
        self, broker: WorkerBroker, engine: Engine, tell: Callable[[], Awaitable[object]], form: str | None = None
    ) -> None:
        """`tell` lets the run know what is being loaded, before its folder is opened: so it is not deleted. `form`: of
        the weights that are meant; others come of settings that are news to this worker, which its next lease is."""
        self.broker = broker
        self.engine = engine
        self.tell = tell
        self.form = form
        self.loading: int | None = None
        self.since: float | None = None
        "monotonic time since which it is loaded"
        self.policy: Policy | None = None
        "what was loaded last"
        self._one = asyncio.Lock()
        self._offer = ""
        "the last that was answered"

    async def __call__(self) -> Policy | None:
        """Loads until the engine has what is published; WeightsError where that cannot be loaded. A folder that
        vanished has been followed by another version: the manifest is read again."""
        async with self._one:
            failed: list[int] = []
            while (policy := await self.broker.policy()) and policy.version > (self.engine.version or 0):
                if self.form not in (None, policy.format):
                    break
                self.loading, self.since = policy.version, time.monotonic()
                try:
                    await self.tell()
                    await self._load(policy)
                    self.policy = policy
                except WeightsError:
                    failed.append(policy.version)
                    if failed.count(policy.version) >= TRIES:
                        raise
                    await asyncio.sleep(PAUSE)
                finally:
                    self.loading = self.since = None
            return self.policy

    async def _load(self, policy: Policy) -> None:
        """From the trainer where it offers that, once; else from the folder."""
        offer = policy.rendezvous
        if offer and isinstance(self.engine, Receiver) and offer.group != self._offer:
            self._offer = offer.group
            if party := await seated(self.broker, offer, self.engine):
                return await self.engine.receive(policy, party)
        return await self.engine.load(policy)
