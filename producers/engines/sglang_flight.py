"""A request on its way through the pool: its deadline, and how it is ended before."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from pipeline.errors import EngineDown, EngineError
from producers.engines.base import Completion, Request
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
