"""The SGLang servers of one worker: who gets a request, who is in service, and the weights that all of them serve.

A request goes the least loaded way. A way leads to one server, or through a router to all. What leaves service loses
its requests at once; what is out of service is looked at until it can be greeted and loaded with the current weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import aiohttp

from pipeline.errors import EngineDown, EngineError, UsageError, WeightsError
from pipeline.rendezvous import Engines
from pipeline.types import Policy
from producers.engines.sglang_adapters import Adapted, AdaptedGuest, Adapters
from producers.engines.sglang_flight import Flight, Way
from producers.engines.sglang_guest import Guest
from producers.engines.sglang_http import Link
from producers.engines.sglang_member import Member
from producers.engines.sglang_receive import ranks
from producers.engines.sglang_timing import Timing
from producers.party import Party

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Servers:
    """Where they are."""

    urls: tuple[str, ...]
    "of the servers themselves, at least one"
    router: str | None = None
    "through which requests go; weights never do"
    key: str | None = field(default=None, repr=False)
    concurrency: int = 256
    "requests in one server at once"
    guest: bool = False
    "they are another worker's, who loads their weights"
    adapters: Adapters | None = None
    "what they are loaded with in place of whole weights"


class Pool:
    """One event loop. `open` first, `close` last."""

    def __init__(self, servers: Servers, session: aiohttp.ClientSession, mode: str, timing: Timing) -> None:
        self.members = [_member(servers, Link(session, url), mode, timing, self._changed) for url in servers.urls]
        if servers.router:
            limit = servers.concurrency * len(self.members)
            self.ways = [Way(Link(session, servers.router), self.members, limit)]
        else:
            self.ways = [Way(m.link, [m], servers.concurrency) for m in self.members]
        self.context_length: int | None = None
        self.paused = False
        self._timing = timing
        self._stir = asyncio.Event()
        self._watchers: list[asyncio.Task[None]] = []

    # -- life

    async def open(self) -> None:
        """Returns when a server has answered; the others are looked for from then on. UsageError where one refuses us,
        EngineDown where none is there in time."""
        began = said = time.monotonic()
        while True:
            await _all(self._meet(m) for m in self.members)
            if any(m.greeted for m in self.members):
                break
            now = time.monotonic()
            if now - began > self._timing.start:
                raise EngineDown(f"no engine has answered for {now - began:.0f} s: {self._whys()}")
            if said == began or now - said > 30:
                said = now
                log.warning("no engine is there yet, waiting: %s", self._whys())
            await asyncio.sleep(self._timing.look)
        windows = [m.context_length for m in self.members if m.greeted and m.context_length is not None]
        self.context_length = min(windows, default=None)
        self._watchers = [asyncio.create_task(self._watch(m)) for m in self.members]

    async def _meet(self, member: Member) -> None:
        try:
            await member.greet(None)
        except EngineDown as error:
            member.take_out(str(error))
        else:
            member.why = "no weights have been loaded yet"

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for member in self.members:
            await member.close()

    # -- requests

    @contextlib.asynccontextmanager
    async def way(self, flight: Flight, avoid: Way | None) -> AsyncIterator[Way]:
        """The least loaded way, waited for while all are full, paused or loading. EngineDown where none is open, and
        none opens in a while: a prompt that is handed back at once is leased again at once."""
        end = asyncio.get_running_loop().time() + self._timing.away
        while (way := self._choose(avoid)) is None:
            try:
                async with asyncio.timeout_at(None if any(way.open for way in self.ways) else end):
                    await self._stir.wait()
            except TimeoutError:
                raise EngineDown(f"no engine is in service: {self._whys()}") from None
        way.flights.add(flight)
        try:
            yield way
        finally:
            way.flights.discard(flight)
            self._wake()

    def _choose(self, avoid: Way | None) -> Way | None:
        free = [way for way in self.ways if way.open and way.free and not self.paused]
        return min(free, key=lambda way: (way is avoid, len(way.flights)), default=None)

    def _whys(self) -> str:
        return "; ".join(f"{m.url}: {m.why}" for m in self.members if m.why)

    def _wake(self) -> None:
        """All who wait look again."""
        self._stir.set()
        self._stir.clear()

    def _changed(self, member: Member) -> None:
        for way in self.ways:
            if member in way.members and not way.open:
                for flight in way.flights:
                    flight.lose(f"engine {member.url} is out of service: {member.why}")
        self._wake()

    # -- weights

    async def joins(self, backend: str) -> Engines:
        """Those in service that can take weights from the trainer."""
        there = [m for m in self.members if m.serving]
        found = await asyncio.gather(*(ranks(m.link, backend, self._timing) for m in there))
        return {m.url: n for m, n in zip(there, found, strict=True) if n}

    async def told(self, name: str) -> bool:
        """Whether all servers were started with that option."""
        replies = [await member.link.get("/server_info", self._timing.reply) for member in self.members]
        return all(reply.ok and reply.fields.get(name) is True for reply in replies)

    async def load(self, policy: Policy, party: Party | None = None) -> None:
        """All servers that answer, at once. WeightsError where they refuse the weights and none takes them. One that
        is away gets them when it is back."""
        for member in self.members:
            member.target, member.party = policy, party
        there = [m for m in self.members if m.greeted]
        failures = await _all(self._load(m) for m in self.members)
        refusals = [error for error in failures if isinstance(error, WeightsError)]
        if refusals and len(failures) == len(there):
            raise refusals[0]

    async def _load(self, member: Member) -> None:
        try:
            if member.greeted:
                await member.load(self.paused)
        finally:
            await member.excuse()

    async def pause(self) -> None:
        """EngineDown where one could not be told; the others then are paused."""
        self.paused = True
        await self._each(Member.pause)

    async def resume(self) -> None:
        self.paused = False
        await self._each(Member.resume)
        self._wake()

    async def _each(self, call: Callable[[Member], Awaitable[None]]) -> None:
        async def after_a_load(member: Member) -> None:
            async with member.lock:
                if member.serving:
                    await call(member)

        for error in await _all(after_a_load(m) for m in self.members):
            raise error

    # -- health

    async def _watch(self, member: Member) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.look):
                    await member.poke.wait()
            member.poke.clear()
            if member.lock.locked():
                continue
            if member.serving:
                await self._look(member)
            if not member.serving:
                await self._heal(member)

    async def _look(self, member: Member) -> None:
        """Twice, before it is taken out. What a look found while a load began counts for nothing."""
        version = member.version
        for wait in (self._timing.sure, 0.0):
            trouble = await member.trouble(self.paused)
            if not trouble or member.lock.locked() or member.version != version:
                return
            await asyncio.sleep(wait)
        member.greeted = False
        member.take_out(trouble)

    async def _heal(self, member: Member) -> None:
        if not member.greeted:
            try:
                await member.greet(self.context_length)
            except (EngineDown, UsageError) as error:
                member.take_out(str(error))
                return
        with contextlib.suppress(EngineError, WeightsError):  # it has been taken out, and said why
            await member.load(self.paused)


def _member(servers: Servers, link: Link, mode: str, timing: Timing, changed: Callable[[Member], None]) -> Member:
    if servers.adapters:
        beside = AdaptedGuest if servers.guest else Adapted
        return beside(link, mode, timing, changed, servers.adapters)
    return (Guest if servers.guest else Member)(link, mode, timing, changed)


async def _all(calls: Iterable[Awaitable[None]]) -> list[EngineError | WeightsError]:
    """What failed; a bug is raised."""
    failures: list[EngineError | WeightsError] = []
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, EngineError | WeightsError):
            failures.append(result)
        elif isinstance(result, BaseException):
            raise result
    return failures
