"""The process that does a worker's jobs, and can be killed: its two ends.

It is started anew, never forked: what the worker has loaded, an accelerator above all, would be broken in a fork. JSON
goes over a socket (rewards/frames.py): first what the process is to be, then job after job. It has no part in RQ.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from pipeline.agreed import Agreed
from pipeline.config import WorkerConfig
from pipeline.errors import MillpondError, UsageError
from pipeline.flags import SECRET
from pipeline.jobs import LARGEST
from pipeline.log import setup
from pipeline.tether import spawn
from producers.jobs import JOBS, Desk, Function
from producers.rewards.frames import HEAD, Frames, length, pack

NICE = 5


class HorseDied(MillpondError):
    """How its process ended."""


class Horse:
    """The worker's end. For one thread."""

    def __init__(self, desk: Desk, kind: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "producers.horse", str(theirs.fileno())]
            self.process: subprocess.Popen[bytes] = spawn(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=sys.stderr, env=_environment()
            )
        self.link = ours
        self.frames = Frames()
        self.heard: deque[dict[str, Any]] = deque()
        self.send({"kind": kind, **_plain(desk)})

    def send(self, message: dict[str, Any]) -> None:
        """What it does not take, since it is dead, the next `read` tells."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.link.sendall(pack(message))

    def read(self, seconds: float) -> dict[str, Any] | None:
        """Its next word; None: nothing yet. HorseDied where it is gone."""
        if not self.heard and select.select([self.link], [], [], max(0.0, seconds))[0]:
            try:
                piece = self.link.recv(1 << 16)
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise HorseDied(self._end_of())
            self.heard.extend(self.frames.take(piece))
        return self.heard.popleft() if self.heard else None

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def yields(self) -> None:
        """To those that need less time: what hangs may compute. There is no way back."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PGRP, self.process.pid, NICE)

    def end(self) -> None:
        """At once, with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.link.close()

    def _end_of(self) -> str:
        try:
            code = self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "its process closed its link"
        return f"its process got {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"


def _environment() -> dict[str, str]:
    """Without our passwords: what is graded may be dangerous."""
    secret = {f"MILLPOND_{name.upper()}" for name in SECRET}
    return {name: value for name, value in os.environ.items() if name not in secret}


def _plain(desk: Desk) -> dict[str, Any]:
    """A desk as JSON values, secrets in it: for the socket only."""
    config: dict[str, Any] = desk.config.model_dump(mode="json")
    for name in config:
        if hasattr(value := getattr(desk.config, name), "get_secret_value"):
            config[name] = value.get_secret_value()
    rest = {"run": desk.run, "url": desk.url, "folder": desk.folder and str(desk.folder)}
    return {"config": config, "rules": desk.rules.model_dump(mode="json"), **rest}


# --- the process


def _desk(said: dict[str, Any]) -> Desk:
    folder = Path(said["folder"]) if said["folder"] else None
    return Desk(WorkerConfig(**said["config"]), Agreed(**said["rules"]), said["run"], said["url"], folder)


async def _serve(link: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=link)
    said = await _read(reader)
    desk = _desk(said)
    setup(f"worker-{said['kind']}", desk.folder)  # one file for all: many may be killed
    try:
        async with JOBS[said["kind"]].ready(desk) as function:
            writer.write(pack({"ready": os.getpid()}))
            while True:
                writer.write(pack(await _done(function, (await _read(reader))["arguments"])))
    except asyncio.IncompleteReadError:  # the worker is gone
        return
    except UsageError as error:
        writer.write(pack({"refused": str(error)}))
    except Exception as error:
        writer.write(pack({"broken": _said(error), "trace": traceback.format_exc()}))
        raise
    finally:
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()


async def _done(function: Function, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        value = await function(**arguments)
        if (size := len(json.dumps(value, allow_nan=False))) > LARGEST:
            raise ValueError(f"it gave {size} bytes of JSON, {LARGEST} are allowed")
    except Exception as error:  # noqa: BLE001 - told to who waits for the job, with its traceback
        return {"error": _said(error), "trace": traceback.format_exc()}
    return {"value": value}


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, MillpondError) else f"{type(error).__name__}: {error}"


async def _read(reader: asyncio.StreamReader) -> dict[str, Any]:
    body = await reader.readexactly(length(await reader.readexactly(HEAD)))
    message: dict[str, Any] = json.loads(body)
    return message


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
