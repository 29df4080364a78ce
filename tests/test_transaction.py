from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.exceptions import ResponseError

from pipeline.connect import connect, connect_async


@pytest.fixture
def key(redis_url: str) -> str:
    return f"test:{uuid.uuid4().hex}"


def use(url: str, verb: Callable[[Any], Awaitable[Any]]) -> Any:
    """What `verb` gives for a worker's client."""

    async def go() -> Any:
        client = connect_async(url, "test")
        try:
            return await verb(client)
        finally:
            await client.aclose()

    return asyncio.run(go())


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_transaction_gives_the_replies_in_order(redis_url: str, key: str, size: int) -> None:
    async def verb(client: Any) -> Any:
        pipe = client.pipeline(transaction=True)
        pipe.rpush(key, b"x" * size)
        pipe.execute_command("LLEN", key)
        pipe.lpop(key)
        return await pipe.execute()

    assert use(redis_url, verb) == [1, 1, b"x" * size]


def test_a_command_that_is_refused_undoes_all_and_is_the_error(redis_url: str, key: str) -> None:
    async def verb(client: Any) -> Any:
        pipe = client.pipeline(transaction=True)
        pipe.rpush(key, b"x")
        pipe.execute_command("NOSUCH", "a")
        with pytest.raises(ResponseError, match="unknown command"):
            await pipe.execute()
        return await client.exists(key)

    assert use(redis_url, verb) == 0


def test_a_command_that_fails_in_the_transaction_is_the_error_and_the_next_reply_is_the_right_one(
    redis_url: str, key: str
) -> None:
    async def verb(client: Any) -> Any:
        pipe = client.pipeline(transaction=True)
        pipe.rpush(key, b"x")
        pipe.execute_command("EVAL", "return redis.error_reply('ours')", 0)
        with pytest.raises(ResponseError, match="ours"):
            await pipe.execute()
        return await client.echo(key)

    assert use(redis_url, verb) == key.encode()


def test_after_a_cancelled_transaction_nobody_reads_its_replies(redis_url: str, key: str) -> None:
    other = connect(redis_url, "test")

    async def verb(client: Any) -> Any:
        await client.ping()
        other.client_pause(10_000, all=False)
        pipe = client.pipeline(transaction=True)
        pipe.rpush(key, b"x")
        task = asyncio.create_task(pipe.execute())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        other.client_unpause()
        return [await client.echo(f"{key}:{i}") for i in range(10)]

    assert use(redis_url, verb) == [f"{key}:{i}".encode() for i in range(10)]
    other.close()
