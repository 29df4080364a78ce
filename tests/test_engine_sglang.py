"""The SGLang engine against a server that speaks the contract and misbehaves on order."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_sglang import FakeRouter, FakeSGLang

from pipeline.errors import EngineDown, EngineError, RequestRefused, UsageError, WeightsError
from pipeline.types import Policy, Span
from producers.engines.base import Completion, Request, Sampling
from producers.engines.sglang import SGLangEngine
from producers.engines.sglang_pool import Servers
from producers.engines.sglang_timing import Timing

VOCABULARY, CONTEXT = 48, 64
QUICK = Timing(
    start=5,
    look=0.03,
    sure=0.01,
    away=0.02,
    reply=5,
    first=5,
    update=5,
    flushes=3,
    between=0.01,
    again=(0.01, 0.02),
    grace=0.5,
)
HASTY = replace(QUICK, update=0.2)


def request(seed: int = 0, size: int = 3, limit: int = 20, stops: tuple[int, ...] = ()) -> Request:
    return Request(f"{seed:08d}", (np.arange(size) % 40 + 2).astype(np.int32), Sampling(limit, 1.0, stops), seed)


def policy(version: int, path: str | None = None) -> Policy:
    return Policy(version, f"w{version}" if path is None else path, "hf", "digest", 0, 0.0)


def loadable(*servers: FakeSGLang) -> None:
    for server in servers:
        server.weighs |= {f"w{version}" for version in range(10)}


@asynccontextmanager
async def engine_of(
    folder: Path,
    *servers: FakeSGLang,
    timing: Timing = QUICK,
    seconds: float = 20.0,
    mode: str = "retract",
    **more: Any,
) -> AsyncIterator[SGLangEngine]:
    """Started, nothing loaded."""
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "max_position_embeddings": 4096}))
    urls = tuple(server.url for server in servers)
    engine = SGLangEngine(folder, Servers(urls, **more), mode, seconds, timing)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def one(folder: Path, **how: Any) -> AsyncIterator[tuple[SGLangEngine, FakeSGLang]]:
    """One server, version 1 loaded, nothing heard yet."""
    async with FakeSGLang(context=CONTEXT) as fake:
        loadable(fake)
        async with engine_of(folder, fake, **how) as engine:
            await engine.load(policy(1))
            fake.heard.clear()
            yield engine, fake


@asynccontextmanager
async def two(folder: Path, **how: Any) -> AsyncIterator[tuple[SGLangEngine, FakeSGLang, FakeSGLang]]:
    async with AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(FakeSGLang(context=CONTEXT)) for _ in range(2)]
        loadable(a, b)
        engine = await stack.enter_async_context(engine_of(folder, a, b, **how))
        await engine.load(policy(1))
        a.heard.clear()
        b.heard.clear()
        yield engine, a, b


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (a condition on anything)
            await asyncio.sleep(0.005)


async def fails(answer: Any, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        await answer
    assert type(caught.value) is kind
    return str(caught.value)


async def entered(engine: AbstractAsyncContextManager[SGLangEngine]) -> None:
    async with engine:
        pass


async def serves(engine: SGLangEngine, fake: FakeSGLang, version: int) -> None:
    """Until a request gets through, and its tokens are of that version."""
    async with asyncio.timeout(10):
        while True:
            with suppress(EngineDown):
                done = await engine.generate(request(99, limit=2))
                assert done.versions == (Span(version, 0, 2),)
                return
            await asyncio.sleep(0.01)


def start(engine: SGLangEngine, count: int, **how: Any) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(engine.generate(request(seed, **how))) for seed in range(count)]


# -- requests


def test_ids_go_out_and_ids_logprobs_and_versions_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            done = await engine.generate(request(5, limit=12))
            assert (len(done.tokens), len(done.logprobs), done.finish) == (12, 12, "length")
            assert done.versions == (Span(1, 0, 12),)
            body = fake.bodies("/generate")[0]
            assert body["input_ids"] == [2, 3, 4]
            assert body["sampling_params"]["sampling_seed"] == 5
            again = await engine.generate(request(5, limit=12))
            assert again.tokens.tolist() == done.tokens.tolist()
            first = done.tokens.tolist()
            cut = await engine.generate(request(5, limit=12, stops=(first[4],)))
            assert (cut.finish, cut.tokens.tolist()) == ("stop", first[: first.index(first[4]) + 1])

    asyncio.run(main())


def test_each_try_has_a_rid_of_its_own_and_all_have_one_length(tmp_path: Path) -> None:
    async def main() -> list[str]:
        async with one(tmp_path) as (engine, fake):
            fake.order("/generate", "503", times=2)
            await asyncio.gather(*start(engine, 5))
            await engine.generate(request(0))
            return [body["rid"] for body in fake.bodies("/generate")]

    rids = asyncio.run(main())
    assert len(rids) == len(set(rids)) == 8
    assert {len(rid) for rid in rids} == {32}


def test_hundreds_run_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path, concurrency=300) as (engine, fake):
            fake.hold_at = 1
            tasks = start(engine, 300, limit=2)
            await fake.tokens_out(1, requests=300)
            await fake.release()
            assert {done.finish for done in await asyncio.gather(*tasks)} == {"length"}

    asyncio.run(main())


def test_the_window_is_respected_before_anything_is_sent(tmp_path: Path) -> None:
    """The server's 64, not the 4096 that the model's folder names (BB-23)."""

    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            assert engine.context_length == CONTEXT
            done = await engine.generate(request(size=CONTEXT - 9, limit=500))
            assert fake.bodies("/generate")[0]["sampling_params"]["max_new_tokens"] == 9
            assert (len(done.tokens), done.finish) == (7, "length")  # the server keeps two to itself
            assert "maximum allowed" in await fails(engine.generate(request(size=CONTEXT - 1)), RequestRefused)
            sent = len(fake.heard)
            for size in (CONTEXT, CONTEXT + 1, 0):
                await fails(engine.generate(request(size=size)), RequestRefused)
            wild = replace(request(), tokens=np.array([2, VOCABULARY], np.int32))
            await fails(engine.generate(wild), RequestRefused)  # it would kill a real server
            assert len(fake.heard) == sent

    asyncio.run(main())


def test_a_4xx_is_final(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.order("/generate", "400")
            assert "ordered 400" in await fails(engine.generate(request()), RequestRefused)
            assert len(fake.bodies("/generate")) == 1

    asyncio.run(main())


@pytest.mark.parametrize("what", ["500", "503", "drop"])
def test_a_passing_failure_is_tried_again_and_never_becomes_a_sample(what: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.order("/generate", what, times=2)
            done = await engine.generate(request(limit=4))
            assert (len(done.tokens), done.finish) == (4, "length")
            assert len(fake.bodies("/generate")) == 3

    asyncio.run(main())


@pytest.mark.parametrize(("what", "kind"), [("500", EngineError), ("503", EngineDown), ("drop", EngineDown)])
def test_tries_are_bounded(what: str, kind: type[Exception], tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.order("/generate", what, times=9)
            await fails(engine.generate(request()), kind)
            assert len(fake.bodies("/generate")) == 3

    asyncio.run(main())


def test_a_wrong_sample_is_refused_and_not_asked_for_again(tmp_path: Path) -> None:
    def null(reply: dict[str, Any]) -> dict[str, Any]:
        reply["meta_info"]["output_token_logprobs"][0][0] = None
        return reply

    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.order("/generate", null)
            assert "None" in await fails(engine.generate(request()), EngineError)
            assert len(fake.bodies("/generate")) == 1
            await engine.generate(request())

    asyncio.run(main())


def test_a_sample_has_a_deadline_and_is_aborted_past_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path, seconds=0.2) as (engine, fake):
            fake.order("/generate", "stall")
            assert "--engine-timeout" in await fails(engine.generate(request()), EngineError)
            await until(lambda: fake.bodies("/abort_request"))
            assert fake.bodies("/abort_request") == [{"rid": fake.bodies("/generate")[0]["rid"]}]

    asyncio.run(main())


def test_a_cancelled_request_is_aborted_and_its_siblings_are_not(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.hold_at = 2
            tasks = start(engine, 4)
            await fake.tokens_out(2, requests=4)
            tasks[1].cancel()
            await until(lambda: fake.bodies("/abort_request") and len(fake.flights) == 3)
            await fake.release()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(done.pop(1), asyncio.CancelledError)
            assert [each.finish for each in done if isinstance(each, Completion)] == ["length"] * 3

    asyncio.run(main())


def test_an_abort_keeps_what_was_sampled(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.hold_at = 3
            (task,) = start(engine, 1)
            await fake.tokens_out(3, requests=1)
            await engine.abort(request(0).rid)
            done = await task
            assert (done.finish, len(done.tokens), done.versions) == ("abort", 3, (Span(1, 0, 3),))
            await engine.abort("unknown!")

    asyncio.run(main())


def test_a_request_that_waits_in_the_server_or_here_is_aborted_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path, concurrency=2) as (engine, fake):
            fake.hold_at, fake.places = 1, 1
            tasks = start(engine, 3)
            await until(lambda: len(fake.flights) == 2 and fake.flights)
            for seed in (1, 2):
                await engine.abort(request(seed).rid)
                done = await tasks[seed]
                assert (done.finish, len(done.tokens)) == ("abort", 0)
            await fake.release()
            assert (await tasks[0]).finish == "length"

    asyncio.run(main())


def test_an_abort_that_the_server_never_answers_ends_all_the_same(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.order("/generate", "stall")
            (task,) = start(engine, 1)
            await until(lambda: fake.bodies("/generate"))
            await engine.abort(request(0).rid)
            assert (await task).finish == "abort"

    asyncio.run(main())


def test_an_abort_that_nobody_asked_for_is_said_to_be_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.hold_at = 3
            (task,) = start(engine, 1)
            await fake.tokens_out(3, requests=1)
            await fake.abort_request({"abort_all": True})
            assert (await task).finish == "abort"

    asyncio.run(main())


# -- the beginning and the end


def test_a_wrong_key_is_refused_at_the_start_and_said_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> str:
        async with FakeSGLang(key="right") as fake:
            return await fails(entered(engine_of(tmp_path, fake, key="wr0ng")), UsageError)

    with caplog.at_level(logging.DEBUG):
        said = asyncio.run(main())
    assert "--engine-api-key" in said
    assert "wr0ng" not in said + caplog.text + repr(Servers(("http://a",), key="wr0ng"))


def test_a_server_that_wants_another_key_for_control_is_refused_at_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with FakeSGLang() as fake:
            fake.order("/continue_generation", "401")
            assert "--engine-api-key" in await fails(entered(engine_of(tmp_path, fake)), UsageError)

    asyncio.run(main())


def test_the_right_key_opens_all(tmp_path: Path) -> None:
    async def main() -> None:
        async with FakeSGLang(key="right") as fake:
            loadable(fake)
            async with engine_of(tmp_path, fake, key="right") as engine:
                await engine.load(policy(1))
                await engine.generate(request())
                await engine.abort("unknown!")

    asyncio.run(main())


def test_a_key_that_is_no_longer_right_loses_no_prompt(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.key = "new"
            await fails(engine.generate(request()), EngineDown)

    asyncio.run(main())


def test_a_server_that_refuses_requests_as_they_are_sent_is_refused_at_the_start(tmp_path: Path) -> None:
    """Else each prompt would be refused in its turn, and dropped."""

    async def main() -> None:
        async with FakeSGLang() as fake:
            fake.order("/generate", "400")
            assert "ordered 400" in await fails(entered(engine_of(tmp_path, fake)), UsageError)
            fake.order("/generate", lambda reply: {"text": "no meta_info"})
            assert "meta_info" in await fails(entered(engine_of(tmp_path, fake)), UsageError)

    asyncio.run(main())


def test_a_server_is_waited_for_at_the_start_but_not_for_ever(tmp_path: Path) -> None:
    async def main() -> None:
        async with FakeSGLang(context=CONTEXT) as fake:
            loadable(fake)
            await fake.stop()
            said = await fails(entered(engine_of(tmp_path, fake, timing=replace(QUICK, start=0.1))), EngineDown)
            assert fake.url in said
            coming = asyncio.create_task(engine_of(tmp_path, fake).__aenter__())
            await asyncio.sleep(0.1)
            assert not coming.done()
            await fake.start()
            await coming

    asyncio.run(main())


def test_a_server_that_somebody_left_paused_is_freed(tmp_path: Path) -> None:
    """As by a worker that was killed in an update."""

    async def main() -> None:
        async with FakeSGLang() as fake:
            loadable(fake)
            fake.mode = "retract"
            async with engine_of(tmp_path, fake) as engine:
                await engine.load(policy(1))
                await engine.generate(request())

    asyncio.run(main())


def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vocabulary"):
        SGLangEngine(tmp_path, Servers(("http://a",)), "retract", 9.0)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="vocabulary"):
        SGLangEngine(tmp_path, Servers(("http://a",)), "retract", 9.0)
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 7, "max_position_embeddings": 9}}')
    engine = SGLangEngine(tmp_path, Servers(("http://a",)), "retract", 9.0)
    assert (engine.vocab_size, engine.context_length) == (7, 9)


def test_a_deterministic_run_needs_servers_that_are_started_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (engine, a, b):
            a.deterministic = True
            assert "--enable-deterministic-inference" in await engine.varies()
            b.deterministic = True
            assert await engine.varies() == ""

    asyncio.run(main())


def test_closing_ends_what_is_in_flight_and_aborts_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with FakeSGLang() as fake:
            loadable(fake)
            fake.hold_at = 1
            async with engine_of(tmp_path, fake, concurrency=2) as engine:
                fake.hold_at = None
                await engine.load(policy(1))
                fake.hold_at = 1
                tasks = start(engine, 3)
                await fake.tokens_out(1, requests=2)
            for task in tasks:
                assert "closed" in await fails(task, EngineDown)
            assert len(fake.bodies("/abort_request")) == 2
            await until(lambda: not fake.flights)
            await fails(engine.generate(request()), EngineDown)

    asyncio.run(main())


# -- weights


def test_nothing_is_sampled_before_weights_have_been_loaded(tmp_path: Path) -> None:
    """A new or restarted server has the base model's (BB-21)."""

    async def main() -> None:
        async with FakeSGLang() as fake:
            loadable(fake)
            async with engine_of(tmp_path, fake) as engine:
                assert engine.version is None
                assert "no weights" in await fails(engine.generate(request()), EngineDown)
                await engine.load(policy(3))
                assert (engine.version, fake.label, fake.weights) == (3, "3", "w3")
                assert (await engine.generate(request(limit=2))).versions == (Span(3, 0, 2),)
                assert "never goes back" in await fails(engine.load(policy(2)), WeightsError)

    asyncio.run(main())


@pytest.mark.parametrize(("mode", "flush"), [("retract", True), ("in_place", False)])
def test_requests_survive_an_update_and_keep_both_versions(mode: str, flush: bool, tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path, mode=mode) as (engine, fake):
            fake.hold_at = 7
            tasks = start(engine, 16)
            await fake.tokens_out(7, requests=16)
            fake.heard.clear()
            await engine.load(policy(2))
            assert fake.calls == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
            assert fake.bodies("/pause_generation") == [{"mode": mode}]
            (update,) = fake.bodies("/update_weights_from_disk")
            assert update == {
                "model_path": "w2",
                "weight_version": "2",
                "abort_all_requests": False,
                "flush_cache": flush,
            }
            await fake.release()
            done = await asyncio.gather(*tasks)
            assert {each.finish for each in done} == {"length"}
            assert {each.versions for each in done} == {(Span(1, 0, 7), Span(2, 7, 20))}

    asyncio.run(main())


def test_no_request_is_lost_over_20_updates_with_64_in_flight(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.weighs |= {f"w{version}" for version in range(10, 30)}
            fake.hold_at = 1
            tasks = start(engine, 64, limit=42)
            for version in range(2, 22):
                await fake.tokens_out(fake.hold_at, requests=64)
                await engine.load(policy(version))
                fake.hold_at += 2
                await fake.move()
            await fake.release()
            for done in await asyncio.gather(*tasks):
                assert (done.finish, len(done.tokens)) == ("length", 42)
                assert [span.version for span in done.versions] == [*range(1, 22)]
            assert "/abort_request" not in fake.calls

    asyncio.run(main())


def test_requests_that_come_during_an_update_wait_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.order("/update_weights_from_disk", "stall")
            loading = asyncio.create_task(engine.load(policy(2)))
            await until(lambda: fake.bodies("/update_weights_from_disk"))
            tasks = start(engine, 3)
            await asyncio.sleep(0.1)
            assert fake.bodies("/generate") == []
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            assert [type(e) for e in await asyncio.gather(*tasks, return_exceptions=True)] == [EngineDown] * 3

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_no_request_begins_on_the_cache_of_older_weights(mode: str, tmp_path: Path) -> None:
    """An update in place keeps the cache, and its prompts come again: siblings of a group, later epochs."""

    async def main() -> None:
        async with one(tmp_path, mode=mode) as (engine, fake):
            for version in (2, 3):
                await asyncio.gather(*start(engine, 3))
                await engine.load(policy(version))
            await asyncio.gather(*start(engine, 3))
            assert fake.stale_hits == 0
            assert bool(len(fake.cache) > 1) == (mode == "in_place")

    asyncio.run(main())


def test_nothing_of_an_earlier_run_is_left_in_the_cache(tmp_path: Path) -> None:
    """Its version 1 was another one."""

    async def main() -> None:
        async with one(tmp_path, mode="in_place") as (engine, fake):
            await engine.generate(request())
            for path in ("other weights", ""):
                fake.weighs.add(path)
                async with engine_of(tmp_path, fake, mode="in_place") as later:
                    await later.load(policy(1, path))
                    assert fake.cache == {}
                    await later.generate(request())
            assert fake.stale_hits == 0

    asyncio.run(main())


def test_weights_without_a_folder_change_the_version_alone_and_abort_nothing(tmp_path: Path) -> None:
    """As the echo trainer publishes them. The server aborts all at a new version unless told not to (BB-02)."""

    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.hold_at = 2
            tasks = start(engine, 16)
            await fake.tokens_out(2, requests=16)
            await engine.load(policy(2, path=""))
            assert (engine.version, fake.label, fake.weights) == (2, "2", "w1")
            await fake.release()
            assert {each.versions for each in await asyncio.gather(*tasks)} == {(Span(1, 0, 2), Span(2, 2, 20))}

    asyncio.run(main())


def test_applied_but_not_flushed_is_flushed_and_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.hold_at = 2
            tasks = start(engine, 4)
            await fake.tokens_out(2, requests=4)
            fake.heard.clear()
            fake.flush_refusals = 3
            await engine.load(policy(2))
            flushes = ["/flush_cache"] * 3
            last = ["/update_weight_version", "/continue_generation"]
            assert fake.calls == ["/pause_generation", "/update_weights_from_disk", *flushes, *last]
            assert (fake.label, fake.stamp) == ("2", "2")
            await fake.release()
            assert {each.versions for each in await asyncio.gather(*tasks)} == {(Span(1, 0, 2), Span(2, 2, 20))}

    asyncio.run(main())


def test_a_flush_that_never_works_is_a_failed_update_and_not_a_dead_worker(tmp_path: Path) -> None:
    """Bounded, with pauses (BB-25); the server is out until a whole update succeeds."""

    async def main() -> None:
        async with one(tmp_path, timing=replace(QUICK, look=60)) as (engine, fake):
            fake.flush_refusals = 99
            await engine.load(policy(2))
            assert fake.calls.count("/flush_cache") == 3
            assert "could not be flushed" in await fails(engine.generate(request()), EngineDown)
            await until(lambda: fake.mode is None)
            fake.flush_refusals = 0
            fake.heard.clear()
            engine._pool.members[0].poke.set()  # type: ignore[union-attr]
            await serves(engine, fake, 2)
            assert "/update_weights_from_disk" in fake.calls

    asyncio.run(main())


def test_weights_that_no_server_can_load_are_an_error_in_the_servers_words(tmp_path: Path) -> None:
    """BB-17, BB-19: the folder may have vanished; a later version then heals."""

    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            said = await fails(engine.load(policy(2, path="gone")), WeightsError)
            assert "Failed to get weights iterator: gone" in said
            assert engine.version == 1
            await until(lambda: fake.mode is None)
            assert "Failed to get" in await fails(engine.generate(request()), EngineDown)
            await engine.load(policy(3))
            await serves(engine, fake, 3)

    asyncio.run(main())


def test_one_server_that_cannot_load_leaves_the_others_serving(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (engine, _, b):
            b.weighs.clear()
            await engine.load(policy(2))
            assert engine.version == 2
            assert {d.versions for d in await asyncio.gather(*start(engine, 6))} == {(Span(2, 0, 20),)}
            assert b.bodies("/generate") == []
            loadable(b)
            await until(lambda: b.label == "2")
            await until(lambda: all(m.serving for m in engine._pool.members))  # type: ignore[union-attr]
            await asyncio.gather(*start(engine, 6))
            assert len([body for body in b.bodies("/generate") if body["input_ids"] != [0]]) == 3

    asyncio.run(main())


def test_an_update_that_never_ends_is_given_up_and_nothing_stays_paused(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path, timing=HASTY) as (engine, fake):
            fake.hold_at = 1
            tasks = start(engine, 3)
            await fake.tokens_out(1, requests=3)
            fake.order("/update_weights_from_disk", "stall")
            await engine.load(policy(2))
            for task in tasks:
                assert "took over" in await fails(task, EngineDown)
            await fake.release()
            await serves(engine, fake, 2)
            assert (fake.mode, fake.weights) == (None, "w2")

    asyncio.run(main())


def test_a_server_that_dies_in_an_update_comes_back_with_the_current_weights_only(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.order("/update_weights_from_disk", "crash")
            await engine.load(policy(2))
            assert engine.version == 2
            await fails(engine.generate(request()), EngineDown)
            await engine.load(policy(3))
            await fake.start()
            await serves(engine, fake, 3)
            assert (fake.weights, fake.label) == ("w3", "3")

    asyncio.run(main())


def test_a_server_that_reports_another_version_than_it_was_given_is_not_used(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.says = "default"
            await engine.load(policy(2))
            assert "reports version 'default'" in await fails(engine.generate(request()), EngineDown)
            fake.says = None
            await serves(engine, fake, 2)

    asyncio.run(main())


def test_an_update_that_is_broken_off_leaves_the_server_running_and_suspect(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.order("/update_weights_from_disk", "stall")
            loading = asyncio.create_task(engine.load(policy(2)))
            await until(lambda: fake.bodies("/update_weights_from_disk"))
            assert fake.mode == "retract"
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await until(lambda: fake.mode is None)
            await serves(engine, fake, 2)
            assert fake.weights == "w2"

    asyncio.run(main())


def test_a_version_that_is_loaded_already_is_not_loaded_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            await engine.load(policy(1))
            assert fake.calls == []

    asyncio.run(main())


# -- health


def test_a_server_that_is_away_loses_its_requests_and_gets_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (engine, a, b):
            a.hold_at = b.hold_at = 1
            tasks = start(engine, 6)
            await a.tokens_out(1, requests=3)
            await b.tokens_out(1, requests=3)
            a.order("/ready", "stall", times=99)
            a.order("/model_info", "503", times=99)
            await b.release()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert sorted(type(each).__name__ for each in done) == ["Completion"] * 3 + ["EngineDown"] * 3
            await asyncio.gather(*start(engine, 4))
            assert len(b.bodies("/generate")) == 7
            await until(lambda: len(a.bodies("/abort_request")) == 3)

    asyncio.run(main())


def test_a_killed_server_is_tried_elsewhere_and_comes_back_with_what_was_published_meanwhile(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (engine, a, b):
            await a.stop()
            done = await asyncio.gather(*start(engine, 4))
            assert len(done) == 4
            await engine.load(policy(2))
            await a.start()
            await until(lambda: a.label == "2")
            await until(lambda: all(m.serving for m in engine._pool.members))  # type: ignore[union-attr]
            assert a.weights == "w2"
            await asyncio.gather(*start(engine, 4))
            assert len(b.bodies("/generate")) == 6

    asyncio.run(main())


def test_a_restarted_server_is_found_out_by_what_it_says_it_serves(tmp_path: Path) -> None:
    """Restarted between two looks: it answers with the base weights, whose label is not ours (BB-21)."""

    async def main() -> None:
        async with one(tmp_path, timing=replace(QUICK, look=60)) as (engine, fake):
            await fake.stop()
            await fake.start()
            assert (await engine.generate(request(limit=2))).versions == (Span(None, 0, 2),)
            await until(lambda: fake.label == "1")
            await serves(engine, fake, 1)
            assert fake.weights == "w1"

    asyncio.run(main())


def test_a_load_with_no_server_there_counts_and_is_made_up_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            await fake.stop()
            await until(lambda: not engine._pool.members[0].greeted)  # type: ignore[union-attr]
            await engine.load(policy(5))
            assert engine.version == 5
            await fails(engine.generate(request()), EngineDown)
            await fake.start()
            await serves(engine, fake, 5)

    asyncio.run(main())


def test_a_request_waits_a_while_for_a_server_to_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path, timing=replace(QUICK, away=10)) as (engine, fake):
            await fake.stop()
            await until(lambda: not engine._pool.members[0].serving)  # type: ignore[union-attr]
            tasks = start(engine, 3)
            await asyncio.sleep(0.1)
            await fake.start()
            assert {done.versions for done in await asyncio.gather(*tasks)} == {(Span(1, 0, 20),)}

    asyncio.run(main())


def test_servers_without_ready_are_asked_for_their_health(tmp_path: Path) -> None:
    async def main() -> None:
        async with FakeSGLang() as fake:
            loadable(fake)
            fake.has_ready = False
            async with engine_of(tmp_path, fake) as engine:
                await engine.load(policy(1))
                await until(lambda: len(fake.bodies("/health")) > 3)
                await engine.generate(request())
                fake.order("/health", "503", times=99)
                await until(lambda: not engine._pool.members[0].serving)  # type: ignore[union-attr]

    asyncio.run(main())


def test_not_ready_after_a_probe_that_met_a_pause_is_not_ill(tmp_path: Path) -> None:
    """Somebody's /health during a pause fails, and /ready says no from then on; a /health afterwards mends it."""

    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.unwell = True
            await until(lambda: fake.bodies("/health") and not fake.unwell)
            assert engine._pool.members[0].serving  # type: ignore[union-attr]

    asyncio.run(main())


def test_a_server_that_somebody_else_pauses_is_taken_out_freed_and_loaded_anew(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.mode = "retract"
            (task,) = start(engine, 1)
            assert "not healthy" in await fails(task, EngineDown)
            await serves(engine, fake, 1)
            assert "/update_weights_from_disk" in fake.calls

    asyncio.run(main())


def test_a_pause_of_our_own_is_no_illness_and_requests_survive_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            fake.hold_at = 2
            tasks = start(engine, 2)
            await fake.tokens_out(2, requests=2)
            await engine.pause()
            fake.heard.clear()
            await fake.release()
            late = start(engine, 5)[2:]
            await engine.load(policy(2))
            await until(lambda: len(fake.bodies("/model_info")) > 6)
            assert fake.bodies("/health") == fake.bodies("/generate") == []
            assert [len(flight.tokens) for flight in fake.flights.values()] == [2, 2]
            await engine.resume()
            spans = {each.versions for each in await asyncio.gather(*tasks, *late)}
            assert spans == {(Span(1, 0, 2), Span(2, 2, 20)), (Span(2, 0, 20),)}

    asyncio.run(main())


# -- many


def test_requests_go_where_fewest_are_and_no_server_has_more_than_its_share(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path, concurrency=4) as (engine, a, b):
            a.hold_at = b.hold_at = 1
            tasks = start(engine, 12)
            await a.tokens_out(1, requests=4)
            await b.tokens_out(1, requests=4)
            await asyncio.sleep(0.05)
            assert (len(a.flights), len(b.flights)) == (4, 4)
            await b.release()
            await until(lambda: len(b.bodies("/generate")) == 8)
            await a.release()
            assert len(await asyncio.gather(*tasks)) == 12

    asyncio.run(main())


def test_a_server_with_a_smaller_window_does_not_join(tmp_path: Path) -> None:
    async def main() -> None:
        async with FakeSGLang(context=CONTEXT) as a, FakeSGLang(context=CONTEXT // 2) as b:
            loadable(a, b)
            await b.stop()
            async with engine_of(tmp_path, a, b) as engine:
                await engine.load(policy(1))
                await b.start()
                await until(lambda: "context of 32" in engine._pool.members[1].why)  # type: ignore[union-attr]
                await asyncio.gather(*start(engine, 4))
                assert b.bodies("/generate") == []

    asyncio.run(main())


def test_through_a_router_requests_go_and_weights_go_past_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            a, b = [await stack.enter_async_context(FakeSGLang(context=CONTEXT, key="k")) for _ in range(2)]
            loadable(a, b)
            router = await stack.enter_async_context(FakeRouter([a.url, b.url]))
            how = {"router": router.url, "key": "k", "concurrency": 4}
            engine = await stack.enter_async_context(engine_of(tmp_path, a, b, **how))
            await engine.load(policy(1))
            a.hold_at = b.hold_at = 1
            tasks = start(engine, 9)
            await a.tokens_out(1, requests=4)
            await b.tokens_out(1, requests=4)
            await engine.load(policy(2))
            await engine.abort(request(0).rid)
            assert (await tasks[0]).finish == "abort"
            await a.release()
            await b.release()
            assert {done.finish for done in await asyncio.gather(*tasks[1:])} == {"length"}
            assert set(router.heard) == {"/generate"}
            assert (a.weights, b.weights) == ("w2", "w2")

    asyncio.run(main())


def test_behind_a_router_one_server_with_unknown_weights_stops_all(tmp_path: Path) -> None:
    """The router would go on sending it requests."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            a, b = [await stack.enter_async_context(FakeSGLang(context=CONTEXT)) for _ in range(2)]
            loadable(a, b)
            router = await stack.enter_async_context(FakeRouter([a.url, b.url]))
            engine = await stack.enter_async_context(engine_of(tmp_path, a, b, router=router.url))
            await engine.load(policy(1))
            b.weighs.clear()
            await engine.load(policy(2))
            await fails(engine.generate(request()), EngineDown)
            loadable(b)
            await serves(engine, b, 2)

    asyncio.run(main())
