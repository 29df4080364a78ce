"""Text and JSON on stdout. On a terminal tables are rich's; elsewhere they are aligned text."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, WIDEST = 80, 120
"Columns that text is wrapped for, and at which a line of a table is cut where there is no terminal."


def line(text: str = "") -> None:
    sys.stdout.write(text + "\n")


def document(value: Any, indent: int | None = 2) -> None:
    """As JSON: ASCII, so that whatever text is in it arrives; NaN and infinities, which JSON lacks, become text."""
    line(json.dumps(json.loads(json.dumps(value), parse_constant=str), indent=indent))


def pairs(rows: Sequence[tuple[str, str]]) -> None:
    """`name   text`, the text wrapped beside its name."""
    wide = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        parts = textwrap.wrap(text, WIDTH - wide, break_on_hyphens=False) or ["-"]
        for i, part in enumerate(parts):
            line(("" if i else name).ljust(wide) + part)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One line a row; the last column is cut where the line would be too long."""
    if sys.stdout.isatty():
        return _rich(head, rows)
    wide = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        text = "  ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)).rstrip()
        line(shorten(text, max(WIDEST, sum(wide[:-1]) + 2 * len(wide) + 20)))
    return None


def _rich(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in head:
        grid.add_column(name, no_wrap=True, overflow="ellipsis")
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    Console().print(grid)


def text(raw: bytes) -> str:
    """Bytes as text, whatever they are."""
    return raw.decode("utf-8", "backslashreplace")


def clean(value: str) -> str:
    """On one line, and nothing in it that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)


def shorten(value: str, width: int) -> str:
    return value if len(value) <= width else value[: width - 1] + "…"


def size(count: float) -> str:
    """Bytes for people: 220 KB (of 1024)."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GB"


def ago(seconds: float) -> str:
    """A duration for people: 3 s, 12 min, 5 h, 3 d."""
    for limit, unit, length in ((100, "s", 1), (6000, "min", 60), (360_000, "h", 3600)):
        if seconds < limit:
            return f"{max(0.0, seconds) / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def counts(values: Mapping[str, int]) -> str:
    """`stale 4, lost 2`, most frequent first."""
    return ", ".join(f"{clean(name)} {n}" for name, n in sorted(values.items(), key=lambda x: (-x[1], x[0])))


def moment(milliseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(milliseconds / 1000))
