"""Trouble with Redis that may pass: told once, with what helps; waited out with back-off; RedisDown past a deadline."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Self

import redis
import redis.asyncio
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)

from pipeline.errors import RedisDown, RedisUnusable, Stopped

log = logging.getLogger(__name__)

AWAY = (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError, OutOfMemoryError)
"Redis, or the way to it, is in trouble that may pass; with what REFUSES names."

REFUSES = (
    (
        ("OOM", "used memory >"),
        "its maxmemory is reached: it goes on when the trainer has drained; give it more, or lower --queue-max-bytes",
    ),
    (("MISCONF",), "it cannot write to its disk: see its log, and make space there"),
    (("READONLY", "read only replica", "UNBLOCKED"), "it is a replica now: point --redis-url at its master"),
    (("LOADING", "loading the dataset"), "it is reading its data from the disk"),
    (("MASTERDOWN",), "it is a replica without its master: point --redis-url at the master"),
    (("NOREPLICAS",), "it has fewer replicas than its min-replicas-to-write"),
    (("CLUSTERDOWN",), "it is a cluster that is down"),
    (("UNKILLABLE", "BUSY "), "a script that is not ours runs in it without end"),
    (("LOST ",), "it was flushed, or keys were deleted or evicted: a running trainer tells it again what it knows"),
)
"Words in what Redis answers, and what that means or what helps."
TOLD_AGAIN = 60.0
"Seconds in which refusals of one kind, which may come and go, are told of once."


def passing(error: RedisError) -> bool:
    """Whether an error of Redis is an outage to be waited out rather than a bug of ours."""
    if isinstance(error, (AuthenticationError, AuthorizationError)):
        return False
    return isinstance(error, AWAY) or _refusal(error) is not None


def told(error: RedisError) -> Exception:
    """What a user is told of an error that will not pass, with what to do."""
    if isinstance(error, AuthenticationError | AuthorizationError):
        return RedisUnusable(f"Redis takes no such user name or password ({error}): see the URL")
    if isinstance(error, NoPermissionError):
        return RedisUnusable(f"{error}: docs/redis-cli.md has the rights that a user needs")
    return error


def _refusal(error: Exception) -> str | None:
    said = str(error)[:200]
    return next((help for words, help in REFUSES if any(word in said for word in words)), None)


class Restarted(ConnectionError):
    """A new connection met another server process than the one before."""


@dataclass
class Seen:
    """What the connections of one owner have met."""

    run_id: str | None = None
    restarted: bool = False
    connects: int = 0
    away: int = 0
    "verbs that wait for Redis to come back"
    lost: float = 0.0
    "seconds in which the owner could do nothing but wait; where several verbs waited at once, their sum"
    told: dict[str, float] = field(default_factory=dict)
    "refusal -> monotonic time when the log last told of it"
    since: float | None = None
    "when trouble began that the log told of and not of its end"
    through: bool = False
    "one of several verbs that waited has got through"

    def meet(self, info: bytes | str) -> None:
        text = info.decode() if isinstance(info, bytes) else info
        run_id = next(line[7:] for line in text.splitlines() if line.startswith("run_id:"))
        before, self.run_id = self.run_id, run_id
        self.connects += 1
        if before is not None and before != run_id:
            self.restarted = True
            raise Restarted("Redis was restarted")

    def tell(self, cause: Exception, patience: float) -> None:
        """Says what the trouble is, where that was not said before."""
        refusal, now = _refusal(cause), time.monotonic()
        if self.since is not None or (refusal and now - self.told.get(refusal, -TOLD_AGAIN) < TOLD_AGAIN):
            return
        self.since = now
        if refusal:
            self.told[refusal] = now
        help = refusal or "no connection to it, or no answer: is it running?"
        log.warning("Redis is away (%s: %s): %s; for at most %.0f s", type(cause).__name__, cause, help, patience)

    def well(self) -> None:
        """A verb got through that trouble kept from it."""
        if self.since is not None:
            log.warning("Redis is back after %.1f s", time.monotonic() - self.since)
        self.since, self.through = None, False


class Outage:
    """What one verb meets until it gets through: back-off with jitter, RedisDown past the deadline.

    All that its owner meets at the same time is one outage in the log: a line when it begins, a line when it ends.
    """

    def __init__(self, seen: Seen, patience: float, stop: threading.Event, again: bool = True) -> None:
        """`again`: the verb is sent again, so that at the end it got through."""
        self.seen = seen
        self.again = again
        self.patience = patience
        self.stop = stop
        self.began: float | None = None
        self.delay = 0.05

    def __enter__(self) -> Self:
        self.entered = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.began is None:
            return
        self.seen.away -= 1
        self.seen.lost += time.monotonic() - self.entered
        self.seen.through |= kind is None and self.again
        if self.seen.through and not self.seen.away:
            self.seen.well()

    def _meet(self, cause: Exception) -> None:
        self.cause = cause
        if self.began is None:
            self.began = time.monotonic()
            self.seen.away += 1
        self.seen.tell(cause, self.patience)

    def _pause(self) -> float:
        """Seconds until the next look; Stopped where the owner was asked to end."""
        if self.stop.is_set():
            raise Stopped(f"asked to stop while Redis was away ({self.cause})")
        if self.began is not None and time.monotonic() - self.began > self.patience:
            raise RedisDown(
                f"Redis was away for {self.patience:.0f} s (--redis-patience); last: {self.cause}"
            ) from self.cause
        if isinstance(self.cause, Restarted):
            return 0.0
        self.delay = min(self.delay * 2, 5.0)
        return self.delay * random.uniform(0.5, 1.0)

    def wait(self, client: redis.Redis, cause: Exception) -> None:
        """After another failure: returns when the server answers; whether it takes the verb, only the verb can tell."""
        self._meet(cause)
        while True:
            self.stop.wait(self._pause())
            try:
                if isinstance(self.cause, ReadOnlyError):  # a name may lead to the new master
                    client.connection_pool.disconnect()
                client.ping()
            except RedisError as error:
                if not passing(error):
                    raise
                self._meet(error)
            else:
                return

    async def wait_async(self, client: redis.asyncio.Redis, cause: Exception) -> None:
        """The same for asyncio."""
        self._meet(cause)
        while True:
            await asyncio.sleep(self._pause())
            try:
                if isinstance(self.cause, ReadOnlyError):
                    await client.connection_pool.disconnect(inuse_connections=False)
                await client.ping()
            except RedisError as error:
                if not passing(error):
                    raise
                self._meet(error)
            else:
                return
