"""Prompts from code of the user's: `--task module.function`.

The function is called once with the FeedConfig and gives rows by number: `rows[i]` is a map as a line of a prompt file
has it, always the same for the same i. With a length they are checked before anything is fed, and make up an epoch;
without one there is no end, and `digest`, if there is such an attribute, says which rows they are.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable
from typing import Any

from pipeline.errors import UsageError
from producers.checks import Checks
from producers.rows import BadRow, Reader, Row, RowKeys


class OwnSource:
    def __init__(self, dotted: str, rows: Any, keys: RowKeys, checks: Checks) -> None:
        if not hasattr(rows, "__getitem__"):
            raise UsageError(f"--task {dotted}: gave a {type(rows).__name__}, which has no rows by number")
        self.dotted = dotted
        self._rows = rows
        self._reader = Reader(keys)
        self._seen = array("q")
        "8 bytes for each checked record"
        self.rows = len(rows) if hasattr(rows, "__len__") else None
        if self.rows is None:
            self.digest = hashlib.sha256(f"{dotted} {getattr(rows, 'digest', '')}".encode()).hexdigest()
        else:
            self.digest = self._check(self.rows, checks)

    def records(self, places: Iterable[int]) -> list[str]:
        return [self._record(place) for place in places]

    def _check(self, count: int, checks: Checks) -> str:
        digest = hashlib.sha256()
        if not count:
            raise UsageError(f"--task {self.dotted}: there are no rows in it")
        for number in range(count):
            try:
                row = self._read(number)
                checks.row(self.dotted, number, row, self._reader.keys)
                digest.update(row.record.encode())
                self._seen.append(_short(row.record))
            except BadRow as error:
                checks.bad(self.dotted, number, error)
        checks.settle()
        return digest.hexdigest()

    def _read(self, number: int) -> Row:
        try:
            line = json.dumps(self._rows[number]).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRow(f"is no JSON: {error}") from error
        return self._reader.read(line)

    def _record(self, place: int) -> str:
        number = place if self.rows is None else place % self.rows
        try:
            record = self._read(number).record
        except BadRow as error:
            raise UsageError(f"--task {self.dotted}: row {number} {error}") from error
        if self.rows is not None and _short(record) != self._seen[number]:
            raise UsageError(
                f"--task {self.dotted}: row {number} is not the one that was checked: rows must not change"
            )
        return record


def _short(record: str) -> int:
    return int.from_bytes(hashlib.blake2b(record.encode(), digest_size=8).digest(), "big", signed=True)
