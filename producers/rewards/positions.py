"""The share of the label that stands where it should: a reward that rises from the first right character on."""

from __future__ import annotations

from pipeline.types import COMPLETED
from producers.rewards.base import RewardInput, label_text


def positions(given: RewardInput) -> float:
    """Right characters plus a right end, out of len(label) + 1.

    The end is right where a completed answer is as long as the label, whether or not its characters are right.
    """
    label = label_text(given, "positions")
    right = sum(a == b for a, b in zip(given.response, label, strict=False))
    ended = given.status == COMPLETED and len(given.response) == len(label)
    return (right + ended) / (len(label) + 1)
