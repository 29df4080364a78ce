from __future__ import annotations

import itertools

import numpy as np
import pytest
from trainer_groups import group, random_groups, sample, sequence

from pipeline.errors import GroupError
from pipeline.types import ABORTED, Group
from trainer.advantages import Estimator, centred, grpo
from trainer.batch import Microbatch, Passes, Unit, aggregated, microbatches, minibatches, shares, units
from trainer.credit import credit

GRPO, CENTRED = Estimator(grpo), Estimator(centred)


def credited(groups: list[Group], estimator: Estimator = GRPO) -> list[Unit]:
    return credit(units(groups), estimator, False)


def test_each_trained_token_is_predicted_by_the_position_before_it() -> None:
    answer = sequence([5, 6, 7], [8, 9, 10, 11], mask=[1, 0, 1, 0])
    (unit,) = units([group(4, sample(0, 1.0, answer))])
    (row,) = unit.rows
    assert unit.id == (4, 0)
    assert row.inputs.tolist() == [5, 6, 7, 8, 9]
    assert row.predictors.tolist() == [2, 4]
    assert row.targets.tolist() == [8, 10]


def test_rows_are_padded_on_the_right_and_their_tokens_lie_flat() -> None:
    short, long = sequence([5], [6, 7]), sequence([5, 5], [8, 9], logprob=-0.5)
    found = credited([group(0, sample(0, 0.0, short), sample(1, 1.0, long))], CENTRED)
    (micro,) = microbatches(aggregated(found, "token", 1), Passes(100))
    assert micro.ids == ((0, 1, 0), (0, 0, 0))
    assert micro.input_ids.tolist() == [[5, 5, 8], [5, 6, 0]]
    assert micro.predictors.tolist() == [1, 2, 3, 4]
    assert micro.targets.tolist() == [8, 9, 6, 7]
    assert micro.logprobs.tolist() == [-0.5, -0.5, -3, -3]
    assert micro.advantages.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert micro.weights.tolist() == [0.25] * 4
    assert micro.lengths.tolist() == [2, 2]


def test_every_sequence_of_a_sample_has_the_samples_advantage() -> None:
    turns = sample(0, 1.0, sequence([3], [4]), sequence([3, 4, 5], [6, 7]))
    found = credited([group(0, turns, sample(1, 0.0, sequence([3], [9])))], CENTRED)
    assert [[row.advantages.tolist() for row in unit.rows] for unit in found] == [[[0.5], [0.5, 0.5]], [[-0.5]]]


def test_aborted_removed_unscored_and_empty_samples_are_not_trained_on() -> None:
    q = sequence([3], [4, 5])
    members = (
        sample(0, 1.0, q),
        sample(1, 1.0, q, status=ABORTED),
        sample(2, 1.0, q, metadata={"remove_sample": True}),
        sample(3, None, q),
        sample(4, 0.0, sequence([3], [])),
        sample(5, 0.0, sequence([3], [4], mask=[0])),
        sample(6, 0.0, q, metadata={"remove_sample": False}),
    )
    found = units([group(0, *members)])
    assert [unit.id[1] for unit in found if unit.rows] == [0, 6]


def test_an_aborted_reward_leaves_the_baseline_alone_and_a_removed_one_does_not() -> None:
    q = sequence([3], [4])

    def first(**changes: object) -> float:
        members = (sample(0, 1.0, q), sample(1, 0.0, q), sample(2, 1.0, q, **changes))
        return float(credited([group(0, *members)], CENTRED)[0].rows[0].advantages[0])

    assert first(status=ABORTED) == pytest.approx(1 / 2)
    assert first(metadata={"remove_sample": True}) == pytest.approx(1 / 3)


def test_groups_of_any_size_in_any_order_keep_their_own_baseline() -> None:
    """BB-34: of 4, 3, 4 and 1, one with equal rewards."""
    rewards = {0: [1.0, 0.0, 0.0, 1.0], 1: [1.0, 1.0, 1.0], 2: [0.0, 2.0, 0.0, 2.0], 3: [5.0]}
    groups = [
        group(id, *(sample(i, r, sequence([3], [4])) for i, r in enumerate(scores))) for id, scores in rewards.items()
    ]
    expected = [(id, i, float(np.float32(a))) for id, scores in rewards.items() for i, a in enumerate(grpo(scores))]
    for shuffled in itertools.permutations(groups):
        found = [(*unit.id, float(unit.rows[0].advantages[0])) for unit in credited([*shuffled])]
        assert found == expected
    assert [a for id, _, a in expected if id in (1, 3)] == [0, 0, 0, 0]


def test_a_sequence_without_a_prompt_is_refused() -> None:
    with pytest.raises(GroupError, match="prompt"):
        units([group(0, sample(0, 1.0, sequence([], [4])))])


def test_minibatches_hold_each_sample_once_and_their_order_follows_the_seed() -> None:
    found = units(random_groups(5, 4))
    parts = minibatches(found, 6, (1, 2))
    assert [len(part) for part in parts] == [6, 6, 6, 2]
    assert sorted(unit.id for part in parts for unit in part) == [unit.id for unit in found]
    assert minibatches(found, 6, (1, 2)) == parts
    assert minibatches(found, 6, (1, 3)) != parts


def test_without_a_size_all_samples_make_one_minibatch() -> None:
    found = units(random_groups(2, 3))
    assert minibatches(found, None, (0, 0)) == [found]
    assert minibatches(found, 6, (0, 0)) == [found]
    assert minibatches([], None, (0, 0)) == []


def tokens_of(micro: Microbatch) -> list[tuple[int, ...]]:
    flat = micro.input_ids.flatten()[micro.predictors]
    return list(zip(flat.tolist(), micro.targets.tolist(), micro.advantages.tolist(), strict=True))


@pytest.mark.parametrize("budget", [1, 12, 40, 10_000])
def test_packing_keeps_to_the_budget_and_loses_no_token(budget: int) -> None:
    found = credited(random_groups(6, 5))
    micros = microbatches(found, Passes(budget))
    assert all(m.input_ids.numel() <= budget or len(m.ids) == 1 for m in micros)
    (whole,) = microbatches(found, Passes(1 << 40))
    assert sorted(t for m in micros for t in tokens_of(m)) == sorted(tokens_of(whole))
    assert sum(len(row.targets) for unit in found for row in unit.rows) == len(whole.targets)


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_passes_may_hold_so_many_sequences_whatever_their_length(rows: int) -> None:
    found = credited(random_groups(6, 5))
    micros = microbatches(found, Passes(1, rows))
    assert {len(m.ids) for m in micros} == {min(rows, 30)}
    (whole,) = microbatches(found, Passes(1 << 40))
    assert sorted(t for m in micros for t in tokens_of(m)) == sorted(tokens_of(whole))


def test_ranks_may_have_as_many_samples_instead_of_as_many_tokens() -> None:
    found = units(random_groups(7, 3))
    parts = shares(found, 4, balanced=False)
    assert [len(part) for part in parts] == [6, 5, 5, 5]
    assert sorted(unit.id for part in parts for unit in part) == [unit.id for unit in found]
    assert parts != shares(found, 4)


def test_the_weights_of_a_minibatch_add_up_to_a_mean_of_its_kind() -> None:
    """Samples of 2, 2 (in two sequences), 1 and no tokens."""
    a, b = sample(0, 1.0, sequence([3], [4, 5])), sample(1, 0.0, sequence([3], [6]), sequence([3], [7]))
    found = units([group(0, a, b, sample(2, 1.0, sequence([3], [8])), sample(3, None, sequence([3], [9])))])

    def weights(kind: str) -> list[list[float]]:
        return [[row.weight for row in unit.rows] for unit in aggregated(found, kind, 10)]

    assert weights("token") == [[1 / 5], [1 / 5, 1 / 5], [1 / 5], []]
    assert weights("sequence") == [[1 / 8], [1 / 8, 1 / 8], [1 / 4], []]
    assert weights("constant") == [[1 / 40], [1 / 40, 1 / 40], [1 / 40], []]


def test_a_batch_with_nothing_to_train_on_has_no_microbatches() -> None:
    assert microbatches([Unit((0, 0), 1.0, ())], Passes(100)) == []


def test_the_tensors_have_the_types_that_the_model_takes() -> None:
    (micro,) = microbatches(units(random_groups(1, 2)), Passes(100))
    kinds = [micro.input_ids, micro.predictors, micro.targets, micro.logprobs, micro.advantages]
    assert [str(t.dtype) for t in kinds] == ["torch.int64"] * 3 + ["torch.float32"] * 2
    assert np.prod(micro.input_ids.shape) > micro.predictors.max()
