"""Losses, per trained token; pure functions of [N] tensors. A new loss is a function here.

A minibatch's loss is the sum over its tokens divided by its number of tokens, so the parts that its microbatches give
add up to it however it was split.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"log ratios beyond this (as in verl) would overflow and turn a gradient of 0 into NaN"

PIECE = 512
"tokens at once where a figure is worked out over the vocabulary"


def logprobs_and_entropy(logits: Tensor, targets: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """[N, V], int64 [N] -> log-probability of each target and entropy in nats, float32 [N] both.

    Without `entropy_gradient` the entropy is only a figure, worked out by pieces: memory stays that of the log-softmax.
    """
    logs = torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    parts = (logs,) if entropy_gradient else torch.split(logs.detach(), PIECE)
    entropy = torch.cat([-(part.exp() * part).sum(dim=-1) for part in parts])
    return logs.gather(1, targets[:, None])[:, 0], entropy


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7) with a range for either side (DAPO, arXiv:2503.14476).

    All [N]. Returns the loss of each token, -min(r A, clamp(r, 1 - low, 1 + high) A) with r = exp(logprobs - old), and
    where the clamp ruled (bool).
    """
    ratio = (logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    free = -ratio * advantages
    bound = -ratio.clamp(1 - low, 1 + high) * advantages
    return torch.maximum(free, bound), bound > free
