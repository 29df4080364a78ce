"""Sequences that grow turn by turn, so that masks, log-probabilities and versions are right by themselves.

What the model sampled is trained on; all else, a tool's answer or a user's next words, is only seen.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.types import Sequence, Tokens
from producers.engines.base import Completion
from producers.engines.stamps import Stamps

Ids = Several[int] | Tokens
LARGEST = (1 << 31) - 1


@dataclass(frozen=True)
class Turn(Completion):
    """What the engine gave. Without tokens, and cut by `length`, where the context had no room left."""

    context: Tokens
    "int32 [P]: what was sent, and the turn follows"
    text: str
    "decoded, without the stop token"


class Trace:
    """A prompt and what followed it, sampled or seen. Nothing in it is decoded and encoded again."""

    def __init__(self, tokens: Ids) -> None:
        """`tokens`: what stands before the first turn; whatever is observed before it belongs there too."""
        self._tokens = as_tokens(tokens)
        self._turns: list[Turn] = []
        self._starts: list[int] = []

    @property
    def tokens(self) -> Tokens:
        """int32: all so far, which is what the engine is sent for the next turn."""
        return self._tokens

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    def sampled(self, turn: Turn) -> None:
        """The model's next turn. ValueError where it was sampled after anything but this trace's tokens."""
        if not isinstance(turn, Turn):
            raise TypeError(f"a {type(turn).__name__} where a turn is expected: what `generate` gave")
        if turn.context is not self._tokens and not np.array_equal(turn.context, self._tokens):
            raise ValueError(
                f"the turn follows {len(turn.context)} tokens which are not the {len(self._tokens)} of this trace: "
                "send `trace.tokens`, and record a turn before anything else"
            )
        self._starts.append(len(self._tokens))
        self._turns.append(turn)
        self._grow(turn.tokens)

    def observed(self, tokens: Ids) -> None:
        """What the model did not sample: it is not trained on, and the next turn follows it."""
        self._grow(as_tokens(tokens))

    def _grow(self, more: Tokens) -> None:
        self._tokens = np.concatenate((self._tokens, more))
        self._tokens.setflags(write=False)

    def sequence(self) -> Sequence:
        """To train on; there is a turn with tokens. What was only seen has log-probability 0 and counts to the version
        before it, so no version stands in it that sampled nothing."""
        placed = [(turn, at) for turn, at in zip(self._turns, self._starts, strict=True) if len(turn.tokens)]
        first = placed[0][1]
        size = len(self._tokens) - first
        logprobs, mask = np.zeros(size, np.float32), np.zeros(size, np.uint8)
        stamps = Stamps(placed[0][0].versions[0].version)
        for turn, at in placed:
            begin, end = at - first, at - first + len(turn.tokens)
            logprobs[begin:end], mask[begin:end] = turn.logprobs, 1
            for span in turn.versions:
                stamps.mark(span.version, begin + span.start)
        return Sequence(self._tokens[:first], self._tokens[first:], logprobs, mask, stamps.spans(size))


@dataclass(frozen=True)
class Answer:
    """What a generate function may give where traces alone do not say it all."""

    traces: Trace | Several[Trace]
    "at least one with a turn; all get the sample's reward"
    metadata: dict[str, Any] = field(default_factory=dict)
    "JSON values: for the reward, as `sample_metadata`, and for whoever reads the group"
    text: str | None = None
    "for the reward: what counts as the answer; None: the last turn's text"
    status: str | None = None
    "completed | truncated; None: truncated where any turn was cut by length"


def as_tokens(value: object) -> Tokens:
    """int32 that nobody can change, a copy unless it was so before; ValueError for anything but token ids in a row."""
    if isinstance(value, str):
        raise ValueError("text where token ids are expected: encode it first")
    given = np.asarray(value)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"{value!r:.60} where token ids in a row are expected")
    if given.size and (given.min() < 0 or given.max() > LARGEST):
        raise ValueError(f"{value!r:.60}: token ids are from 0 to {LARGEST}")
    if given.dtype == np.int32 and not given.flags.writeable:
        return given
    made = given.astype(np.int32)
    made.setflags(write=False)
    return made
