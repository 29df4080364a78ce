"""redis-py's asynchronous transaction with one timeout around all of it.

redis-py sets a timer for the write and for each reply, counts retries that we do not make, and packs in Python; a push
of 64 KB takes 1.4 times as long that way [measured].
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import hiredis
import redis.asyncio
from redis import exceptions
from redis.asyncio.client import Pipeline

COPIED = 6000
"Bytes; a larger argument is sent from where it is."


class Transaction(Pipeline):
    """MULTI, the commands, EXEC in one write. Without watched keys and without redis-py's response callbacks."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """The commands' replies as they came; raises what Redis refused first."""
        commands: list[tuple[Any, ...]] = [("MULTI",), *(args for args, _ in self.command_stack), ("EXEC",)]
        connection = await self.connection_pool.get_connection()
        limit = connection.socket_timeout  # for the write and all replies
        try:
            async with asyncio.timeout(limit):
                await connection.send_packed_command(_packed(connection, commands))
                return await _replies(connection, len(commands))
        except TimeoutError:  # the cancelled read has closed the connection
            raise exceptions.TimeoutError(f"no reply to a transaction within {limit} s") from None
        finally:
            await self.connection_pool.release(connection)


def _packed(connection: Any, commands: Sequence[tuple[Any, ...]]) -> list[bytes]:
    """hiredis is ten times faster where it need not copy a payload."""
    pieces: list[bytes] = []
    for args in commands:
        large = any(isinstance(arg, bytes) and len(arg) > COPIED for arg in args)
        pieces += connection.pack_command(*args) if large else [hiredis.pack_command(args)]
    return pieces


async def _replies(connection: Any, count: int) -> list[Any]:
    refused: exceptions.ResponseError | None = None
    for _ in range(count - 1):
        try:
            await connection.read_response(timeout=math.inf)
        except exceptions.ResponseError as error:
            refused = refused or error
    try:
        replies: list[Any] = await connection.read_response(timeout=math.inf)
    except exceptions.ExecAbortError as error:
        raise refused or error from None
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


class Client(redis.asyncio.Redis):
    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Transaction:
        return Transaction(self.connection_pool, self.response_callbacks, transaction, shard_hint)
