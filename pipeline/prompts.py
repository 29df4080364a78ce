"""What --prompt-data names: one file or several, each with a share of the epoch and a slice of its rows.

rows.jsonl                       a file
a.jsonl,b.parquet                several, one after the other
data/*.jsonl                     all that match, in order of their names
easy.jsonl:0.25,hard.jsonl:2     of each epoch a quarter of the one's rows, and the other's twice
rows.jsonl@[0:1000]              the first thousand rows, as slime writes it
"""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UsageError

_TERM = re.compile(r"(?P<path>.*?)(?:@\[(?P<start>-?\d*):(?P<stop>-?\d*)\])?(?::(?P<weight>\d+(?:\.\d*)?|\.\d+))?")


@dataclass(frozen=True)
class Part:
    """One file."""

    path: Path
    start: int | None = None
    stop: int | None = None
    "rows that are used, as Python slices"
    weight: float = 1.0
    "how often a row comes in an epoch; below 1, which share of the rows does"

    @property
    def whole(self) -> bool:
        return self.start is None and self.stop is None and self.weight == 1


def parts(text: str) -> list[Part]:
    """The files, all of which exist; UsageError says which does not, or stands in it twice."""
    found = [part for term in _terms(text) for part in _files(term.strip())]
    paths = [part.path for part in found if part.whole]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise UsageError(
            f"--prompt-data {text}: {twice} stands in it twice; weight it with {twice}:2 if it is meant so"
        )
    return found


def _terms(text: str) -> list[str]:
    return [text] if Path(text).exists() else text.split(",")


def _files(term: str) -> list[Part]:
    if term and Path(term).exists():
        return [Part(Path(term))]
    match = _TERM.fullmatch(term)
    if match is None or not match["path"]:
        raise UsageError(f"--prompt-data {term!r}: not a path, PATH@[FROM:TO], PATH:WEIGHT, or several with commas")
    start, stop = (int(text) if text else None for text in match.group("start", "stop"))
    weight = float(match["weight"] or 1)
    if weight == 0:
        raise UsageError(f"--prompt-data {term}: a weight of 0 leaves the file out; do so")
    path = match["path"]
    paths = [Path(path)] if Path(path).exists() else [Path(name) for name in sorted(glob.glob(path, recursive=True))]
    if not paths:
        raise UsageError(f"--prompt-data {path}: there is no such file")
    return [Part(one, start, stop, weight) for one in paths]
