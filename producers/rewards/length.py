"""Longer answers are better: for trying out a setup without labels."""

from __future__ import annotations

from producers.rewards.base import RewardInput


def length(given: RewardInput) -> float:
    """Characters in the answer."""
    return float(len(given.response))
