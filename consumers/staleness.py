"""How old a group is, what is too old, and what is said about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.room import given_up, lag
from pipeline.types import Group

FRESH, STALE, ABORTED, UNKNOWN, FUTURE = "fresh", "stale", "aborted", "unknown_version", "future_version"
GIVEN_UP = "given_up_branch"
"Too old because the trainer went back to a checkpoint."


@dataclass(frozen=True)
class Limit:
    """What the versions of a group are held against, at the moment a batch is handed over."""

    current: int
    "the published version"
    lineage: tuple[tuple[int, int], ...]
    max_staleness: int | None
    "None: unbounded"

    def age(self, group: Group) -> int | None:
        """Publications since the oldest token of the group, over all samples and sequences; None if one is unknown."""
        ages = [lag(version, self.current, self.lineage) for version in group.versions]
        known = [age for age in ages if age is not None]
        return max(known) if known and len(known) == len(ages) else None

    def judge(self, group: Group) -> str:
        """FRESH, or why the group must not be trained on. A group older than the limit is stale, one at it is not."""
        if group.aborted:
            return ABORTED
        age = self.age(group)
        if age is None:
            return UNKNOWN
        if any((lag(version, self.current, self.lineage) or 0) < 0 for version in group.versions):
            return FUTURE
        if self.max_staleness is not None and age > self.max_staleness:
            given = any(given_up(version, self.current, self.lineage) for version in group.versions)
            return GIVEN_UP if given else STALE
        return FRESH


def statistics(ages: Sequence[int]) -> dict[str, float]:
    """avg_staleness and max_staleness of a batch, and how many groups are of which age."""
    counts = {f"staleness/count_{age}": float(count) for age, count in sorted(Counter(ages).items())}
    return {"avg_staleness": sum(ages) / max(1, len(ages)), "max_staleness": float(max(ages, default=0)), **counts}


def by_verdict(groups: Iterable[Group], limit: Limit) -> dict[str, list[Group]]:
    """The groups sorted by verdict."""
    sorted_out: dict[str, list[Group]] = {}
    for group in groups:
        sorted_out.setdefault(limit.judge(group), []).append(group)
    return sorted_out
