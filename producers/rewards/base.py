"""What a reward is given, and what it may give back."""

from __future__ import annotations

import asyncio
import math
import numbers
import reprlib
from collections.abc import Coroutine, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pipeline.errors import RewardError
from pipeline.types import Prompt, Sample

T = TypeVar("T")


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
    sample_metadata: dict[str, Any] = field(default_factory=dict)
    "what a generate function passed on"


@dataclass(frozen=True)
class Grading:
    """What a reward leaves to a process that can be killed: `producers.rewards.grade.GRADERS[grader](**arguments)`."""

    grader: str
    arguments: dict[str, Any] = field(default_factory=dict)
    "JSON values"


Value = float | Mapping[str, Any] | None
"What a built-in reward gives: a number, a map with a `score` among others, or None: unscored."


class Scorer(Protocol):
    """A reward that is ready for use."""

    async def score_group(self, inputs: Sequence[RewardInput]) -> list[float | None]:
        """A finite number for each input, in order, or None: unscored. The inputs share one prompt.

        RewardError where the reward gave something else; what a user's function raises passes through untouched.
        """
        ...


def reward_input(prompt: Prompt, sample: Sample) -> RewardInput:
    record = prompt.fields
    return RewardInput(
        record["prompt"],
        record["label"],
        record["metadata"],
        sample.text,
        sample.status,
        sample.index,
        prompt.id,
        deepcopy(sample.metadata),
    )


async def together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once, their results in order; when one fails the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def label_text(given: RewardInput, name: str) -> str:
    """The label, a number as it is written in Python. RewardError where there is none."""
    if given.label is None:
        raise RewardError(
            f"reward function {name}: prompt {given.prompt_id} has no label: name its key with --label-key, "
            "or choose a reward that needs none"
        )
    return str(given.label)


def score(value: object, name: str, given: RewardInput, key: str | None = None) -> float | None:
    """`value` as a reward: a finite number or bool, those of numpy and torch included, or None.

    `key` names the one to take where a map of several is given.
    """
    where = f"reward function {name}: prompt {given.prompt_id}, sample {given.index}"
    if isinstance(value, Mapping) and key is not None:
        if key not in value:
            raise RewardError(f"{where}: no {key!r} in {reprlib.repr(value)} (--reward-key)")
        value = value[key]
    if value is None:
        return None
    try:
        result = number(value)
    except ValueError as error:
        raise RewardError(f"{where}: {reprlib.repr(value)} is {error}") from error
    return result


def number(value: object) -> float:
    """A finite number or bool as a float; ValueError says what else it is. [1.0] and "1.0" are no numbers."""
    if getattr(value, "shape", None) == () and hasattr(
        value, "item"
    ):  # numpy and torch scalars, without importing them
        value = value.item()
    if not isinstance(value, numbers.Real):
        hint = "; which of its values? --reward-key NAME" if isinstance(value, Mapping) else ""
        raise ValueError(f"a {type(value).__name__}, not a number or a bool{hint}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError("not finite")
    return result
