"""From a lease to a group, without Redis: n samples or an error, and nothing left running in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest
from make import Hand, maker_of, record, until
from rig import agreed

from pipeline.errors import EngineDown, EngineError, RequestRefused, RewardError
from pipeline.types import COMPLETED, TRUNCATED, Group, Policy, Prompt, Span
from producers.engines.echo import EchoEngine
from producers.group import Progress, SampleAborted, seed_of
from producers.rewards import RewardInput
from producers.rewards.custom import Custom

PROMPT = Prompt(7, 1, 0, record(7))


def policy(version: int) -> Policy:
    return Policy(version, "", "hf", "", version, 0.0)


def made(engine: EchoEngine, prompt: Prompt = PROMPT, **how: Any) -> Group:
    rules = agreed(**{"n_samples_per_prompt": 3, **how.pop("rules", {})})

    async def go() -> Group:
        await engine.start()
        return await maker_of(engine, rules, **how).make(prompt, Progress(), asyncio.Event())

    return asyncio.run(go())


def by_hand(
    act: Callable[[Hand, asyncio.Task[Group], Progress], Coroutine[Any, Any, None]], slots: int = 64, n: int = 3
) -> Hand:
    """Makes a group of n with a hand-held engine; `act` runs once its first requests are there."""

    async def go() -> Hand:
        engine, progress = Hand(), Progress()
        await engine.start()
        await engine.load(policy(1))
        maker = maker_of(engine, agreed(n_samples_per_prompt=n), slots=slots)
        task = asyncio.create_task(maker.make(PROMPT, progress, engine.poke))
        await until(lambda: len(engine.held) == min(slots, n))
        await act(engine, task, progress)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return engine

    return asyncio.run(go())


# -- what a group is


def test_a_group_has_n_samples_in_order_with_what_the_engine_gave() -> None:
    group = made(EchoEngine("0", 5))
    assert [s.index for s in group.samples] == [0, 1, 2]
    assert group.prompt is PROMPT
    for sample in group.samples:
        (sequence,) = sample.sequences
        assert bytes(sequence.prompt_tokens.tolist()) == b"p7"
        assert (len(sequence.tokens), len(sequence.logprobs), sequence.loss_mask.tolist()) == (5, 5, [1] * 5)
        assert sample.text == bytes(sequence.tokens.tolist()[:-1]).decode()
        assert (sample.status, sample.reward) == (COMPLETED, 4.0)


def test_an_answer_cut_off_at_the_length_limit_is_truncated() -> None:
    group = made(EchoEngine("0", 9), rules={"rollout_max_response_len": 6})
    assert {s.status for s in group.samples} == {TRUNCATED}
    assert {len(s.sequences[0].tokens) for s in group.samples} == {6}


def test_answers_depend_on_seed_prompt_and_sample_and_not_on_worker_or_attempt() -> None:
    def texts(prompt: Prompt, **how: Any) -> list[str]:
        return [s.text for s in made(EchoEngine("0", 30), prompt, **how).samples]

    first = texts(PROMPT)
    assert len(set(first)) == 3
    assert texts(Prompt(7, 4, 3, PROMPT.record), worker="w2") == first
    assert texts(PROMPT, rules={"rollout_seed": 43}) != first
    assert texts(Prompt(8, 1, 0, PROMPT.record)) != first


def test_seeds_have_63_bits_and_do_not_collide() -> None:
    seeds = {seed_of(run, prompt, i) for run in range(3) for prompt in range(100) for i in range(8)}
    assert len(seeds) == 2400
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert max(seeds) > 1 << 62


def test_each_reward_goes_to_its_own_sample() -> None:
    def reward(given: RewardInput) -> float:
        return given.index / 10

    assert [s.reward for s in made(EchoEngine("0", 3), scorer=Custom("t.reward", reward)).samples] == [0.0, 0.1, 0.2]


# -- progress


def test_progress_tells_running_from_finished_samples_and_each_one_that_ends_pokes() -> None:
    async def act(engine: Hand, task: asyncio.Task[Group], progress: Progress) -> None:
        assert (progress.running, progress.finished, engine.poke.is_set()) == (3, 0, False)
        engine.end(7, 1)
        await until(lambda: progress.finished == 1)
        assert (progress.running, engine.poke.is_set()) == (2, True)
        engine.end(7)
        await task
        assert (progress.running, progress.finished) == (0, 0)

    by_hand(act)


def test_the_oldest_version_is_the_one_when_the_first_request_was_sent() -> None:
    async def act(engine: Hand, task: asyncio.Task[Group], progress: Progress) -> None:
        assert progress.oldest == 1
        engine.advance(7, 0.5)
        await engine.load(policy(2))
        engine.end(7)
        await until(lambda: len(engine.sent) == 3)
        engine.end(7)
        group = await task
        assert progress.oldest == 1
        assert group.samples[0].sequences[0].versions == (Span(1, 0, 2), Span(2, 2, 4))
        assert group.samples[2].sequences[0].versions == (Span(2, 0, 4),)
        assert group.versions == {1, 2}

    by_hand(act, slots=2)


def test_no_more_requests_than_slots_are_in_the_engine() -> None:
    async def act(engine: Hand, task: asyncio.Task[Group], progress: Progress) -> None:
        for count in range(2, 6):
            assert len(engine.held) == 2
            engine.end(7, engine.sent[count - 2][1])
            await until(lambda count=count: len(engine.sent) == min(5, count + 1))  # type: ignore[misc]
        engine.end(7)
        await task

    by_hand(act, slots=2, n=5)


# -- one fails


@pytest.mark.parametrize("error", [EngineError("500"), RequestRefused("no"), EngineDown("gone"), KeyError("a bug")])
def test_one_sample_that_fails_cancels_its_siblings_and_nothing_is_left_running(error: Exception) -> None:
    async def act(engine: Hand, task: asyncio.Task[Group], progress: Progress) -> None:
        engine.end(7, 0)
        engine.fail(7, 1, error)
        with pytest.raises(type(error)) as caught:
            await task
        assert caught.value is error
        assert engine.held == {}

    by_hand(act, n=8)


def test_a_sample_that_the_engine_aborts_fails_the_group_by_name() -> None:
    async def act(engine: Hand, task: asyncio.Task[Group], progress: Progress) -> None:
        await engine.abort(engine.held[7, 2])
        with pytest.raises(SampleAborted, match="prompt 7, sample 2"):
            await task
        assert engine.held == {}

    by_hand(act)


@pytest.mark.parametrize(
    ("errors", "decides"),
    [
        ([EngineError("a"), RequestRefused("b"), KeyError("c")], KeyError),
        ([EngineDown("a"), RequestRefused("b")], RequestRefused),
        ([EngineError("a"), EngineDown("b")], EngineError),
    ],
)
def test_of_several_failures_a_bug_decides_then_what_is_final(
    errors: Sequence[Exception], decides: type[Exception]
) -> None:
    async def act(engine: Hand, task: asyncio.Task[Group], progress: Progress) -> None:
        for sample, error in enumerate(errors):
            engine.fail(7, sample, error)
        with pytest.raises(decides):
            await task

    by_hand(act)


def test_a_cancelled_group_leaves_nothing_running() -> None:
    async def act(engine: Hand, task: asyncio.Task[Group], progress: Progress) -> None:
        engine.end(7, 1)
        await until(lambda: progress.finished)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.held == {}

    by_hand(act)


def test_a_cancel_from_within_the_engine_fails_the_sample_and_is_not_taken_for_ours() -> None:
    async def act(engine: Hand, task: asyncio.Task[Group], progress: Progress) -> None:
        engine.cancel(7, 1)
        with pytest.raises(EngineError, match="prompt 7, sample 1"):
            await task
        assert engine.held == {}

    by_hand(act)


def test_a_reward_that_gives_no_number_is_an_error_with_the_functions_name_and_the_ids() -> None:
    def reward(given: RewardInput) -> object:
        return "1.0" if given.index == 2 else 1.0

    with pytest.raises(RewardError, match=r"t\.reward: prompt 7, sample 2: '1\.0' is a str"):
        made(EchoEngine("0", 3), scorer=Custom("t.reward", reward))


def test_a_reward_that_cancels_itself_is_an_error_and_not_taken_for_our_cancel() -> None:
    async def reward(given: RewardInput) -> float:
        raise asyncio.CancelledError

    with pytest.raises(RewardError, match="prompt 7"):
        made(EchoEngine("0", 3), scorer=Custom("t.reward", reward))


# -- what is never sent


def test_a_prompt_longer_than_allowed_is_refused_before_anything_is_sent() -> None:
    engine = Hand()
    with pytest.raises(RequestRefused, match=r"prompt 7 has 2 tokens, --rollout-max-prompt-len is 1"):
        made(engine, rules={"rollout_max_prompt_len": 1})
    assert engine.sent == []


def test_a_prompt_of_just_the_length_allowed_is_sent() -> None:
    assert len(made(EchoEngine("0", 3), rules={"rollout_max_prompt_len": 2}).samples) == 3


def test_answers_are_asked_to_fit_what_the_context_leaves() -> None:
    class Narrow(EchoEngine):
        context_length = 8

    group = made(Narrow("0", 50))
    assert {len(s.sequences[0].tokens) for s in group.samples} == {6}
    assert np.unique([len(s.sequences[0].prompt_tokens) for s in group.samples]).tolist() == [2]
