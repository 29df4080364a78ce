"""One token a row out of logits, and the draws that decide."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ONE = np.float32(1 - 2**-23)
"the largest draw: times any total near 1 it stays below that total in float32"


def draws(seed: int, count: int) -> NDArray[np.float32]:
    """Uniform numbers in [0, 1): the t-th decides the t-th token of a request, whatever it is batched with.

    Philox is a counter-based generator: equal seeds give equal numbers on every machine (Salmon et al., SC11).
    """
    return np.minimum(np.random.Generator(np.random.Philox(key=seed)).random(count, dtype=np.float32), ONE)


def pick(
    logits: Tensor, temperature: Tensor | None, uniforms: Tensor, top_p: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [rows, 1] and their log-probabilities float32 [rows, 1] at `temperature` [rows, 1]; None is 1.

    `top_p` [rows, 1] leaves the likeliest tokens that have so much probability together, one at least: 0 is greedy.
    Inverts the cumulative distribution at `uniforms` [rows, 1]: the token is the first whose cumulative probability
    exceeds the draw, so one of probability 0 never comes. Logits [rows, vocab] that are not finite give NaN.
    """
    logits = logits.float()
    logp = torch.log_softmax(logits if temperature is None else logits / temperature, -1)
    cumulated = (logp.exp() if top_p is None else _nucleus(logp.exp(), top_p)).cumsum(-1)
    tokens = torch.searchsorted(cumulated, uniforms * cumulated[:, -1:], right=True)
    tokens.clamp_(max=logits.shape[-1] - 1)
    return tokens, logp.gather(1, tokens)


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Those outside the nucleus become 0 (Holtzman et al. 2020). Of equals the first goes first."""
    ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
    kept = ordered.where(ordered.cumsum(-1) - ordered < top_p, 0)
    kept[:, :1] = ordered[:, :1]
    return torch.zeros_like(probabilities).scatter(-1, index, kept)
