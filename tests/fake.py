"""The same rig on fakeredis, which needs the scripts bent a little: the tests adapt, the product does not.

It is spared what the marks say and all that takes the fixtures `real` or `own`: lost replies, outages and restarts (it
has no INFO, no log, no sockets), full memory, many processes at once, and the count of commands.
"""

from __future__ import annotations

from typing import Any

import fakeredis
import redis.asyncio.client
import redis.client
from rig import B, Rig

from pipeline.leases import WorkerBroker

SPARED = {
    "other error": "fakeredis words the error of XREADGROUP without a stream as XGROUP's",
    "no connections": "fakeredis has no connections to cut",
}
"Why a row of the contract is not asked of fakeredis."


def bent(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """fakeredis knows no shebang line, and inside Lua XREADGROUP answers a flat {stream, entries}, {} for nothing."""
    if args[0] != "EVAL" or not str(args[1]).startswith("#!"):
        return args
    text = str(args[1]).split("\n", 1)[1].replace("ipairs(got[1][2])", "ipairs(got[2] or {})")
    return "EVAL", text, *args[2:]


class Pipe(redis.client.Pipeline):
    def execute_command(self, *args: Any, **options: Any) -> Any:
        return super().execute_command(*bent(args), **options)  # type: ignore[no-untyped-call]


class AsyncPipe(redis.asyncio.client.Pipeline):
    def execute_command(self, *args: Any, **options: Any) -> Any:
        return super().execute_command(*bent(args), **options)


class Client(fakeredis.FakeRedis):  # type: ignore[misc]
    def execute_command(self, *args: Any, **options: Any) -> Any:
        return super().execute_command(*bent(args), **options)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Pipe:
        return Pipe(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class AsyncClient(fakeredis.FakeAsyncRedis):  # type: ignore[misc]
    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await super().execute_command(*bent(args), **options)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> AsyncPipe:
        return AsyncPipe(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class FakeRig(Rig):
    def __init__(self) -> None:
        self.server = fakeredis.FakeServer()
        super().__init__("redis://nowhere")

    def connect(self) -> redis.Redis:
        return Client(server=self.server)

    def _kept(self, broker: B) -> B:
        broker.client = self.connect()
        return super()._kept(broker)

    def new_worker(self, name: str) -> WorkerBroker:
        worker = super().new_worker(name)
        worker.client = AsyncClient(server=self.server)
        return worker
