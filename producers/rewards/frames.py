"""JSON over a socket or pipe, each value behind its length: what the generator, the host and its graders exchange."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

LARGEST = 16 << 20
"Bytes of a value; more is a mistake."

_LENGTH = struct.Struct(">I")
HEAD = _LENGTH.size


def pack(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return _LENGTH.pack(len(body)) + body


def length(head: bytes) -> int:
    """Bytes that follow. ValueError where no one of ours can have sent it."""
    (size,) = _LENGTH.unpack(head)
    if size > LARGEST:
        raise ValueError(f"a frame of {size} bytes")
    return int(size)


class Frames:
    """Values out of the pieces in which they come."""

    def __init__(self) -> None:
        self._data = bytearray()

    def take(self, piece: bytes) -> Iterator[Any]:
        """The values that are complete now."""
        self._data += piece
        while len(self._data) >= HEAD:
            end = HEAD + length(bytes(self._data[:HEAD]))
            if len(self._data) < end:
                return
            body = bytes(self._data[HEAD:end])
            del self._data[:end]
            yield json.loads(body)
