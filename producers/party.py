"""A worker's part in a weight update over a process group: it answers the trainer's offer, and is seated or not.

`pipeline.rendezvous` has the whole of it, `producers.engines.sglang_receive` the calls to the engine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from urllib.parse import urlsplit

from pipeline.leases import WorkerBroker
from pipeline.rendezvous import PATIENCE, Engines, Rendezvous, Roster, seat
from pipeline.types import Policy

log = logging.getLogger(__name__)

LOOK = 0.02
"Seconds between looks for the roster."
CONNECT = 2.0
"Seconds in which the trainer must be reached."


@dataclass(frozen=True)
class Party:
    """One update, to some of this worker's engines."""

    broker: WorkerBroker
    offer: Rendezvous
    roster: Roster

    def seat(self, url: str) -> int | None:
        """First rank of an engine; None where it does not take part."""
        return self.roster.seats.get(seat(self.broker.worker, url))

    async def stands(self) -> bool:
        """The trainer is there, and has not given the update up. To be asked just before an engine joins: it would try
        for half an hour to reach one that has gone, and listen to nobody meanwhile."""
        roster = await self.broker.roster(self.offer.group)
        return bool(roster and roster.seats) and await _reachable(self.offer)

    async def over(self, url: str, why: str = "") -> None:
        """`why` it failed, which ends the update for all; empty where it has all tensors."""
        await self.broker.join(self.offer.group, engine=url, why=why[:300])


@runtime_checkable
class Receiver(Protocol):
    """An engine that can have weights from the trainer as well."""

    async def joins(self, backend: str) -> Engines:
        """Those of its servers that can now join a group of that kind."""
        ...

    async def receive(self, policy: Policy, party: Party) -> None:
        """As `Engine.load`; what has a seat takes them from the trainer, and from the folder where that fails."""
        ...


async def seated(broker: WorkerBroker, offer: Rendezvous, engine: Receiver) -> Party | None:
    """None where the update goes without us, or is long over. The engine goes on meanwhile."""
    roster = await broker.roster(offer.group)
    if roster is None:
        there = await _reachable(offer)
        can = await engine.joins(offer.backend) if there else {}
        able = {url: ranks for url, ranks in can.items() if not _local(offer.host) or _local(urlsplit(url).hostname)}
        await broker.join(offer.group, engines=able)
        if not able:
            return None
        roster = await _awaited(broker, offer.group)
        if roster is None:
            for url in able:  # if we were late rather than the trainer, nobody need wait for us
                await broker.join(offer.group, engine=url, why="it has waited too long for the roster")
            return None
    party = Party(broker, offer, roster)
    return party if any(name.startswith(f"{broker.worker} ") for name in roster.seats) else None


async def _awaited(broker: WorkerBroker, group: str) -> Roster | None:
    end = time.monotonic() + PATIENCE
    while (roster := await broker.roster(group)) is None and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(LOOK)
    return roster


async def _reachable(offer: Rendezvous) -> bool:
    """From here; an engine that cannot connect would stand still for half an hour and say nothing."""
    try:
        async with asyncio.timeout(CONNECT):
            _, writer = await asyncio.open_connection(offer.host, offer.port)
    except OSError as error:
        log.warning(
            "the trainer offers weights at %s port %d, which cannot be reached from here (--update-weight-host): %s",
            *(offer.host, offer.port, error or type(error).__name__),
        )
        return False
    writer.close()
    return True


def _local(host: str | None) -> bool:
    """Means another machine on each machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
