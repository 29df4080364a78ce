"""What every engine refuses before anything runs."""

from __future__ import annotations

from pipeline.errors import RequestRefused, WeightsError
from pipeline.types import Policy
from producers.engines.base import Request


def budget(request: Request, vocab_size: int, context_length: int) -> int:
    """Tokens the engine may sample, at least 1: `max_new_tokens`, or what is left of the window.

    A prompt one short of the window has room for one token; a longer one, an empty one and one with ids outside the
    vocabulary are refused for good.
    """
    size = len(request.tokens)
    if size == 0:
        raise RequestRefused("the prompt has no tokens")
    if size >= context_length:
        raise RequestRefused(
            f"the prompt has {size} tokens, which leaves no room for an answer in a context of {context_length}"
        )
    low, high = int(request.tokens.min()), int(request.tokens.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestRefused(f"the prompt has the token {wrong}, outside the engine's vocabulary of {vocab_size}")
    return min(request.sampling.max_new_tokens, context_length - size)


def refuse_older(loaded: int | None, policy: Policy) -> None:
    """Versions only grow: raises WeightsError where `policy` is older than what is loaded; the same again is fine."""
    if loaded is not None and policy.version < loaded:
        raise WeightsError(f"the engine serves version {loaded} and never goes back to version {policy.version}")
