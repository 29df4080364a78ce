"""The generators' engines, held for one evaluation: nothing is leased, and no newer weights are loaded there.

The trainer begins it before it publishes the version (scripts/hold.lua). It ends with the evaluation, or by itself
where nobody renews it: with a worker that died, generation goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pipeline.errors import MillpondError
from pipeline.evals import HOLD
from pipeline.leases import WorkerBroker

log = logging.getLogger(__name__)

EVERY = 5.0
"Seconds between renewals."


@asynccontextmanager
async def holding(broker: WorkerBroker, version: int) -> AsyncIterator[None]:
    """Renewed while the block lasts. MillpondError where they are held no longer."""

    async def keep(seconds: float) -> bool:
        return bool(await broker.patiently(lambda: broker.script("keep_hold", version, int(seconds * 1000))))

    async def renew() -> None:
        kept = True
        while kept:
            await asyncio.sleep(EVERY)
            kept = await keep(HOLD)
        log.warning("the engines are not held for version %d any longer", version)

    if not await keep(HOLD):
        raise MillpondError(f"the engines are not held for version {version} any longer: it was begun too late")
    renewing = asyncio.create_task(renew())
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])
        await keep(0)
