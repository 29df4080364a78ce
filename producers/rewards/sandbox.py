"""Grading where it can be killed: `grade` gives a score, or None where the grading did not end within its limits.

A host process (host.py) beside the generator forks the graders; JSON goes over a socket. Whatever a grading does, its
siblings, the event loop and the generator's memory are left alone. A host that dies is started again and what it had
is graded once more; the host ends when the generator does, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from pipeline.errors import RewardError, UsageError
from producers.rewards.base import Value
from producers.rewards.forked import Limits
from producers.rewards.frames import HEAD, length, pack

log = logging.getLogger(__name__)

DEATHS = 5
"Hosts that may die in a row without one result."
QUIET = 30.0
"Seconds between two lines in the log about gradings without a result."

PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])["path"]
from producers.rewards.grade import main
main()
"""
"For `python -I`: it imports from where we do, and from nowhere else."

_THREADS = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
_LOST = {"score": None, "why": "its host died"}


class Sandbox:
    """One host and its graders, of one kind; for the event loop it is first used in."""

    def __init__(self, grader: str, workers: int, limits: Limits) -> None:
        self.grader = grader
        self.workers = workers
        self.limits = limits
        self.unscored = 0
        "gradings without a result so far"
        self._said = float("-inf")
        self._ids = count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._starting = asyncio.Lock()
        self._host: _Host | None = None
        self._deaths = 0
        "of hosts, since the last result"

    async def grade(self, **arguments: Any) -> Value:
        """The score, or None: killed at a limit, or died. UsageError where the grader cannot be had here."""
        result = await self._once(arguments)
        if result is _LOST:
            result = await self._once(arguments)
        score: Value = result["score"]
        if score is None:
            self._tell(result.get("why", "the grader gave none"))
        return score

    async def start(self) -> None:
        """Returns when gradings can begin; does nothing where they can."""
        await self._ready()

    async def close(self) -> None:
        """Ends the host and what it grades."""
        if self._host is not None:
            host, self._host = self._host, None
            await host.end()

    async def _once(self, arguments: dict[str, Any]) -> dict[str, Any]:
        host = await self._ready()
        id = next(self._ids)
        result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[id] = result
        host.writer.write(pack({"id": id, "arguments": arguments}))
        try:
            return await result
        except asyncio.CancelledError:
            host.writer.write(pack({"cancel": id}))
            raise
        finally:
            self._waiting.pop(id, None)

    async def _ready(self) -> _Host:
        async with self._starting:
            if self._host is None:
                if self._deaths >= DEATHS:
                    raise RewardError(f"{self.grader}: the grading host died {self._deaths} times without one result")
                self._host = await _Host.born(self.grader, self.workers, self.limits)
                self._host.listen(self._result, self._gone)
            return self._host

    def _result(self, message: dict[str, Any]) -> None:
        self._deaths = 0
        waiting = self._waiting.get(message["id"])
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def _gone(self) -> None:
        if self._host is None:
            return
        log.error("%s: the grading host died; it is started again", self.grader)
        self._host, self._deaths = None, self._deaths + 1
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(_LOST)

    def _tell(self, why: str) -> None:
        self.unscored += 1
        if time.monotonic() - self._said > QUIET:
            self._said = time.monotonic()
            log.warning("%s: %d answers have no score so far; the latest: %s", self.grader, self.unscored, why)


class _Host:
    """The process, and this end of its link."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: Any) -> None:
        self.process = process
        self.reader = reader
        self.writer: asyncio.StreamWriter = writer
        self.listening: asyncio.Task[None] | None = None

    @classmethod
    async def born(cls, grader: str, workers: int, limits: Limits) -> _Host:
        ours, theirs = socket.socketpair()
        settings = {"grader": grader, "workers": workers, "seconds": limits.seconds, "memory": limits.memory}
        with theirs:
            process = _start({"path": sys.path, "link": theirs.fileno(), **settings})
        host = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            first = await host._read()
        except asyncio.IncompleteReadError:
            raise RewardError(f"{grader}: the grading host ended as it was started; its words stand above") from None
        except asyncio.CancelledError:
            await host.end()
            raise
        if "refused" in first:
            await host.end()
            raise UsageError(first["refused"])
        return host

    def listen(self, result: Callable[[dict[str, Any]], None], gone: Callable[[], None]) -> None:
        async def read() -> None:
            try:
                while True:
                    result(await self._read())
            except (asyncio.IncompleteReadError, ConnectionResetError):
                gone()
                await self.end()

        self.listening = asyncio.create_task(read())

    async def _read(self) -> dict[str, Any]:
        body = await self.reader.readexactly(length(await self.reader.readexactly(HEAD)))
        message: dict[str, Any] = json.loads(body)
        return message

    async def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.writer.close()
        if self.listening is not None and self.listening is not asyncio.current_task():
            self.listening.cancel()


def _start(settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-c", PROGRAM, json.dumps(settings)],
        pass_fds=[settings["link"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **_THREADS},
    )
