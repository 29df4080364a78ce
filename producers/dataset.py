"""A prompt file: JSONL or Parquet, every row checked before any is used, decoded one by one when asked for.

All prompts of a file are text, or all are lists of chat messages. Lines end with \\n alone: U+2028, U+0085 and such
are text inside a JSON string. A byte order mark, \\r\\n, blank lines and a missing last newline do no harm.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import UsageError
from producers import parquet
from producers.checks import Checks
from producers.rows import BadRow, Reader, RowKeys, record

_BOM = b"\xef\xbb\xbf"
_UTF16 = "UTF-16: convert it to UTF-8"
_OTHER = {b"\x1f\x8b": "gzip: unpack it", b"\xff\xfe": _UTF16, b"\xfe\xff": _UTF16}
_PARQUET = b"PAR1"

ANY = RowKeys()
"All keys are found out."

Starts = NDArray[np.int64]
Identity = tuple[int, int, int, int]


class Dataset:
    """A checked prompt file. Holds 8 bytes a row; the text stays on disk."""

    def __init__(self, path: Path, keys: RowKeys, starts: Starts, digest: str, text: Identity | int) -> None:
        self.path = path
        self.keys = keys
        "what was named, and what was found for the rest"
        self.digest = digest
        "sha256 of the file"
        self._starts = starts
        self._text = text
        "which file at the path has the rows; or the descriptor of another one that has them"
        if isinstance(text, int):
            weakref.finalize(self, os.close, text)

    @classmethod
    def open(cls, path: Path, keys: RowKeys = ANY, checks: Checks | None = None) -> Dataset:
        """Read the file once; UsageError names the first bad rows by file and line, and counts all."""
        own = checks or Checks()
        if path.exists() and not path.is_file():
            raise UsageError(f"--prompt-data {path}: not a file")
        reader = Reader(keys)
        try:
            with path.open("rb") as file:
                seen: Identity | int = _identity(file)
                if _is_parquet(path, file):
                    seen, digest = parquet.as_lines(path, file, keys)
                    with _opened(seen) as lines:
                        starts, _ = _check(path, lines, reader, own)
                else:
                    starts, digest = _check(path, file, reader, own)
        except OSError as error:
            raise UsageError(f"--prompt-data {path}: {error.strerror or error}") from error
        if checks is None:
            own.settle()
        return cls(path, reader.keys, starts, digest, seen)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def rows(self) -> int:
        return len(self._starts)

    def record(self, row: int) -> str:
        return self.records([row])[0]

    def records(self, places: Iterable[int]) -> list[str]:
        """The pristine records, going round from the last row to the first; UsageError when the file is no longer the
        one that was checked."""
        try:
            with self._lines() as file:
                return [record(self._line(file, place % len(self)), self.keys) for place in places]
        except OSError as error:
            raise UsageError(f"--prompt-data {self.path}: {error.strerror}") from error

    def _lines(self) -> BinaryIO:
        if isinstance(self._text, int):
            return _opened(self._text)
        file = self.path.open("rb")
        if _identity(file) != self._text:
            file.close()
            raise UsageError(f"--prompt-data {self.path}: the file has changed since it was checked")
        return file

    def _line(self, file: BinaryIO, row: int) -> bytes:
        file.seek(int(self._starts[row]))
        return file.readline()


@lru_cache(maxsize=4)
def order(seed: int, epoch: int, rows: int, shuffle: bool) -> NDArray[np.int64]:
    """int64 [rows]: the rows in the order in which an epoch uses them; read-only.

    A sort by raw output of the bit generator, which is the same in all versions of numpy, as a resume needs it;
    `Generator.permutation` is not (NEP 19).
    """
    ranks = np.random.PCG64([seed, epoch]).random_raw(rows) if shuffle else np.arange(rows)
    result = np.argsort(ranks, kind="stable")
    result.setflags(write=False)
    return result


def row_of(id: int, seed: int, rows: int, shuffle: bool) -> int:
    """The row behind a prompt's id: feed numbers go through one epoch's order after the other."""
    return int(order(seed, id // rows, rows, shuffle)[id % rows])


def _check(path: Path, file: BinaryIO, reader: Reader, checks: Checks) -> tuple[Starts, str]:
    """Byte offsets of the rows, int64 [rows], and the digest."""
    starts, digest, seen = array("q"), hashlib.sha256(), 0
    for number, start, line in _lines(file, digest.update):
        seen += 1
        try:
            row = reader.read(line)
            checks.row(path, number, row, reader.keys)
            starts.append(start)
        except BadRow as error:
            checks.bad(path, number, error)
    if not seen:
        raise UsageError(f"--prompt-data {path}: there are no rows in this file")
    return np.array(starts, dtype=np.int64), digest.hexdigest()


def _lines(file: BinaryIO, feel: Callable[[bytes], object]) -> Iterator[tuple[int, int, bytes]]:
    """Number from 1, byte offset and bytes of each line that is not blank; `feel` is given every byte."""
    offset = 0
    for number, line in enumerate(file, 1):
        feel(line)
        mark = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
        if line[mark:].strip(b" \t\r\n"):
            yield number, offset + mark, line[mark:]
        offset += len(line)


def _is_parquet(path: Path, file: BinaryIO) -> bool:
    """UsageError for formats that are neither."""
    head = file.read(4)
    file.seek(0)
    for magic, name in _OTHER.items():
        if head.startswith(magic):
            raise UsageError(f"--prompt-data {path}: this is {name}")
    if b"\0" in head:
        raise UsageError(f"--prompt-data {path}: this is no text, or {_UTF16}")
    return head == _PARQUET


def _opened(descriptor: int) -> BinaryIO:
    """The file from its beginning; closing it leaves the descriptor open."""
    file = os.fdopen(os.dup(descriptor), "rb")
    file.seek(0)
    return file


def _identity(file: BinaryIO) -> Identity:
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
