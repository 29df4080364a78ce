"""A user's reward function: sync or async, of one sample or of a whole group.

An async function runs on the event loop. A sync one runs in threads, up to THREADS calls at once, and must bear that;
the threads are the rewards' own, so that slow ones hold nothing else up.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import RewardError
from producers.rewards.base import RewardInput, score, together

THREADS = 16


@dataclass(frozen=True)
class Custom:
    """`function(RewardInput)` gives a number, a bool or None."""

    name: str
    "dotted path, for messages"
    function: Callable[..., Any]
    key: str | None = None
    "the reward's place in a map that the function gives"
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(THREADS, "reward"))

    async def score_group(self, inputs: Sequence[RewardInput]) -> list[float | None]:
        values = await together([self._call(given) for given in inputs])
        return [score(value, self.name, given, self.key) for value, given in zip(values, inputs, strict=True)]

    async def _call(self, argument: RewardInput | list[RewardInput]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(argument)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self.threads, self._call_in_thread, argument)
        return await result if inspect.isawaitable(result) else result  # async __call__, or a plain def around one

    def _call_in_thread(self, argument: RewardInput | list[RewardInput]) -> Any:
        try:
            return self.function(argument)
        except (StopIteration, TimeoutError) as error:
            # A future cannot carry the one, whoever awaits would wait for ever, and loses the traceback of the other.
            raise RuntimeError(f"{self.name} raised {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class CustomGroup(Custom):
    """`function(list[RewardInput])` gives a list with a number, a bool or None for each."""

    async def score_group(self, inputs: Sequence[RewardInput]) -> list[float | None]:
        values = await self._call(list(inputs))
        if getattr(values, "ndim", None) == 1 and hasattr(values, "tolist"):  # arrays of numpy and torch
            values = values.tolist()
        prompt = f"reward function {self.name}: prompt {inputs[0].prompt_id}"
        if not isinstance(values, list | tuple):
            raise RewardError(f"{prompt}: a {type(values).__name__}, not a list of {len(inputs)} rewards")
        if len(values) != len(inputs):
            raise RewardError(f"{prompt}: {len(values)} rewards for samples 0 to {len(inputs) - 1}")
        return [score(value, self.name, given, self.key) for value, given in zip(values, inputs, strict=True)]
