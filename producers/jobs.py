"""What `millpond worker` does: one entry a kind of job (`pipeline.jobs.KINDS`), and nothing else is ever called.

To add a kind: a `Kind` there, and here an async context manager that is given a Desk, makes ready what the kind needs
(an engine, a scorer) and yields the function; its arguments and what it returns are JSON values. All of it lives in a
process of its own, where torch may be loaded, and which is killed when a job takes longer than who put it allows.
What the function raises fails the job, with its traceback.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.agreed import Agreed
from pipeline.config import WorkerConfig
from pipeline.evals import Ask, agree
from pipeline.jobs import EVAL, REWARD, Jobs
from pipeline.keys import Keys
from pipeline.leases import WorkerBroker
from pipeline.metrics import Values
from producers import rewards
from producers.evaluate import evaluate
from producers.holding import holding
from producers.rewards.base import RewardInput


@dataclass(frozen=True)
class Desk:
    """What a job finds in its process."""

    config: WorkerConfig
    "this worker's own: dotted paths are from here, never from Redis"
    rules: Agreed
    "what all workers of the run agree on"
    run: str
    url: str = field(repr=False)
    "of the run's Redis"
    folder: Path | None
    "the run's, where this worker was told of it"


Function = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Job:
    """How a kind is done."""

    ready: Callable[[Desk], AbstractAsyncContextManager[Function]]
    lasting: bool
    "one process does job after job; else each has a new one, which gives back all that it took"


@asynccontextmanager
async def reward(desk: Desk) -> AsyncIterator[Function]:
    """Scores one answer, or a group, as a generator would; the reward has graded known answers before."""
    async with rewards.opened(desk.config, desk.rules.group_rm) as scorer:

        async def score(inputs: list[dict[str, Any]]) -> list[float | None]:
            return await scorer.score_group([RewardInput(**given) for given in inputs])

        yield score


@asynccontextmanager
async def evaluation(desk: Desk) -> AsyncIterator[Function]:
    """Evaluates one version of the weights (producers.evaluate)."""

    async def run(ask: dict[str, Any]) -> Values:
        asked = Ask(**ask)
        agree(asked, desk.config)
        if not asked.shared:
            return await evaluate(asked, desk.config, desk.rules, _scores(desk))
        broker = WorkerBroker(desk.url, Keys(desk.run), "evaluation", desk.config.redis_patience)
        try:
            async with holding(broker, asked.version):
                return await evaluate(asked, desk.config, desk.rules, _scores(desk))
        finally:
            await broker.close()

    yield run


def _scores(desk: Desk) -> Jobs | None:
    """Answers of an evaluation are jobs as well where the run's are: one that hangs would hold it all up."""
    own = desk.config.eval_rm_type is not None or desk.config.eval_function_path is not None
    return None if own or desk.rules.rm_place != "worker" else Jobs(desk.url, Keys(desk.run), "eval-rewards")


JOBS = {REWARD.name: Job(reward, lasting=True), EVAL.name: Job(evaluation, lasting=False)}
