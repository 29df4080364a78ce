"""1 where the answer is the label, else 0."""

from __future__ import annotations

from producers.rewards.base import RewardInput, label_text


def exact(given: RewardInput) -> float:
    """White space around either does not count; the labels 42 and "42" are alike."""
    return float(given.response.strip() == label_text(given, "exact").strip())
