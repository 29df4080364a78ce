"""The way from one process to Redis, which can be slow, dead, or cut at any byte.

A TCP port before the server's unix socket. TCP, because only there a connection can be reset rather than closed.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import unquote, urlsplit

COMMAND, REPLY = "command", "reply"


@dataclass(eq=False)
class Pair:
    """One connection: the process's end and the server's."""

    client: socket.socket
    server: socket.socket
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    doomed: float | None = None
    "share of the next reply that comes through before it is cut"

    def reset(self) -> None:
        """RST to both ends; what is on its way is lost."""
        for task in self.tasks:
            task.cancel()
        for end in (self.client, self.server):
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            shut(end)


def shut(end: socket.socket) -> None:
    """Closes it; a loop that still watched its number would take the next socket of that number for it."""
    if end.fileno() >= 0:
        loop = asyncio.get_running_loop()
        loop.remove_reader(end)
        loop.remove_writer(end)
        end.close()


class Link:
    """`with Link(url) as link`: `link.url` leads where `url` does. Orders may come from any thread."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = unquote(parts.path)
        self._listener = self._listen(0)
        self._port = self._listener.getsockname()[1]
        self.url = f"redis://:{parts.password}@127.0.0.1:{self._port}"
        self._pairs: set[Pair] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._lag = 0.0
        self._order: tuple[str, float, bytes] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    # -- orders

    def cut(self, way: str, share: float, word: bytes = b"") -> None:
        """Of the next command that holds `word`, or of the reply to it, this share arrives, then both ends are reset. A
        REPLY with the share 0: the command is done, and its sender never hears of it."""
        self._order = (way, share, word)

    @property
    def ordered(self) -> bool:
        """A cut was ordered, and nothing has come that way since."""
        return self._order is not None

    def reset(self) -> None:
        """All connections, now."""
        self._soon(self._reset)

    def half_close(self, way: str) -> None:
        """No more comes this `way` on the connections there are, politely: the other way still works."""
        self._soon(lambda: self._half_close(way))

    def slow(self, seconds: float) -> None:
        """Each piece of data takes so long, either way."""
        self._lag = seconds

    def hole(self) -> None:
        """Everything is swallowed; connecting works and brings nothing."""
        self._soon(self._open.clear)

    def fill(self, late: bool) -> None:
        """The hole ends. `late`: what it swallowed is delivered now, though its sender may have given up long ago."""
        self._soon(lambda: (None if late else self._reset(), self._open.set()))

    def refuse(self) -> None:
        """Nobody listens, and what was connected is reset."""
        self._soon(lambda: (self._accepting.cancel(), shut(self._listener), self._reset()))

    def heal(self) -> None:
        self._lag, self._order = 0.0, None
        self._soon(lambda: (self._open.set(), self._again()))

    # -- how

    def _listen(self, port: int) -> socket.socket:
        made = socket.create_server(("127.0.0.1", port), backlog=128)
        made.setblocking(False)
        return made

    def _again(self) -> None:
        if self._listener.fileno() < 0:
            self._listener = self._listen(self._port)
            self._accepting = self._loop.create_task(self._accept())

    def _soon(self, act: Callable[[], object]) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (act(), done.set()))
        done.wait(10)

    def _run(self) -> None:
        self._accepting = self._loop.create_task(self._accept())
        self._loop.run_forever()

    def _reset(self) -> None:
        for pair in self._pairs:
            pair.reset()
        self._pairs.clear()

    def _half_close(self, way: str) -> None:
        for pair in self._pairs:
            with suppress(OSError):
                (pair.server if way == COMMAND else pair.client).shutdown(socket.SHUT_WR)

    async def _accept(self) -> None:
        listener = self._listener
        while listener.fileno() >= 0:
            try:
                client, _ = await self._loop.sock_accept(listener)
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server = socket.socket(socket.AF_UNIX)
            server.setblocking(False)
            pair = Pair(client, server)
            try:
                server.connect(self._target)
            except OSError:  # no server: as a closed port, though a moment later
                pair.reset()
                continue
            self._pairs.add(pair)
            pair.tasks = [
                self._loop.create_task(self._carry(pair, COMMAND)),
                self._loop.create_task(self._carry(pair, REPLY)),
            ]

    async def _carry(self, pair: Pair, way: str) -> None:
        source, sink = (pair.client, pair.server) if way == COMMAND else (pair.server, pair.client)
        try:
            while data := await self._loop.sock_recv(source, 1 << 18):
                await self._open.wait()
                if self._lag:
                    await asyncio.sleep(self._lag)
                share = self._share(pair, way, data)
                if share is not None:
                    await self._loop.sock_sendall(sink, data[: int(share * len(data))])
                    self._drop(pair)
                    return
                await self._loop.sock_sendall(sink, data)
            await self._open.wait()
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(pair)
            return
        if all(task.done() or task is asyncio.current_task() for task in pair.tasks):
            self._drop(pair)

    def _share(self, pair: Pair, way: str, data: bytes) -> float | None:
        """How much of it may pass where it is to be cut."""
        if way == REPLY:
            return pair.doomed
        if self._order and self._order[2] in data:
            (way, share, _), self._order = self._order, None
            if way == COMMAND:
                return share
            pair.doomed = share
        return None

    def _drop(self, pair: Pair) -> None:
        self._pairs.discard(pair)
        current = asyncio.current_task()
        pair.tasks = [task for task in pair.tasks if task is not current]
        pair.reset()

    def close(self) -> None:
        def end() -> None:
            self._accepting.cancel()
            shut(self._listener)
            self._reset()
            self._loop.call_later(0.05, self._loop.stop)

        self._loop.call_soon_threadsafe(end)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
