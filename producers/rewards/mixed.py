"""Which reward scores a group: the row's own (`metadata.rm_type`, as in slime), else what --rm-type says.

`--rm-type row` says nothing: rows that name no reward are scored by their `metadata.data_source`, which verl's has.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config import Rewards
from pipeline.errors import RewardError, UsageError
from producers.rewards.base import RewardInput, Scorer
from producers.rewards.built_in import BuiltIn
from producers.rewards.choice import REMOTE, ROW, chosen, parse
from producers.rewards.forked import Limits
from producers.rewards.graders import Graders
from producers.rewards.remote import Remote
from producers.rewards.self_test import self_test


@dataclass(frozen=True)
class Weighted:
    """The weighted sum of several; unscored where one of them is."""

    parts: tuple[tuple[Scorer, float], ...]

    async def score_group(self, inputs: Sequence[RewardInput]) -> list[float | None]:
        columns = [await scorer.score_group(inputs) for scorer, _ in self.parts]
        return [self._sum(rewards) for rewards in zip(*columns, strict=True)]

    def _sum(self, rewards: Sequence[float | None]) -> float | None:
        scored = [reward for reward in rewards if reward is not None]
        if len(scored) < len(rewards):
            return None
        return math.fsum(reward * weight for reward, (_, weight) in zip(scored, self.parts, strict=True))


class Kinds:
    """Makes scorers by name; they share what grades, and the connections to the judge."""

    def __init__(self, config: Rewards) -> None:
        self.config = config
        self.graders = Graders(config.rm_workers, Limits(config.rm_timeout, config.rm_memory << 20))
        self._judge: Remote | None = None

    def scorer(self, text: str) -> Scorer:
        """Of one name, or of several with weights. ValueError where there is none such, UsageError without --rm-url."""
        terms = parse(text)
        if len(terms) == 1 and terms[0][1] == 1:
            return self.one(terms[0][0])
        return Weighted(tuple((self.one(name), weight) for name, weight in terms))

    def one(self, name: str) -> Scorer:
        if name != REMOTE:
            return BuiltIn(name, self.graders, self.config.reward_key)
        if self._judge is None:
            if self.config.rm_url is None:
                raise UsageError(f"{REMOTE}: where is the judge? --rm-url http://HOST:PORT/PATH")
            self._judge = Remote(self.config.rm_url, self.config)
        return self._judge

    async def close(self) -> None:
        await self.graders.close()
        if self._judge is not None:
            await self._judge.close()


class ByRow:
    """The reward of each row: its own, else the run's, else that of its source."""

    def __init__(self, text: str, kinds: Kinds) -> None:
        self.text = text
        self.kinds = kinds
        self.ready: dict[str, Scorer] = {}
        "what has been tested, by how it was named"
        self._testing = asyncio.Lock()
        if text != ROW:
            try:
                self.kinds.scorer(text)
            except UsageError:
                raise
            except ValueError as error:
                raise UsageError(f"--rm-type: {error}") from None

    async def test(self) -> None:
        """Has the run's own reward grade known answers."""
        if self.text != ROW:
            await self._prepare(self.text)

    async def score_group(self, inputs: Sequence[RewardInput]) -> list[float | None]:
        metadata = inputs[0].metadata
        try:
            name = chosen(self.text, metadata.get("rm_type"), metadata.get("data_source"))
            if name not in self.ready:
                await self._prepare(name)
        except UsageError:
            raise
        except ValueError as error:
            raise RewardError(f"prompt {inputs[0].prompt_id}: {error}") from None
        return await self.ready[name].score_group(inputs)

    async def _prepare(self, name: str) -> None:
        async with self._testing:
            if name not in self.ready:
                scorer = self.kinds.scorer(name)
                for part, _ in parse(name):
                    await self_test(part, BuiltIn(part, self.kinds.graders))
                self.ready[name] = scorer
