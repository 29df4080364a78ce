"""Filters of groups where they are made, and of samples in the assembled batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from consumers.filters import remove, removed, rollout_sample_filter
from pipeline.errors import GroupError, UsageError
from pipeline.types import COMPLETED, Group, Prompt, Sample, Sequence, Span
from producers import filters
from producers.filters import Verdict


def group(*rewards: float | None, id: int = 0) -> Group:
    tokens = np.arange(3, dtype=np.int32)
    sequence = Sequence(tokens, tokens, np.zeros(3, np.float32), np.ones(3, np.uint8), (Span(1, 0, 3),))
    samples = tuple(Sample(n, COMPLETED, "t", reward, (sequence,), {"n": n}) for n, reward in enumerate(rewards))
    return Group(Prompt(id, 1, 0, "{}"), samples, "w", 1.0)


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((1.0, 1.0), "zero_std_1.0"),
        ((-0.0, 0.0), "zero_std_0.0"),
        ((-0.5, -0.5, -0.5), "zero_std_-0.5"),
        ((0.123, 0.123), "zero_std_0.1"),
        ((0.1 + 0.2, 0.3), "zero_std_0.3"),
        ((1e300, 1e300), "zero_std_1e300"),
        ((1.0,), "zero_std_1.0"),
        ((1.0, None, 1.0), "zero_std_1.0"),
        ((None, None), "unscored"),
    ],
)
def test_a_group_with_equal_rewards_is_dropped_under_its_reward(rewards: tuple[float, ...], reason: str) -> None:
    judge = filters.load("producers.filters.nonzero_std")
    assert judge(group(*rewards)) == Verdict(False, reason)


@pytest.mark.parametrize("rewards", [(0.0, 1.0), (1.0, 1.0, 1.001), (None, 0.0, 1.0), (-1.0, 1.0)])
def test_a_group_whose_rewards_differ_is_kept(rewards: tuple[float, ...]) -> None:
    assert filters.load("producers.filters.nonzero_std")(group(*rewards)) == Verdict(True)


def says(verdict: object) -> Callable[[Group], Any]:
    return lambda group: verdict


drop_softly, drop_oddly = says(Verdict(False)), says(Verdict(False, "no spaces, please"))
drop_at_length, drop_tersely, drop_by_number = says(Verdict(False, "x" * 65)), says(Verdict(False, "")), says(False)
drop_soundly = says(Verdict(False, "A-z_0.9" + "x" * 57))


@pytest.mark.parametrize("name", ["drop_softly", "drop_oddly", "drop_at_length", "drop_tersely"])
def test_a_group_is_not_dropped_without_a_sound_reason(name: str) -> None:
    judge = filters.load(f"{__name__}.{name}")
    with pytest.raises(UsageError, match=f"--dynamic-sampling-filter-path {__name__}.{name}: the reason .* must match"):
        judge(group(1.0))


def test_a_filter_gives_a_verdict_and_nothing_else() -> None:
    with pytest.raises(UsageError, match=r"gave a bool, not a producers\.filters\.Verdict"):
        filters.load(f"{__name__}.drop_by_number")(group(1.0))
    assert not filters.load(f"{__name__}.drop_soundly")(group(1.0)).keep


def test_a_sample_filter_marks_samples_and_leaves_the_batch_as_it_was() -> None:
    batch = [group(0.0, 1.0, id=n) for n in range(2)]

    def drop_the_first(groups: list[Group]) -> list[Group]:
        return [replace(g, samples=(remove(g.samples[0]), *g.samples[1:])) for g in groups]

    result = rollout_sample_filter(drop_the_first, batch)
    assert [[removed(s) for s in g.samples] for g in result] == [[True, False]] * 2
    assert result[0].samples[0].metadata == {"n": 0, "remove_sample": True}
    assert not any(removed(s) for g in batch for s in g.samples)
    assert result[0].samples[0].sequences is batch[0].samples[0].sequences


def no_longer(groups: list[Group]) -> list[Group]:
    return groups[:1]


def fewer_samples(groups: list[Group]) -> list[Group]:
    return [replace(g, samples=g.samples[:1]) for g in groups]


def change(**fields: Any) -> Callable[[list[Group]], list[Group]]:
    return lambda groups: [replace(g, samples=tuple(replace(s, **fields) for s in g.samples)) for g in groups]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (no_longer, "sample filter no_longer: gave 1 groups for 2"),
        (lambda groups: [*groups, groups[0]], "gave 3 groups for 2"),
        (lambda groups: groups.clear() or groups, "gave 0 groups for 2"),
        (fewer_samples, "prompt 0: 1 samples for 2"),
        (lambda groups: groups[::-1], "prompt 0: prompt 1 stands in its place"),
        (lambda groups: None, "must give the list of groups back"),
        (lambda groups: [g.samples for g in groups], "must give the list of groups back"),
        (change(reward=0.5), "sample 0 is changed in more than its metadata"),
        (change(index=1), "sample 0 is changed"),
        (change(text="u"), "sample 0 is changed"),
        (change(sequences=()), "sample 0 has other sequences"),
    ],
)
def test_a_sample_filter_that_does_more_than_mark_is_refused(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(GroupError) as caught:
        rollout_sample_filter(function, [group(0.0, 1.0, id=n) for n in range(2)])
    assert problem in str(caught.value)
