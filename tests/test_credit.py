"""Each token's advantage, against numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from trainer_groups import group, random_groups, sample, sequence

from pipeline.types import Group
from trainer.advantages import ESTIMATORS
from trainer.batch import units
from trainer.credit import credit


def pair(id: int, *rewards: float) -> Group:
    """Answers of one token, two tokens, and so on."""
    return group(id, *(sample(i, r, sequence([3], range(4, 5 + i))) for i, r in enumerate(rewards)))


def given(
    groups: list[Group], name: str, whitened: bool, costs: dict[tuple[int, int], list[float]] | None = None
) -> list[list[float]]:
    penalties = {id: np.array(cost) for id, cost in (costs or {}).items()}
    found = credit(units(groups), ESTIMATORS[name], whitened, penalties)
    return [[float(a) for row in unit.rows for a in row.advantages] for unit in found]


def test_whitened_over_tokens_not_over_samples() -> None:
    # tokens 1 | 0 0: mean 1/3, variance (4/9 + 1/9 + 1/9) / 2 = 1/3
    found = given([pair(0, 1.0, 0.0)], "reinforce_plus_plus", True)
    scale = (1 / 3 + 1e-8) ** 0.5
    assert found[0] == pytest.approx([2 / 3 / scale])
    assert found[1] == pytest.approx([-1 / 3 / scale] * 2)


def test_whitening_crosses_groups_and_a_group_baseline_comes_first() -> None:
    # advantages -1/2 | 1/2 1/2 and -2 | 2 2 over six tokens: mean 5/12
    found = given([pair(0, 0.0, 1.0), pair(1, 0.0, 4.0)], "reinforce_plus_plus_baseline", True)
    values = np.array([-0.5, 0.5, 0.5, -2, 2, 2])
    expected = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    assert [a for part in found for a in part] == pytest.approx(expected.tolist())


def test_a_batch_of_equal_rewards_teaches_exactly_nothing() -> None:
    assert given([pair(0, 0.3, 0.1 + 0.2), pair(1, 0.3)], "reinforce_plus_plus", True) == [[0], [0, 0], [0]]


def test_a_penalty_lowers_the_reward_before_the_group_is_compared() -> None:
    # 1 - 0.5 against 0 - (0.1 + 0.2)
    found = given([pair(0, 1.0, 0.0)], "dr_grpo", False, {(0, 0): [0.5], (0, 1): [0.1, 0.2]})
    assert found[0] == pytest.approx([0.4])
    assert found[1] == pytest.approx([-0.4, -0.4])


def test_by_token_a_penalty_counts_from_its_token_on() -> None:
    found = given([pair(0, 1.0, 0.5)], "reinforce_plus_plus", False, {(0, 0): [0.5], (0, 1): [0.1, 0.2]})
    assert found[0] == pytest.approx([0.5])
    assert found[1] == pytest.approx([0.5 - 0.3, 0.5 - 0.2])


def test_an_unscored_sample_has_no_token_and_moves_nobody() -> None:
    with_one = group(0, *pair(0, 1.0, 0.0).samples, sample(2, None, sequence([3], [4, 5, 6])))
    found = given([with_one], "reinforce_plus_plus", True)
    assert found[:2] == given([pair(0, 1.0, 0.0)], "reinforce_plus_plus", True)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("whitened", [False, True])
def test_order_changes_nothing(name: str, whitened: bool) -> None:
    groups = random_groups(5, 4)
    shuffled = [groups[i] for i in (3, 0, 4, 2, 1)]
    assert given(groups, name, whitened) == given(shuffled, name, whitened)
