"""Adapters alone on SGLang servers: one a version, each request sampled to its end with its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import Adapter, FakeSGLang
from test_engine_sglang import CONTEXT, HASTY, QUICK, engine_of, entered, fails, request, serves, start, until

from pipeline.config import GenerateConfig
from pipeline.errors import EngineDown, UsageError, WeightsError
from pipeline.types import PEFT, Policy, Span
from producers import engines
from producers.engines.sglang import SGLangEngine
from producers.engines.sglang_adapters import Adapters

BESIDE = Adapters(8, Path("/model"))
LORA = {"enable_lora": True, "max_lora_rank": 16, "max_loaded_loras": None, "dp_size": 1}


def policy(version: int, path: str | None = None) -> Policy:
    return Policy(version, f"w{version}" if path is None else path, PEFT, "d1" * 32, 0, 0.0)


def name(version: int) -> str:
    return f"millpond-v{version}-{'d1' * 8}"


def server(**how: Any) -> FakeSGLang:
    fake = FakeSGLang(context=CONTEXT, **how)
    fake.lora = dict(LORA)
    fake.weighs |= {f"w{version}" for version in range(40)}
    return fake


@asynccontextmanager
async def one(folder: Path, **how: Any) -> AsyncIterator[tuple[SGLangEngine, FakeSGLang]]:
    """One server, version 1 loaded, nothing heard yet."""
    async with server() as fake, engine_of(folder, fake, adapters=BESIDE, **how) as engine:
        await engine.load(policy(1))
        fake.heard.clear()
        yield engine, fake


def loaded(fake: FakeSGLang, *versions: int) -> Callable[[], bool]:
    return lambda: set(fake.adapters) == {name(version) for version in versions}


def named(fake: FakeSGLang) -> list[str | None]:
    return [body.get("lora_path") for body in fake.bodies("/generate")]


async def held(engine: SGLangEngine, fake: FakeSGLang, first: int, count: int = 2) -> list[asyncio.Task[Any]]:
    """So many requests with two tokens each, and no more."""
    fake.hold_at = 2
    before = len(fake.flights)
    made = [asyncio.create_task(engine.generate(request(first + n))) for n in range(count)]
    await fake.tokens_out(2, before + count)
    return made


# -- requests


def test_what_is_in_flight_is_sampled_to_its_end_with_its_own_and_nothing_waits(tmp_path: Path) -> None:
    """BB-02, BB-05: 16 requests and an update; not one is aborted, none carries two versions, and each says that which
    it was sent with. The old adapter goes with its last request; nobody was paused, nothing flushed or relabelled."""

    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            old = await held(engine, fake, 0, 16)
            await engine.load(policy(2))
            assert engine.version == 2
            new = await held(engine, fake, 16, 4)
            assert set(fake.adapters) == {name(1), name(2)}
            await fake.release()
            for tasks, version in ((old, 1), (new, 2)):
                for done in await asyncio.gather(*tasks):
                    assert (done.finish, done.versions) == ("length", (Span(version, 0, 20),))
            await until(loaded(fake, 2))
            assert named(fake) == [name(1)] * 16 + [name(2)] * 4
            assert {*fake.calls} == {"/generate", "/load_lora_adapter", "/unload_lora_adapter"}
            assert fake.stale_hits == 0

    asyncio.run(main())


def test_a_request_that_lasts_holds_no_update_up(tmp_path: Path) -> None:
    """The server would wait for it with all that follows, were its adapter taken down before it ends."""

    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            (long,) = await held(engine, fake, 0, 1)
            for version in range(2, 7):
                await asyncio.wait_for(engine.load(policy(version)), 5)
            await until(loaded(fake, 1, 6))
            await fake.release()
            assert (await long).versions == (Span(1, 0, 20),)
            await until(loaded(fake, 6))

    asyncio.run(main())


def test_while_one_is_loaded_requests_go_on_with_the_one_before(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            async with fake.adapting:
                loading = asyncio.create_task(engine.load(policy(2)))
                await until(lambda: "/load_lora_adapter" in fake.calls)
                done = await asyncio.wait_for(engine.generate(request()), 5)
                assert done.versions == (Span(1, 0, 20),)
            await loading
            assert (await engine.generate(request())).versions == (Span(2, 0, 20),)

    asyncio.run(main())


def test_who_breaks_off_frees_the_adapter_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            cancelled, aborted = await held(engine, fake, 0)
            await engine.load(policy(2))
            cancelled.cancel()
            await engine.abort(request(1).rid)
            assert (await aborted).versions == (Span(1, 0, 2),)
            await until(loaded(fake, 2))

    asyncio.run(main())


def test_the_number_there_at_once_is_bounded_and_the_oldest_makes_room(tmp_path: Path) -> None:
    """By us: a server that makes room by itself waits for the requests. They are handed back for no fault of theirs."""

    async def main() -> None:
        async with server() as fake:
            fake.lora["max_loaded_loras"] = 3
            async with engine_of(tmp_path, fake, adapters=BESIDE) as engine:
                tasks = []
                for version in range(1, 4):
                    await engine.load(policy(version))
                    tasks += await held(engine, fake, version, 1)
                await asyncio.wait_for(engine.load(policy(4)), 5)
                assert "made room" in await fails(tasks[0], EngineDown)
                assert set(fake.adapters) == {name(2), name(3), name(4)}
                await fake.release()
                assert [(await task).versions[0].version for task in tasks[1:]] == [2, 3]
                await until(loaded(fake, 4))

    asyncio.run(main())


# -- servers that fail


def test_a_server_that_was_restarted_has_the_current_one_alone_before_it_serves(tmp_path: Path) -> None:
    """BB-21: it has the model without an adapter, under a label that looks as ever."""

    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            for version in range(2, 6):
                await engine.load(policy(version))
            await fake.stop()
            await fake.start()
            fake.heard.clear()
            await serves(engine, fake, 5)
            assert set(fake.adapters) == {name(5)}
            assert {*named(fake)} <= {None, name(5)}
            first = next(i for i, (path, body) in enumerate(fake.heard) if path == "/load_lora_adapter")
            before = [body.get("lora_path") for path, body in fake.heard[:first] if path == "/generate"]
            assert all(found is None or found == name(5) for found in before)

    asyncio.run(main())


def test_a_request_that_meets_a_server_without_its_adapter_is_no_refused_prompt(tmp_path: Path) -> None:
    """The answer is a 400, as to a prompt that is too long, and its prompt would be dropped for good."""

    async def main() -> None:
        async with one(tmp_path, timing=replace(HASTY, look=60, update=5)) as (engine, fake):
            fake.adapters.clear()
            fake.ever.clear()
            said = await fails(engine.generate(request()), EngineDown)
            assert "never been loaded" in said
            await serves(engine, fake, 1)
            assert set(fake.adapters) == {name(1)}

    asyncio.run(main())


@pytest.mark.parametrize("trouble", ["400", "503", "drop", "stall", "crash"])
def test_a_server_on_which_a_load_fails_serves_nothing_until_one_succeeds(
    tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    """BB-17: the wait is bounded, the server's own words are in the log, its requests are lost at once, and it comes
    back by itself with the version that is wanted."""
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with one(tmp_path, timing=HASTY) as (engine, fake):
            tasks = await held(engine, fake, 0)
            fake.order("/load_lora_adapter", trouble)
            if trouble == "400":
                assert "ordered 400" in await fails(engine.load(policy(2)), WeightsError)
            else:
                await engine.load(policy(2))
            for task in tasks:
                assert "service: " in await fails(task, EngineDown)
            fake.hold_at = None
            if trouble == "crash":
                await fake.start()
            await serves(engine, fake, 2)
            await until(loaded(fake, 2))

    asyncio.run(main())
    assert "is out of service" in caplog.text
    assert "is in service with version 2" in caplog.text


def test_one_server_of_two_goes_on_where_the_other_cannot_load(tmp_path: Path) -> None:
    async def main() -> None:
        async with server() as a, server() as b, engine_of(tmp_path, a, b, adapters=BESIDE) as engine:
            await engine.load(policy(1))
            a.order("/load_lora_adapter", "400", times=3)
            await engine.load(policy(2))
            assert engine.version == 2
            for done in await asyncio.gather(*start(engine, 6)):
                assert done.versions == (Span(2, 0, 20),)
            await until(lambda: loaded(a, 2)() and loaded(b, 2)())

    asyncio.run(main())


def test_weights_that_are_no_adapter_are_not_taken_for_one(tmp_path: Path) -> None:
    """A trainer that was resumed with merged weights is met before its rules are."""

    async def main() -> None:
        async with one(tmp_path) as (engine, fake):
            await engine.load(replace(policy(2), format="hf"))
            assert "whole weights" in await fails(engine.generate(request()), EngineDown)
            assert "/update_weights_from_disk" not in fake.calls
            await engine.load(policy(3))
            await serves(engine, fake, 3)

    asyncio.run(main())


# -- the first words


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"enable_lora": None}, "started without --enable-lora: start it with --enable-lora --max-lora-rank 8"),
        ({"enable_lora": False}, "started without --enable-lora"),
        ({"max_lora_rank": 4}, "--max-lora-rank 4: start it with"),
        ({"dp_size": 2}, "--dp-size 2"),
        ({"max_loaded_loras": 1}, "--max-loaded-loras 1"),
    ],
)
def test_a_server_without_room_for_them_is_refused_before_anything_is_sampled(
    tmp_path: Path, how: dict[str, Any], said: str
) -> None:
    async def main() -> str:
        async with server() as fake:
            fake.lora |= how
            return await fails(entered(engine_of(tmp_path, fake, adapters=BESIDE)), UsageError)

    assert said in asyncio.run(main())


def test_a_router_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    flags = {"engine": "sglang", "engine_url": "http://a:1", "hf_checkpoint": tmp_path, "rm_type": "exact"}
    config = GenerateConfig(**flags, engine_router_url="http://r:1")
    with pytest.raises(UsageError, match=r"--engine-router-url with .* some of its servers do not have yet"):
        engines.build(config, "retract", 8)


def test_what_an_earlier_worker_left_there_is_taken_down_and_others_stay(tmp_path: Path) -> None:
    """One of this very version and these weights, too: nobody knows how it came there."""

    async def main() -> None:
        async with server() as fake:
            fake.adapters = {n: Adapter("w1") for n in ("millpond-v9-00", name(1), "somebody's")}
            mine = fake.adapters[name(1)]
            async with engine_of(tmp_path, fake, adapters=BESIDE) as engine:
                await engine.load(policy(1))
                assert set(fake.adapters) == {name(1), "somebody's"}
                assert fake.adapters[name(1)] is not mine

    asyncio.run(main())


def test_the_model_comes_back_where_an_earlier_run_had_put_its_weights(tmp_path: Path) -> None:
    """Adapters added to those would give other tokens than the trainer's, and nothing would say so."""
    there = Adapters(8, tmp_path / "model")

    async def main() -> None:
        async with server(label="12") as fake, engine_of(tmp_path, fake, adapters=there) as engine:
            said = await fails(engine.load(policy(1)), WeightsError)
            assert "could not be loaded there" in said
            assert "start it anew" in said
            assert fake.adapters == {}
            fake.weighs.add(str(tmp_path / "model"))
            await serves(engine, fake, 1)
            assert (fake.weights, fake.label) == (str(tmp_path / "model"), "default")

    asyncio.run(main())


def test_a_server_that_names_another_model_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may have the same one under another path: nobody but people can know."""

    async def main() -> None:
        async with one(tmp_path):
            pass
        assert "serves as started, and the run's adapters are of /model" in caplog.text
        caplog.clear()
        async with server() as fake, engine_of(tmp_path, fake, adapters=BESIDE) as engine:
            fake.path = "/model"
            await engine.load(policy(1))
        assert "adapters are of" not in caplog.text

    asyncio.run(main())


def test_tokens_of_a_model_that_was_replaced_under_way_have_no_known_version(tmp_path: Path) -> None:
    """By somebody else who loads weights there; the server leaves service and has its model back when it returns."""

    async def main() -> None:
        async with one(tmp_path, timing=replace(QUICK, look=60)) as (engine, fake):
            (task,) = await held(engine, fake, 0, 1)
            fake.weighs.add("/model")
            fake.weights, fake.label, fake.stamp = "theirs", "7", "7"
            await fake.release()
            assert (await task).versions == (Span(None, 0, 20),)
            await until(lambda: fake.label == "default")
            await serves(engine, fake, 1)

    asyncio.run(main())


# -- guests


def test_who_evaluates_on_a_generators_servers_names_its_adapter_and_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with one(tmp_path) as (owner, fake), engine_of(tmp_path, fake, adapters=BESIDE, guest=True) as guest:
            loading = asyncio.create_task(guest.load(policy(2)))
            await asyncio.sleep(0.05)
            assert not loading.done()
            await owner.load(policy(2))
            await loading
            fake.heard.clear()
            assert (await guest.generate(request())).versions == (Span(2, 0, 20),)
            assert named(fake) == [name(2)]
            assert fake.calls == ["/generate"]

    asyncio.run(main())
