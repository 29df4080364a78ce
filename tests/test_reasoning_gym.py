"""reasoning-gym's tasks as prompts without end, and its scorers as rewards. Skipped where it is not installed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from pipeline.config import FeedConfig, GenerateConfig
from pipeline.errors import RewardError, UsageError
from pipeline.types import COMPLETED, Prompt, Sample
from producers.gym import BLOCK, GYM, Gym
from producers.rewards import RewardInput, opened, reward_input
from producers.sources import open_source


def gym(task: str, seed: int = 42) -> Gym:
    found = open_source(FeedConfig(task=GYM + task, rollout_seed=seed))
    assert isinstance(found, Gym)
    return found


def scored(records: list[str], answers: list[str], **fields: Any) -> list[float | None]:
    async def main() -> list[float | None]:
        async with opened(GenerateConfig(rm_type="reasoning_gym", **fields), False) as scorer:
            prompts = [Prompt(id, 1, 0, record) for id, record in enumerate(records)]
            samples = [Sample(0, COMPLETED, answer, None, ()) for answer in answers]
            groups = [[reward_input(p, s)] for p, s in zip(prompts, samples, strict=True)]
            return [(await scorer.score_group(group))[0] for group in groups]

    return asyncio.run(main())


def test_a_prompts_id_says_which_item_it_is() -> None:
    found = gym("chain_sum?min_terms=2&max_terms=2")
    places = [0, 7, BLOCK - 1, BLOCK, 5_000_000_007]
    records = found.records(places)
    assert gym("chain_sum?min_terms=2&max_terms=2").records(reversed(places)) == records[::-1]
    assert len({json.loads(record)["prompt"] for record in found.records(range(200))}) > 150
    assert found.rows is None
    digests = {gym(task, seed).digest for task in ("chain_sum", "chain_sum?min_terms=2", "gcd") for seed in (1, 2)}
    assert len(digests) == 6


def test_items_are_the_same_in_every_process() -> None:
    code = "import sys; from producers.gym import Gym; sys.stdout.write(Gym(sys.argv[1], 1).records([3])[0])"
    said = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, GYM + "family_relationships"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_right_answers_are_right_wherever_they_stand() -> None:
    (record,) = gym("chain_sum").records([5])
    right = json.loads(record)["label"]
    answers = [
        *(right, f" {right}\n", rf"so \boxed{{{right}}}", f"<think>1</think> <answer>{right}</answer>"),
        *(f"it is {right}", f"<answer>{right}</answer> <answer>no</answer>", f"<think>{right}"),
    ]
    assert [score == 1 for score in scored([record] * len(answers), answers)] == [True] * 4 + [False] * 3


def test_tasks_are_scored_with_their_own_settings_after_a_way_through_json() -> None:
    tasks = ("knights_knaves", "mini_sudoku", "gsm_symbolic", "number_sorting?min_numbers=3&max_numbers=4")
    records = [gym(task).records([2])[0] for task in tasks]
    assert scored(records, [json.loads(record)["label"] for record in records]) == [1.0] * len(tasks)


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("nonsense", "Dataset 'nonsense' not registered"),
        ("chain_sum?no_such=1", "no_such"),
        ("chain_sum?min_terms=0", "--task reasoning_gym:chain_sum"),
        ("composite", "name one of its tasks"),
        ("ransom_note", "could not go on with the same ones"),
        ("arc_agi", "do not survive JSON"),
    ],
)
def test_a_task_that_cannot_be_fed_is_refused(task: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        gym(task)
    assert problem in str(caught.value)


def test_a_prompt_that_is_no_task_is_named() -> None:
    async def main() -> None:
        async with opened(GenerateConfig(rm_type="reasoning_gym"), False) as scorer:
            await scorer.score_group([RewardInput("q", 1, {}, "1", COMPLETED, 0, 7)])

    with pytest.raises(RewardError, match="prompt 7 is no task of it"):
        asyncio.run(main())
