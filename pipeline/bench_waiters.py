"""Workers that are connected and wait, many in one process: `python -m pipeline.bench_waiters RUN COUNT`.

Each does what a generator does that has nothing to do: three connections, a heartbeat and a reap every few seconds, and
a lease (of nothing) when it hears something on `wake` or has heard nothing for a while. The Redis is the one that
MILLPOND_REDIS_URL names; a line on stdout says that all wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys

from pipeline.keys import Keys
from pipeline.leases import WorkerBroker, new_worker_id
from pipeline.pulse import EVERY

IDLE, JITTER = (1.0, 2.0), 0.01
"as the generator has them"


async def _wait(url: str, keys: Keys, ready: asyncio.Semaphore) -> None:
    worker = new_worker_id()
    broker, pulse = WorkerBroker(url, keys, worker), WorkerBroker(url, keys, worker)
    poke = asyncio.Event()
    info = {"host": "bench", "pid": os.getpid(), "engine": "none", "version": None, "in_flight": 0, "samples": 0}

    async def listen() -> None:
        async for _ in broker.wakes():
            await asyncio.sleep(random.uniform(0, JITTER))
            poke.set()

    async def beat() -> None:
        while True:
            await asyncio.sleep(random.uniform(0.5, 1.5) * EVERY)
            await pulse.heartbeat(info, 0)
            await pulse.reap()

    await broker.register(info)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(listen())
        tasks.create_task(beat())
        await pulse.heartbeat(info, 0)
        ready.release()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(*IDLE)):
                    await poke.wait()
            poke.clear()
            await broker.lease(0, 0)


async def _all(url: str, keys: Keys, count: int) -> None:
    ready = asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(_wait(url, keys, ready))
            await ready.acquire()
        sys.stdout.write("ready\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_all(os.environ["MILLPOND_REDIS_URL"], Keys(sys.argv[1]), int(sys.argv[2])))
