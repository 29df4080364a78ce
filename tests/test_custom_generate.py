"""Samples that a function makes, turn by turn: what a group is then, what goes wrong, and what is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make import maker_of, record, until
from rig import agreed, policy
from test_tokens import CHAT, ids, make

from pipeline.config import TrainConfig
from pipeline.errors import EngineDown, EngineError, GenerateError, RequestRefused, UsageError
from pipeline.modes import agreed as agreed_by
from pipeline.types import COMPLETED, TRUNCATED, Group, Prompt, Span
from producers.custom_generate import Play, load
from producers.engines.base import Completion, Request, Sampling
from producers.engines.echo import EchoEngine
from producers.episode import Bounds, Episode
from producers.group import Progress, SampleAborted, seed_of
from producers.rewards import RewardInput
from producers.rewards.custom import Custom
from producers.tokens import HFTokenizer
from producers.trace import Answer, Trace

PROMPT = Prompt(7, 1, 0, record(7))
Function = Callable[[Episode], Coroutine[Any, Any, Any]]


class Table(EchoEngine):
    """An echo engine that keeps what it was sent. Its answers of 4 tokens end by themselves, or when a test says so."""

    def __init__(self, latency: str = "0", context: int = 1 << 20) -> None:
        super().__init__(latency, 4)
        self.context_length = context
        self.sent: list[Request] = []
        self.given: list[Completion] = []

    async def generate(self, request: Request) -> Completion:
        self.sent.append(request)
        self.given.append(await super().generate(request))
        return self.given[-1]

    @property
    def running(self) -> int:
        return len(self._flights)

    def end(self, at: int) -> None:
        self._flights[self.sent[at].rid].land(4, "stop")

    def fail(self, at: int, error: BaseException) -> None:
        self._flights[self.sent[at].rid].future.set_exception(error)


def made(function: Function, engine: EchoEngine | None = None, prompt: Prompt = PROMPT, **how: Any) -> Group:
    """By an engine that answers at once; nothing is left running, whatever became of the group."""
    rules = agreed(**{"n_samples_per_prompt": 2, **how.pop("rules", {})})

    async def go() -> Group:
        table = engine or Table()
        await table.start()
        await table.load(policy(1))
        try:
            maker = maker_of(table, rules, play=Play("my.play", function), **how)
            return await maker.make(prompt, Progress(), asyncio.Event())
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert not table._flights

    return asyncio.run(go())


def by_hand(
    function: Function,
    act: Callable[[Table, asyncio.Task[Group]], Coroutine[Any, Any, None]],
    n: int = 1,
    slots: int = 64,
) -> None:
    """`act` runs beside a group that is made, and nothing is left running behind it."""

    async def go() -> None:
        engine = Table("1e9")
        await engine.start()
        await engine.load(policy(1))
        maker = maker_of(engine, agreed(n_samples_per_prompt=n), slots=slots, play=Play("my.play", function))
        task = asyncio.create_task(maker.make(PROMPT, Progress(), asyncio.Event()))
        await act(engine, task)
        assert engine.running == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(go())


async def two_turns(episode: Episode) -> Trace:
    trace = episode.trace()
    await episode.turn(trace)
    episode.observe(trace, "no")
    await episode.turn(trace)
    return trace


# -- what a sample is


def test_a_sample_of_two_turns_is_one_sequence_with_a_mask() -> None:
    engine = Table()
    group = made(two_turns, engine)
    assert [sample.index for sample in group.samples] == [0, 1]
    for sample in group.samples:
        (sequence,) = sample.sequences
        assert bytes(sequence.prompt_tokens.tolist()) == b"p7"
        assert sequence.loss_mask.tolist() == [1] * 4 + [0] * 2 + [1] * 4
        assert bytes(sequence.tokens[4:6].tolist()) == b"no"
        assert (sequence.logprobs == 0).tolist() == [False] * 4 + [True] * 2 + [False] * 4
        assert sequence.versions == (Span(1, 0, 10),)
        assert sample.text == bytes(sequence.tokens[6:9].tolist()).decode()  # its last turn, without the stop token
        assert (sample.status, sample.reward) == (COMPLETED, 3.0)


def test_the_next_turn_is_sent_the_very_tokens_that_were_sampled() -> None:
    """The stop token within them has no text, so text that is encoded again could not give them."""
    engine = Table()
    made(two_turns, engine, rules={"n_samples_per_prompt": 1})
    first, second = engine.sent
    assert second.tokens.tolist() == [*first.tokens, *engine.given[0].tokens, *b"no"]
    assert 0 in second.tokens


def test_a_function_of_one_turn_makes_what_is_made_without_one() -> None:
    async def plain(episode: Episode) -> Trace:
        trace = episode.trace()
        await episode.turn(trace)
        return trace

    async def go() -> Group:
        engine = Table()
        await engine.start()
        await engine.load(policy(1))
        maker = maker_of(engine, agreed(n_samples_per_prompt=2))
        return await maker.make(PROMPT, Progress(), asyncio.Event())

    own, without = made(plain), asyncio.run(go())
    assert [s.text for s in own.samples] == [s.text for s in without.samples]
    assert [s.sequences[0].logprobs.tolist() for s in own.samples] == [
        s.sequences[0].logprobs.tolist() for s in without.samples
    ]


def test_each_turn_has_its_own_id_and_a_seed_that_is_no_workers_nor_attempts() -> None:
    def sent(prompt: Prompt, worker: str) -> list[Request]:
        engine = Table()
        made(two_turns, engine, prompt, worker=worker)
        return sorted(engine.sent, key=lambda request: request.seed)

    first, second = sent(PROMPT, "w1"), sent(Prompt(7, 3, 1, PROMPT.record), "w2")
    assert [r.seed for r in first] == [r.seed for r in second]
    assert sorted(seed_of(42, 7, i, turn) for i in range(2) for turn in range(2)) == [r.seed for r in first]
    assert len({r.rid for r in first + second}) == 8
    assert len({len(r.rid) for r in first + second}) == 1


def test_what_a_function_draws_is_its_samples_and_no_turns() -> None:
    seeds = []

    async def draws(episode: Episode) -> Trace:
        seeds.append(episode.seed)
        return await two_turns(episode)

    made(draws)
    made(draws, prompt=Prompt(7, 2, 0, PROMPT.record))
    assert sorted(seeds[:2]) == sorted(seeds[2:])
    assert len({*seeds, *(seed_of(42, 7, i, turn) for i in range(2) for turn in range(99))}) == 2 + 2 * 99


def test_several_traces_are_several_sequences_of_one_sample_with_one_reward() -> None:
    async def branches(episode: Episode) -> Answer:
        traces = [episode.trace(), Trace([*episode.tokens, 65])]
        await asyncio.gather(*map(episode.turn, traces))
        return Answer(traces, {"found": [episode.index]}, text="four")

    seen: list[Any] = []

    def reward(given: RewardInput) -> float:
        seen.append(given.sample_metadata)
        return len(given.response) + given.sample_metadata["found"].pop()

    group = made(branches, scorer=Custom("t.reward", reward))
    for index, sample in enumerate(group.samples):
        assert [bytes(q.prompt_tokens.tolist()) for q in sample.sequences] == [b"p7", b"p7A"]
        assert (sample.text, sample.reward, sample.metadata) == ("four", 4.0 + index, {"found": [index]})


def test_a_sample_has_a_copy_of_its_record() -> None:
    async def writes(episode: Episode) -> Trace:
        episode.prompt.fields["metadata"]["mine"] = 1
        assert "mine" not in episode.prompt.fields["metadata"]
        return await two_turns(episode)

    made(writes)


# -- lengths


def test_a_turn_cut_off_by_length_makes_a_truncated_sample_unless_the_function_says_otherwise() -> None:
    async def short(episode: Episode) -> Answer:
        trace = episode.trace()
        assert (await episode.turn(trace, max_new_tokens=1)).finish == "length"
        episode.observe(trace, "go on")
        assert (await episode.turn(trace)).finish == "stop"
        return Answer(trace, status=COMPLETED if episode.index else None)

    assert [sample.status for sample in made(short).samples] == [TRUNCATED, COMPLETED]


def test_a_turn_has_no_more_tokens_than_the_run_allows() -> None:
    async def long(episode: Episode) -> Trace:
        trace = episode.trace()
        await episode.turn(trace, max_new_tokens=9)
        return trace

    group = made(long, rules={"rollout_max_response_len": 3})
    assert [len(sample.sequences[0].tokens) for sample in group.samples] == [3, 3]


@pytest.mark.parametrize(("context", "sampled"), [(3, 1), (7, 4), (8, 4), (9, 5), (12, 8), (13, 8), (14, 8), (15, 9)])
def test_turns_fill_the_context_and_then_one_is_empty(context: int, sampled: int) -> None:
    """2 tokens of prompt, and each round 4 sampled ones and 2 seen."""

    async def until_cut(episode: Episode) -> Trace:
        trace = episode.trace()
        while (await episode.turn(trace)).finish == "stop":
            episode.observe(trace, "no")
        return trace

    engine = Table(context=context)
    group = made(until_cut, engine)
    assert all(len(r.tokens) + r.sampling.max_new_tokens <= context for r in engine.sent)
    for sample in group.samples:
        (sequence,) = sample.sequences
        assert (sample.status, sequence.loss_mask.sum()) == (TRUNCATED, sampled)


def test_an_engine_that_keeps_the_end_of_its_context_to_itself_cuts_an_episode_short() -> None:
    class Keeps(Table):
        async def generate(self, request: Request) -> Completion:
            if self.context_length - len(request.tokens) < 7:
                raise RequestRefused("too long")
            return await super().generate(request)

    for context, sampled in ((14, 4), (15, 8)):
        for sample in made(two_turns, Keeps(context=context)).samples:
            assert sample.sequences[0].loss_mask.sum() == sampled
            assert sample.status == (TRUNCATED if sampled == 4 else COMPLETED)
    with pytest.raises(RequestRefused, match="too long"):
        made(two_turns, Keeps(context=8))


def test_a_prompt_that_fills_the_context_is_refused_before_its_function_sees_it() -> None:
    async def never(episode: Episode) -> Trace:
        raise AssertionError

    with pytest.raises(RequestRefused, match="2 tokens, which leaves no room"):
        made(never, Table(context=2))


def test_a_first_turn_for_which_the_function_leaves_no_room_refuses_the_prompt() -> None:
    async def wordy(episode: Episode) -> Trace:
        trace = episode.trace()
        episode.observe(trace, "x" * 30)
        await episode.turn(trace)
        return trace

    with pytest.raises(RequestRefused, match=r"my\.play: prompt 7, sample \d: a context of 20 tokens has no room"):
        made(wordy, Table(context=20))


# -- what is no sample


async def nothing(episode: Episode) -> object:
    return episode.trace()


async def twice(episode: Episode) -> object:
    return 2 * [await two_turns(episode)]


def giving(value: object) -> Function:
    async def play(episode: Episode) -> object:
        return value

    return play


def answering(**fields: Any) -> Function:
    async def play(episode: Episode) -> Answer:
        return Answer(await two_turns(episode), **fields)

    return play


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (giving(None), "it gave None; expected is a Trace"),
        (giving("text"), "it gave a value of type str; expected is a Trace"),
        (giving([]), "it gave an empty list"),
        (giving([None]), "it gave None"),
        (giving(Answer("text")), "it gave a value of type str"),  # type: ignore[arg-type]
        (nothing, "it gave traces in which the model has sampled nothing"),
        (twice, "it gave the same trace twice"),
        (answering(text=5), "its text is a value of type int"),
        (answering(status="done"), "status: 'done'"),
        (answering(metadata={1: 2}), "metadata: the key 1; keys are text"),
        (answering(metadata={"a": [object()]}), r"metadata\.a\[0\]: a value of type object"),
        (answering(metadata=[]), "metadata: a value of type list where a map"),
    ],
)
def test_what_is_no_sample_is_refused_with_function_prompt_and_sample(function: Function, problem: str) -> None:
    with pytest.raises(GenerateError, match=rf"generate function my\.play: prompt 7, sample \d: {problem}"):
        made(function)


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [("p7", "encode it first"), ([], "nothing to sample after"), ([256], "token 256 is outside"), ([1.0], "token ids")],
)
def test_tokens_that_no_engine_may_be_sent_are_the_functions_bug(tokens: Any, problem: str) -> None:
    async def play(episode: Episode) -> object:
        return await episode.generate(tokens)

    with pytest.raises(ValueError, match=problem):
        made(play)


# -- what goes wrong


def test_a_bug_in_a_function_is_its_own_error_and_ends_the_siblings() -> None:
    async def buggy(episode: Episode) -> Trace:
        if episode.index == 0:
            await asyncio.sleep(0)
            raise ZeroDivisionError("in the game")
        return await two_turns(episode)

    with pytest.raises(ZeroDivisionError, match="in the game"):
        made(buggy, Table("1e9"))


async def swallows(episode: Episode) -> Trace:
    trace = episode.trace()
    await episode.turn(trace)
    for _ in range(3):
        try:
            await episode.turn(trace)
        except Exception:  # noqa: BLE001 (as users write it)
            continue
    return trace


async def wraps(episode: Episode) -> Trace:
    trace = episode.trace()
    await episode.turn(trace)
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(episode.generate(trace.tokens))
            both.create_task(episode.generate(trace.tokens))
    except ExceptionGroup as error:
        raise RuntimeError("no luck") from error
    return trace


@pytest.mark.parametrize("function", [swallows, wraps])
@pytest.mark.parametrize("error", [EngineError("500"), EngineDown("gone"), RequestRefused("no")])
def test_an_engines_error_decides_whatever_the_function_makes_of_it(function: Function, error: EngineError) -> None:
    async def act(engine: Table, task: asyncio.Task[Group]) -> None:
        await until(lambda: engine.running == 1)
        engine.end(0)
        await until(lambda: len(engine.sent) > 1 and engine.running)
        engine.fail(1, error)
        with pytest.raises(type(error)) as caught:
            await task
        assert caught.value is error
        assert len(engine.sent) <= 3

    by_hand(function, act)


def test_an_aborted_turn_fails_the_group_by_name() -> None:
    async def act(engine: Table, task: asyncio.Task[Group]) -> None:
        await until(lambda: engine.running == 1)
        await engine.abort(engine.sent[0].rid)
        with pytest.raises(SampleAborted, match="prompt 7, sample 0"):
            await task

    by_hand(swallows, act)


def test_a_function_that_cancels_itself_is_an_error_and_not_taken_for_our_cancel() -> None:
    async def play(episode: Episode) -> Trace:
        raise asyncio.CancelledError

    with pytest.raises(GenerateError, match=r"my\.play: prompt 7, sample \d: cancelled from within"):
        made(play)


def test_a_function_may_go_on_after_a_failed_task_group_of_its_own() -> None:
    async def tool(works: bool) -> None:
        if not works:
            raise ConnectionError

    async def play(episode: Episode) -> Trace:
        trace = episode.trace()
        try:
            async with asyncio.TaskGroup() as tools:
                tools.create_task(tool(True))
                tools.create_task(tool(False))
        except* ConnectionError:
            episode.observe(trace, "no tool")
        await episode.turn(trace)
        return trace

    assert len(made(play).samples) == 2


# -- what is left running: nothing


async def branches_and_strays(episode: Episode) -> Trace:
    """Waits for three turns at once, and has forgotten a fourth."""
    stray = asyncio.create_task(episode.generate([1, 2, 3]))
    stray.add_done_callback(lambda task: task.cancelled() or task.exception())
    traces = [episode.trace() for _ in range(3)]
    await asyncio.gather(*map(episode.turn, traces))
    return traces[0]


def test_a_cancelled_sample_leaves_no_request_running() -> None:
    async def act(engine: Table, task: asyncio.Task[Group]) -> None:
        await until(lambda: engine.running == 8)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    by_hand(branches_and_strays, act, n=2)


def test_a_finished_sample_leaves_no_request_running() -> None:
    async def act(engine: Table, task: asyncio.Task[Group]) -> None:
        await until(lambda: engine.running == 4)
        for at in range(4):
            if len(engine.sent[at].tokens) == 2:
                engine.end(at)
        assert len((await task).samples) == 1

    by_hand(branches_and_strays, act)


def test_a_function_that_goes_on_after_a_cancel_gets_nothing_more_from_the_engine() -> None:
    async def deaf(episode: Episode) -> Trace:
        trace = episode.trace()
        for _ in range(3):
            try:
                await episode.turn(trace)
            except asyncio.CancelledError:
                continue
        return trace

    async def act(engine: Table, task: asyncio.Task[Group]) -> None:
        await until(lambda: engine.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(engine.sent) == 1

    by_hand(deaf, act)


def test_a_function_may_end_a_turn_that_takes_too_long_and_go_on() -> None:
    async def impatient(episode: Episode) -> Trace:
        trace = episode.trace()
        try:
            async with asyncio.timeout(0.01):
                await episode.turn(trace)
        except TimeoutError:
            await episode.turn(trace)
        return trace

    async def act(engine: Table, task: asyncio.Task[Group]) -> None:
        await until(lambda: len(engine.sent) == 2)
        assert engine.running == 1
        engine.end(1)
        (sample,) = (await task).samples
        assert len(sample.sequences[0].tokens) == 4

    by_hand(impatient, act)


def test_a_tool_holds_no_slot() -> None:
    """One slot, two samples: each has its turn while the other's tool runs."""
    tool = asyncio.Event()

    async def play(episode: Episode) -> Trace:
        trace = episode.trace()
        await episode.turn(trace)
        await tool.wait()
        return trace

    async def act(engine: Table, task: asyncio.Task[Group]) -> None:
        for at in range(2):
            await until(lambda at=at: len(engine.sent) == at + 1)  # type: ignore[misc]
            assert engine.running == 1
            engine.end(at)
        await until(lambda: engine.running == 0)
        tool.set()
        await task

    by_hand(play, act, n=2, slots=1)


# -- versions


def test_versions_are_those_of_each_turn_over_updates_between_and_within_them() -> None:
    async def act(engine: Table, task: asyncio.Task[Group]) -> None:
        await until(lambda: engine.running == 1)
        engine.end(0)
        await until(lambda: len(engine.sent) == 2)
        await engine.load(policy(2))
        engine.end(1)
        await until(lambda: len(engine.sent) == 3)
        engine._flights[engine.sent[2].rid].ran = 0.5e9
        await engine.load(policy(4))
        engine.end(2)
        (sample,) = (await task).samples
        assert sample.sequences[0].versions == (Span(1, 0, 6), Span(2, 6, 14), Span(4, 14, 16))

    async def three_turns(episode: Episode) -> Trace:
        trace = episode.trace()
        for _ in range(2):
            await episode.turn(trace)
            episode.observe(trace, "no")
        await episode.turn(trace)
        return trace

    by_hand(three_turns, act)


# -- which function


def a_plain_function(episode: Episode) -> None: ...


class Callable_:
    async def __call__(self, episode: Episode) -> Trace:
        return await two_turns(episode)


an_object = Callable_()


def test_a_function_must_be_asynchronous() -> None:
    with pytest.raises(UsageError, match=r"--custom-generate-function-path .*a_plain_function': it must be an async"):
        load(f"{__name__}.a_plain_function")
    for name in ("two_turns", "an_object"):
        assert made(load(f"{__name__}.{name}").function).versions == {1}


def test_all_workers_agree_on_the_function() -> None:
    values: dict[str, Any] = {"num_rollout": 1, "rm_type": "length"}
    plain = agreed_by(TrainConfig.model_validate(values)).code
    own = agreed_by(TrainConfig.model_validate({**values, "custom_generate_function_path": "my.play"})).code
    assert own.keys() - plain.keys() == {"custom_generate_function_path"}


# -- chats


def test_a_chat_goes_on_behind_the_models_turn_and_its_end_is_not_said_twice(tmp_path: Path) -> None:
    """`#` ends a turn; the model has sampled it, or was cut off before."""
    chat = HFTokenizer(make(tmp_path, bos=True, template=CHAT, generation={"eos_token_id": ids("#")}))
    says = [{"role": "tool", "content": "4"}]
    assert chat.follow(says).tolist() == ids("#<tool>4#<a>")
    assert chat.follow("4").tolist() == ids("4")

    def goes_on(said: str) -> list[int]:
        async def send(_: Request) -> Completion:
            answer = np.array(ids(said), np.int32)
            return Completion(answer, answer.astype(np.float32), "stop", (Span(1, 0, len(answer)),))

        async def play(episode: Episode) -> list[int]:
            trace = episode.trace()
            await episode.turn(trace)
            episode.observe(trace, says)
            return trace.tokens.tolist()

        sampling, prompt = Sampling(9, 1.0, chat.stop_token_ids), np.array(ids("<user>2+2#<a>"))
        episode = Episode(PROMPT, prompt, 0, sampling, chat, Bounds(200, 99), dict, hash, send)
        return asyncio.run(episode.run(play))

    for said in ("calc#", "calc"):
        assert goes_on(said) == ids("<user>2+2#<a>calc#<tool>4#<a>")


def test_a_template_that_hides_an_answer_cannot_be_continued(tmp_path: Path) -> None:
    hides = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    with pytest.raises(UsageError, match="cannot be continued"):
        HFTokenizer(make(tmp_path, template=hides)).follow([{"role": "user", "content": "x"}])
