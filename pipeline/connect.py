"""Connections to Redis under the client rules of the protocol.

No hidden retries (a repeated RPUSH is a second group), socket timeouts above any blocking call, and every new
connection learns which server it met: a `run_id` that changed means Redis was restarted and may know less than we do,
and the command that would have been sent is not sent before the owner of the connection has seen to that.
"""

from __future__ import annotations

import ctypes
import re
import sys
from typing import Any
from urllib.parse import parse_qs, urlsplit

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipeline.errors import RedisUnusable, UsageError
from pipeline.log import mask
from pipeline.outage import Seen
from pipeline.transaction import Client

BLOCK = 1.0
"Seconds the one blocking pop waits."
SOCKET_TIMEOUT = 10.0


def _options(url: str, name: str) -> dict[str, Any]:
    query = parse_qs(urlsplit(url).query)
    if query.get("decode_responses", ["false"])[0].lower() not in ("false", "0", "no", ""):
        raise RedisUnusable("--redis-url: decode_responses would destroy binary groups; take it out of the URL")
    try:
        timeout = float(query.get("socket_timeout", [SOCKET_TIMEOUT])[0])
    except ValueError:
        timeout = 0.0
    if timeout < 2 * BLOCK:
        raise UsageError(f"--redis-url: socket_timeout must be a number of seconds from {2 * BLOCK:.0f}: pops wait")
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
        client = redis.Redis.from_url(
            url, retry=Retry(NoBackoff(), 0), max_connections=4, redis_connect_func=hello, **_options(url, name)
        )
        client.connection_pool.connection_class(**client.connection_pool.connection_kwargs)
        return client
    except UsageError:
        raise
    except TypeError as error:
        odd = [word for word in parse_qs(urlsplit(url).query) if f"'{word}'" in str(error)]
        raise UsageError(f"--redis-url: {', '.join(odd) or error}: a connection to Redis has no such option") from None
    except redis.ConnectionError as error:  # nothing was connected to yet
        raise UsageError(f"--redis-url: {error}") from None
    except ValueError as error:  # which may hold a part of the password
        if found := re.fullmatch(r"Invalid value for '(\w+)' in connection URL\.?", str(error)):
            raise UsageError(f"--redis-url: {found[1]} has a value there that it cannot have") from None
        raise UsageError(
            "--redis-url is no URL with a host and a port: special characters in a user's name and password must be "
            "percent-encoded"
        ) from None


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


def verify(client: redis.Redis, url: str = "") -> list[str]:
    """Warnings about a server; RedisUnusable where it must not be used. Asked at start."""
    try:
        return _verify(client.info())
    except RedisUnusable as error:
        raise RedisUnusable(f"--redis-url {mask(url)}: {error}" if url else str(error)) from None


def _verify(info: dict[str, Any]) -> list[str]:
    if info.get("redis_mode") == "cluster" or info.get("cluster_enabled"):
        raise RedisUnusable(
            "this is a Redis Cluster: Millpond's scripts touch several keys at once; use a single server"
        )
    if info.get("role") != "master":
        raise RedisUnusable("this Redis is a replica and takes no writes; point --redis-url at its master")
    if int(str(info["redis_version"]).split(".")[0]) < 7:
        raise RedisUnusable(f"Redis {info['redis_version']} is too old: 7.0 or later, or Valkey, is needed")
    if evicts := eviction(info):
        raise RedisUnusable(evicts)
    if not info.get("aof_enabled"):
        return ["this Redis has no append-only file: a restart of it loses what it holds (CONFIG SET appendonly yes)"]
    return []


def eviction(info: dict[str, Any]) -> str:
    """What is wrong with the eviction policy, and what helps; empty where nothing is."""
    policy = info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return ""
    return (
        f"maxmemory-policy is {policy}: under memory pressure this Redis would delete queued groups; "
        "run `CONFIG SET maxmemory-policy noeviction` on it"
    )


def _keep_buffers() -> None:
    """Keep large buffers instead of returning them to the kernel: 3 times faster at 256 KB (measured; glibc only)."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt:
            mallopt(-3, 256 << 20)  # M_MMAP_THRESHOLD
            mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
            mallopt(-2, 16 << 20)  # M_TOP_PAD
