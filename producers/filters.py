"""Dynamic filters: keep or drop a group where it is made, with a reason. Dropped groups never cross the wire."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from pipeline import code
from pipeline.errors import UsageError
from pipeline.types import Group

FLAG = "--dynamic-sampling-filter-path"

_REASON = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Verdict:
    """What a filter says about a group."""

    keep: bool
    reason: str | None = None
    "why it is dropped: 1 to 64 characters out of A-Z a-z 0-9 _ . -; dropped groups are counted under it"


Filter = Callable[[Group], Verdict]


def nonzero_std(group: Group) -> Verdict:
    """Drop groups whose rewards are all equal, as DAPO does (arXiv 2503.14476, 3.2): they have no advantages.

    Rewards that float32 cannot tell apart are equal. Samples without a reward do not count.
    """
    rewards = [sample.reward for sample in group.samples if sample.reward is not None]
    if not rewards:
        return Verdict(False, "unscored")
    if not math.isclose(min(rewards), max(rewards), rel_tol=1e-7):
        return Verdict(True)
    shown = round(rewards[0], 1) + 0.0  # no minus zero
    return Verdict(False, f"zero_std_{shown}".replace("+", ""))


def load(dotted: str) -> Filter:
    """The filter that `dotted` names; calls of it raise UsageError where it gives anything but a sound Verdict."""
    function = code.load(dotted, FLAG)

    def judge(group: Group) -> Verdict:
        verdict = function(group)
        if not isinstance(verdict, Verdict):
            raise UsageError(f"{FLAG} {dotted}: gave a {type(verdict).__name__}, not a producers.filters.Verdict")
        if not verdict.keep and not (isinstance(verdict.reason, str) and _REASON.fullmatch(verdict.reason)):
            raise UsageError(f"{FLAG} {dotted}: the reason {verdict.reason!r} must match {_REASON.pattern}")
        return verdict

    return judge
