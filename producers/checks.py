"""What is wrong with the rows of all prompt files, gathered while they are read and said at once."""

from __future__ import annotations

import hashlib
import logging
from array import array

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import UsageError
from producers.rewards.built_in import BOXED, NEED_LABEL
from producers.rewards.choice import ROW, chosen, parse
from producers.rows import ALIASES, BadRow, Row, RowKeys

log = logging.getLogger(__name__)

SHOWN = 10
"Bad rows that are named one by one; the others are counted."


class Checks:
    """One for all files of a run. `rm_type` is what --rm-type says; None: the reward is not known here."""

    def __init__(self, rm_type: str | None = None) -> None:
        if rm_type is not None and rm_type != ROW:
            try:
                parse(rm_type)
            except ValueError as error:
                raise UsageError(f"--rm-type: {error}") from None
        self.rm_type = rm_type
        self._bad: list[str] = []
        self._kinds: dict[str, tuple[object, int]] = {}
        self._files: list[object] = []
        self._places = array("q")
        "file and line of the rows with an id, and in `_ids` 8 bytes that stand for it"
        self._ids = array("q")
        self._unlabelled = 0
        self._first = ""
        "the first row without a label"

    def row(self, file: object, number: int, row: Row, keys: RowKeys) -> None:
        """BadRow where a row that is sound by itself does not go with the others, or with its reward."""
        self._kinds.setdefault(row.kind, (file, number))
        kind, (where, line) = next(iter(self._kinds.items()))
        if row.kind != kind:
            place = f"line {line}" if where == file else f"{where}:{line}"
            raise BadRow(f"{keys.input!r} is {row.kind}, but {kind} in {place}: use one form in all rows")
        if not row.label:
            self._unlabelled += 1
            self._first = self._first or f"{file}:{number}"
        self._score(row, keys)
        if row.id is not None:
            self._ids.append(int.from_bytes(hashlib.blake2b(str(row.id).encode(), digest_size=8).digest(), "big") >> 1)
            self._places.extend((self._number(file), number))

    def bad(self, file: object, number: int, error: BadRow) -> None:
        self._bad.append(f"{file}:{number}: {error}" if len(self._bad) < SHOWN else "")

    def settle(self) -> None:
        """UsageError that names the bad rows; a warning each about labels and ids."""
        count = len(self._bad)
        if count:
            more = [f"... and {count - SHOWN} more"] if count > SHOWN else []
            raise UsageError(
                "\n".join(
                    [
                        f"--prompt-data: {count} bad row{'s' if count > 1 else ''}, none is used",
                        *self._bad[:SHOWN],
                        *more,
                    ]
                )
            )
        if self._unlabelled:
            log.warning("%d rows have no label, the first is %s (--label-key)", self._unlabelled, self._first)
        self._twice()

    def _number(self, file: object) -> int:
        if not self._files or self._files[-1] != file:
            self._files.append(file)
        return len(self._files) - 1

    def _score(self, row: Row, keys: RowKeys) -> None:
        """BadRow where the row's reward does not exist, or needs the label that is missing."""
        if self.rm_type is None:
            return
        try:
            names = [name for name, _ in parse(chosen(self.rm_type, row.rm_type, row.source))]
        except ValueError as error:
            raise BadRow(str(error)) from None
        needs = next((name for name in names if name.removeprefix(BOXED) in NEED_LABEL), None)
        if needs and not row.label:
            name = repr(keys.label) if keys.label else f"any of {', '.join(ALIASES['label'])}"
            raise BadRow(f"no label under {name}, and the reward {needs} needs one (--label-key)")

    def _twice(self) -> None:
        """Rows with an id that another row had before."""
        ids, places = np.array(self._ids, np.int64), np.array(self._places, np.int64).reshape(-1, 2)
        order = np.argsort(ids, kind="stable")
        again = np.flatnonzero(ids[order][1:] == ids[order][:-1])
        if len(again):
            first, second = (self._place(places[order[again[0] + n]]) for n in (0, 1))
            log.warning("%d rows have an id that another has too: %s and %s, for one", len(again), first, second)

    def _place(self, place: NDArray[np.int64]) -> str:
        return f"{self._files[place[0]]}:{place[1]}"
