"""A generator on the real server: what it leases and when, and where each leased prompt ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import pytest
from lossy import Lossy
from make import Hand, at_work, calm, drain_of, feed, hired, push, record, until
from rig import Rig, policy

from consumers.staleness import Limit
from pipeline.audit import audit
from pipeline.code import digest
from pipeline.codec import decode
from pipeline.config import GenerateConfig
from pipeline.errors import EngineDown, EngineError, RequestRefused, RewardError, UsageError, WeightsError, WorkerFailed
from pipeline.join import Place
from pipeline.pulse import STUCK, TrainerPulse, WorkerPulse
from pipeline.replies import Pulse
from pipeline.scripts import load
from pipeline.types import Group, Policy
from producers import cli
from producers.engines.base import Completion, Request
from producers.engines.echo import EchoEngine
from producers.filters import Verdict
from producers.group import Progress
from producers.rewards import RewardInput
from producers.rewards.custom import Custom


def queued(rig: Rig) -> list[Group]:
    return [decode(message) for message in rig.groups()]


def done(rig: Rig) -> set[int]:
    return {g.prompt.id for g in queued(rig)}


def retries(rig: Rig) -> dict[int, tuple[int, int]]:
    """id -> (attempt, strikes) of what is in the retry stream."""
    return {int(e["id"]): (int(e["attempt"]), int(e["strikes"])) for e in rig.entries()}


def leased(rig: Rig) -> int:
    return rig.standing().pending


def sound(rig: Rig) -> bool:
    """Each prompt in exactly one place, by the audit."""
    return audit(rig.feeder()).holds


def gone(rig: Rig) -> bool:
    """No worker has left a trace."""
    return not (rig.raw.exists(rig.keys["workers"], rig.keys["workers:info"]) or rig.consumers() or leased(rig))


# -- how much is in flight


def test_a_finished_sample_makes_room_before_its_group_is_done(real: Rig) -> None:
    real.trainer(n_samples_per_prompt=4, in_flight=2)
    feed(real, 6)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine, concurrency=8):
            await until(lambda: len(engine.held) == 8)
            assert engine.prompts() == [0, 1]
            engine.end(0, 0, 1)
            engine.end(1, 3)
            await calm(engine)
            assert engine.prompts() == [0, 1]
            engine.end(1, 2)
            await until(lambda: engine.prompts() == [0, 1, 2])
            await calm(engine)
            assert len(engine.held) == 8
            assert queued(real) == []

    real.do(go())
    assert sound(real)


def test_unfinished_groups_are_bounded_however_few_samples_they_still_wait_for(real: Rig) -> None:
    real.trainer(n_samples_per_prompt=4, in_flight=8, bound=50)
    feed(real, 20)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine, concurrency=8):
            for prompt in range(4):
                await until(lambda prompt=prompt: prompt in engine.prompts())  # type: ignore[misc]
                engine.end(prompt, 0, 1, 2)
            await calm(engine)
            assert engine.prompts() == [0, 1, 2, 3]
            assert len(engine.held) == 4
            engine.end(2)
            await until(lambda: engine.prompts() == [0, 1, 3, 4])

    real.do(go())


def test_with_granularity_group_only_a_whole_group_makes_room(real: Rig) -> None:
    real.trainer(n_samples_per_prompt=4, in_flight=2, rollout_submission_granularity="group")
    feed(real, 6)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine, concurrency=16):
            await until(lambda: len(engine.held) == 8)
            engine.end(0, 0, 1, 2)
            engine.end(1, 0, 1, 2)
            await calm(engine)
            assert engine.prompts() == [0, 1]
            engine.end(1)
            await until(lambda: engine.prompts() == [0, 2])

    real.do(go())


def test_the_cap_of_samples_in_flight_is_the_runs_and_holds_over_two_workers(real: Rig) -> None:
    real.trainer(in_flight=3, bound=50, queue_capacity=50)
    feed(real, 30)

    async def go() -> None:
        one, other = Hand(), Hand()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(at_work(real, one, name="w1"))
            await stack.enter_async_context(at_work(real, other, name="w2"))
            draw = random.Random(1)
            for _ in range(12):
                await until(lambda: len(one.held) + len(other.held) in (5, 6))
                await calm(one)
                assert len(one.held) + len(other.held) <= 6
                engine = draw.choice([engine for engine in (one, other) if engine.held])
                engine.end(*draw.choice(list(engine.held)))

    real.do(go())
    assert sound(real)


def test_what_a_worker_told_of_a_group_does_not_outlive_the_group(real: Rig) -> None:
    real.trainer(in_flight=2)
    feed(real, 9)
    one, other = real.worker("w1"), real.worker("w2")
    for end in (one.push, one.hand_back):
        first, second = real.lease(one, 2)
        real.lease(one, 0, spare=2)
        if end == one.push:
            push(real, one, first, 1)
        else:
            real.do(one.hand_back([first], "test"))
        third = real.lease(other, 2)
        assert len(third) == 1
        real.do(other.hand_back(third, "test"))
        real.do(one.hand_back([second], "test"))


def test_a_workers_own_concurrency_bounds_it(real: Rig) -> None:
    real.trainer(in_flight=50, bound=50)
    feed(real, 30)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine, concurrency=7):
            await until(lambda: len(engine.held) == 6)
            await calm(engine)
            assert engine.prompts() == [0, 1, 2]

    real.do(go())


def test_a_worker_smaller_than_a_group_still_makes_groups(real: Rig) -> None:
    real.trainer(n_samples_per_prompt=4)
    feed(real, 2)

    async def go() -> None:
        async with at_work(real, EchoEngine("0.001", 4), concurrency=3):
            await until(lambda: done(real) == {0, 1})

    real.do(go())
    assert [len(g.samples) for g in queued(real)] == [4, 4]


def test_a_full_list_makes_the_generator_wait_and_nothing_is_dropped(real: Rig) -> None:
    trainer = real.trainer(queue_capacity=2, bound=50, in_flight=4)
    feed(real, 12)

    async def go() -> None:
        found: list[int] = []

        def full() -> bool:
            return len(real.groups()) == min(2, 12 - len(found))

        async with at_work(real, EchoEngine("0", 4)):
            while len(found) < 12:
                await until(full)
                await asyncio.sleep(0.03)
                assert len(real.groups()) <= 2
                messages, _ = trainer.take(2, block=False)
                found += [decode(m).prompt.id for m in messages if trainer.hold(decode(m).prompt)]
        assert sorted(found) == list(range(12))

    real.do(go())
    assert (real.counter("pushed"), len(real.standing().open)) == (12, 12)
    assert retries(real) == {}
    assert gone(real)


# -- where a leased prompt ends


class Faulty(EchoEngine):
    """Answers at once, but for the requests of one prompt, which end as told."""

    def __init__(self, prompt: int, error: Exception | None = None, finish: str = "stop", logprob: float = -1.0):
        super().__init__("0", 4)
        self.prompt, self.error, self.finish, self.logprob = f"p{prompt}".encode(), error, finish, logprob
        self.asked = 0

    async def generate(self, request: Request) -> Completion:
        answer = await super().generate(request)
        if bytes(request.tokens.tolist()) != self.prompt:
            return answer
        self.asked += 1
        if self.error:
            raise self.error
        logprobs = answer.logprobs.copy()
        logprobs[0] = self.logprob
        return Completion(answer.tokens, logprobs, self.finish, answer.versions)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (Faulty(1, EngineError("500")), "bad_sample"),
        (Faulty(1, finish="abort"), "aborted"),
        (Faulty(1, logprob=float("nan")), "bad_sample"),
        (Faulty(1, logprob=float("-inf")), "bad_sample"),
    ],
    ids=["error", "abort", "nan", "inf"],
)
def test_a_prompt_that_always_fails_is_dead_after_its_strikes_and_the_others_are_made(
    real: Rig, engine: Faulty, reason: str
) -> None:
    real.trainer(max_prompt_attempts=3)
    feed(real, 4)

    async def go() -> None:
        async with at_work(real, engine):
            await until(lambda: done(real) == {0, 2, 3} and real.entries("dead"))

    real.do(go())
    (dead,) = real.entries("dead")
    assert (dead["id"], dead["reason"], dead["strikes"], dead["prompt"]) == ("1", reason, "3", record(1))
    assert (real.counter(f"recycled:{reason}"), real.counter(f"dead:{reason}")) == (2, 1)
    assert engine.asked in range(3, 7)
    assert sound(real)
    assert gone(real)


def test_a_request_that_is_never_answered_costs_its_prompt_a_strike_at_the_deadline(real: Rig) -> None:
    real.trainer(max_prompt_attempts=2, rollout_group_timeout=0.3, n_samples_per_prompt=3)
    feed(real, 3)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine, concurrency=9):
            while len(done(real)) < 2 or not real.entries("dead"):
                engine.end(0)
                engine.end(2)
                engine.end(1, 0, 2)
                await asyncio.sleep(0.01)
            assert engine.held == {}

    real.do(go())
    (dead,) = real.entries("dead")
    assert (dead["id"], dead["reason"]) == ("1", "deadline")
    assert sound(real)


def test_a_prompt_that_the_engine_refuses_is_dropped_once_under_its_reason(real: Rig) -> None:
    real.trainer()
    feed(real, 3)
    engine = Faulty(1, RequestRefused("too long"))

    async def go() -> None:
        async with at_work(real, engine):
            await until(lambda: done(real) == {0, 2} and real.counter("dropped:refused"))

    real.do(go())
    assert real.counter("dropped:refused") == 1
    assert retries(real) == {}
    assert sound(real)


def test_a_prompt_whose_engine_is_down_goes_round_without_a_strike_and_not_in_a_tight_loop(
    real: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    real.trainer()
    feed(real, 3)
    engine = Faulty(1, EngineDown("connection refused"))

    async def go() -> None:
        async with at_work(real, engine):
            await until(lambda: done(real) == {0, 2})
            await asyncio.sleep(0.3)
            assert real.counter("recycled:engine_down") < 3
            await until(lambda: real.counter("recycled:engine_down") > 1)
            assert [r.getMessage()[:18] for r in caplog.records] == ["the engine is down"]
            engine.error = None
            await until(lambda: done(real) == {0, 1, 2})

    real.do(go())
    (made,) = [g.prompt for g in queued(real) if g.prompt.id == 1]
    assert made.attempt > 1
    assert made.strikes == 0
    assert sound(real)


def test_a_group_that_is_too_large_is_dead_lettered_at_once(real: Rig) -> None:
    real.trainer(max_group_bytes=200)
    feed(real, 2)

    async def go() -> None:
        async with at_work(real, EchoEngine("0", 100)):
            await until(lambda: len(real.entries("dead")) == 2)

    real.do(go())
    assert sorted((e["id"], e["reason"]) for e in real.entries("dead")) == [("0", "too_large"), ("1", "too_large")]
    assert queued(real) == []
    assert sound(real)


def test_what_the_filter_drops_hands_its_place_back_and_counts_under_its_reason(real: Rig) -> None:
    real.trainer(bound=2, in_flight=2)
    feed(real, 10)

    def keep(group: Group) -> Verdict:
        return Verdict(group.prompt.id in (4, 9), "boring")

    async def go() -> None:
        async with at_work(real, EchoEngine("0", 4), keep=keep):
            await until(lambda: done(real) == {4, 9})

    real.do(go())
    assert real.counter("dropped:boring") == 8
    assert real.counter("pushed") == 2
    assert retries(real) == {}
    assert sound(real)


def test_each_of_a_hundred_prompts_ends_in_exactly_one_place_whatever_the_engine_does(real: Rig) -> None:
    real.trainer(bound=200, in_flight=20, queue_capacity=200, queue_max_bytes=1 << 20, max_prompt_attempts=2)
    feed(real, 100)

    async def go() -> None:
        engine = EchoEngine("lognormal:0.002:1", 4, failure_rate=0.15, abort_rate=0.15)
        async with at_work(real, engine, concurrency=40, keep=lambda g: Verdict(g.prompt.id % 7 != 0, "seventh")):
            await until(lambda: not real.standing().waiting)

    real.do(go())
    places = Counter(audit(real.feeder()).places)
    assert places["queued"] + places["dropped"] + places["dead"] == 100
    assert all(places[where] > 0 for where in ("queued", "dropped", "dead"))
    assert places["queued"] == real.counter("pushed")
    assert sound(real)


# -- weights


def test_a_late_joiner_sends_nothing_before_it_has_the_weights(real: Rig) -> None:
    trainer = real.trainer()
    trainer.publish(policy(5), [])
    feed(real, 1)

    async def go() -> None:
        engine = Hand()
        engine.gate.clear()
        async with at_work(real, engine) as generator:
            await until(lambda: engine.loads == [5] and leased(real) == 1)
            await calm(engine)
            assert engine.sent == []
            assert generator.info()["loading"] == 5
            assert trainer.worker_versions() == {5}
            engine.gate.set()
            await until(lambda: len(engine.held) == 2)
            engine.end(0)
            await until(lambda: done(real) == {0})

    real.do(go())
    assert [g.versions for g in queued(real)] == [{5}]


def test_what_is_leased_under_new_weights_is_never_sampled_with_old_ones(real: Rig) -> None:
    trainer = real.trainer(max_weight_staleness=0, bound=1)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine):
            feed(real, 1)
            await until(lambda: len(engine.held) == 2)
            engine.end(0)
            await until(lambda: done(real) == {0})
            engine.gate.clear()
            feed(real, 1)
            batch = drain_of(trainer, 1).batch(Limit(1, (), 0))
            assert batch is not None
            trainer.publish(policy(2), [g.prompt for g in batch.groups])
            await until(lambda: engine.loads == [1, 2] and leased(real) == 1)
            await calm(engine)
            assert engine.prompts() == []
            engine.gate.set()
            await until(lambda: engine.prompts() == [1])
            engine.end(1)
            await until(lambda: done(real) == {1})

    real.do(go())
    assert [g.versions for g in queued(real)] == [{2}]


class SlowLoad(EchoEngine):
    async def load(self, policy: Policy) -> None:
        await asyncio.sleep(0.02)
        await super().load(policy)


def test_in_lock_step_no_group_is_born_stale_however_slow_the_engine_loads(real: Rig) -> None:
    trainer = real.trainer(max_weight_staleness=0, bound=3, in_flight=3)
    feed(real, 60)

    async def go() -> None:
        drain = drain_of(trainer, 3, starve_timeout=20)
        async with AsyncExitStack() as stack:
            for name in ("w1", "w2"):
                engine = SlowLoad("lognormal:0.005:1", 8)
                await stack.enter_async_context(at_work(real, engine, name=name))
            for version in range(1, 16):
                batch = await asyncio.to_thread(drain.batch, Limit(version, (), 0))
                assert batch is not None
                assert all(g.versions == {version} for g in batch.groups)
                trainer.publish(policy(version + 1), [g.prompt for g in batch.groups])
                trainer.commit([g.prompt for g in batch.groups])

    real.do(go())
    assert real.counter("committed") == 45
    assert not [name for name in trainer.counters() if name.startswith("strikes")]


def test_a_request_that_spans_an_update_keeps_both_versions(real: Rig) -> None:
    trainer = real.trainer()
    trainer.publish(policy(3), [])
    feed(real, 1)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine):
            await until(lambda: len(engine.held) == 2)
            engine.advance(0, 0.5)
            trainer.publish(policy(4), [])
            await until(lambda: engine.version == 4)
            engine.end(0)
            await until(lambda: done(real) == {0})

    real.do(go())
    (group,) = queued(real)
    assert group.versions == {3, 4}
    assert [[s.version for s in q.versions] for q in (s.sequences[0] for s in group.samples)] == [[3, 4], [3, 4]]
    assert Limit(4, (), 0).judge(group) == "stale"


def test_nothing_of_an_aborted_round_is_in_the_group_that_the_trainer_gets(real: Rig) -> None:
    """Aborted twice after half its tokens, under another version each time (slime#2092: half an answer was kept)."""
    trainer = real.trainer()
    feed(real, 1)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine):
            for round in (1, 2):
                await until(lambda: len(engine.held) == 2)
                engine.advance(0, 0.5)
                await engine.abort(engine.held[0, 0])
                await until(lambda round=round: real.counter("recycled:aborted") == round)  # type: ignore[misc]
                trainer.publish(policy(round + 1), [])
                await until(lambda round=round: engine.version == round + 1)  # type: ignore[misc]
            await until(lambda: len(engine.held) == 2)
            engine.end(0)
            await until(lambda: done(real) == {0})

    real.do(go())
    (group,) = queued(real)
    assert (group.prompt.attempt, group.prompt.strikes, group.prompt.record) == (3, 2, record(0))
    assert group.versions == {3}
    for sample in group.samples:
        (answer,) = sample.sequences
        assert len(answer.tokens) == len(answer.loss_mask) == len(answer.logprobs) == 4
        assert [(s.start, s.end) for s in answer.versions] == [(0, 4)]


def test_at_a_new_version_only_what_is_over_the_limit_is_cancelled(real: Rig) -> None:
    trainer = real.trainer(max_weight_staleness=1, in_flight=4)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine):
            for version in (1, 2, 3):
                feed(real, 1)
                await until(lambda version=version: version - 1 in engine.prompts())  # type: ignore[misc]
                kept = dict(engine.held)
                trainer.publish(policy(version + 1), [])
                await until(lambda version=version: engine.version == version + 1)  # type: ignore[misc]
                await calm(engine)
                ends = {1: [], 2: [0], 3: [1]}[version]
                assert {k: rid for k, rid in engine.held.items() if k[0] not in ends} == {
                    k: rid for k, rid in kept.items() if k[0] not in ends
                }
                assert all(engine.held[key] != kept[key] for key in engine.held if key[0] in ends)

    real.do(go())
    assert real.counter("strikes:stale") == 2
    assert sound(real)


def test_a_prompt_that_always_outlasts_two_updates_is_dead_after_its_strikes(real: Rig) -> None:
    trainer = real.trainer(max_weight_staleness=1, bound=2, in_flight=2, max_prompt_attempts=3)
    feed(real, 50)

    async def go() -> int:
        engine, drain = Hand(), drain_of(trainer, 1, starve_timeout=20)
        async with at_work(real, engine):
            for version in range(1, 50):
                if real.entries("dead"):
                    assert engine.sent.count((0, 0)) == 3
                    return version
                await until(lambda: any(prompt for prompt in engine.prompts()))
                engine.end(next(prompt for prompt in engine.prompts() if prompt))
                batch = await asyncio.to_thread(drain.batch, Limit(version, (), 1))
                assert batch is not None
                trainer.publish(policy(version + 1), [g.prompt for g in batch.groups])
                await until(lambda version=version: engine.version == version + 1)  # type: ignore[misc]
                await calm(engine)
        raise AssertionError("it circles for ever")

    assert real.do(go()) < 12
    (dead,) = real.entries("dead")
    assert (dead["id"], dead["reason"], dead["strikes"]) == ("0", "stale", "3")
    assert sound(real)


def test_a_folder_that_vanished_means_the_manifest_is_read_again(real: Rig) -> None:
    trainer = real.trainer(max_weight_staleness=2)
    feed(real, 1)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine):
            await until(lambda: len(engine.held) == 2)
            engine.gone = {2}
            trainer.publish(policy(2), [])
            await until(lambda: 2 in engine.loads)
            trainer.publish(policy(3), [])
            await until(lambda: engine.version == 3)
            assert len(engine.held) == 2

    real.do(go())
    assert retries(real) == {0: (2, 0)}


def test_weights_that_can_never_be_read_end_the_worker_and_its_prompts_go_back_without_a_strike(real: Rig) -> None:
    real.trainer()
    feed(real, 2)

    async def go() -> None:
        engine = Hand()
        engine.gone = {1}
        async with hired(real, engine) as generator:
            with pytest.raises(WeightsError, match="weights/1 is gone"):
                await generator.run()
            assert len(engine.loads) == 4

    real.do(go())
    assert retries(real) == {0: (2, 0), 1: (2, 0)}
    assert gone(real)


def test_a_version_whose_announcement_was_missed_is_loaded_when_a_heartbeat_tells_of_it(real: Rig) -> None:
    real.trainer()
    feed(real, 1)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine, concurrency=2) as generator:
            await until(lambda: len(engine.held) == 2)
            await calm(engine)
            real.raw.set(real.keys["weights:version"], 2)
            real.raw.hset(real.keys["weights"], "version", "2")
            generator.hear(Pulse(True, "running", False, 2))
            await until(lambda: engine.version == 2)
            assert len(engine.held) == 2

    real.do(go())


def test_a_version_published_while_the_subscription_is_broken_is_loaded_all_the_same(real: Rig) -> None:
    trainer = real.trainer()
    feed(real, 1)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine, concurrency=2):
            await until(lambda: len(engine.held) == 2)
            before = dict(engine.held)
            ids = [client["id"] for client in real.raw.client_list("pubsub") if real.keys.run in client["name"]]
            for id in ids:
                real.raw.client_kill_filter(_id=id)
            trainer.publish(policy(2), [])
            await until(lambda: engine.version == 2)
            assert engine.held == before
            assert len(ids) == 1

    real.do(go())


# -- stopping


@pytest.mark.parametrize("at", ["sampling", "loading", "full", "scoring", "idle"])
def test_a_halted_generator_hands_everything_back_without_strikes(real: Rig, at: str) -> None:
    real.trainer(queue_capacity=1, bound=20)
    if at != "idle":
        feed(real, 4)

    async def slow(given: RewardInput) -> float:
        await asyncio.sleep(1000)
        return 1.0

    async def go() -> None:
        engine: EchoEngine = EchoEngine("0", 4) if at in ("full", "scoring") else Hand()
        if at == "loading":
            assert isinstance(engine, Hand)
            engine.gate.clear()
        scorer = Custom("t.slow", slow) if at == "scoring" else None
        async with at_work(real, engine, scorer=scorer) as generator:
            if at == "full":
                await until(lambda: len(queued(real)) == 1)
            elif at != "idle":
                await until(lambda: leased(real) == 4)
            await asyncio.sleep(0.05)
            generator.halt()
            await asyncio.wait_for(until(lambda: gone(real)), 3)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    real.do(go())
    assert set(retries(real).values()) <= {(2, 0)}
    assert len(retries(real)) == {"full": 3, "idle": 0}.get(at, 4)
    assert sound(real)


def test_sigterm_hands_everything_back_and_the_worker_ends_with_0(real: Rig) -> None:
    real.trainer(code={"custom_rm_path": digest(f"{__name__}.reward_with_a_bug")})
    feed(real, 2)

    async def go() -> None:
        await until(lambda: leased(real) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(asyncio.run, go())
        assert generate(real, "reward_with_a_bug", echo_latency="1000") == 0
        sent.result()
    assert retries(real) == {0: (2, 0), 1: (2, 0)}
    assert gone(real)
    assert not real.raw.exists(real.keys["alarm"])


def test_a_halt_before_the_run_is_a_halt(real: Rig) -> None:
    real.trainer()
    feed(real, 4)

    async def go() -> None:
        engine = Hand()
        async with hired(real, engine) as generator:
            generator.halt()
            await asyncio.wait_for(generator.run(), 3)
            assert engine.sent == []

    real.do(go())
    assert gone(real)


def test_the_end_of_the_run_ends_the_worker_but_not_before_it_has_seen_it_alive(real: Rig) -> None:
    real.trainer()
    feed(real, 1)

    async def go() -> None:
        engine = Hand()
        async with hired(real, engine) as generator:
            generator.hear(Pulse(True, "done", False, 1))
            running = asyncio.create_task(generator.run())
            await until(lambda: len(engine.held) == 2)
            generator.hear(Pulse(True, "running", False, 1))
            generator.hear(Pulse(True, "done", False, 1))
            await asyncio.wait_for(running, 3)

    real.do(go())
    assert gone(real)


@pytest.mark.parametrize("times", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_cancelled_again_and_again_under_load_a_generator_loses_nothing(real: Rig, times: int) -> None:
    trainer = real.trainer(bound=12, in_flight=12, queue_capacity=6)
    feed(real, 8 * times)
    drain, draw, trained = drain_of(trainer, 4), random.Random(7), 0

    async def once(seconds: float) -> None:
        engine = EchoEngine("lognormal:0.003:1", 4, failure_rate=0.02)
        async with hired(real, engine, concurrency=24, keep=lambda g: Verdict(g.prompt.id % 11 != 0, "x")) as generator:
            running = asyncio.create_task(generator.run())
            await asyncio.sleep(seconds)
            running.cancel()
            await asyncio.wait([running], timeout=10)
            assert running.cancelled()
            assert asyncio.all_tasks() == {asyncio.current_task()}
        assert gone(real)

    for round in range(times):
        real.do(once(draw.uniform(0, 0.05)))
        if len(real.groups()) >= 4:
            batch = drain.batch(Limit(1 + trained, (), 100))
            assert batch is not None
            trained += 1
            trainer.publish(policy(1 + trained), [g.prompt for g in batch.groups])
            trainer.commit([g.prompt for g in batch.groups])
        assert round % 5 or sound(real)
    places = audit(real.feeder()).places
    assert sum(places.values()) == 8 * times
    assert places["committed"] == 4 * trained > 0
    assert real.counter("pushed") == places["committed"] + places["queued"] + places["taken"]
    assert real.counter("strikes:worker_died") == 0


# -- other workers, other rounds, lost replies


def test_a_reaped_worker_registers_anew_and_what_it_had_is_done_once(real: Rig) -> None:
    real.trainer()
    feed(real, 1)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine, concurrency=2) as generator:
            await until(lambda: len(engine.held) == 2)
            first = dict(engine.held)
            real.silence("w1")
            assert real.reap() == ["w1"]
            generator.hear(Pulse(False, "", False, None))
            await until(lambda: engine.held and not set(engine.held.values()) & set(first.values()))
            assert real.raw.zscore(real.keys["workers"], "w1")
            await until(lambda: len(engine.held) == 2)
            engine.end(0)
            await until(lambda: done(real) == {0})

    real.do(go())
    (group,) = queued(real)
    assert (group.prompt.attempt, group.prompt.strikes) == (2, 1)
    assert sound(real)


def test_a_reaped_worker_that_nobody_told_finds_out_when_it_leases(real: Rig) -> None:
    real.trainer()
    feed(real, 2)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine):
            await until(lambda: len(engine.held) == 4)
            real.silence("w1")
            assert real.reap() == ["w1"]
            engine.end(0, 0)
            await until(lambda: engine.sent.count((0, 0)) == 2 and engine.sent.count((1, 1)) == 2)

    real.do(go())
    assert sound(real)


def test_the_push_of_a_worker_that_was_declared_dead_is_lost(real: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    real.trainer()
    feed(real, 1)

    async def go() -> None:
        async with hired(real, EchoEngine("0", 4)) as generator:
            leased = await generator.broker.lease(1, 0)
            real.silence("w1")
            assert real.reap() == ["w1"]
            await generator.worker.work(leased.leases[0], Progress(), asyncio.Event())

    real.do(go())
    assert queued(real) == []
    assert retries(real) == {0: (2, 1)}
    assert "prompt 0 went round again meanwhile" in caplog.text


def test_prompts_leased_by_a_reply_that_never_came_are_adopted(real: Rig) -> None:
    real.trainer()
    feed(real, 2)

    async def go() -> None:
        engine = Hand()
        with Lossy(real.url) as relay:
            async with hired(real, engine, url=relay.url) as generator:
                relay.lose(load("lease").sha.encode())
                running = asyncio.create_task(generator.run())
                await until(lambda: len(engine.held) == 4)
                assert relay.lost == 1
                generator.halt()
                await running

    real.do(go())
    assert retries(real) == {0: (2, 0), 1: (2, 0)}
    assert sound(real)


def test_a_push_whose_reply_never_came_is_pushed_once(real: Rig) -> None:
    real.trainer()
    feed(real, 1)

    async def go() -> None:
        with Lossy(real.url) as relay:
            relay.lose(b"LTRIM")  # out of the script of push
            async with at_work(real, EchoEngine("0", 4), url=relay.url) as generator:
                await until(lambda: relay.lost == 1 and not generator.jobs)

    real.do(go())
    assert [g.prompt.id for g in queued(real)] == [0]
    assert real.counter("pushed") == 1
    assert sound(real)


def test_adopting_leaves_what_is_under_way_alone(real: Rig) -> None:
    real.trainer()
    feed(real, 2)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine, concurrency=4) as generator:
            await until(lambda: len(engine.held) == 4)
            before = dict(engine.held)
            generator.broker.suspect = True
            generator.poke.set()
            await until(lambda: not generator.broker.suspect)
            await calm(engine)
            assert engine.held == before

    real.do(go())


def test_a_fresh_prompt_and_one_that_goes_round_again_may_have_the_same_entry_id(real: Rig) -> None:
    real.trainer()
    for key, id in (("prompts", 0), ("prompts:retry", 1)):
        fields: Any = {"id": id, "attempt": 1, "strikes": 0, "prompt": record(id)}
        real.raw.xadd(real.keys[key], fields, id="5-0")
    real.raw.set(real.keys["feed"], 2)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine) as generator:
            await until(lambda: len(engine.held) == 4)
            assert len(generator.jobs) == 2
            engine.end(0)
            await until(lambda: done(real) == {0} and len(generator.jobs) == 1)

    real.do(go())
    assert retries(real) == {1: (2, 0)}
    assert gone(real)


# -- bugs


def reward_with_a_bug(given: RewardInput) -> float:
    return {"a": 1.0}[given.response]


def reward_that_times_out(given: RewardInput) -> float:
    raise TimeoutError("the judge did not answer")


async def async_reward_that_times_out(given: RewardInput) -> float:
    raise TimeoutError("the judge did not answer")


def reward_of_text(given: RewardInput) -> Any:
    return "good" if given.index == 1 else 1.0


def generate(rig: Rig, rm: str, **fields: Any) -> int:
    """A whole `millpond generate`, flags read already."""
    config = GenerateConfig(engine="echo", custom_rm_path=f"{__name__}.{rm}", server_concurrency=4, **fields)
    return asyncio.run(cli._generate(config, Place(rig.url, rig.keys.run, None), threading.Event()))


@pytest.mark.parametrize(
    ("rm", "error", "what"),
    [
        ("reward_with_a_bug", KeyError, "KeyError: "),
        ("reward_that_times_out", RuntimeError, "reward_that_times_out raised TimeoutError: the judge did not answer"),
        ("async_reward_that_times_out", TimeoutError, "TimeoutError: the judge did not answer"),
        ("reward_of_text", RewardError, "test_generator.reward_of_text: prompt 0, sample 1: 'good' is a str"),
    ],
)
def test_a_reward_that_raises_stops_the_run_with_its_traceback(
    real: Rig, rm: str, error: type[Exception], what: str
) -> None:
    trainer = real.trainer(code={"custom_rm_path": digest(f"{__name__}.{rm}")}, in_flight=1, max_prompt_attempts=1)
    feed(real, 3)
    with pytest.raises(error):
        generate(real, rm)
    (entry,) = real.entries("errors")
    assert entry["epoch"] == str(trainer.epoch)
    assert what in entry["what"]
    assert "Traceback (most recent call last)" in entry["trace"]
    with pytest.raises(WorkerFailed, match=r"(?s)failed: .*Traceback") as caught:
        drain_of(trainer).batch(Limit(1, (), 1))
    assert what in str(caught.value)
    if error is not RewardError:
        assert f"in {rm}" in str(caught.value)
    assert real.entries("dead") == []
    assert all(strikes == 0 for _, strikes in retries(real).values())
    assert gone(real)
    assert sound(real)


def test_a_filter_that_raises_stops_the_worker_with_its_error(real: Rig) -> None:
    real.trainer()
    feed(real, 1)

    def keep(group: Group) -> Verdict:
        raise ZeroDivisionError("in the filter")

    async def go() -> None:
        async with hired(real, EchoEngine("0", 4), keep=keep) as generator:
            with pytest.raises(ZeroDivisionError, match="in the filter"):
                await generator.run()

    real.do(go())
    assert retries(real) == {0: (2, 0)}
    assert gone(real)


@pytest.mark.parametrize("code", [{}, {"rm_type": digest("length")}, {"custom_rm_path": digest("other.reward")}])
def test_a_worker_with_other_rewards_than_the_run_says_so_and_takes_no_prompts(real: Rig, code: dict[str, str]) -> None:
    real.trainer(code=code)
    feed(real, 3)
    with pytest.raises(UsageError, match=r"-rm-\w+ is .* here, and .* trainer .*all must agree"):
        generate(real, "reward_with_a_bug")
    assert leased(real) == 0
    assert not real.raw.exists(real.keys["alarm"])


# -- signs of life


def pulse_of(rig: Rig, heard: list[Pulse], turned: float) -> WorkerPulse:
    return WorkerPulse(rig.url, rig.keys, "w1", lambda: ({"version": 7}, 3, turned), heard.append)


def test_a_heartbeat_tells_what_the_worker_has_and_brings_status_and_version(real: Rig) -> None:
    real.trainer()
    real.worker()
    real.silence("w1")
    heard: list[Pulse] = []
    pulse = pulse_of(real, heard, time.monotonic())
    pulse.beat()
    pulse.broker.close()
    assert heard == [Pulse(True, "running", False, 1)]
    assert json.loads(real.raw.hget(real.keys["workers:info"], "w1") or "") == {"version": 7}
    assert real.raw.hget(real.keys["workers:spare"], "w1") == b"3"
    assert real.reap() == []


def test_a_worker_whose_event_loop_hangs_gives_no_sign_of_life(real: Rig, caplog: pytest.LogCaptureFixture) -> None:
    real.trainer()
    real.worker()
    real.silence("w1")
    heard: list[Pulse] = []
    pulse = pulse_of(real, heard, time.monotonic() - STUCK - 1)
    pulse.beat()
    pulse.broker.close()
    assert heard == []
    assert "the event loop has not turned for 61 s: no heartbeat" in caplog.text
    assert real.reap() == ["w1"]


def test_a_worker_that_was_declared_dead_hears_so(real: Rig) -> None:
    real.trainer()
    heard: list[Pulse] = []
    pulse = pulse_of(real, heard, time.monotonic())
    pulse.beat()
    pulse.broker.close()
    assert [p.known for p in heard] == [False]
    assert not real.raw.exists(real.keys["workers"])


def test_the_trainers_sign_of_life_keeps_others_away_and_that_of_a_zombie_does_not(real: Rig) -> None:
    old = real.trainer()
    beats = TrainerPulse(real.url, old)
    real.raw.hset(real.keys["state"], "trainer_seen", 1)
    beats.beat()
    with pytest.raises(UsageError, match="has a trainer: trainer, seen 0 s ago"):
        real.new_trainer().takeover("other")
    real.trainer()
    real.raw.hset(real.keys["state"], "trainer_seen", 1)
    beats.beat()
    beats.broker.close()
    assert real.raw.hget(real.keys["state"], "trainer_seen") == b"1"
