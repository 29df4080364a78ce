"""Sampling by SGLang servers over HTTP, one or many: token ids out, ids with log-probabilities and versions back.

`sglang_pool` has the servers, `sglang_member` one of them with its weights and health, `sglang_wire` what is sent,
`sglang_reply` what may come back, `sglang_http` the calls.

Each try of a request has a rid of its own: the server keeps what it knows of a rid for a while, and aborts by prefix.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from pipeline.errors import EngineDown, RequestRefused, UsageError
from pipeline.rendezvous import Engines
from pipeline.types import Policy
from producers.engines import sglang_wire as wire
from producers.engines.base import Completion, Request
from producers.engines.limits import budget, refuse_older
from producers.engines.sglang_flight import Flight, Way
from producers.engines.sglang_http import Reply, open_session
from producers.engines.sglang_member import Member
from producers.engines.sglang_pool import Pool, Servers
from producers.engines.sglang_reply import Asked, completion, passing, problem
from producers.engines.sglang_timing import Timing
from producers.party import Party

log = logging.getLogger(__name__)

UNKNOWN = 1 << 31


class SGLangEngine:
    """An `Engine`. The servers are this worker's own: it pauses them and loads them as it sees fit."""

    def __init__(
        self, checkpoint: Path, servers: Servers, mode: str, seconds: float, timing: Timing | None = None
    ) -> None:
        """`mode`: retract or in_place; `seconds` a sample may take. UsageError for a folder without a config.json."""
        self.vocab_size, self.context_length = read_sizes(checkpoint)
        self._servers, self._mode, self._seconds = servers, mode, seconds
        self._timing = timing or Timing()
        self._version: int | None = None
        self._flights: dict[str, Flight] = {}
        self._errands: set[asyncio.Task[Any]] = set()
        self._pool: Pool | None = None

    @property
    def version(self) -> int | None:
        """Of every server that is in service, once a load is over."""
        return self._version

    async def start(self) -> None:
        """UsageError where a server refuses us for good, EngineDown where none is there in time."""
        session = open_session(self._servers.key)
        pool = Pool(self._servers, session, self._mode, self._timing)
        try:
            await pool.open()
        except BaseException:
            await session.close()
            raise
        self.context_length = min(self.context_length, pool.context_length or self.context_length)
        self._pool, self._session = pool, session

    async def close(self) -> None:
        """Requests in flight fail with EngineDown, and are aborted where they run."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        await pool.close()
        flights = list(self._flights.values())
        for flight in flights:
            flight.lose("the engine was closed")
        await asyncio.gather(*(flight.over.wait() for flight in flights))
        if self._errands:
            await asyncio.wait(self._errands)
        await self._session.close()

    def _running(self) -> Pool:
        if self._pool is None:
            raise EngineDown("the engine is not running")
        return self._pool

    async def load(self, policy: Policy) -> None:
        """WeightsError where no server can load them. With none there, the version stands and requests fail."""
        refuse_older(self._version, policy)
        await self._running().load(policy)
        self._version = policy.version

    async def joins(self, backend: str) -> Engines:
        return await self._running().joins(backend)

    async def receive(self, policy: Policy, party: Party) -> None:
        """As `load`."""
        refuse_older(self._version, policy)
        await self._running().load(policy, party)
        self._version = policy.version

    async def pause(self) -> None:
        await self._running().pause()

    async def resume(self) -> None:
        await self._running().resume()

    async def varies(self) -> str:
        steady = await self._running().told("enable_deterministic_inference")
        return "" if steady else "start the SGLang servers with --enable-deterministic-inference"

    # -- requests

    async def generate(self, request: Request) -> Completion:
        limit = budget(request, self.vocab_size, self.context_length)
        pool = self._running()
        if request.rid in self._flights:
            raise ValueError(f"request {request.rid} is in flight already")
        flight = self._flights[request.rid] = Flight(request, limit, self._seconds)
        try:
            return await flight.land(self._answer(pool, flight))
        finally:
            del self._flights[request.rid]

    async def abort(self, rid: str) -> None:
        """What waits here ends at once; what runs ends when its server says so, or after a while if it does not."""
        flight = self._flights.get(rid)
        if flight is not None:
            flight.aborted = True
            flight.end_in(self._timing.grace if flight.wire else 0.0)
            await self._abort(flight.runs_at, flight.wire)

    async def _answer(self, pool: Pool, flight: Flight) -> Completion:
        """By the last of a few tries."""
        way: Way | None = None
        pauses = iter(self._timing.again)
        while True:
            async with pool.way(flight, way) as way:
                sent = way.version
                with way.lend(sent, flight) as adapter:
                    reply = await self._send(way, flight, sent, adapter)
                if reply.ok:
                    return self._read(reply, way, flight, sent)
            failure = problem(reply, way.link.url, adapter)
            if not isinstance(failure, RequestRefused):
                _suspect(way)
            pause = next(pauses, None)
            if pause is None or not passing(reply):
                raise failure
            log.debug("a request is sent again: %s", failure)
            await asyncio.sleep(pause)

    async def _send(self, way: Way, flight: Flight, version: int | None, adapter: str | None) -> Reply:
        rid = uuid.uuid4().hex
        flight.wire, flight.runs_at = rid, way.members
        try:
            body = wire.generate(flight.request, flight.limit, rid, version, adapter)
            return await way.link.post("/generate", body, None)
        except asyncio.CancelledError:
            self._errand(self._abort(way.members, rid))
            raise
        finally:
            flight.wire = ""

    def _read(self, reply: Reply, way: Way, flight: Flight, sent: int | None) -> Completion:
        done = completion(reply, Asked(flight.limit, self.vocab_size, sent, way.known, way.label))
        if any(span.version is None for span in done.versions):
            _suspect(way)
        if done.finish == "abort" and not flight.aborted and way.version != sent:
            raise EngineDown(f"{way.link.url} aborted a request at a weight update")
        return done

    async def _abort(self, members: list[Member], rid: str) -> None:
        """Wherever it runs; a server that does not know it does nothing."""
        if rid:
            seconds = self._timing.grace
            await asyncio.gather(*(m.link.post("/abort_request", wire.abort(rid), seconds) for m in members))

    def _errand(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)


def _suspect(way: Way) -> None:
    """Have its servers looked at, now."""
    for member in way.members:
        member.poke.set()


def read_sizes(checkpoint: Path) -> tuple[int, int]:
    """Vocabulary and context length, as a Hugging Face config.json says; without the latter, what the servers say."""
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config = config.get("text_config") or config
        return int(config["vocab_size"]), int(config.get("max_position_embeddings") or UNKNOWN)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--hf-checkpoint {checkpoint}: no vocabulary size in its config.json: {error}") from error
