"""What a trace makes of turns and what stands between them: masks, log-probabilities, versions."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from rig import records

from pipeline.codec import decode, encode
from pipeline.types import COMPLETED, Group, Prompt, Sample, Span
from producers.trace import Trace, Turn


def turn(context: np.ndarray | list[int], tokens: list[int], *versions: int | None) -> Turn:
    """One token by each version, log-probability -1 each."""
    spans = tuple(Span(version, at, at + 1) for at, version in enumerate(versions))
    logprobs = np.full(len(tokens), -1, np.float32)
    return Turn(np.array(tokens, np.int32), logprobs, "stop", spans, np.array(context, np.int32), "text")


def test_what_the_model_sampled_is_trained_on_and_nothing_else() -> None:
    trace = Trace([1, 2])
    trace.sampled(turn([1, 2], [3, 4], 7, 7))
    trace.observed([5])
    trace.observed(np.array([6, 7], np.int64))
    trace.sampled(turn([1, 2, 3, 4, 5, 6, 7], [8, 9], 7, 8))
    trace.observed([10])
    made = trace.sequence()
    assert made.prompt_tokens.tolist() == [1, 2]
    assert made.tokens.tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert made.loss_mask.tolist() == [1, 1, 0, 0, 0, 1, 1, 0]
    assert made.logprobs.tolist() == [-1, -1, 0, 0, 0, -1, -1, 0]
    assert made.versions == (Span(7, 0, 6), Span(8, 6, 8))
    assert trace.tokens.tolist() == list(range(1, 11))
    kinds = [made.prompt_tokens.dtype, made.tokens.dtype, made.logprobs.dtype, made.loss_mask.dtype]
    assert kinds == [np.int32, np.int32, np.float32, np.uint8]


def test_what_was_only_seen_counts_to_the_version_before_it() -> None:
    trace = Trace([1])
    trace.sampled(turn([1], [2], 4))
    trace.observed([3, 3])
    trace.sampled(turn([1, 2, 3, 3], [5, 5], None, 6))
    trace.observed([6])
    assert trace.sequence().versions == (Span(4, 0, 3), Span(None, 3, 4), Span(6, 4, 6))


def test_what_is_observed_before_the_first_turn_belongs_to_the_prompt() -> None:
    trace = Trace([])
    trace.observed([1])
    trace.observed([2, 3])
    trace.sampled(turn([1, 2, 3], [4], 0))
    assert trace.sequence().prompt_tokens.tolist() == [1, 2, 3]
    assert trace.sequence().tokens.tolist() == [4]


@pytest.mark.parametrize("context", [[1], [1, 2, 4], [1, 2, 3, 3], []])
def test_a_turn_that_was_sampled_after_other_tokens_is_refused(context: list[int]) -> None:
    trace = Trace([1, 2, 3])
    with pytest.raises(ValueError, match="not the 3 of this trace"):
        trace.sampled(turn(context, [4], 0))
    assert trace.tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("value", ["text", [1.5], [[1]], [-1], [1 << 31], 5, None, ["1"]])
def test_only_token_ids_in_a_row_are_tokens(value: object) -> None:
    with pytest.raises(ValueError, match="token ids"):
        Trace(value)  # type: ignore[arg-type]
    trace = Trace([1])
    with pytest.raises(ValueError, match="token ids"):
        trace.observed(value)  # type: ignore[arg-type]


def test_nobody_changes_a_trace_from_outside() -> None:
    given = np.array([1, 2], np.int32)
    trace = Trace(given)
    given[0] = 9
    trace.observed([3])
    with pytest.raises(ValueError, match="read-only"):
        trace.tokens[0] = 9
    assert trace.tokens.tolist() == [1, 2, 3]


TOKENS = some.lists(some.integers(0, 255), min_size=1, max_size=4)
VERSIONS = some.lists(some.integers(1, 5), min_size=4, max_size=4)
STEPS = some.lists(some.tuples(some.booleans(), TOKENS, VERSIONS), max_size=8)


@given(prompt=TOKENS, steps=STEPS, last=TOKENS)
def test_any_trace_is_a_sequence_that_a_message_carries(
    prompt: list[int], steps: list[tuple[bool, list[int], list[int]]], last: list[int]
) -> None:
    trace = Trace(prompt)
    sampled: list[tuple[int, int]] = []
    for ours, tokens, versions in [*steps, (True, last, [3, 3, 2, 2])]:
        if ours:
            sampled += [(len(trace.tokens) + at, versions[at]) for at in range(len(tokens))]
            trace.sampled(turn(trace.tokens, tokens, *versions[: len(tokens)]))
        else:
            trace.observed(tokens)
    made = trace.sequence()
    first = len(made.prompt_tokens)
    assert [*made.prompt_tokens, *made.tokens] == trace.tokens.tolist()
    assert (np.flatnonzero(made.loss_mask) + first).tolist() == [at for at, _ in sampled]
    stamped = {at + first: span.version for span in made.versions for at in range(span.start, span.end)}
    assert all(stamped[at] == version for at, version in sampled)
    assert {span.version for span in made.versions} == {version for _, version in sampled}
    group = Group(Prompt(0, 1, 0, records(0, 1)[0]), (Sample(0, COMPLETED, "", 1.0, (made,)),), "w", 0.1)
    (again,) = decode(encode(group)).samples[0].sequences
    assert json.dumps([again.tokens.tolist(), again.versions]) == json.dumps([made.tokens.tolist(), made.versions])
