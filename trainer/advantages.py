"""Rewards of one group -> one advantage a sample. Pure; a new estimator is a function and a line in ESTIMATORS.

A function sees one group at a time, so nothing depends on group sizes, on positions in a batch or on its order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import GroupError

Advantages = NDArray[np.float64]

NOISE = 1e-6
"rewards that differ by no more than this times max(1, |largest reward|) are equal"
STD_EPS = 1e-6
"added to the deviation, as slime does"


def grpo(rewards: Sequence[float | None], std: bool = True) -> Advantages:
    """(r - mean) / (deviation + 1e-6) over the group, without `std` just r - mean (DeepSeekMath, arXiv:2402.03300).

    The deviation is the unbiased one (n - 1), as torch.std, slime and TRL have it. None is unscored: it leaves the mean
    and the deviation of its siblings alone and gets 0. One scored sample, or equal rewards: exactly 0.
    A reward that is not finite: GroupError.
    """
    scored = np.array([r is not None for r in rewards], dtype=bool)
    values = np.array([r for r in rewards if r is not None], dtype=np.float64)
    if not np.isfinite(values).all():
        raise GroupError(f"rewards {list(rewards)}: a reward is a finite number or None")
    result = np.zeros(len(rewards))
    if len(values) < 2 or np.ptp(values) <= NOISE * max(1.0, float(np.abs(values).max())):
        return result
    centred = values - values.mean()
    result[scored] = centred / (values.std(ddof=1) + STD_EPS) if std else centred
    return result


ESTIMATORS: dict[str, Callable[[Sequence[float | None], bool], Advantages]] = {"grpo": grpo}
"by the name --advantage-estimator gives it"
