"""Workers whose samples are made by a function: updates between turns, deadlines, stops, bugs; a whole run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_sglang import FakeSGLang
from make import at_work, drain_of, feed, until
from processes import PATIENT, SMALL, Stage, audited, contiguous, own_code, prompts, steps
from rig import Rig, policy
from test_custom_generate import Table, two_turns
from test_engine_sglang import QUICK
from test_generator import gone, leased, queued, retries, sound

from consumers.staleness import FRESH, STALE, Limit
from pipeline.code import digest
from pipeline.config import GenerateConfig
from pipeline.errors import GenerateError, Starved, UsageError, WorkerFailed
from pipeline.join import Place
from producers import cli
from producers.custom_generate import Play
from producers.engines.sglang import SGLangEngine
from producers.engines.sglang_pool import Servers
from producers.episode import Episode
from producers.trace import Trace


class Game:
    """Turns with a tool between them, which a test lets return."""

    def __init__(self, turns: int = 2) -> None:
        self.turns = turns
        self.tool = asyncio.Semaphore(0)
        self.waiting = 0
        "samples whose tool runs"
        self.cancelled = 0
        "tools"

    async def play(self, episode: Episode) -> Trace:
        trace = episode.trace()
        await episode.turn(trace)
        for _ in range(1, self.turns):
            self.waiting += 1
            try:
                await self.tool.acquire()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            finally:
                self.waiting -= 1
            episode.observe(trace, "no")
            await episode.turn(trace)
        return trace

    def go_on(self) -> None:
        """Both samples of a group."""
        self.tool.release()
        self.tool.release()


@contextlib.asynccontextmanager
async def playing(rig: Rig, prompts: int = 1, turns: int = 2) -> AsyncIterator[tuple[Game, Table]]:
    """A worker all of whose samples are at their first tool; nothing is left in its engine."""
    game, engine = Game(turns), Table()
    feed(rig, prompts)
    async with at_work(rig, engine, play=Play("t.game", game.play)):
        await until(lambda: game.waiting == 2 * prompts)
        yield game, engine
    assert engine.running == game.waiting == 0


def test_a_group_is_as_old_as_its_oldest_turn(real: Rig) -> None:
    trainer = real.trainer(max_weight_staleness=1)

    async def go() -> None:
        async with playing(real) as (game, engine):
            trainer.publish(policy(2), [])
            await until(lambda: engine.version == 2)
            game.go_on()
            await until(lambda: queued(real))

    real.do(go())
    (group,) = queued(real)
    assert group.versions == {1, 2}
    assert [Limit(version, (), 1).judge(group) for version in (2, 3)] == [FRESH, STALE]
    trainer.publish(policy(3), [])
    with pytest.raises(Starved):
        drain_of(trainer, 1).batch(Limit(3, (), 1))
    assert retries(real) == {0: (2, 1)}
    assert real.counter("recycled:stale") == 1
    assert sound(real)


def test_a_group_whose_first_turn_is_too_old_is_cancelled_at_its_tool(real: Rig) -> None:
    trainer = real.trainer(max_weight_staleness=1)

    async def go() -> None:
        async with playing(real, turns=3) as (game, engine):
            trainer.publish(policy(2), [])
            await until(lambda: engine.version == 2)
            game.go_on()
            await until(lambda: len(engine.given) == 4 and game.waiting == 2)  # at the tool after its second turn
            assert game.cancelled == 0
            trainer.publish(policy(3), [])
            await until(lambda: game.cancelled == 2)
            await until(lambda: game.waiting == 2)  # the next round
            game.go_on()
            game.go_on()
            await until(lambda: queued(real))

    real.do(go())
    (group,) = queued(real)
    assert (group.prompt.attempt, group.prompt.strikes, group.versions) == (2, 1, {3})
    assert real.counter("strikes:stale") == 1
    assert sound(real)


def test_a_tool_that_never_returns_costs_its_prompt_a_strike_at_the_deadline(real: Rig) -> None:
    real.trainer(rollout_group_timeout=0.3, max_prompt_attempts=1)
    feed(real, 1)

    async def go() -> None:
        game, engine = Game(), Table()
        async with at_work(real, engine, play=Play("t.game", game.play)):
            await until(lambda: real.entries("dead"))
            assert (game.cancelled, game.waiting, engine.running) == (2, 0, 0)

    real.do(go())
    (dead,) = real.entries("dead")
    assert (dead["id"], dead["reason"]) == ("0", "deadline")
    assert sound(real)


def test_a_stop_while_tools_run_hands_their_prompts_back_without_a_strike(real: Rig) -> None:
    real.trainer()

    async def go() -> None:
        async with playing(real, prompts=2) as (game, _):
            pass
        assert game.cancelled == 4

    real.do(go())
    assert retries(real) == {0: (2, 0), 1: (2, 0)}
    assert gone(real)
    assert sound(real)


def test_turns_on_an_sglang_server_follow_the_very_tokens_it_gave(real: Rig, tmp_path: Path) -> None:
    real.trainer(rollout_max_response_len=6)
    (tmp_path / "config.json").write_text('{"vocab_size": 256}')
    feed(real, 1)

    async def go() -> list[Any]:
        async with FakeSGLang(vocab=256, context=200) as fake:
            fake.weighs |= {"weights/1"}
            engine = SGLangEngine(tmp_path, Servers((fake.url,)), "retract", 20, replace(QUICK, start=9))
            async with at_work(real, engine, play=Play("t.two_turns", two_turns)):
                await until(lambda: queued(real))
            return fake.bodies("/generate")

    bodies = real.do(go())
    (group,) = queued(real)
    assert group.versions == {1}
    for sample in group.samples:
        (sequence,) = sample.sequences
        seen = len(sequence.loss_mask) - int(sequence.loss_mask.sum())
        turns = np.split(np.arange(len(sequence.tokens)), np.flatnonzero(np.diff(sequence.loss_mask)) + 1)
        assert (seen, len(turns)) == (2, 3)
        sent = [*sequence.prompt_tokens.tolist(), *sequence.tokens[: turns[2][0]].tolist()]
        assert sum(body["input_ids"] == sent for body in bodies) == 1
    assert len({body["rid"] for body in bodies}) == len(bodies)


# -- `millpond generate`


async def buggy(episode: Episode) -> Trace:
    trace = await two_turns(episode)
    raise KeyError(f"move {len(trace.turns)}")


async def wrong(episode: Episode) -> Any:
    return (await two_turns(episode)).sequence()


def generate(rig: Rig, play: str | None) -> int:
    """A whole `millpond generate`, flags read already."""
    config = GenerateConfig(
        engine="echo",
        rm_type="length",
        server_concurrency=4,
        custom_generate_function_path=play and f"{__name__}.{play}",
    )
    return asyncio.run(cli._generate(config, Place(rig.url, rig.keys.run, None), threading.Event()))


def code(play: str) -> dict[str, str]:
    return {"rm_type": digest("length"), "custom_generate_function_path": digest(f"{__name__}.{play}")}


@pytest.mark.parametrize(
    ("play", "error", "what"),
    [
        ("buggy", KeyError, "KeyError: 'move 2'"),
        ("wrong", GenerateError, "test_agents_at_work.wrong: prompt 0, sample 0: it gave a value of type Sequence"),
    ],
)
def test_a_bug_in_a_function_stops_the_run_with_its_traceback(
    real: Rig, play: str, error: type[Exception], what: str
) -> None:
    trainer = real.trainer(code=code(play), in_flight=1, max_prompt_attempts=1, n_samples_per_prompt=1)
    feed(real, 3)
    with pytest.raises(error):
        generate(real, play)
    (entry,) = real.entries("errors")
    assert what in entry["what"]
    with pytest.raises(WorkerFailed, match=r"(?s)failed: .*Traceback") as caught:
        drain_of(trainer).batch(Limit(1, (), 1))
    assert what in str(caught.value)
    assert (f"in {play}" in str(caught.value)) == (play == "buggy")
    assert real.entries("dead") == []
    assert all(strikes == 0 for _, strikes in retries(real).values())
    assert gone(real)
    assert sound(real)


@pytest.mark.parametrize(("runs", "mine"), [("buggy", None), (None, "buggy"), ("buggy", "wrong")])
def test_a_worker_with_another_function_than_the_run_says_so_and_takes_no_prompts(
    real: Rig, runs: str | None, mine: str | None
) -> None:
    real.trainer(code=code(runs) if runs else {"rm_type": digest("length")})
    feed(real, 3)
    with pytest.raises(UsageError, match=r"--custom-generate-function-path is .* here, .*trainer .*all must agree"):
        generate(real, mine)
    assert leased(real) == 0
    assert not real.raw.exists(real.keys["alarm"])


# -- `millpond run`

AGENT = """
import asyncio
from producers.trace import Answer, Trace

async def play(episode):
    first, second = episode.trace(), episode.trace()
    for number in range(2):
        await episode.turn(first)
        await asyncio.sleep(0.001)
        episode.observe(first, f"tool {number}")
    episode.observe(second, episode.prompt.fields["label"])
    await episode.turn(second)
    return Answer([first, second], {"turns": 3, "label": episode.prompt.fields["label"]})

def reward(x):
    assert x.sample_metadata["label"] == x.label
    return x.sample_metadata["turns"] / 4
"""


def test_a_run_whose_samples_are_made_by_a_function_goes_the_whole_way_round(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("--engine", "echo", "--train-backend", "echo", *SMALL, *PATIENT, "--echo-latency", "0.005")
    own = ("--custom-generate-function-path", "mine.play", "--custom-rm-path", "mine.reward")
    with Stage(tmp_path) as stage:
        data = ("--prompt-data", prompts(tmp_path, 27), "--num-epoch", "1")
        stage.millpond("run", "--out", out, *words, *own, *data, **own_code(tmp_path, AGENT)).ends(0)
        assert audited(stage, out)["committed"] == 27
    lines = steps(out)
    assert contiguous(lines) == 7
    assert {line["rollout/raw_reward"] for line in lines} == {0.75}
    assert {line["rollout/response_len/mean"] for line in lines} == {3 * 8.0}


def test_a_function_that_is_not_there_or_not_asynchronous_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    words = ("--engine", "echo", "--train-backend", "echo", "--rm-type", "length", *SMALL)
    for number, (path, problem) in enumerate([("mine.pluy", "has no 'pluy'"), ("mine.reward", "an async function")]):
        with Stage(tmp_path) as stage:
            data = ("--prompt-data", prompts(tmp_path, 9), "--num-epoch", "1", "--out", tmp_path / f"run{number}")
            flags = ("--custom-generate-function-path", path)
            said = stage.millpond("run", *words, *flags, *data, **own_code(tmp_path, AGENT)).ends(2)
        assert f"--custom-generate-function-path '{path}'" in said
        assert problem in said
