"""Rewards: what scores a sample, or a whole group. One file a kind."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline import code
from pipeline.config import Rewards
from pipeline.errors import UsageError
from producers.rewards.base import RewardInput, Scorer, reward_input, score
from producers.rewards.custom import Custom, CustomGroup
from producers.rewards.exact import exact
from producers.rewards.length import length
from producers.rewards.positions import positions
from producers.rewards.random import random

__all__ = ["BUILT_IN", "RewardInput", "Scorer", "build", "reward_input"]

BUILT_IN: dict[str, Callable[[RewardInput], float]] = {
    "exact": exact,
    "positions": positions,
    "length": length,
    "random": random,
}
"--rm-type: cheap pure functions of one sample, called where they are needed."


@dataclass(frozen=True)
class BuiltIn:
    name: str

    async def score_group(self, inputs: Sequence[RewardInput]) -> list[float | None]:
        return [score(BUILT_IN[self.name](given), self.name, given) for given in inputs]


def build(config: Rewards, group_rm: bool) -> Scorer:
    """The reward that the flags select; UsageError where they select none, two, or one that does not exist.

    `group_rm` is the run's, which all workers agree on.
    """
    if (config.rm_type is None) == (config.custom_rm_path is None):
        names = f"--rm-type ({', '.join(BUILT_IN)}) or --custom-rm-path module.function"
        raise UsageError(f"{'no reward' if config.rm_type is None else 'two rewards'}: give one of {names}")
    if config.custom_rm_path is not None:
        function = code.load(config.custom_rm_path, "--custom-rm-path")
        return (CustomGroup if group_rm else Custom)(config.custom_rm_path, function)
    name = config.rm_type or ""
    if name not in BUILT_IN:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"--rm-type {name!r}: there are {', '.join(BUILT_IN)}{hint}")
    if group_rm:
        raise UsageError(f"--group-rm: --rm-type {name} scores single samples; a group needs --custom-rm-path")
    return BuiltIn(name)
