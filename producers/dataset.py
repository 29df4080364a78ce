"""Prompt files: JSONL, every row checked before any is used, decoded one by one when asked for.

All prompts of a file are text, or all are lists of chat messages. Lines end with \\n alone: U+2028, U+0085 and such
are text inside a JSON string. A byte order mark, \\r\\n, blank lines and a missing last newline do no harm.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import UsageError
from producers.rows import BadRow, RowKeys, record

SHOWN = 10
"Bad rows that are named one by one; the others are counted."

_BOM = b"\xef\xbb\xbf"
_UTF16 = "UTF-16: convert it to UTF-8"
_OTHER = {b"\x1f\x8b": "gzip: unpack it", b"PAR1": "Parquet: use JSONL", b"\xff\xfe": _UTF16, b"\xfe\xff": _UTF16}


class Dataset:
    """A checked prompt file. Holds 8 bytes a row; the text stays on disk."""

    def __init__(self, path: Path, keys: RowKeys, starts: NDArray[np.int64], digest: str, seen: os.stat_result) -> None:
        self.path = path
        self.keys = keys
        self.digest = digest
        "sha256 of the file"
        self._starts = starts
        self._seen = _identity(seen)

    @classmethod
    def open(cls, path: Path, input_key: str, label_key: str, metadata_key: str) -> Dataset:
        """Read the file once; UsageError names the first bad rows by file and line, and counts all."""
        keys = RowKeys(input_key, label_key, metadata_key)
        if path.exists() and not path.is_file():
            raise UsageError(f"--prompt-data {path}: not a file")
        try:
            with path.open("rb") as file:
                seen = os.fstat(file.fileno())
                starts, digest = _check(path, file, keys)
        except OSError as error:
            raise UsageError(f"--prompt-data {path}: {error.strerror}") from error
        return cls(path, keys, starts, digest, seen)

    def __len__(self) -> int:
        return len(self._starts)

    def record(self, row: int) -> str:
        return self.records([row])[0]

    def records(self, rows: Iterable[int]) -> list[str]:
        """The pristine records; UsageError when the file is no longer the one that was checked."""
        try:
            with self.path.open("rb") as file:
                if _identity(os.fstat(file.fileno())) != self._seen:
                    raise UsageError(f"--prompt-data {self.path}: the file has changed since it was checked")
                return [record(self._line(file, row), self.keys)[0] for row in rows]
        except OSError as error:
            raise UsageError(f"--prompt-data {self.path}: {error.strerror}") from error

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


def _check(path: Path, file: BinaryIO, keys: RowKeys) -> tuple[NDArray[np.int64], str]:
    """Byte offsets of the rows, int64 [rows], and the digest."""
    _refuse_other_formats(path, file)
    starts, digest = array("q"), hashlib.sha256()
    bad: list[str] = []
    kinds: dict[str, int] = {}
    for number, start, line in _lines(file, digest.update):
        try:
            kind = record(line, keys)[1]
            kinds.setdefault(kind, number)
            if len(kinds) > 1 and kind != next(iter(kinds)):
                first, where = next(iter(kinds.items()))
                raise BadRow(f"{keys.input!r} is {kind}, but {first} in line {where}: use one form in all rows")
            starts.append(start)
        except BadRow as error:
            bad.append(f"{path}:{number}: {error}" if len(bad) < SHOWN else "")
    if bad:
        more = [f"... and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
        raise UsageError("\n".join([f"--prompt-data: {len(bad)} bad rows, none is used", *bad[:SHOWN], *more]))
    if not starts:
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


def _refuse_other_formats(path: Path, file: BinaryIO) -> None:
    head = file.read(4)
    file.seek(0)
    for magic, name in _OTHER.items():
        if head.startswith(magic):
            raise UsageError(f"--prompt-data {path}: this is {name}")
    if b"\0" in head:
        raise UsageError(f"--prompt-data {path}: this is no text, or {_UTF16}")


def _identity(stat: os.stat_result) -> tuple[int, int, int, int]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
