"""What `--eval-function-path` names: `def f(x: EvalInput) -> dict[str, float]`, sync or async, in an RQ worker."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from pipeline import code
from pipeline.errors import MillpondError
from pipeline.evals import Ask
from pipeline.evaluation import TAKEN
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
    "folder in the Hugging Face layout (--lora-publish adapter: peft's), there until it ends; None: nothing is trained"
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
        threads = ThreadPoolExecutor(1, "evaluation")  # of its own: the event loop waits for its others as it ends
        result = await asyncio.get_running_loop().run_in_executor(threads, _called, dotted, function, given)
    if not isinstance(result, Mapping):
        raise MillpondError(f"{FLAG} {dotted} gave a {type(result).__name__}; expected are numbers by name")
    found = {str(name).removeprefix("eval/"): _number(dotted, name, value) for name, value in result.items()}
    if taken := sorted(TAKEN & found.keys()):
        raise MillpondError(f"{FLAG} {dotted}: give {taken[0]!r} another name: eval/{taken[0]} says something else")
    return {f"eval/{name}": value for name, value in found.items()}


def _called(dotted: str, function: Callable[[EvalInput], object], given: EvalInput) -> object:
    try:
        return function(given)
    except StopIteration as error:  # a future cannot carry it, and whoever awaits would wait for ever
        raise RuntimeError(f"{dotted} raised {type(error).__name__}: {error}") from error


def _number(dotted: str, name: object, value: object) -> float:
    try:
        return number(value)
    except ValueError as error:
        raise MillpondError(f"{FLAG} {dotted}: {name!r} is {error}") from None
