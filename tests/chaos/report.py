"""What many episodes tell: how often each kind of fault was injected and survived, and how long recovery took."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from episode import Record


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One a kind, ordered by name. Recovery in seconds, where a fault was alone."""
    injected: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    times: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for kind, _ in record.faults:
            injected[kind] += 1
            survived[kind] += record.survived
        for kind, seconds in record.recovery if record.alone else ():
            times[kind].append(seconds)
    return [
        {
            "kind": kind,
            "injected": injected[kind],
            "survived": survived[kind],
            "median": round(median(times[kind]), 2) if times[kind] else None,
            "max": round(max(times[kind]), 2) if times[kind] else None,
        }
        for kind in sorted({*injected, *times})
    ]


def totals(records: Sequence[Record]) -> dict[str, int]:
    names = ("steps", "prompts", "made", "discarded")
    return {
        "episodes": len(records),
        "failed": sum(not record.survived for record in records),
        "faults": sum(len(record.faults) for record in records),
        **{name: sum(getattr(record, name) for record in records) for name in names},
    }


def text(records: Sequence[Record]) -> str:
    """For people."""
    found = rows(records)
    wide = max((len(row["kind"]) for row in found), default=4)
    lines = [f"{'fault':<{wide}}  injected  survived  recovery median s  max s"]
    for row in found:
        times = [f"{row[name]:.2f}" if row[name] is not None else "-" for name in ("median", "max")]
        lines.append(
            f"{row['kind']:<{wide}}  {row['injected']:>8}  {row['survived']:>8}  {times[0]:>17}  {times[1]:>5}"
        )
    return "\n".join([*lines, "", ", ".join(f"{n} {name}" for name, n in totals(records).items())])
