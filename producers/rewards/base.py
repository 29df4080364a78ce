"""What a reward is given, and what it may give back."""

from __future__ import annotations

import json
import math
import numbers
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.errors import RewardError
from pipeline.types import Prompt, Sample


@dataclass(frozen=True)
class RewardInput:
    """One answer to be scored; each sample gets its own copy of the record, so a function may change what is in it."""

    prompt: str | list[dict[str, Any]]
    "text, or chat messages: maps with a role and a content at least"
    label: str | int | float | bool | None
    "as it stands in the prompt file; None where the row has none"
    metadata: dict[str, Any]
    "as it stands in the prompt file; empty where the row has none"
    response: str
    "the decoded answer, without the stop token"
    status: str
    "completed | truncated | aborted"
    index: int
    "of the sample in its group, from 0"
    prompt_id: int


class Scorer(Protocol):
    """A reward that is ready for use."""

    async def score_group(self, inputs: Sequence[RewardInput]) -> list[float | None]:
        """A finite number for each input, in order, or None: unscored. The inputs share one prompt.

        RewardError where the reward gave something else; what a user's function raises passes through untouched.
        """
        ...


def reward_input(prompt: Prompt, sample: Sample) -> RewardInput:
    record = json.loads(prompt.record)
    return RewardInput(
        record["prompt"], record["label"], record["metadata"], sample.text, sample.status, sample.index, prompt.id
    )


def score(value: object, name: str, given: RewardInput) -> float | None:
    """`value` as a reward: a finite number or bool, those of numpy and torch included, or None."""
    if value is None:
        return None
    try:
        result = number(value)
    except ValueError as error:
        where = f"prompt {given.prompt_id}, sample {given.index}"
        raise RewardError(f"reward function {name}: {where}: {reprlib.repr(value)} is {error}") from error
    return result


def number(value: object) -> float:
    """A finite number or bool as a float; ValueError says what else it is. [1.0] and "1.0" are no numbers."""
    if getattr(value, "shape", None) == () and hasattr(
        value, "item"
    ):  # numpy and torch scalars, without importing them
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise ValueError(f"a {type(value).__name__}, not a number or a bool")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError("not finite")
    return result
