"""A relay before a Redis that can lose a reply: the command is executed, and its sender never hears of it."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote, urlsplit


class Lossy:
    """A unix socket in front of `url`. `lose(word)`: the next command that holds `word` is done, its reply is lost."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._folder = tempfile.TemporaryDirectory(prefix="lossy-")
        self._target = unquote(parts.path)
        path = str(Path(self._folder.name) / "s")
        self.url = f"unix://:{parts.password}@{quote(path)}"
        self._word: bytes | None = None
        self.lost = 0
        self._open: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, word: bytes) -> None:
        self._word = word

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._target)
                self._open += [client, server]
                threading.Thread(target=self._relay, args=(client, server), daemon=True).start()
                threading.Thread(target=self._answer, args=(client, server), daemon=True).start()

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError), client, server:
            while sent := client.recv(1 << 20):
                if self._word and self._word in sent:
                    self._word, self.lost = None, self.lost + 1
                    client.shutdown(socket.SHUT_WR)  # before the reply can come
                server.sendall(sent)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while reply := server.recv(1 << 20):
                client.sendall(reply)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._folder.cleanup()
