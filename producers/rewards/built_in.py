"""The rewards that come with Millpond, by the name --rm-type gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from producers.rewards.answer import answer
from producers.rewards.base import Grading, RewardInput, Value, score, together
from producers.rewards.dapo import dapo
from producers.rewards.deepscaler import deepscaler
from producers.rewards.exact import exact
from producers.rewards.f1 import f1
from producers.rewards.gpqa import gpqa
from producers.rewards.graders import Graders
from producers.rewards.gsm8k import gsm8k
from producers.rewards.ifeval import ifeval
from producers.rewards.length import length
from producers.rewards.math import math
from producers.rewards.positions import positions
from producers.rewards.programs import code
from producers.rewards.random import random
from producers.rewards.reasoning_gym import reasoning_gym

BUILT_IN: dict[str, Callable[[RewardInput], Value | Grading]] = {
    "math": math,
    "gsm8k": gsm8k,
    "deepscaler": deepscaler,
    "dapo": dapo,
    "gpqa": gpqa,
    "f1": f1,
    "code": code,
    "ifeval": ifeval,
    "exact": exact,
    "positions": positions,
    "length": length,
    "random": random,
    "reasoning_gym": reasoning_gym,
}
"Cheap pure functions of one sample, called where they are needed; what is not cheap they leave to the sandbox."

BOXED = "boxed_"
"Before a name: the reward is given what stands in the last box instead of the response."

NEED_LABEL = {"math", "gsm8k", "deepscaler", "dapo", "f1", "exact", "positions"}


@dataclass(frozen=True)
class BuiltIn:
    name: str
    graders: Graders | None = None
    key: str | None = None
    "the reward's place where there are several"

    async def score_group(self, inputs: Sequence[RewardInput]) -> list[float | None]:
        function = BUILT_IN[self.name.removeprefix(BOXED)]
        if self.name.startswith(BOXED):
            inputs = [replace(given, response=answer(given.response) or "") for given in inputs]
        values = [function(given) for given in inputs]
        settled = await together([self._settle(value) for value in values if isinstance(value, Grading)])
        rest = iter(settled)
        done = [next(rest) if isinstance(value, Grading) else value for value in values]
        return [score(value, self.name, given, self._key(value)) for value, given in zip(done, inputs, strict=True)]

    def _key(self, value: Value) -> str:
        return self.key if self.key and isinstance(value, dict) and self.key in value else "score"

    async def _settle(self, grading: Grading) -> Value:
        if self.graders is None:
            raise RuntimeError(f"{self.name} needs a sandbox")
        return await self.graders.grade(grading)
