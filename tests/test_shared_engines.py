"""Evaluations on engines over HTTP: their own, or the generators', which nobody else uses or changes meanwhile."""

from __future__ import annotations

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import FakeSGLang, in_a_thread
from make import Hand, at_work, calm, drain_of, feed, loop_of, until
from rig import Rig, agreed, policy
from test_evaluate import Weighty, answer, bare, eventually, lines, train, worker
from test_evaluation import asked, prompts

from consumers.staleness import Limit
from pipeline.causes import causes
from pipeline.code import digest
from pipeline.codec import decode
from pipeline.config import WorkerConfig
from pipeline.errors import Fenced, MillpondError, Starved, UsageError, WeightsError
from pipeline.evals import HOLD
from pipeline.glance import look
from pipeline.jobs import EVAL, Jobs, Outcome
from pipeline.status import evaluated
from producers.claim import LASTS, Claim, servers
from producers.evaluate import evaluate
from producers.holding import holding
from trainer.demo_model import make
from trainer.loop import Loop

# -- the generators' engines


def test_what_is_in_flight_ends_and_nothing_is_leased_or_loaded_until_the_evaluation_has_ended(real: Rig) -> None:
    trainer = real.trainer(bound=20, in_flight=2, max_weight_staleness=2)
    feed(real, 12)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine, concurrency=4):
            await until(lambda: engine.prompts() == [0, 1])
            trainer.hold_engines(policy(2), HOLD)
            trainer.publish(policy(2), [])
            await until(lambda: engine.version == 2)
            trainer.publish(policy(3), [])
            engine.end(0)
            engine.end(1)
            await until(lambda: len(real.groups()) == 2)
            await calm(engine)
            assert (engine.loads, engine.held) == ([1, 2], {})
            assert "evaluating" in {cause.name for cause in causes(look(trainer))}
            trainer.let_go(2)
            await until(lambda: engine.prompts() == [2, 3])
            assert engine.loads == [1, 2, 3]

    real.do(go())
    assert {group.aborted for group in map(decode, real.groups())} == {False}
    ends = {name for name in real.raw.hkeys(real.keys["counters"]) if name.startswith((b"recycled", b"dropped"))}
    assert ends == {b"recycled:shutdown"}  # of those that were leased afterwards


def test_a_generator_without_prompts_loads_what_the_evaluation_waits_for(real: Rig) -> None:
    trainer = real.trainer()
    trainer.hold_engines(policy(2), HOLD)
    trainer.publish(policy(2), [])

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine):
            await until(lambda: engine.version == 2)

    real.do(go())


def test_engines_that_nobody_holds_any_longer_go_on_by_themselves(run: Rig) -> None:
    trainer = run.trainer()
    feed(run, 4)
    worker = run.worker()
    trainer.hold_engines(policy(2), 0.2)
    assert run.do(worker.lease(2, 0)).why == "evaluation"
    assert trainer.held()
    eventually(lambda: len(run.lease(worker, 2)) == 2)
    assert not trainer.held()


def test_a_replaced_trainer_holds_nothing(run: Rig) -> None:
    old = run.trainer()
    run.trainer()
    with pytest.raises(Fenced):
        old.hold_engines(policy(9), HOLD)
    assert not run.raw.exists(run.keys["evals:hold"])


def test_a_worker_renews_what_is_held_for_its_version_and_ends_it(run: Rig) -> None:
    trainer, worker = run.trainer(), run.worker()
    trainer.hold_engines(policy(2), 5.0)

    async def go() -> int:
        with pytest.raises(MillpondError, match="not held for version 3 any longer"):
            async with holding(worker, 3):
                pass
        async with holding(worker, 2):
            return int(run.raw.pttl(run.keys["evals:hold"]))

    assert run.do(go()) > 50_000
    assert not trainer.held()


def test_a_trainer_does_not_starve_while_an_evaluation_has_the_engines(
    real: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trainer = real.trainer()
    trainer.hold_engines(policy(2), 2.5)
    with pytest.raises(Starved):
        drain_of(trainer).batch(Limit(1, (), 1))
    assert "an evaluation has the engines" in caplog.text


def test_the_trainer_holds_the_engines_before_it_publishes_and_lets_go_at_the_end(real: Rig, tmp_path: Path) -> None:
    seen: list[int] = []
    worker = real.new_worker("evaluator")

    def evaluator() -> None:
        for step in (2, 4):
            seen.append(int(eventually(lambda: real.raw.hget(real.keys["evals:hold"], "version"))))
            answer(real, step, {"eval/a": step})
            real.do(worker.script("keep_hold", seen[-1], 0))

    shared = {"eval_function_path": None, "eval_prompt_data": "a x", "eval_shared_engines": True}
    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(evaluator)
        train(real, tmp_path, Weighty(), num_rollout=4, **shared)
        working.result()
    assert seen == [3, 5]
    assert bare(lines(tmp_path)) == {2: {"eval/a": 2}, 4: {"eval/a": 4}}
    assert not real.raw.exists(real.keys["evals:hold"])


def resumed(rig: Rig, folder: Path, step: int, **fields: Any) -> Loop:
    """At that step, with the evaluation of step 2 in flight on shared engines when the last trainer ended."""
    ask = asked(step=2, version=3, shared=True)
    (folder / "evals.open.json").write_text(json.dumps([ask.model_dump(mode="json")]))
    shared = {"eval_prompt_data": "a x", "eval_shared_engines": True, "save_interval": 0}
    loop = loop_of(rig, folder, Weighty(), eval_interval=2, **shared, **fields)
    assert loop.evals
    loop.now = replace(loop.now, step=step, version=9, fresh=False)
    loop.broker.hold_engines(policy(3), HOLD)
    loop.evals.begin(step)
    return loop


def test_after_a_resume_from_later_weights_what_was_in_flight_on_shared_engines_is_missing_and_status_says_why(
    real: Rig, tmp_path: Path
) -> None:
    loop = resumed(real, tmp_path, 3)
    assert bare(lines(tmp_path)) == {2: {"eval/missing": 1}}
    assert not loop.broker.held()
    assert evaluated(look(real.feeder()).evals) == (
        "1 (missing 1); step 2 missing: a resume has given the engines that were held for it newer weights"
    )
    loop.report.file.close()


def test_after_a_resume_from_the_weights_that_were_in_flight_on_shared_engines_they_are_evaluated_again(
    real: Rig, tmp_path: Path
) -> None:
    loop = resumed(real, tmp_path, 2)
    assert loop.evals
    assert (loop.evals.flights, loop.broker.held()) == ([], False)
    loop._evaluate(loop.publish(9))
    assert [(flight.ask.step, flight.ask.version) for flight in loop.evals.flights] == [(2, 9)]
    assert real.raw.hget(real.keys["evals:hold"], "version") == b"9"
    answer(real, 2, {"eval/a": 0.5})
    eventually(lambda: loop.evals.look() or not loop.evals.flights)  # type: ignore[union-attr,func-returns-value]
    assert bare(lines(tmp_path)) == {2: {"eval/a": 0.5}}
    loop.report.file.close()


# -- servers


def sglang(folder: Path, fake: FakeSGLang, **more: Any) -> WorkerConfig:
    make(folder / "model", 1)
    rows = prompts(folder, *(f"A:{n}=" for n in range(1000, 1010)))
    return WorkerConfig(rm_type="length", hf_checkpoint=folder / "model", eval_prompt_data=f"a {rows}", **more)


def test_a_guest_changes_nothing_on_the_servers(tmp_path: Path) -> None:
    async def go() -> tuple[dict[str, float], list[str]]:
        async with FakeSGLang(vocab=22, label="7") as fake:
            config = sglang(tmp_path, fake, engine="sglang", engine_url=fake.url, eval_shared_engines=True)
            found = await evaluate(asked(shared=True, samples=2), config, agreed())
            assert {body["sampling_params"]["temperature"] for body in fake.bodies("/generate")} == {0}
            return found, [path for path, _ in fake.heard]

    found, calls = asyncio.run(go())
    assert (found["eval/a/samples"], found["eval/weight_version"]) == (20, 7)
    assert set(calls) <= {"/model_info", "/v1/models", "/ready", "/health", "/generate"}


@pytest.mark.parametrize("shared", [True, False])
def test_servers_that_depend_on_batches_are_refused_in_a_deterministic_run(tmp_path: Path, shared: bool) -> None:
    async def go(steady: bool) -> dict[str, float]:
        async with FakeSGLang(vocab=22, label="7") as fake:
            fake.deterministic = steady
            fake.weighs.add("weights/7")
            where = {"engine": "sglang", "engine_url": fake.url} if shared else {"eval_engine_url": fake.url}
            config = sglang(tmp_path, fake, eval_shared_engines=shared, **where)
            ask = asked(path="weights/7", shared=shared, samples=2)
            return await evaluate(ask, config, agreed(deterministic_mode=True))

    assert asyncio.run(go(True))["eval/a/samples"] == 20
    with pytest.raises(UsageError, match="--deterministic-mode: start the SGLang servers with --enable-deterministic"):
        asyncio.run(go(False))


def test_a_guest_waits_for_the_version_and_gives_up_where_the_server_has_gone_on(tmp_path: Path) -> None:
    async def go(label: str, later: str) -> dict[str, float]:
        async with FakeSGLang(vocab=22, label=label) as fake:
            config = sglang(tmp_path, fake, engine="sglang", engine_url=fake.url, eval_shared_engines=True)
            evaluating = asyncio.create_task(evaluate(asked(shared=True), config, agreed()))
            await until(lambda: fake.heard)
            assert not fake.bodies("/generate")
            fake.label = fake.stamp = later
            return await evaluating

    assert asyncio.run(go("6", "7"))["eval/a/samples"] == 10
    with pytest.raises(WeightsError, match="it has gone on to version 8"):
        asyncio.run(go("6", "8"))


def test_servers_for_evaluations_alone_load_just_that_version(tmp_path: Path) -> None:
    async def go() -> tuple[dict[str, float], list[Any]]:
        async with FakeSGLang(vocab=22, label="9") as fake:
            fake.weighs.add("weights/7")
            config = sglang(tmp_path, fake, eval_engine_url=fake.url)
            found = await evaluate(asked(path="weights/7", temperature=0.5, top_p=0.9), config, agreed())
            sampling = fake.bodies("/generate")[-1]["sampling_params"]
            assert (sampling["temperature"], sampling["top_p"]) == (0.5, 0.9)
            return found, fake.bodies("/update_weights_from_disk")

    found, loads = asyncio.run(go())
    assert found["eval/a/samples"] == 10
    assert [(body["model_path"], body["weight_version"]) for body in loads] == [("weights/7", "7")]


def test_a_server_for_evaluations_is_one_workers_until_it_lets_go_or_falls_silent(run: Rig) -> None:
    broker = run.feeder()
    both, one = Claim(broker, "w1", ("http://a:1", "http://b:1")), Claim(broker, "w2", ("http://b:1",))
    assert (both.other(), one.other(), both.other()) == ("", "w1", "")
    one.let_go()
    assert one.other() == "w1"
    both.let_go()
    assert (one.other(), both.other()) == ("", "w2")
    assert not run.raw.hexists(run.keys["evals:engines"], "http://a:1")
    ends = int(run.raw.hget(run.keys["evals:engines"], "http://b:1").split()[1])
    assert 0 < ends - run.now() <= LASTS * 1000
    run.raw.hset(run.keys["evals:engines"], "http://b:1", f"w2 {run.now() - 1}")
    assert both.other() == ""
    one.renewed = float("-inf")
    assert not one.kept()
    assert 0 < run.raw.pttl(run.keys["evals:engines"]) <= LASTS * 1000


def test_who_evaluates_elsewhere_or_as_a_guest_claims_nothing(run: Rig) -> None:
    sglang = {"rm_type": "f1", "engine": "sglang", "engine_url": "http://a:1"}
    assert servers(WorkerConfig(**sglang)) == ("http://a:1",)
    assert servers(WorkerConfig(**sglang, eval_engine_url="http://b:1,http://c:1")) == ("http://b:1", "http://c:1")
    for none in ({"rm_type": "f1"}, {**sglang, "eval_shared_engines": True}, {**sglang, "eval_function_path": "m.f"}):
        assert servers(WorkerConfig(**none)) == ()
    assert Claim(run.feeder(), "w1", ()).other() == ""
    assert not run.raw.exists(run.keys["evals:engines"])


def test_two_workers_with_the_same_server_evaluate_one_after_the_other(
    real: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fake = FakeSGLang(vocab=22, label="1")
    fake.weighs.update({"weights/7", "weights/8"})
    fake.hold_at = 1

    def loads() -> list[str]:
        return [body["weight_version"] for body in fake.bodies("/update_weights_from_disk")]

    with in_a_thread(fake) as loop, closing(Jobs(real.url, real.keys, "test")) as jobs:
        config = sglang(tmp_path, fake, eval_engine_url=fake.url).model_dump(exclude_unset=True)
        with worker(real, **config, engine="local"), worker(real, **config, engine="local"):
            asks = [asked(path=f"weights/{n}", version=n, code={"rm_type": digest("length")}) for n in (7, 8)]
            ids = [jobs.put(EVAL, f"{a.version}", {"ask": a.model_dump(mode="json")}, 100, 100) for a in asks]
            eventually(lambda: fake.flights and ("jobs are taken when it does not" in caplog.text or len(loads()) > 1))
            assert loads() == ["7"]
            asyncio.run_coroutine_threadsafe(fake.release(), loop).result()
            ended: dict[str, Outcome] = {}
            eventually(lambda: ended.update(jobs.ended([i for i in ids if i not in ended])) or len(ended) == 2)  # type: ignore[func-returns-value]
    assert [ended[id].value["eval/weight_version"] for id in ids] == [7, 8]
    assert loads() == ["7", "8"]
