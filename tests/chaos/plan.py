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


@dataclass(frozen=True)
class Setting:
    """Of the run that it befalls."""

    rows: int | None = 600
    "prompts of the one epoch; None: the run ends by its steps"
    pace: float = 0.3
    "seconds a step takes while there are faults to come"
    staleness: int | None = 2
    save_interval: int = 3
    durability: str = "second"
    alone: bool = False
    "each fault is recovered from before the next"


def each(dice: random.Random, kinds: Sequence[str], pause: float, longest: float) -> list[Fault]:
    """Each of `kinds` once, in any order. Most faults are short; `longest` is met now and then."""
    return [_fault(dice, kind, pause, longest) for kind in dice.sample(kinds, len(kinds))]


def some(dice: random.Random, groups: Sequence[Sequence[str]], seconds: float, longest: float = 30.0) -> list[Fault]:
    """As many as go into so long, as many of one group of kinds as of another, by default beyond the limits of
    heartbeats and sockets."""
    plan: list[Fault] = []
    while sum(fault.after for fault in plan) < seconds:
        plan.append(_fault(dice, dice.choice(dice.choice(groups)), 3.0, longest))
    return plan


def _fault(dice: random.Random, kind: str, pause: float, longest: float) -> Fault:
    return Fault(kind, dice.uniform(0, pause), longest * dice.random() ** 3, dice.random())


def any_setting(dice: random.Random) -> Setting:
    return Setting(
        rows=dice.randint(600, 1200),
        staleness=dice.choice([0, 1, 2, 3, None]),
        save_interval=dice.choice([1, 3, 7]),
        durability=dice.choice(["process", "second"]),
    )


def unlucky(id: int) -> bool:
    """Prompts that a filter drops, under that word as the reason."""
    return id % 29 == 3
