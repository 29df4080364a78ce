from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import GroupError
from trainer.advantages import ESTIMATORS, Advantages, Rewards, centred, grpo, plain, rloo


def test_grpo_divides_by_the_unbiased_deviation() -> None:
    # mean 1/2, deviation sqrt(4 * 0.25 / 3) = 0.57735
    assert grpo([1, 0, 0, 1]) == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)


def test_without_deviation_only_the_mean_is_taken_off() -> None:
    assert centred([2, 0, 1, 5]).tolist() == [0, -2, -1, 3]


def test_unscored_members_leave_the_baseline_alone_and_get_nothing() -> None:
    """BB-35."""
    # mean 2/3, deviation sqrt((1/9 + 4/9 + 1/9) / 2) = 0.57735
    found = grpo([1, None, 0, 1])
    assert found == pytest.approx([0.577349, 0, -1.154699, 0.577349], abs=1e-6)
    assert found[1] == 0


@pytest.mark.parametrize(
    "rewards",
    [
        [],
        [3.0],
        [None] * 4,
        [None, 0.7, None],
        [0.0] * 8,
        [0.1 + 0.2, 0.3, 0.3],
        [float(np.float32(0.1)), 0.1],
        [1e9, 1e9 + 1],
        [-5.0, -5.0],
    ],
)
@pytest.mark.parametrize("of_group", [grpo, centred, rloo])
def test_what_teaches_nothing_gives_exactly_zero(
    rewards: list[float | None], of_group: Callable[[Rewards], Advantages]
) -> None:
    assert of_group(rewards).tolist() == [0.0] * len(rewards)


def test_leave_one_out_takes_off_the_mean_of_the_others() -> None:
    # 2 - (0 + 1 + 5) / 3, 0 - 8 / 3, 1 - 7 / 3, 5 - 3 / 3
    assert rloo([2, 0, 1, 5]) == pytest.approx([0, -8 / 3, -4 / 3, 4])
    assert rloo([2, None, 0]) == pytest.approx([2, 0, -2])


def test_reinforce_takes_off_nothing_within_the_group() -> None:
    assert plain([1.0, None, 1.0, 0.5]).tolist() == [1, 0, 1, 0.5]


def test_every_estimator_refuses_what_is_not_finite_and_ignores_what_is_unscored() -> None:
    for estimator in ESTIMATORS.values():
        assert estimator.of_group([None, None]).tolist() == [0, 0]
        with pytest.raises(GroupError, match="finite"):
            estimator.of_group([1.0, math.nan])


def test_a_small_difference_that_is_no_noise_counts() -> None:
    assert grpo([0, 1e-4]) == pytest.approx([-0.7, 0.7], abs=0.02)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(GroupError, match="finite"):
        grpo([1.0, bad, None])


def test_every_estimator_stands_in_the_documents_table_of_tests_and_these_are_there() -> None:
    tests = Path(__file__).parent
    text = (tests.parent / "docs" / "training.md").read_text(encoding="utf-8")
    table = text.partition("## What holds it to its source")[2].partition("\n## ")[0]
    assert set(ESTIMATORS) <= set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    there = set(re.findall(r"^def (test_\w+)", "".join(p.read_text() for p in tests.glob("test_*.py")), re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", table))
    assert len(named) > 20
    assert named <= there
