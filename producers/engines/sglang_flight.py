"""A request on its way through the pool: its deadline, how it is ended before, and the ways there are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from pipeline.errors import EngineDown, EngineError
from producers.engines.base import Completion, Request
from producers.engines.sglang_http import Link
from producers.engines.sglang_member import Member
from producers.engines.sglang_reply import ABORTED


class Flight:
    """Ends in time: by its answer, its deadline, an abort, or the loss of its engine. One timer does for all."""

    def __init__(self, request: Request, limit: int, seconds: float) -> None:
        self.request = request
        self.limit = limit
        "tokens it may have"
        self.wire = ""
        "the rid it runs under now; each try has its own"
        self.runs_at: list[Member] = []
        "one of these"
        self.aborted = False
        self.lost = ""
        "why its engine is gone"
        self.over = asyncio.Event()
        self._seconds = seconds
        self._timer = asyncio.timeout(seconds)

    async def land(self, answer: Awaitable[Completion]) -> Completion:
        """The answer, or what stands for it. EngineDown where the engine was lost, EngineError past the deadline."""
        try:
            async with self._timer:
                return await answer
        except TimeoutError:
            if self.lost:
                raise EngineDown(self.lost) from None
            if self.aborted:
                return ABORTED
            raise EngineError(f"no answer in {self._seconds:.0f} s (--engine-timeout)") from None
        finally:
            self.over.set()

    def lose(self, why: str) -> None:
        self.lost = why
        self.end_in(0.0)

    def end_in(self, seconds: float) -> None:
        """At the latest."""
        end = asyncio.get_running_loop().time() + seconds
        when = self._timer.when()
        if not self._timer.expired() and when is not None and end < when:
            self._timer.reschedule(end)


@dataclass
class Way:
    """Where a request can be sent."""

    link: Link
    members: list[Member]
    "one, or all those behind a router"
    limit: int
    flights: set[Flight] = field(default_factory=set)

    @property
    def open(self) -> bool:
        """A router cannot be told to pass over a server that nobody knows the weights of."""
        return any(m.serving for m in self.members) and not any(m.dirty for m in self.members)

    @property
    def free(self) -> bool:
        return len(self.flights) < self.limit and not any(m.updating for m in self.members)

    @property
    def version(self) -> int | None:
        """The oldest that is served."""
        return min((m.version for m in self.members if m.serving and m.version is not None), default=None)

    @property
    def label(self) -> str | None:
        """Of the model, where versions are adapters beside it: never behind a router."""
        return self.members[0].label

    def lend(self, version: int | None, flight: Flight) -> AbstractContextManager[str | None]:
        """See Member."""
        return self.members[0].lend(version, flight)

    @property
    def known(self) -> set[int]:
        return set().union(*(m.known for m in self.members))
