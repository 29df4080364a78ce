"""How old a group is, what is too old, and how far generation may run ahead. No Redis."""

from __future__ import annotations

import random

import pytest
from make import ABORT, group, sequence

from consumers.staleness import ABORTED, FRESH, FUTURE, GIVEN_UP, STALE, UNKNOWN, Limit, by_verdict, statistics
from pipeline.errors import UsageError
from pipeline.room import ahead, bound, lag, slack
from pipeline.types import COMPLETED, Group, Prompt, Sample

PROMPT = Prompt(0, 1, 0, "{}")

# -- room


@pytest.mark.parametrize(
    ("staleness", "batch", "interval", "groups"),
    [(0, 4, 1, 4), (1, 4, 1, 8), (2, 4, 3, 36), (0, 1, 1, 1), (0, 4, 2, 8)],
)
def test_the_bound_is_one_batch_an_update_more_than_the_staleness(
    staleness: int, batch: int, interval: int, groups: int
) -> None:
    assert bound(staleness, batch, interval, queue_capacity=1) == groups


def test_without_a_staleness_bound_the_queue_is_the_bound() -> None:
    assert bound(None, 4, 1, queue_capacity=11) == 11


def test_a_queue_that_can_never_fill_what_an_update_needs_is_refused_with_the_numbers() -> None:
    assert bound(None, 4, 2, queue_capacity=8) == 8
    with pytest.raises(UsageError, match=r"queue of 7 groups .* 4 x --update-weights-interval 2 = 8: raise"):
        bound(None, 4, 2, queue_capacity=7)


def test_a_batch_of_slack_is_left_where_there_are_batches_enough() -> None:
    assert [slack(staleness, 4, 3) for staleness in (None, 0, 1, 2, 3, 9)] == [0, 0, 0, 0, 12, 12]
    assert [ahead(48, 12, unsettled) for unsettled in (0, 23, 24, 48)] == [48, 48, 36, 36]
    assert ahead(48, 0, 0) == 48


# -- lag


def test_lag_counts_publications() -> None:
    assert [lag(version, 5) for version in (1, 4, 5)] == [4, 1, 0]


def test_an_unknown_version_has_no_lag() -> None:
    assert lag(None, 5) is None
    assert lag(None, 5, [(4, 2)]) is None


def test_a_newer_version_than_the_current_has_a_negative_lag() -> None:
    assert lag(6, 5) == -1
    assert lag(6, 5, [(4, 2)]) == -1


@pytest.mark.parametrize(
    ("version", "age"),
    [
        (8, 0),
        (7, 1),
        (6, 2),  # the restored weights under their new number
        (3, 2),  # the same weights under their old one
        (2, 3),
        (4, 3),  # given up at the resume: one update up, two down
        (5, 4),
    ],
)
def test_after_a_resume_lag_is_the_way_over_the_version_that_was_restored(version: int, age: int) -> None:
    assert lag(version, 8, [(6, 3)]) == age


def test_a_resume_that_is_not_published_yet_does_not_count() -> None:
    assert lag(4, 5, [(6, 3)]) == 1


def test_two_resumes_of_the_same_checkpoint_are_both_counted_from_it() -> None:
    lineage = [(6, 3), (9, 3)]
    assert [lag(version, 10, lineage) for version in (9, 3, 2, 7, 6, 5)] == [1, 1, 2, 5, 4, 3]


class History:
    """A run that trains and is now and then resumed from an earlier version of its present branch."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.parent: dict[int, tuple[int, int]] = {}
        "version -> (version it came from, updates between them)"
        self.lineage: dict[int, tuple[tuple[int, int], ...]] = {1: ()}
        self.current = 1
        for version in range(2, 30):
            if draw.random() < 0.25:
                restored = draw.choice(self.path(self.current))
                self.parent[version] = restored, 0
                self.lineage[version] = (*self.lineage[restored], (version, restored))
            else:
                self.parent[version] = self.current, 1
                self.lineage[version] = self.lineage[self.current]
            self.current = version

    def path(self, version: int) -> list[int]:
        """From a version back to the first."""
        found = [version]
        while found[-1] in self.parent:
            found.append(self.parent[found[-1]][0])
        return found

    def updates(self, version: int, ancestor: int) -> int:
        path = self.path(version)
        return sum(self.parent[v][1] for v in path[: path.index(ancestor)])

    def distance(self, version: int) -> int:
        """Updates back to where the two part, and up again."""
        fork = next(v for v in self.path(self.current) if v in self.path(version))
        return self.updates(self.current, fork) + self.updates(version, fork)


@pytest.mark.parametrize("seed", range(40))
def test_lag_is_the_number_of_updates_on_the_present_branch_and_never_less_on_others(seed: int) -> None:
    history = History(seed)
    lineage = history.lineage[history.current]
    for version in range(1, history.current + 1):
        found, true = lag(version, history.current, lineage), history.distance(version)
        assert found is not None
        assert found >= true
        if version in history.path(history.current):
            assert found == true


# -- verdicts


def limit(current: int, most: int | None, lineage: tuple[tuple[int, int], ...] = ()) -> Limit:
    return Limit(current, lineage, most)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_group_at_the_limit_is_fresh_and_one_beyond_it_is_stale(k: int) -> None:
    current = 7
    rows = {current - k - 1: STALE, current - k: FRESH, current: FRESH, current + 1: FUTURE}
    assert {version: limit(current, k).judge(group(PROMPT, version)) for version in rows} == rows


def test_without_a_limit_everything_known_is_fresh() -> None:
    assert limit(900, None).judge(group(PROMPT, 1)) == FRESH
    assert limit(900, None).judge(group(PROMPT, None)) == UNKNOWN
    assert limit(900, None).judge(group(PROMPT, 901)) == FUTURE


def test_the_oldest_token_decides_not_the_last_and_not_the_mean() -> None:
    assert limit(4, 0).judge(group(PROMPT, 3, 4, 4, 4)) == STALE
    assert limit(4, 0).age(group(PROMPT, 3, 4, 4, 4)) == 1
    assert limit(4, 1).judge(group(PROMPT, 3, 4, 4, 4)) == FRESH


def test_the_oldest_token_is_looked_for_in_every_sequence_of_every_sample() -> None:
    turns = Sample(1, COMPLETED, "", 0.0, (sequence(9, 9), sequence(9, 6), sequence(9)))
    of = Group(PROMPT, (Sample(0, COMPLETED, "", 0.0, (sequence(9),)), turns), "w1", 0.1)
    assert limit(9, 2).age(of) == 3
    assert limit(9, 2).judge(of) == STALE


def test_one_token_of_unknown_version_makes_a_group_unknown_however_fresh_the_rest() -> None:
    assert limit(4, 2).judge(group(PROMPT, 4, None, 4)) == UNKNOWN
    assert limit(4, 2).age(group(PROMPT, 4, None, 4)) is None


def test_one_token_of_a_version_that_was_never_published_makes_a_group_an_error_of_history() -> None:
    assert limit(4, 2).judge(group(PROMPT, 3, 5)) == FUTURE


def test_an_aborted_sample_makes_a_group_aborted_whatever_its_versions() -> None:
    for version in (None, 1, 4, 5):
        assert limit(4, 0).judge(group(PROMPT, version, **ABORT)) == ABORTED


def test_a_group_without_a_token_is_never_fresh() -> None:
    empty = Sample(0, COMPLETED, "", 0.0, (sequence(),))
    assert limit(4, None).judge(Group(PROMPT, (empty,), "w1", 0.1)) == UNKNOWN


def test_a_branch_that_was_given_up_is_as_old_as_the_way_back() -> None:
    resumed = limit(8, 3, ((6, 3),))
    assert [resumed.judge(group(PROMPT, version)) for version in (4, 5, 3)] == [FRESH, GIVEN_UP, FRESH]


def test_only_what_is_too_old_because_of_a_resume_is_not_to_blame() -> None:
    resumed = limit(8, 0, ((6, 3),))
    assert [resumed.judge(group(PROMPT, version)) for version in (2, 3, 4, 5, 6, 7, 8)] == [
        *(STALE, STALE, GIVEN_UP, GIVEN_UP, STALE, STALE, FRESH)
    ]
    assert resumed.judge(group(PROMPT, 5, 7, 8)) == GIVEN_UP
    assert limit(5, 0, ((6, 3),)).judge(group(PROMPT, 4)) == STALE


def test_groups_are_sorted_out_by_verdict() -> None:
    groups = [group(Prompt(id, 1, 0, "{}"), version) for id, version in enumerate((4, 3, None, 4))]
    found = by_verdict(groups, limit(4, 0))
    assert {why: [g.prompt.id for g in gs] for why, gs in found.items()} == {FRESH: [0, 3], STALE: [1], UNKNOWN: [2]}


def test_staleness_of_a_batch_is_its_mean_and_its_maximum() -> None:
    counts = {"staleness/count_0": 1, "staleness/count_1": 2, "staleness/count_6": 1}
    assert statistics([6, 0, 1, 1]) == {"avg_staleness": 2.0, "max_staleness": 6.0, **counts}
    assert statistics([]) == {"avg_staleness": 0.0, "max_staleness": 0.0}
