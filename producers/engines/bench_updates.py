"""Weight updates under load: what becomes of the requests that are in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np

from pipeline.errors import EngineError
from pipeline.measure import Figure
from pipeline.types import Policy
from producers.engines.base import Completion, Request, Sampling
from producers.engines.sglang import SGLangEngine
from producers.engines.sglang_pool import Servers

IN_FLIGHT = 64
PATIENCE = 600.0
"seconds a sample may take"


def of_updates(checkpoint: Path, servers: Servers, length: int, updates: int) -> Iterator[Figure]:
    """64 requests of `length` tokens are always in flight, while the model's own weights are loaded `updates` times
    as new ones: whenever half of the requests have ended."""
    load = asyncio.run(_Load(checkpoint, servers, length).through(updates))
    yield Figure("updates", updates, "")
    yield Figure("pause", median(load.pauses), "s")
    yield Figure("answers", len(load.whole), "requests")
    yield Figure("across", sum(len({span.version for span in one.versions}) > 1 for one in load.whole), "requests")
    yield Figure("lost", load.lost, "requests", at_most=0)


class _Load:
    """What is asked, and what comes of it."""

    def __init__(self, checkpoint: Path, servers: Servers, length: int) -> None:
        self.checkpoint, self.length = checkpoint, length
        self.engine = SGLangEngine(checkpoint, replace(servers, concurrency=IN_FLIGHT), "retract", PATIENCE)
        self.pauses: list[float] = []
        "seconds of each update"
        self.whole: list[Completion] = []
        self.lost = 0
        self._ended = asyncio.Semaphore(0)
        self._numbers = count()
        self._over = False

    async def through(self, updates: int) -> _Load:
        await self.engine.start()
        try:
            await self.engine.load(self._policy(1))
            streams = [asyncio.create_task(self._stream()) for _ in range(IN_FLIGHT)]
            for version in range(2, updates + 2):
                for _ in range(IN_FLIGHT // 2):
                    await self._ended.acquire()
                begin = time.perf_counter()
                await self.engine.load(self._policy(version))
                self.pauses.append(time.perf_counter() - begin)
            self._over = True
            await asyncio.gather(*streams)
        finally:
            await self.engine.close()
        return self

    async def _stream(self) -> None:
        while not self._over:
            try:
                done = await self.engine.generate(self._request())
            except EngineError:
                self.lost += 1
            else:
                self._sort(done)
            self._ended.release()

    def _sort(self, done: Completion) -> None:
        if done.finish == "abort":
            self.lost += 1
        else:
            self.whole.append(done)

    def _policy(self, version: int) -> Policy:
        return Policy(version, str(self.checkpoint.resolve()), "hf", "", 0, time.time())

    def _request(self) -> Request:
        n = next(self._numbers)
        return Request(f"{n:032x}", np.array([4 + n % 7, 5, 6], np.int32), Sampling(self.length, 1.0, ()), n)
