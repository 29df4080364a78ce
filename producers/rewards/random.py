"""Noise, for trying out the plumbing."""

from __future__ import annotations

from random import Random

from producers.rewards.base import RewardInput


def random(given: RewardInput) -> float:
    """Uniform in [0, 1); the same for the same prompt id and sample index, whatever the answer."""
    return Random(f"{given.prompt_id}/{given.index}").random()
