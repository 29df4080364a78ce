"""Off-policy corrections: weights for tokens that another policy sampled than the one being trained. Pure functions.

`old` are the trainer's log-probabilities before the step, `rollout` the sampler's, [N] both; `lengths` as in
trainer.losses.Scored. Weights multiply the tokens' losses and carry no gradient. With `old` recomputed this is also the
decoupled objective of AReaL (arXiv:2505.24298, eq. 5): the clip is around the proximal policy, the weight leads back to
the behaviour policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.losses import LOG_RATIO_LIMIT, by_sequence


@dataclass(frozen=True)
class Rule:
    """How far a weight may go."""

    level: str
    "token; sequence: the product of its tokens' ratios; geometric: their geometric mean"
    mode: str
    "truncate: cut to the bounds (TIS); mask: 0 outside of them (IcePop)"
    low: float
    high: float


def importance(old: Tensor, rollout: Tensor, lengths: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """The weights, and the ratio exp(old - rollout) at the rule's level, [N] both.

    Truncated importance sampling is V-trace's idea (arXiv:1802.01561); masks by token are IcePop's (Ring-1T,
    arXiv:2510.18855, eq. 3).
    """
    with torch.no_grad():
        log = old - rollout
        if rule.level != "token":
            log = by_sequence(log, lengths, mean=rule.level == "geometric")
        ratio = log.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        if rule.mode == "truncate":
            return ratio.clamp(rule.low, rule.high), ratio
        return torch.where((ratio >= rule.low) & (ratio <= rule.high), ratio, 0.0), ratio
