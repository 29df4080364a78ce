"""Off-policy corrections: weights for tokens that another policy sampled than the one being trained. Pure functions."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.losses import LOG_RATIO_LIMIT


def truncated(old: Tensor, rollout: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling, as slime's --use-tis; the idea is V-trace's (arXiv:1802.01561).

    All [N]: `old` the trainer's log-probabilities before the step, `rollout` the sampler's. Returns, without gradients,
    the weights that multiply the tokens' losses, clamp(ratio, low, high), and the ratio exp(old - rollout) itself.
    """
    with torch.no_grad():
        ratio = (old - rollout).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        return ratio.clamp(low, high), ratio
