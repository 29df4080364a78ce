"""The engine without a model: scripted, repeatable, honest about versions."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from pipeline.config import GenerateConfig
from pipeline.errors import EngineDown, EngineError, RequestRefused, UsageError, WeightsError
from pipeline.types import Policy, Span
from producers.engines import build
from producers.engines.base import Completion, Request, Sampling
from producers.engines.echo import EchoEngine
from producers.engines.echo_script import Latency
from producers.engines.stamps import Stamps
from producers.tokens import ByteTokenizer

PROMPT = np.array([65, 61], np.int32)
SLOW = {"latency": "10", "response_len": 20_000}
"2000 tokens a second"
A_WHILE = 0.02


def request(seed: int, limit: int = 1 << 19, prompt: Any = PROMPT) -> Request:
    return Request(f"{seed:08d}", np.asarray(prompt, np.int32), Sampling(limit, 1.0, (0,)), seed)


def policy(version: int) -> Policy:
    return Policy(version, "", "hf", "", 0, 0.0)


def play(
    scene: Callable[[EchoEngine], Awaitable[Any]], latency: str = "0", response_len: int = 8, **rates: float
) -> Any:
    """What `scene` gives with a started engine."""

    async def main() -> Any:
        engine = EchoEngine(latency, response_len, **rates)
        await engine.start()
        try:
            return await scene(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


async def launch(engine: EchoEngine, each: Request) -> asyncio.Task[Completion]:
    """Returns when the request is in flight."""
    task = asyncio.create_task(engine.generate(each))
    await asyncio.sleep(0)
    return task


def test_an_answer_follows_from_the_seed_alone() -> None:
    async def alone(engine: EchoEngine) -> Completion:
        return await engine.generate(request(7))

    async def in_a_crowd(engine: EchoEngine) -> list[Completion]:
        return await asyncio.gather(*(engine.generate(request(seed)) for seed in range(20)))

    one, many = play(alone), play(in_a_crowd, latency="lognormal:0.001:1")
    assert one.tokens.tolist() == many[7].tokens.tolist()
    assert one.logprobs.tolist() == many[7].logprobs.tolist()
    assert len({tuple(c.tokens.tolist()) for c in many}) == 20


def test_an_answer_is_text_with_plausible_logprobs_and_ends_with_the_stop_token() -> None:
    async def scene(engine: EchoEngine) -> Completion:
        return await engine.generate(request(1))

    done = play(scene)
    assert done.tokens.dtype == np.int32
    assert done.logprobs.dtype == np.float32
    assert np.isfinite(done.logprobs).all()
    assert (done.logprobs <= 0).all()
    assert (done.finish, done.tokens[-1], len(done.tokens), len(done.logprobs)) == ("stop", 0, 8, 8)
    assert 0 not in done.tokens[:-1]
    assert ByteTokenizer().decode(done.tokens).isprintable()


def test_an_answer_longer_than_allowed_is_cut() -> None:
    async def scene(engine: EchoEngine) -> Completion:
        return await engine.generate(request(1, limit=3))

    done = play(scene)
    assert (done.finish, len(done.tokens)) == ("length", 3)
    assert 0 not in done.tokens


def test_a_request_that_spans_an_update_has_both_versions() -> None:
    async def scene(engine: EchoEngine) -> Completion:
        await engine.load(policy(3))
        task = await launch(engine, request(1))
        await asyncio.sleep(A_WHILE)
        await engine.load(policy(5))
        await asyncio.sleep(A_WHILE)
        await engine.abort(request(1).rid)
        return await task

    done = play(scene, **SLOW)
    old, new = done.versions
    assert (old.version, new.version) == (3, 5)
    assert 0 == old.start < old.end == new.start < new.end == len(done.tokens)


def test_nothing_is_sampled_while_paused() -> None:
    async def scene(engine: EchoEngine) -> Completion:
        task = await launch(engine, request(1))
        await asyncio.sleep(A_WHILE)
        await engine.pause()
        await engine.load(policy(1))
        await asyncio.sleep(A_WHILE)
        await engine.load(policy(2))
        await engine.resume()
        await asyncio.sleep(A_WHILE)
        await engine.abort(request(1).rid)
        return await task

    done = play(scene, **SLOW)
    assert [span.version for span in done.versions] == [None, 2]


def test_a_request_made_while_paused_waits_even_without_latency() -> None:
    async def scene(engine: EchoEngine) -> tuple[bool, Completion]:
        await engine.pause()
        task = await launch(engine, request(1))
        await asyncio.sleep(A_WHILE)
        early = task.done()
        await engine.load(policy(4))
        await engine.resume()
        return early, await task

    early, done = play(scene)
    assert not early
    assert done.versions == (Span(4, 0, 8),)


def test_stamps_have_no_gaps_no_empty_spans_and_no_needless_ones() -> None:
    stamps = Stamps(None)
    for version, token in ((1, 0), (2, 3), (3, 3), (3, 5), (4, 8)):
        stamps.mark(version, token)
    assert stamps.version == 4
    assert stamps.spans(9) == (Span(1, 0, 3), Span(3, 3, 8), Span(4, 8, 9))
    assert stamps.spans(8) == (Span(1, 0, 3), Span(3, 3, 8))
    assert stamps.spans(4) == (Span(1, 0, 3), Span(3, 3, 4))
    assert stamps.spans(0) == ()


def test_an_aborted_request_keeps_what_it_has() -> None:
    async def scene(engine: EchoEngine) -> tuple[Completion, Completion]:
        await engine.abort("unknown!")
        late = await launch(engine, request(1))
        await asyncio.sleep(A_WHILE)
        at_once = await launch(engine, request(2))
        await engine.pause()
        await asyncio.gather(engine.abort(request(1).rid), engine.abort(request(2).rid))
        return await late, await at_once

    late, at_once = play(scene, **SLOW)
    assert late.finish == at_once.finish == "abort"
    assert 0 < len(late.tokens) == len(late.logprobs) == late.versions[-1].end < 20_000
    assert len(at_once.tokens) < len(late.tokens)


def test_a_cancelled_request_is_gone() -> None:
    async def scene(engine: EchoEngine) -> str:
        task = await launch(engine, request(1))
        with pytest.raises(ValueError, match="in flight already"):
            await engine.generate(request(1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = await launch(engine, request(1))
        await engine.abort(request(1).rid)
        return (await again).finish

    assert play(scene, **SLOW) == "abort"


def test_failures_and_aborts_are_scripted_by_the_seed() -> None:
    async def scene(engine: EchoEngine) -> list[str]:
        tasks = (engine.generate(request(seed)) for seed in range(400))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return [result.finish if isinstance(result, Completion) else type(result).__name__ for result in results]

    first, second = (play(scene, failure_rate=0.2, abort_rate=0.1) for _ in range(2))
    assert first == second
    assert 50 < first.count("EngineError") < 110
    assert 15 < first.count("abort") < 60
    assert set(first) == {"EngineError", "abort", "stop"}


def test_a_scripted_failure_is_an_engine_error() -> None:
    async def scene(engine: EchoEngine) -> None:
        await engine.generate(request(1))

    with pytest.raises(EngineError, match="scripted"):
        play(scene, failure_rate=1.0)


def test_thousands_of_requests_run_at_once() -> None:
    async def scene(engine: EchoEngine) -> int:
        done = await asyncio.gather(*(engine.generate(request(seed)) for seed in range(3000)))
        return sum(len(c.tokens) for c in done)

    assert play(scene, latency="lognormal:0.01:1") == 3000 * 8


def test_an_older_version_is_never_loaded() -> None:
    async def scene(engine: EchoEngine) -> int | None:
        assert engine.version is None
        await engine.load(policy(5))
        await engine.load(policy(5))
        with pytest.raises(WeightsError, match="never goes back"):
            await engine.load(policy(4))
        return engine.version

    assert play(scene) == 5


def test_prompts_it_can_never_serve_are_refused() -> None:
    async def scene(engine: EchoEngine) -> None:
        for prompt, why in (([], "no tokens"), ([256], "vocabulary"), ([-1], "vocabulary")):
            with pytest.raises(RequestRefused, match=why):
                await engine.generate(request(1, prompt=prompt))

    play(scene)


def test_closing_fails_what_is_in_flight_and_what_comes_later() -> None:
    async def scene(engine: EchoEngine) -> None:
        task = await launch(engine, request(1))
        await engine.close()
        for call in (task, engine.generate(request(2))):
            with pytest.raises(EngineDown):
                await call

    play(scene, **SLOW)


def test_latencies_are_numbers_or_lognormal() -> None:
    assert Latency.parse("0.5").draw(3.0) == 0.5
    assert Latency.parse("lognormal:2:0").draw(3.0) == 2.0
    assert Latency.parse("lognormal:2:1").draw(1.0) == pytest.approx(2 * np.e)
    for text in ("", "fast", "-1", "nan", "lognormal:1", "lognormal:1:2:3", "lognormal:1:-2", "1:2"):
        with pytest.raises(UsageError, match="--echo-latency"):
            Latency.parse(text)


def test_the_builder_makes_the_engine_the_config_names() -> None:
    config = GenerateConfig(engine="echo", echo_response_len=5, echo_failure_rate=1.0)
    engine, tokenizer = build(config, "retract")
    assert isinstance(engine, EchoEngine)
    assert isinstance(tokenizer, ByteTokenizer)

    async def main() -> None:
        await engine.start()
        with pytest.raises(EngineError, match="scripted"):
            await engine.generate(request(1))

    asyncio.run(main())
    with pytest.raises(UsageError, match="--hf-checkpoint"):
        build(GenerateConfig(engine="local"), "retract")


def test_a_request_is_never_changed() -> None:
    async def scene(engine: EchoEngine) -> Request:
        one = request(1)
        await engine.generate(one)
        return one

    assert dataclasses.asdict(play(scene))["tokens"].tolist() == PROMPT.tolist()
