"""What `--eval-function-path` names: `def f(x: EvalInput) -> dict[str, float]`, sync or async, in an RQ worker."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline import code
from pipeline.errors import MillpondError
from pipeline.evals import Ask
from pipeline.metrics import Values
from producers.rewards.base import number

FLAG = "--eval-function-path"


@dataclass(frozen=True)
class EvalInput:
    """What is to be evaluated, and how."""

    step: int
    "training steps done"
    version: int
    weights: Path | None
    "folder in the Hugging Face layout, there until the function ends; None where nothing is trained"
    samples: int
    "answers to each prompt"
    temperature: float
    top_p: float
    max_response_len: int
    sets: dict[str, Path] = field(default_factory=dict)
    "--eval-prompt-data"


async def call(dotted: str, ask: Ask, sets: dict[str, Path]) -> Values:
    """The numbers that the function gives, each under `eval/`. What it raises passes through."""
    function = code.load(dotted, FLAG)
    weights = Path(ask.path) if ask.path else None
    how = ask.samples, ask.temperature, ask.top_p, ask.max_response_len
    given = EvalInput(ask.step, ask.version, weights, *how, sets)
    if inspect.iscoroutinefunction(function):
        result = await function(given)
    else:
        result = await asyncio.to_thread(function, given)
    if not isinstance(result, Mapping):
        raise MillpondError(f"{FLAG} {dotted} gave a {type(result).__name__}; expected are numbers by name")
    return {f"eval/{str(name).removeprefix('eval/')}": _number(dotted, name, value) for name, value in result.items()}


def _number(dotted: str, name: object, value: object) -> float:
    try:
        return number(value)
    except ValueError as error:
        raise MillpondError(f"{FLAG} {dotted}: {name!r} is {error}") from None
