"""What becomes of one lease: pushed, dropped under a reason, handed back, or lost to another round."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pipeline.codec import encode
from pipeline.errors import EngineDown, EngineError, MessageError, RequestRefused
from pipeline.leases import WorkerBroker
from pipeline.replies import Lease
from pipeline.types import Group
from producers.catch_up import CatchUp
from producers.filters import Verdict
from producers.group import Maker, Progress, SampleAborted
from producers.party import Receiver

log = logging.getLogger(__name__)

FULL = (0.2, 1.0)
"Seconds between tries to push into a full list."
DOWN = 1.0
"Seconds that a worker leases nothing after its engine was found down: what it hands back is for others."

TOLD_AGAIN = 60.0
"Seconds after which an engine that is still down is told of again."


@dataclass
class Job:
    """One lease being worked on."""

    lease: Lease
    progress: Progress
    task: asyncio.Task[None] | None = None


class Worker:
    """Makes, filters and pushes groups; keeps no lease itself."""

    def __init__(self, broker: WorkerBroker, maker: Maker, keep: Callable[[Group], Verdict] | None) -> None:
        self.broker = broker
        self.maker = maker
        self.rules = maker.rules
        self.unused = "drop" if maker.rules.async_unused_samples_handler == "drop" else "strike"
        "what stale and aborted groups get: round again with a strike, or dropped under the reason"
        self.keep = keep
        self.joins = self.rules.update_weight_transport == "distributed" and isinstance(maker.engine, Receiver)
        "it answers where a trainer offers weights"
        self.made: deque[tuple[float, int]] = deque(maxlen=512)
        "(when, tokens) of the latest groups"
        self.down = 0.0
        "monotonic time until which nothing is leased"
        self.trouble = ""
        "what the engine said when it was found down; empty once a group was made again"

        self.told = -TOLD_AGAIN
        "monotonic time when the log last told that the engine is down"

    def tokens_per_sec(self) -> float:
        """Over the last 10 seconds."""
        now = time.monotonic()
        return sum(count for when, count in list(self.made) if now - when < 10) / 10

    def info(self, weights: CatchUp, starting: float | None) -> dict[str, Any]:
        """What people see of this worker; `starting`: monotonic time since when its engine does."""
        since = weights.since if starting is None else starting
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "engine": type(self.maker.engine).__name__,
            "version": self.maker.engine.version,
            "loading": weights.loading,
            "joins": self.joins,
            "ready": starting is None,
            "busy_for": since and round(time.monotonic() - since, 1),
            "trouble": self.trouble,
            "tokens_per_sec": round(self.tokens_per_sec(), 1),
        }

    async def work(
        self, lease: Lease, progress: Progress, poke: asyncio.Event, after: asyncio.Task[None] | None = None
    ) -> None:
        """Each lease ends in exactly one of: pushed, dropped, handed back, lost to another round; and not before
        `after` has ended."""
        try:
            async with _turn(after), asyncio.timeout(self.rules.rollout_group_timeout) as deadline:
                group = await self.maker.make(lease.prompt, progress, poke)
        except TimeoutError:
            if not deadline.expired():  # a reward function's own
                raise
            await self._give_up(lease, "deadline", f"not done in {self.rules.rollout_group_timeout:.0f} s")
        except RequestRefused as error:
            log.warning("prompt %d is dropped: %s", lease.prompt.id, error)
            await self.broker.drop(lease, "refused")
        except MessageError as error:
            log.error("prompt %d is dead-lettered: %s", lease.prompt.id, error)
            await self.broker.hand_back([lease], "bad_record", "bury")
        except EngineDown as error:
            self._tell(error)
            self.down, self.trouble = time.monotonic() + DOWN, str(error)[:500]
            await self.broker.hand_back([lease], "engine_down")
        except SampleAborted as error:
            log.warning("prompt %d: %s", lease.prompt.id, error)
            await self.broker.hand_back([lease], "aborted", self.unused)
        except EngineError as error:
            await self._give_up(lease, "bad_sample", error)
        else:
            await self._finish(lease, group)

    def _tell(self, error: EngineDown) -> None:
        """One line an outage, not one a prompt; again while it lasts."""
        now = time.monotonic()
        if now - self.told >= TOLD_AGAIN:
            self.told = now
            log.warning("the engine is down (%s); its prompts are handed back until it answers", error)

    async def _give_up(self, lease: Lease, reason: str, why: object) -> None:
        log.warning("prompt %d gets a strike (%s): %s", lease.prompt.id, reason, why)
        await self.broker.hand_back([lease], reason, "strike")

    async def _finish(self, lease: Lease, group: Group) -> None:
        self.trouble = ""
        self.made.append((time.monotonic(), sum(len(q.tokens) for s in group.samples for q in s.sequences)))
        verdict = self.keep(group) if self.keep else None
        if verdict is not None and not verdict.keep:
            await self.broker.drop(lease, verdict.reason or "filtered")
            return
        try:
            message = encode(group)
        except MessageError as error:
            await self._give_up(lease, "bad_sample", error)
            return
        if len(message) > self.rules.max_group_bytes:
            log.error("prompt %d is dead-lettered: its group has %d bytes", lease.prompt.id, len(message))
            await self.broker.hand_back([lease], "too_large", "bury")
            return
        await self._push(lease, message)

    async def _push(self, lease: Lease, message: bytes) -> None:
        began = said = time.monotonic()
        while (answer := await self.broker.push(lease, message)) == "full":
            if time.monotonic() - said > 30:
                said = time.monotonic()
                log.warning("the group list has been full for %.0f s; prompt %d waits", said - began, lease.prompt.id)
            await asyncio.sleep(random.uniform(*FULL))
        if answer == "lost":
            log.info("prompt %d went round again meanwhile; its group is not needed", lease.prompt.id)


@asynccontextmanager
async def _turn(after: asyncio.Task[None] | None) -> AsyncIterator[None]:
    """Whatever the block ends with but a cancel, it ends after `after`."""
    try:
        yield
    except Exception:
        if after:
            await asyncio.wait([after])
        raise
    if after:
        await asyncio.wait([after])
