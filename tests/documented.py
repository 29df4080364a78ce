"""docs/metrics.md names every metric there is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "docs" / "metrics.md"


def undocumented(names: Iterable[str]) -> list[str]:
    """Names without a row; `<reason>` in a row's name stands for anything."""
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    patterns = [re.sub(r"<\w+>", ".+", re.escape(name)) for name in told]
    found = {name for name in names if name not in ("step", "time")}
    return sorted(name for name in found if not any(re.fullmatch(pattern, name) for pattern in patterns))
