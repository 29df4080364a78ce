"""Losses, per trained token; pure functions of [N] tensors. A new loss is a function here and a line in LOSSES.

What a minibatch's loss is, is the sum of its tokens' losses, each times its weight (trainer.batch.aggregated), so the
parts that its microbatches give add up to it however it was split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"log ratios beyond this (as in verl) would overflow and turn a gradient of 0 into NaN"

PIECE = 512
"tokens at once where a figure is worked out over the vocabulary"

KL_LIMIT = 10.0
"what low_var_kl is cut to on both sides, as in slime and verl"


@dataclass(frozen=True)
class Clip:
    """The range of the ratio that still teaches."""

    low: float
    "1 - low"
    high: float
    "1 + high"
    dual: float | None = None
    "at a negative advantage the loss is at most this times its size (arXiv:1912.09729, eq. 4)"


def logprobs_and_entropy(logits: Tensor, targets: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """[N, V], int64 [N] -> log-probability of each target and entropy in nats, float32 [N] both.

    Without `entropy_gradient` the entropy is only a figure, worked out by pieces: memory stays that of the log-softmax.
    """
    logs = torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    parts = (logs,) if entropy_gradient else torch.split(logs.detach(), PIECE)
    entropy = torch.cat([-(part.exp() * part).sum(dim=-1) for part in parts])
    return logs.gather(1, targets[:, None])[:, 0], entropy


@dataclass(frozen=True)
class Scored:
    """Trained tokens of whole sequences, one sequence after the other."""

    logprobs: Tensor
    "[N] by the model that is trained; carries the gradient"
    old: Tensor
    "[N] by the policy before the step"
    advantages: Tensor
    "[N]"
    lengths: Tensor
    "int64 [B]: trained tokens of each sequence; their sum is N"


def clipped(scored: Scored, clip: Clip) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7) with a range for either side (DAPO, arXiv:2503.14476).

    Returns the loss of each token, -min(r A, clamp(r, 1 - low, 1 + high) A) with r = exp(logprobs - old), and where the
    clamp ruled (bool), [N] both.
    """
    return _surrogate(_ratio(scored.logprobs - scored.old), scored.advantages, clip)


def gspo(scored: Scored, clip: Clip) -> tuple[Tensor, Tensor]:
    """As `clipped`, with one ratio a sequence: exp of its tokens' mean log ratio (GSPO, arXiv:2507.18071, eq. 5)."""
    means = by_sequence(scored.logprobs - scored.old, scored.lengths, mean=True)
    return _surrogate(_ratio(means), scored.advantages, clip)


def cispo(scored: Scored, clip: Clip) -> tuple[Tensor, Tensor]:
    """-sg(clamp(r, 1 - low, 1 + high)) A logprobs: the weight is clipped, no token's gradient is dropped (MiniMax-M1,
    arXiv:2506.13585, eq. 4). The paper has no lower bound: --eps-clip 1."""
    ratio = _ratio(scored.logprobs - scored.old).detach()
    weight = ratio.clamp(1 - clip.low, 1 + clip.high)
    return -weight * scored.advantages * scored.logprobs, weight != ratio


LOSSES: dict[str, Callable[[Scored, Clip], tuple[Tensor, Tensor]]] = {"clip": clipped, "gspo": gspo, "cispo": cispo}
"by the name an estimator gives it (trainer.advantages)"


def kl(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """[N], [N] -> an estimate of KL(policy || reference) a token (Schulman, http://joschu.net/blog/kl-approx.html).

    With d = logprobs - reference: k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d, low_var_kl is k3 cut to +-10.
    """
    d = logprobs - reference
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3 = (-d).exp() - 1 + d
    return k3 if kind == "k3" else k3.clamp(-KL_LIMIT, KL_LIMIT)


def by_sequence(values: Tensor, lengths: Tensor, mean: bool) -> Tensor:
    """[N], int64 [B] -> [N]: for each token the sum or mean over its sequence."""
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    sums = values.new_zeros(len(lengths)).index_add(0, owner, values)
    return (sums / lengths if mean else sums)[owner]


def _ratio(log: Tensor) -> Tensor:
    return log.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    free = -ratio * advantages
    bound = -ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    loss, ruled = torch.maximum(free, bound), bound > free
    if clip.dual is not None:
        most = -advantages * clip.dual
        cut = (advantages < 0) & (loss > most)
        loss, ruled = torch.where(cut, most, loss), ruled | cut
    return loss, ruled
