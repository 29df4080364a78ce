"""TensorBoard's event files, scalars only: TFRecords of Event messages, written without TensorFlow or protobuf.

https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/event.proto, summary.proto
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path


class EventFile:
    """One file; TensorBoard reads all that are in its folder."""

    def __init__(self, folder: Path, purge: int) -> None:
        """What other files of the folder hold of step `purge` and later ones is no longer shown."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._write(time.time(), 0, _text(3, b"brain.Event:2"))
        self._write(time.time(), purge, _text(7, _varint(1 << 3) + _varint(1)))  # SessionLog.START
        self._file.flush()

    def write(self, when: float, step: int, values: Mapping[str, float]) -> None:
        """`when` in unix seconds."""
        told = b"".join(
            _text(1, _text(1, name.encode()) + b"\x15" + struct.pack("<f", v)) for name, v in values.items()
        )
        self._write(when, step, _text(5, told))
        self._file.flush()

    def _write(self, when: float, step: int, what: bytes) -> None:
        event = b"\x09" + struct.pack("<d", when) + b"\x10" + _varint(step) + what
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked(length) + event + _masked(event))

    def close(self) -> None:
        self._file.close()


def _text(field: int, content: bytes) -> bytes:
    """A field of bytes, text or another message."""
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _entries() -> Iterator[int]:
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        yield value


_TABLE = tuple(_entries())


def _masked(data: bytes) -> bytes:
    """CRC-32C as TFRecord stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
