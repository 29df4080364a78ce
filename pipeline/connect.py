"""Connections to Redis under the client rules of the protocol.

No hidden retries (a repeated RPUSH is a second group), socket timeouts above any blocking call, and every new
connection learns which server it met: a `run_id` that changed means Redis was restarted and may know less than we do,
and the command that would have been sent is not sent before the owner of the connection has seen to that.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import random
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)
from redis.retry import Retry

from pipeline.errors import RedisDown, RedisUnusable, Stopped, UsageError
from pipeline.transaction import Client

log = logging.getLogger(__name__)

BLOCK = 1.0
"Seconds the one blocking pop waits."
SOCKET_TIMEOUT = 10.0
AWAY = (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError, OutOfMemoryError)
"Redis, or the way to it, is in trouble that may pass. MISCONF and the like: see `passing`."
_PASSING = ("MISCONF", "LOADING", "READONLY", "MASTERDOWN", "OOM", "CLUSTERDOWN", "UNKILLABLE", "BUSY ")


def passing(error: RedisError) -> bool:
    """Whether an error of Redis is an outage to be waited out rather than a bug of ours."""
    if isinstance(error, (AuthenticationError, AuthorizationError)):
        return False
    return isinstance(error, AWAY) or any(word in str(error)[:200] for word in _PASSING)


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

    def meet(self, info: bytes | str) -> None:
        text = info.decode() if isinstance(info, bytes) else info
        run_id = next(line[7:] for line in text.splitlines() if line.startswith("run_id:"))
        before, self.run_id = self.run_id, run_id
        self.connects += 1
        if before is not None and before != run_id:
            self.restarted = True
            raise Restarted("Redis was restarted")


def _options(url: str, name: str) -> dict[str, Any]:
    query = parse_qs(urlsplit(url).query)
    if query.get("decode_responses", ["false"])[0].lower() not in ("false", "0", "no", ""):
        raise RedisUnusable("--redis-url: decode_responses would destroy binary groups; take it out of the URL")
    return {
        "socket_timeout": SOCKET_TIMEOUT,
        "socket_connect_timeout": 5.0,
        "socket_read_size": 1 << 20,
        "client_name": name,
    }


def connect(url: str, name: str, seen: Seen | None = None) -> redis.Redis:
    """A client for one thread at a time; `name` shows in CLIENT LIST."""
    tracker = seen or Seen()

    def hello(connection: Any) -> None:
        connection.on_connect()
        connection.send_command("INFO", "server")
        tracker.meet(connection.read_response())

    _keep_buffers()
    try:
        return redis.Redis.from_url(
            url, retry=Retry(NoBackoff(), 0), max_connections=4, redis_connect_func=hello, **_options(url, name)
        )
    except ValueError as error:
        raise UsageError(f"--redis-url: {error}") from None


def connect_async(url: str, name: str, seen: Seen | None = None) -> redis.asyncio.Redis:
    """The same for asyncio; calls wait for one of 8 connections."""
    tracker = seen or Seen()

    async def hello(connection: Any) -> None:
        await connection.on_connect()
        await connection.send_command("INFO", "server")
        tracker.meet(await connection.read_response())

    _keep_buffers()
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        retry=redis.asyncio.retry.Retry(NoBackoff(), 0),
        max_connections=8,
        timeout=None,
        redis_connect_func=hello,
        **_options(url, name),
    )
    return Client.from_pool(pool)


def verify(client: redis.Redis) -> list[str]:
    """Warnings about a server; RedisUnusable where it must not be used. Asked once, at start."""
    info: dict[str, Any] = client.info()
    if info.get("redis_mode") == "cluster" or info.get("cluster_enabled"):
        raise RedisUnusable(
            "this is a Redis Cluster: Millpond's scripts touch several keys at once; use a single server"
        )
    if info.get("role") != "master":
        raise RedisUnusable("this Redis is a replica and takes no writes; point --redis-url at its master")
    if int(str(info["redis_version"]).split(".")[0]) < 7:
        raise RedisUnusable(f"Redis {info['redis_version']} is too old: 7.0 or later, or Valkey, is needed")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise RedisUnusable(
            f"maxmemory-policy is {policy}: under memory pressure this Redis would delete queued groups; "
            "run `CONFIG SET maxmemory-policy noeviction` on it"
        )
    if not info.get("aof_enabled"):
        return ["this Redis has no append-only file: a restart of it loses what it holds (CONFIG SET appendonly yes)"]
    return []


class Outage:
    """What one verb meets until it gets through: back-off with jitter, RedisDown past the deadline.

    All that its owner meets at the same time is one outage in the log: a line when it begins, a line when it ends.
    """

    def __init__(self, seen: Seen, patience: float, stop: threading.Event) -> None:
        self.seen = seen
        self.patience = patience
        self.stop = stop
        self.began: float | None = None
        self.delay = 0.05

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.began is not None:
            self.seen.away -= 1
            if kind is None and not self.seen.away:
                log.warning("Redis is back after %.1f s", time.monotonic() - self.began)

    def _meet(self, cause: Exception) -> None:
        self.cause = cause
        if self.began is None:
            self.began = time.monotonic()
            self.seen.away += 1
            if self.seen.away == 1:
                log.warning("Redis is away (%s: %s), for at most %.0f s", type(cause).__name__, cause, self.patience)

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
                client.ping()
            except RedisError as error:
                if not passing(error):
                    raise
                self.cause = error
            else:
                return

    async def wait_async(self, client: redis.asyncio.Redis, cause: Exception) -> None:
        """The same for asyncio."""
        self._meet(cause)
        while True:
            await asyncio.sleep(self._pause())
            try:
                await client.ping()
            except RedisError as error:
                if not passing(error):
                    raise
                self.cause = error
            else:
                return


def _keep_buffers() -> None:
    """Keep large buffers instead of returning them to the kernel: 3 times faster at 256 KB (measured; glibc only)."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt:
            mallopt(-3, 256 << 20)  # M_MMAP_THRESHOLD
            mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
            mallopt(-2, 16 << 20)  # M_TOP_PAD
