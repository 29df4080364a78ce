"""An engine without a model, for tests and benchmarks: scripted latencies, failures, aborts and versions.

What a request gives follows from its seed alone, how long it takes and whether it fails or aborts included, so a run
repeats. A request costs a timer and a few small arrays: thousands run at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pipeline.errors import EngineDown, EngineError
from pipeline.types import Policy
from producers.engines.base import Completion, Request
from producers.engines.echo_script import Answer, Latency, Script
from producers.engines.limits import budget, refuse_older
from producers.engines.stamps import Stamps


@dataclass
class Flight:
    """A request that runs. Its tokens come at equal distances over `seconds`."""

    future: asyncio.Future[Completion]
    stamps: Stamps
    answer: Answer
    since: float = 0.0
    "loop time at which `timer` was set"
    ran: float = 0.0
    "seconds it had run before that"
    timer: asyncio.TimerHandle | None = None

    def halt(self, now: float) -> None:
        if self.timer:
            self.timer.cancel()
            self.timer, self.ran = None, self.ran + now - self.since

    def given(self, now: float) -> int:
        """Tokens so far."""
        ran = self.ran + (now - self.since if self.timer else 0.0)
        size = len(self.answer.tokens)
        return min(size, int(size * ran / self.answer.seconds)) if self.answer.seconds else 0

    def land(self, size: int, finish: str) -> None:
        """Complete it with its first `size` tokens."""
        if not self.future.done():
            tokens, logprobs = self.answer.tokens[:size], self.answer.logprobs[:size]
            self.future.set_result(Completion(tokens, logprobs, finish, self.stamps.spans(size)))


class EchoEngine:
    """An `Engine` over bytes. `failure_rate` and `abort_rate` are shares of the requests."""

    vocab_size = 256
    context_length = 1 << 20

    def __init__(self, latency: str, response_len: int, failure_rate: float = 0.0, abort_rate: float = 0.0) -> None:
        """UsageError for a latency that is none; `response_len` is at least 1."""
        self._script = Script(Latency.parse(latency), response_len, failure_rate, abort_rate)
        self._flights: dict[str, Flight] = {}
        self._version: int | None = None
        self._paused, self._open = False, False

    @property
    def version(self) -> int | None:
        return self._version

    async def start(self) -> None:
        self._open = True

    async def generate(self, request: Request) -> Completion:
        """EngineError where the seed says that it fails."""
        limit = budget(request, self.vocab_size, self.context_length)
        if not self._open:
            raise EngineDown("the engine is not running")
        if request.rid in self._flights:
            raise ValueError(f"request {request.rid} is in flight already")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        flight = Flight(future, Stamps(self._version), self._script.answer(request, limit))
        self._flights[request.rid] = flight
        if not self._paused:
            self._go(flight)
        try:
            return await future
        finally:
            del self._flights[request.rid]
            flight.halt(_now())

    def _go(self, flight: Flight) -> None:
        loop = asyncio.get_running_loop()
        flight.since = loop.time()
        flight.timer = loop.call_later(flight.answer.ends * flight.answer.seconds - flight.ran, self._end, flight)

    def _end(self, flight: Flight) -> None:
        size = int(len(flight.answer.tokens) * flight.answer.ends)
        if flight.answer.finish != "fail":
            flight.land(size, flight.answer.finish)
        elif not flight.future.done():
            flight.future.set_exception(EngineError(f"scripted failure after {size} tokens"))

    async def abort(self, rid: str) -> None:
        if rid in self._flights:
            flight = self._flights[rid]
            flight.land(flight.given(_now()), "abort")

    async def load(self, policy: Policy) -> None:
        """Only the version counts: there are no weights."""
        refuse_older(self._version, policy)
        self._version = policy.version
        for flight in self._flights.values():
            flight.stamps.mark(policy.version, flight.given(_now()))

    async def pause(self) -> None:
        self._paused = True
        for flight in self._flights.values():
            flight.halt(_now())

    async def resume(self) -> None:
        if self._paused:
            self._paused = False
            for flight in self._flights.values():
                self._go(flight)

    async def varies(self) -> str:
        return ""

    async def close(self) -> None:
        self._open = False
        for flight in self._flights.values():
            if not flight.future.done():
                flight.future.set_exception(EngineDown("the engine was closed"))


def _now() -> float:
    return asyncio.get_running_loop().time()
