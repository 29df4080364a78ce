"""Rewards of one group -> one advantage a sample. Pure; a new estimator is a function and a line in ESTIMATORS.

A function sees one group at a time, so nothing depends on group sizes, on positions in a batch or on its order. None is
unscored: it leaves its siblings' baseline alone and gets 0. Where nothing can be learned the answer is exactly 0: one
scored sample where siblings are the baseline, or rewards that are equal but for float noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import GroupError

Advantages = NDArray[np.float64]
Rewards = Sequence[float | None]

NOISE = 1e-6
"rewards that differ by no more than this times max(1, |largest reward|) are equal"
STD_EPS = 1e-6
"added to the deviation, as slime does"


def equal(values: Advantages) -> bool:
    """But for float noise; so is a single one, and none."""
    return len(values) < 2 or bool(np.ptp(values) <= NOISE * max(1.0, float(np.abs(values).max())))


def grpo(rewards: Rewards) -> Advantages:
    """(r - mean) / (deviation + 1e-6) over the group (DeepSeekMath, arXiv:2402.03300, 4.1.2). The deviation is the
    unbiased one (n - 1), as torch.std, slime and TRL have it."""

    def scaled(values: Advantages) -> Advantages:
        result: Advantages = (values - values.mean()) / (values.std(ddof=1) + STD_EPS)
        return result

    return _of_scored(rewards, scaled)


def centred(rewards: Rewards) -> Advantages:
    """r - mean: Dr. GRPO (arXiv:2503.20783, eq. 3), the baseline of REINFORCE++-baseline (arXiv:2501.03262), and GRPO
    with --disable-grpo-std-normalization."""
    return _of_scored(rewards, lambda values: values - values.mean())


def rloo(rewards: Rewards) -> Advantages:
    """r - mean of the others, which is n / (n - 1) times `centred` (arXiv:2402.14740, eq. 8)."""
    return _of_scored(rewards, lambda values: (values - values.mean()) * (len(values) / (len(values) - 1)))


def plain(rewards: Rewards) -> Advantages:
    """The reward itself: REINFORCE++ has no group baseline, only the batch's mean and deviation (arXiv:2501.03262)."""
    return _of_scored(rewards, lambda values: values, alone=True)


def _of_scored(rewards: Rewards, of: Callable[[Advantages], Advantages], alone: bool = False) -> Advantages:
    """`of` the scored; 0 for the others, and for all where siblings are the measure and are equal. A reward that is not
    finite: GroupError."""
    scored = np.array([r is not None for r in rewards], dtype=bool)
    values = np.array([r for r in rewards if r is not None], dtype=np.float64)
    if not np.isfinite(values).all():
        raise GroupError(f"rewards {list(rewards)}: a reward is a finite number or None")
    result = np.zeros(len(rewards))
    if alone or not equal(values):
        result[scored] = of(values)
    return result


@dataclass(frozen=True)
class Estimator:
    """What --advantage-estimator names: an advantage, and what its paper has with it."""

    of_group: Callable[[Rewards], Advantages]
    loss: str = "clip"
    "a name in trainer.losses.LOSSES"
    aggregation: str = "token"
    "what --loss-aggregation is unless it is given"
    whitened: bool = False
    "what --normalize-advantages is unless it is given"
    by_token: bool = False
    "a KL penalty in the reward counts from its token on, not for the whole sample"


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(grpo),
    "dr_grpo": Estimator(centred, aggregation="constant"),
    "rloo": Estimator(rloo),
    "reinforce_plus_plus": Estimator(plain, whitened=True, by_token=True),
    "reinforce_plus_plus_baseline": Estimator(centred, whitened=True),
    "gspo": Estimator(grpo, loss="gspo", aggregation="sequence"),
    "cispo": Estimator(grpo, loss="cispo"),
}
"by the name --advantage-estimator gives it"
