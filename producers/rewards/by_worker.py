"""--rm-place worker: answers are scored by `millpond worker`, in processes that are killed when they hang.

Each answer is a job (pipeline.jobs), with --group-rm each group. What a worker cannot score in time is unscored, never
0: killed at --rm-timeout, killed by others twice, or no worker took it within --rm-patience. What a reward function
raises ends the run with its traceback, as it does where a generator scores. Nobody who is cancelled waits for a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import RedisError

from pipeline.config import Rewards
from pipeline.errors import RewardError, UsageError
from pipeline.jobs import FAILED, REFUSED, REWARD, Jobs, Outcome
from pipeline.outage import passing, told
from producers.rewards.base import RewardInput, number, together

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL = 0.2
"Seconds of one wait for results."
AWAY = 1.0
"Seconds between tries while Redis is away."
LATER = 30.0
"Seconds beyond its own time in which a job's end is written down, or it is found that its worker is dead."
QUIET = 30.0
"Seconds between two lines in the log about answers without a score."


@asynccontextmanager
async def opened(config: Rewards, group_rm: bool, jobs: Jobs) -> AsyncIterator[ByWorker]:
    scorer = ByWorker(config, group_rm, jobs)
    try:
        yield scorer
    finally:
        await scorer.close()


class ByWorker:
    """For the event loop it is first used in. `jobs` is closed with it."""

    def __init__(self, config: Rewards, group_rm: bool, jobs: Jobs) -> None:
        self.group_rm = group_rm
        self.jobs = jobs
        self.patience = config.rm_patience
        own = config.custom_rm_path is not None
        self.seconds = config.rm_timeout if own else config.rm_timeout + config.rm_patience
        "for one job; built-in rewards have limits of their own within them"
        self.unscored = 0
        "answers without a score so far"
        self._waiting: dict[str, asyncio.Future[Outcome]] = {}
        self._over: list[str] = []
        "ids of jobs that nobody waits for any more"
        self._writes, self._reads = ThreadPoolExecutor(1, "jobs"), ThreadPoolExecutor(1, "jobs")
        "one after the other: nothing is forgotten before it is put"
        self._reading: asyncio.Task[None] | None = None
        self._said = float("-inf")

    async def score_group(self, inputs: Sequence[RewardInput]) -> list[float | None]:
        if self.group_rm:
            return await self._score(inputs)
        return [score for scores in await together([self._score([given]) for given in inputs]) for score in scores]

    async def close(self) -> None:
        """Waits for no job."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        over = [*self._over, *self._waiting]
        with contextlib.suppress(RedisError):
            await self._call(self._writes, partial(self.jobs.forget, over))
        for threads in (self._writes, self._reads):
            threads.shutdown(wait=False)
        self.jobs.close()

    async def _score(self, inputs: Sequence[RewardInput]) -> list[float | None]:
        outcome = await self._outcome({"inputs": [asdict(given) for given in inputs]})
        where = f"prompt {inputs[0].prompt_id}, sample {inputs[0].index}"
        if outcome.state == "done":
            return _scores(outcome.value, len(inputs), where)
        if outcome.what in (FAILED, REFUSED):
            raise RewardError(f"the reward of {where}, in a worker: {outcome.why}")
        self._tell(len(inputs), outcome.why)
        return [None] * len(inputs)

    async def _outcome(self, arguments: dict[str, Any]) -> Outcome:
        name, end = uuid.uuid4().hex, time.monotonic() + self.patience
        id = self.jobs.id(REWARD, name)
        try:
            if why := await self._put(name, arguments, end):
                return Outcome("lost", why=why)
            waiting = self._waiting[id] = asyncio.get_running_loop().create_future()
            self._read()
            return await asyncio.wait_for(waiting, max(0.0, end - time.monotonic()) + self.seconds + LATER)
        except TimeoutError:
            return Outcome("lost", why=f"no worker has scored it in {self.patience:g} s (--rm-patience)")
        finally:
            self._waiting.pop(id, None)
            self._over.append(id)

    async def _put(self, name: str, arguments: dict[str, Any], end: float) -> str:
        """Why it could not be put before `end`; empty where it could."""
        while True:
            try:
                put = partial(self.jobs.put, REWARD, name, arguments, self.seconds, self.patience)
                await self._call(self._writes, put)
                return ""
            except UsageError as error:  # too large
                return str(error)
            except (TypeError, ValueError) as error:
                raise RewardError(f"--rm-place worker: what is to be scored is no JSON: {error}") from None
            except RedisError as error:
                if not passing(error):
                    raise told(error) from None
                if time.monotonic() > end:
                    return f"Redis takes no job ({error})"
            await asyncio.sleep(AWAY)

    def _read(self) -> None:
        """Sees to it that results are read."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._results())
            self._reading.add_done_callback(self._ended)

    def _ended(self, reading: asyncio.Task[None]) -> None:
        """A bug in there is for all who wait."""
        error = None if reading.cancelled() else reading.exception()
        for waiting in self._waiting.values() if error else ():
            if not waiting.done():
                waiting.set_exception(error or RuntimeError())

    async def _results(self) -> None:
        while self._waiting or self._over:
            over, ids = list(self._over), list(self._waiting)
            try:
                await self._call(self._writes, partial(self.jobs.forget, over))
                del self._over[: len(over)]
                ended = await self._call(self._reads, partial(self.jobs.ended, ids, POLL))
            except RedisError as error:
                if not passing(error):
                    raise told(error) from None
                await asyncio.sleep(AWAY)
                continue
            for id, outcome in ended.items():
                if id in self._waiting and not self._waiting[id].done():
                    self._waiting[id].set_result(outcome)
            await asyncio.sleep(0)

    async def _call(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def _tell(self, count: int, why: str) -> None:
        self.unscored += count
        if time.monotonic() - self._said > QUIET:
            self._said = time.monotonic()
            log.warning("%d answers have no score so far; the latest: %s", self.unscored, why)


def _scores(values: object, count: int, where: str) -> list[float | None]:
    if not isinstance(values, list) or len(values) != count:
        raise RewardError(f"the reward of {where}: a worker gave no list of {count} scores")
    try:
        return [None if value is None else number(value) for value in values]
    except ValueError as error:
        raise RewardError(f"the reward of {where}: a worker gave {error}") from None
