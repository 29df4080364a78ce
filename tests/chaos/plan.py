"""What happens in an episode, all of it drawn from one seed before it begins, so that it can be shown and replayed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    kind: str
    after: float
    "seconds since the fault before"
    lasts: float
    "seconds; how long what was killed stays away, or what was stopped stands still"
    share: float
    "0 to 1, for whatever else there is to choose: which generator, how many bytes"


def draw(dice: random.Random, kinds: Sequence[str], pause: float, longest: float) -> list[Fault]:
    """Each of `kinds` once, in any order. Most faults are short; `longest` is met now and then."""
    shuffled = dice.sample(kinds, len(kinds))
    return [Fault(kind, dice.uniform(0, pause), longest * dice.random() ** 3, dice.random()) for kind in shuffled]


def unlucky(id: int) -> bool:
    """Prompts that a filter drops, under that word as the reason."""
    return id % 29 == 3
