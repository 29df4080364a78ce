"""The end of tasks."""

from __future__ import annotations

import asyncio

AGAIN = 0.1
"Seconds after which a task that was cancelled and goes on is cancelled again."


async def cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Returns when all have ended. Before Python 3.12 wait_for, which redis-py calls, can swallow a cancel
    (python/cpython#86296), so it is said again."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=AGAIN)
