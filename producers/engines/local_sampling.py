"""One token a row out of logits."""

from __future__ import annotations

import torch
from torch import Tensor


def pick(logits: Tensor, temperature: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 [rows, 1] and their log-probabilities float32 [rows, 1] at `temperature` [rows, 1].

    Inverts the cumulative distribution at `uniforms` [rows, 1]: the token is the first whose cumulative probability
    exceeds the draw, so one of probability 0 never comes. Logits [rows, vocab] that are not finite give NaN.
    """
    logp = torch.log_softmax(logits.float() / temperature, -1)
    cumulated = logp.exp().cumsum(-1)
    total = cumulated[:, -1:]
    point = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulated, point, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens, logp.gather(1, tokens)
