"""Measuring on a machine where other things run: short rounds that take turns, medians, ratios within one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One number of a benchmark."""

    name: str
    value: float
    unit: str
    "us, ms, s, bytes, %, x (a ratio)"
    at_most: float | None = None
    "the aim, where there is one"
    at_least: float | None = None
    "the aim, where more is better"

    @property
    def met(self) -> bool | None:
        """Whether the aim is reached; None where there is none."""
        if self.at_most is None and self.at_least is None:
            return None
        low = 0.0 if self.at_least is None else self.at_least
        high = self.value if self.at_most is None else self.at_most
        return low <= self.value <= high

    @property
    def aim(self) -> str:
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return "" if self.at_least is None else f"at least {self.at_least:g}"

    def document(self) -> dict[str, Any]:
        return {"value": self.value, "unit": self.unit, "aim": self.aim or None, "met": self.met}


Clock = Callable[[], float]


def turns(
    sides: Mapping[str, Callable[[], object]], rounds: int, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds by `clock` of each side in each of `rounds` rounds, after one that is not counted.

    The sides take turns within a round, every other round backwards: what slows the machine down hits all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            begin = clock()
            sides[name]()
            if turn:
                seconds[name].append(clock() - begin)
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median of the ratios of the same round."""
    return median(a / b for a, b in zip(above, below, strict=True))
