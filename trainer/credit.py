"""Each trained token's advantage: its sample's (trainer.advantages), less a KL penalty, whitened over the step.

Pure. All samples of a step at once, by prompt id: order and split into minibatches change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from trainer.advantages import Advantages, Estimator, equal
from trainer.batch import Unit

VARIANCE_EPS = 1e-8
"added to the variance, as slime does"

Penalties = Mapping[tuple[int, int], Advantages]
"sample -> what each of its trained tokens costs, over its sequences one after the other"


def credit(
    units: Sequence[Unit], estimator: Estimator, whitened: bool, penalties: Penalties | None = None
) -> list[Unit]:
    """The units, in order, with `advantages` in their rows.

    `penalties`: --kl-coef times (log-probability - reference's) of each token. They lower the sample's reward by their
    sum before the group is compared, or, for an estimator by token, each token's return by its own and all later ones
    (arXiv:2501.03262, eq. 6, undiscounted).
    """
    costs: Penalties = penalties or {}
    found: list[tuple[Unit, Advantages]] = []
    for _, siblings in groupby(units, key=lambda unit: unit.id[0]):
        group = list(siblings)
        whole = [0.0 if estimator.by_token else float(costs.get(unit.id, _NONE).sum()) for unit in group]
        rewards = [None if u.score is None else u.score - cost for u, cost in zip(group, whole, strict=True)]
        for unit, advantage in zip(group, estimator.of_group(rewards), strict=True):
            tokens = np.full(unit.tokens, advantage)
            if estimator.by_token and unit.id in costs:
                tokens -= costs[unit.id][::-1].cumsum()[::-1]
            found.append((unit, tokens))
    values = _whitened([tokens for _, tokens in found]) if whitened else [tokens for _, tokens in found]
    return [_credited(unit, tokens) for (unit, _), tokens in zip(found, values, strict=True)]


_NONE = np.zeros(0)


def _whitened(parts: Iterable[Advantages]) -> list[Advantages]:
    """Mean 0 and (unbiased) variance 1 over all tokens; exactly 0 where all are equal."""
    parts = list(parts)
    tokens = np.concatenate(parts) if parts else _NONE
    if equal(tokens):
        return [np.zeros(len(part)) for part in parts]
    mean, scale = tokens.mean(), np.sqrt(tokens.var(ddof=1) + VARIANCE_EPS)
    return [(part - mean) / scale for part in parts]


def _credited(unit: Unit, tokens: Advantages) -> Unit:
    ends = np.cumsum([len(row.targets) for row in unit.rows])
    cut = np.split(tokens.astype(np.float32), ends[:-1]) if unit.rows else []
    return replace(unit, rows=tuple(replace(r, advantages=part) for r, part in zip(unit.rows, cut, strict=True)))
