"""Evaluates one version of the weights on sets of prompts, with an engine of its own or one it is a guest of.

Consumes what a trainer asks for (or `millpond eval`); waits for the engine; produces numbers by name. All samples carry
that one version: what another version sampled, or was aborted, is sampled again, and never scored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline import code
from pipeline.agreed import Agreed
from pipeline.config import EvalWork, Rewards
from pipeline.errors import EngineError, MillpondError, RequestRefused, UsageError
from pipeline.evals import Ask
from pipeline.evaluation import sets
from pipeline.jobs import Jobs
from pipeline.metrics import Values
from pipeline.recording import MODE, unfit
from pipeline.types import Group, Prompt
from producers import custom_generate, engines, eval_function, eval_metrics, rewards
from producers.checks import Checks
from producers.dataset import Dataset
from producers.engines.base import Engine, Sampling
from producers.eval_metrics import Answers
from producers.group import Maker, Progress
from producers.rewards import by_worker
from producers.rows import RowKeys
from producers.tokens import Tokenizer

log = logging.getLogger(__name__)

PAUSES = (0.0, 1.0, 5.0, 15.0)
"Seconds before each try of a prompt after the first."


async def evaluate(ask: Ask, config: EvalWork, rules: Agreed, jobs: Jobs | None = None) -> Values:
    """Metrics by name; MillpondError where it takes too long. Of the run's `rules` hold the seed and how prompts are
    rendered. With `jobs`, which are closed with it, the run's reward is left to workers (--rm-place)."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(ask.seconds) as deadline:
            if config.eval_function_path is not None:
                files = sets(config.eval_prompt_data) if config.eval_prompt_data else {}
                found = await eval_function.call(config.eval_function_path, ask, files)
            else:
                found = await _on_sets(ask, config, rules, jobs)
    except TimeoutError:
        if not deadline.expired():
            raise
        raise MillpondError(f"not done in {ask.seconds:.0f} s (--eval-timeout)") from None
    return {**found, "eval/weight_version": ask.version, "eval/seconds": time.monotonic() - began}


async def _on_sets(ask: Ask, config: EvalWork, rules: Agreed, jobs: Jobs | None) -> Values:
    data, reward = open_sets(config), reward_of(config)
    whole = rules.group_rm and config.eval_rm_type is None
    scored = by_worker.opened(reward, whole, jobs) if jobs else rewards.opened(reward, whole)
    if config.eval_engine_url is not None:
        more = {"engine": "sglang", "engine_url": config.eval_engine_url, "engine_router_url": None}
        config = config.model_copy(update=more)
    rules = rules.model_copy(update={"n_samples_per_prompt": ask.samples, "rollout_max_prompt_len": None})
    own = config.custom_generate_function_path
    play = custom_generate.load(own) if own else custom_generate.ONCE
    found: Values = {}
    async with scored as scorer, _engine(ask, config, rules) as (engine, tokenizer):
        sampling = Sampling(ask.max_response_len, ask.temperature, tokenizer.stop_token_ids, ask.top_p)
        slots = engines.slots(config)
        maker = Maker(engine, tokenizer, scorer, rules, "evaluation", asyncio.Semaphore(slots), play, sampling)
        crew = Crew(maker, ask.version, max(2, 2 * slots // ask.samples))
        if rules.deterministic_mode:
            await _same_again(engine, config, ask)
            crew = replace(crew, most=max(1, slots // ask.samples), waves=slots > 1 and not ask.shared)
        for name, dataset in data.items():
            answers = await crew.all(dataset)
            found |= eval_metrics.values(name, answers, len(dataset) - len(answers))
            log.info("version %d on %s: %s", ask.version, name, found.get(f"eval/{name}"))
    return found


def open_sets(config: EvalWork) -> dict[str, Dataset]:
    """All sets of --eval-prompt-data, their rows checked; UsageError says what is wrong in which."""
    keys, found = RowKeys(config.eval_input_key, config.eval_label_key), {}
    for name, path in sets(config.eval_prompt_data or "").items():
        try:
            checks = Checks(reward_of(config).rm_type)
            found[name] = Dataset.open(Path(path), keys, checks)
            checks.settle()
        except UsageError as error:
            said = str(error).replace("--prompt-data", f"--eval-prompt-data {name}")
            said = said.replace("(--input-key)", "(--eval-input-key)").replace("(--label-key)", "(--eval-label-key)")
            raise UsageError(said if config.eval_rm_type is None else said.replace("--rm-", "--eval-rm-")) from None
    return found


def try_out(config: EvalWork) -> None:
    """UsageError for what would let each evaluation fail: told of at the start, not when the first is due."""
    if config.eval_prompt_data is not None:
        open_sets(config)
    if config.eval_function_path is not None:
        code.load(config.eval_function_path, eval_function.FLAG)
    elif config.eval_prompt_data is not None:
        if (reward := reward_of(config).custom_rm_path) is not None:
            code.load(reward, "--custom-rm-path")
        if config.custom_generate_function_path is not None:
            custom_generate.load(config.custom_generate_function_path)


def reward_of(config: EvalWork) -> Rewards:
    """What scores: the run's, or --eval-rm-type."""
    if config.eval_rm_type is None:
        return config
    return config.model_copy(update={"rm_type": config.eval_rm_type, "custom_rm_path": None, "group_rm": False})


@asynccontextmanager
async def _engine(ask: Ask, config: EvalWork, rules: Agreed) -> AsyncIterator[tuple[Engine, Tokenizer]]:
    """An engine that serves just that version."""
    engine, tokenizer = engines.build(config, rules.pause_generation_mode, rules.adapter_rank)
    try:
        await engine.start()
        await engine.load(ask.policy)
        yield engine, tokenizer
    finally:
        await engine.close()


async def _same_again(engine: Engine, config: EvalWork, ask: Ask) -> None:
    """UsageError where another evaluation of the same weights could have other figures."""
    why = [*unfit(config, ask.samples)]
    if varies := await engine.varies():
        why.append(f"{MODE}: {varies}")
    if why:
        raise UsageError("\n".join(why))


@dataclass(frozen=True)
class Crew:
    """Has the prompts of a set answered, some at once."""

    maker: Maker
    version: int
    most: int
    "groups at once"
    pauses: tuple[float, ...] = PAUSES
    waves: bool = False
    "all requests of so many groups wait in the engine before it begins: rounding depends on what is batched together"

    async def all(self, dataset: Dataset) -> list[Answers]:
        """In the rows' order, without those that have no room in the engine."""
        made: list[asyncio.Task[Answers | None]] = []
        free = asyncio.Semaphore(self.most)
        try:
            if self.waves:
                for first in range(0, len(dataset), self.most):
                    made += await self._wave(dataset, range(first, min(first + self.most, len(dataset))))
            else:
                async with asyncio.TaskGroup() as tasks:
                    for row in range(len(dataset)):
                        await free.acquire()
                        made.append(tasks.create_task(self._one(dataset, row, Progress())))
                        made[-1].add_done_callback(lambda _: free.release())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return [found for task in made if (found := task.result()) is not None]

    async def _wave(self, dataset: Dataset, rows: range) -> list[asyncio.Task[Answers | None]]:
        under_way = [Progress(unsent=self.maker.rules.n_samples_per_prompt) for _ in rows]
        await self.maker.engine.pause()
        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(self._one(dataset, *one)) for one in zip(rows, under_way, strict=True)]
            while any(progress.unsent > 0 for progress in under_way):  # noqa: ASYNC110
                await asyncio.sleep(0)
            await self.maker.engine.resume()
        return made

    async def _one(self, dataset: Dataset, row: int, progress: Progress) -> Answers | None:
        try:
            return Answers.of(await self._made(Prompt(row, 1, 0, dataset.record(row)), progress))
        except RequestRefused as error:
            log.warning("prompt %d is left out: %s", row, error)
            return None

    async def _made(self, prompt: Prompt, progress: Progress) -> Group:
        trouble: Exception | None = None
        for pause in (None, *self.pauses):
            if pause is not None:
                log.warning("prompt %d is made again: %s", prompt.id, trouble)
                await asyncio.sleep(pause)
            try:
                group = await self.maker.make(prompt, progress, asyncio.Event())
            except RequestRefused:
                raise
            except EngineError as error:
                trouble = error
                continue
            if group.versions == {self.version}:
                return group
            trouble = EngineError(f"it was sampled with the versions {sorted(map(str, group.versions))}")
        raise trouble or EngineError("never made")
