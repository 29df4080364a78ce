"""--rm-place worker: what a generator makes of answers that workers score, or do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from processes import SMALL, Stage, audited, own_code, prompts, steps
from rig import Rig, agreed
from rq import Queue
from rq.job import Job
from rq.results import Result
from rq.serializers import JSONSerializer

from pipeline.config import GenerateConfig, WorkerConfig
from pipeline.errors import RewardError
from pipeline.evals import code_of
from pipeline.jobs import REWARD, Jobs
from producers.jobs import JOBS, Desk
from producers.rewards import RewardInput
from producers.rewards.by_worker import ByWorker, opened


def given(response: str, index: int = 0) -> RewardInput:
    return RewardInput("q", 5, {"k": [1]}, response, "completed", index, 7)


class Worker:
    """Ends jobs as it is told, as RQ writes it down."""

    def __init__(self, rig: Rig) -> None:
        self.raw = rig.raw
        self.queue = Queue(rig.keys.queue("rewards"), connection=rig.raw, serializer=JSONSerializer)

    async def take(self) -> Job:
        while not (ids := self.queue.get_job_ids()):  # noqa: ASYNC110 (another process's doing)
            await asyncio.sleep(0.01)
        self.raw.lrem(self.queue.key, 1, ids[0])
        return Job.fetch(ids[0], connection=self.raw, serializer=JSONSerializer)

    def done(self, job: Job, value: Any) -> None:
        Result.create(job, Result.Type.SUCCESSFUL, 60, return_value=value)

    def failed(self, job: Job, why: str) -> None:
        Result.create_failure(job, 60, exc_string=why)


def scored(rig: Rig, work: Callable[[ByWorker, Worker], Awaitable[None]], group_rm: bool = False, **how: Any) -> None:
    async def main() -> None:
        config = GenerateConfig(custom_rm_path="m.f", **{"rm_patience": 60.0, "rm_timeout": 60.0, **how})
        jobs = Jobs(rig.url, rig.keys, "rewards")
        async with asyncio.timeout(60), opened(config, group_rm, jobs) as scorer:
            await work(scorer, Worker(rig))

    asyncio.run(main())


def left(rig: Rig) -> list[bytes]:
    return [*rig.raw.scan_iter(f"rq:job:{rig.keys.job_tag}*"), *rig.raw.scan_iter(f"rq:results:{rig.keys.job_tag}*")]


def test_each_answer_is_a_job_and_is_forgotten_once_it_is_scored(real: Rig) -> None:
    async def work(scorer: ByWorker, worker: Worker) -> None:
        group = asyncio.create_task(scorer.score_group([given("a", 0), given("b", 1), given("c", 2)]))
        jobs = [await worker.take() for _ in range(3)]
        sent = {job.kwargs["inputs"][0]["response"]: job for job in jobs}
        assert sent["b"].kwargs["inputs"] == [{**vars(given("b", 1)), "sample_metadata": {}}]
        assert {job.timeout for job in jobs} == {60}
        worker.done(sent["c"], [3])
        worker.failed(sent["b"], "late: not done in 60 s")
        worker.done(sent["a"], [None])
        assert await group == [None, None, 3.0]
        assert scorer.unscored == 1

    scored(real, work)
    assert left(real) == []


def test_a_group_reward_is_one_job(real: Rig) -> None:
    async def work(scorer: ByWorker, worker: Worker) -> None:
        group = asyncio.create_task(scorer.score_group([given("a", 0), given("b", 1)]))
        job = await worker.take()
        assert [one["response"] for one in job.kwargs["inputs"]] == ["a", "b"]
        worker.done(job, [0.5, True])
        assert await group == [0.5, 1.0]

    scored(real, work, group_rm=True)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([1.0, 2.0], "no list of 1 scores"),
        ("1", "no list"),
        ([1e999], "not finite"),
        (["1"], "a str"),
    ],
)
def test_what_is_no_score_ends_the_run(real: Rig, value: Any, why: str) -> None:
    async def work(scorer: ByWorker, worker: Worker) -> None:
        group = asyncio.create_task(scorer.score_group([given("a")]))
        worker.done(await worker.take(), value)
        with pytest.raises(RewardError, match=f"prompt 7, sample 0: a worker gave .*{why}"):
            await group

    scored(real, work)


@pytest.mark.parametrize("why", ["failed: KeyError: 'x'\nTraceback ...", "refused: it has no time-out"])
def test_a_bug_in_a_reward_ends_the_run_with_its_traceback_and_siblings_wait_no_longer(real: Rig, why: str) -> None:
    async def work(scorer: ByWorker, worker: Worker) -> None:
        group = asyncio.create_task(scorer.score_group([given("a"), given("b")]))
        first, _ = await worker.take(), await worker.take()
        worker.failed(first, why)
        with pytest.raises(RewardError, match=r"in a worker: (failed: KeyError.*\nTraceback|refused)"):
            await group

    scored(real, work)
    assert left(real) == []


def test_what_no_worker_takes_in_time_is_unscored(real: Rig) -> None:
    async def work(scorer: ByWorker, worker: Worker) -> None:
        assert await scorer.score_group([given("a"), given("b")]) == [None, None]

    scored(real, work, rm_patience=1.0)
    assert left(real) == []


def test_jobs_that_vanish_with_a_flushed_redis_are_unscored(real: Rig) -> None:
    async def work(scorer: ByWorker, worker: Worker) -> None:
        group = asyncio.create_task(scorer.score_group([given("a")]))
        job = await worker.take()
        real.raw.delete(job.key)
        assert await group == [None]

    scored(real, work)


def test_a_stop_waits_for_no_job(real: Rig) -> None:
    async def work(scorer: ByWorker, worker: Worker) -> None:
        group = asyncio.create_task(scorer.score_group([given("a"), given("b")]))
        await worker.take()
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group

    scored(real, work)
    assert left(real) == []
    assert not real.raw.exists(f"rq:queue:{real.keys.queue('rewards')}")


@pytest.mark.parametrize(
    ("place", "own", "left_to_workers"),
    [("worker", {}, True), ("worker", {"eval_rm_type": "length"}, False), ("generator", {}, False)],
)
def test_answers_of_an_evaluation_are_left_to_workers_where_the_runs_are(
    real: Rig, tmp_path: Path, place: str, own: dict[str, Any], left_to_workers: bool
) -> None:
    """Nobody scores them here: they end unscored, and in place they are scored."""
    config = WorkerConfig(
        rm_type="length", rm_patience=0.5, engine="echo", eval_prompt_data=f"set {prompts(tmp_path, 3)}", **own
    )
    desk = Desk(config, agreed(rm_place=place), real.keys.run, real.url, None)
    how = {"samples": 1, "temperature": 0.0, "top_p": 1.0, "max_response_len": 5, "seconds": 60.0, "shared": False}
    where = {"step": 6, "version": 7, "path": "", "digest": "", "sets": ["set"], "code": code_of(config)}
    ask = {**how, **where}

    async def main() -> dict[str, float]:
        async with asyncio.timeout(120), JOBS["eval"].ready(desk) as function:
            found: dict[str, float] = await function(ask=ask)
            return found

    found = asyncio.run(main())
    assert found["eval/set/samples"] == 3
    assert found["eval/set/unscored"] == (3 if left_to_workers else 0)


MINE = """
import os, time
from pathlib import Path

def score(x):
    if x.prompt_id == 3 and x.index == 0:
        time.sleep(1000)
    if x.prompt_id == 5 and x.index == 1 and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), 9)
    return x.index
"""


def test_a_run_whose_rewards_hang_and_die_ends_with_all_prompts_trained(tmp_path: Path) -> None:
    echo = ("--engine", "echo", "--train-backend", "echo", *SMALL, "--prompt-data", prompts(tmp_path, 12))
    reward = ("--custom-rm-path", "mine.score", "--rm-place", "worker", "--rm-timeout", 5, "--rm-spares", 0)
    with Stage(tmp_path) as stage:
        out = tmp_path / "run"
        code = own_code(tmp_path, MINE)
        stage.millpond("run", "--out", out, *echo, *reward, "--num-epoch", 1, **code).ends(0, seconds=120)
        assert audited(stage, out)["committed"] == 12
    assert sum(line["rollout/unscored"] for line in steps(out)) >= 1
    assert (tmp_path / "died").exists()
    config = (out / "config.toml").read_text()
    assert 'rm_place = "worker"' in config
    assert json.dumps(str(REWARD.name)) not in config
