"""Rewards: what scores a sample, or a whole group. One file a kind; docs/rewards.md describes them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pipeline import code
from pipeline.config import Rewards
from pipeline.errors import UsageError
from producers.rewards.base import RewardInput, Scorer, reward_input
from producers.rewards.built_in import BUILT_IN, BuiltIn
from producers.rewards.choice import REMOTE
from producers.rewards.custom import Custom, CustomGroup
from producers.rewards.mixed import ByRow, Kinds

__all__ = ["BUILT_IN", "BuiltIn", "RewardInput", "Scorer", "build", "opened", "reward_input"]


def build(config: Rewards, group_rm: bool) -> Scorer:
    """The reward that the flags select; UsageError where they select none, two, or one that does not exist.

    `group_rm` is the run's, which all workers agree on. What needs processes or connections makes them when it is first
    used; `opened` sees to their end.
    """
    return _build(config, group_rm, Kinds(config))


@asynccontextmanager
async def opened(config: Rewards, group_rm: bool) -> AsyncIterator[Scorer]:
    """The same, once it has graded known answers where it will grade all others. UsageError where it got one wrong."""
    kinds = Kinds(config)
    try:
        scorer = _build(config, group_rm, kinds)
        if isinstance(scorer, ByRow):
            await scorer.test()
        yield scorer
    finally:
        await kinds.close()


def _build(config: Rewards, group_rm: bool, kinds: Kinds) -> Scorer:
    if (config.rm_type is None) == (config.custom_rm_path is None):
        names = f"--rm-type ({', '.join([*BUILT_IN, REMOTE])}) or --custom-rm-path module.function"
        raise UsageError(f"{'no reward' if config.rm_type is None else 'two rewards'}: give one of {names}")
    if config.custom_rm_path is not None:
        function = code.load(config.custom_rm_path, "--custom-rm-path")
        return (CustomGroup if group_rm else Custom)(config.custom_rm_path, function, config.reward_key)
    if group_rm:
        raise UsageError(
            f"--group-rm: --rm-type {config.rm_type} scores single samples; a group needs --custom-rm-path"
        )
    return ByRow(config.rm_type or "", kinds)
