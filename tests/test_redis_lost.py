"""Redis loses keys while a run lives: by DEL, FLUSHALL, XGROUP DESTROY, XTRIM or eviction. Nobody restarted it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from make import Hand, at_work, calm, crew, feed, feeding, loop_of, until
from make import run as run_loop
from processes import Parts, eventually, holds, prompts
from rig import Rig, ids, ones, policy, records

from pipeline.audit import audit
from pipeline.errors import RedisDown, RedisUnusable
from pipeline.fence import LOSSES
from pipeline.keys import GROUP, NAMES
from pipeline.server import EmbeddedServer
from pipeline.types import Group
from producers.engines.echo import EchoEngine
from trainer.backends.base import At
from trainer.backends.echo import EchoBackend


class Busy:
    """0 committed, 1-2 published, 3-4 taken, 5 popped for nobody, 6-8 queued, 9-10 leased, 11 round again, 12 dropped,
    13 dead, 14 to be fed again, 15-19 fresh."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.trainer: Any = rig.trainer(bound=99, in_flight=99, queue_capacity=99)
        self.feeder, self.worker = rig.feeder(20), rig.worker()
        rig.queued(self.worker, 9)
        published = rig.take(self.trainer, 3)
        self.trainer.publish(policy(2), published)
        assert self.trainer.commit(published[:1]) == []
        rig.take(self.trainer, 2)
        rig.raw.lpop(rig.keys["groups"])
        self.leases = rig.lease(self.worker, 2)
        again, dropped, dead, gone = rig.lease(self.worker, 4)
        rig.do(self.worker.hand_back([again], "aborted", "strike"))
        rig.do(self.worker.drop(dropped, "zero_std"))
        rig.do(self.worker.hand_back([dead], "too_large", "bury"))
        rig.do(self.worker.hand_back([gone], "shutdown"))
        entry = next(e for e, f in self.entries("prompts:retry") if f[b"id"] == b"14")
        rig.raw.xdel(rig.keys["prompts:retry"], entry)
        rig.raw.sadd(rig.keys["refeed"], 14)

    def entries(self, stream: str) -> Any:
        return self.rig.raw.xrange(self.rig.keys[stream])


def delete(name: str) -> Callable[[Busy], Any]:
    return lambda busy: busy.rig.raw.delete(busy.rig.keys[name])


def destroy(name: str) -> Callable[[Busy], Any]:
    return lambda busy: busy.rig.raw.xgroup_destroy(busy.rig.keys[name], GROUP)


def all_keys(busy: Busy) -> None:
    busy.rig.raw.delete(*busy.rig.keys.all())


VANISHES: dict[str, Callable[[Busy], Any]] = {
    "everything": all_keys,
    **{name: delete(name) for name in NAMES if name not in ("groups:fenced", "wake")},
    "the group of prompts": destroy("prompts"),
    "the group of prompts:retry": destroy("prompts:retry"),
    "leased and waiting entries": lambda b: b.rig.raw.xtrim(b.rig.keys["prompts"], maxlen=2, approximate=False),
    "a waiting entry": lambda b: b.rig.raw.xdel(b.rig.keys["prompts"], b.entries("prompts")[-1][0]),
    "an open entry": lambda b: b.rig.raw.hdel(b.rig.keys["open"], "3"),
    "an unsettled id": lambda b: b.rig.raw.zrem(b.rig.keys["unsettled"], "7"),
    "cursor and what is committed": lambda b: b.rig.raw.delete(*(b.rig.keys[n] for n in ("feed", "done:committed"))),
}
HARMLESS = ("groups", "groups:sizes", "workers", "workers:info", "workers:spare", "alarm", "errors", "dead")
HARMLESS += ("quarantine", "counters", "weights:joins", "weights:roster", "evals:hold", "evals:engines")
"Keys whose loss loses no prompt, or no more than a trainer's check finds without asking why."


@pytest.mark.parametrize("what", VANISHES)
def test_what_vanishes_is_told_again_and_every_prompt_is_trained_once(
    run: Rig, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    busy = Busy(run)
    assert run.conserved()
    VANISHES[what](busy)
    busy.trainer.check()
    assert run.conserved()
    assert run.ended() == {0}
    assert sorted(busy.trainer.ledger.taken) == [3, 4]
    assert run.standing().unsettled.keys() >= {3, 4}
    assert (busy.trainer.version(), busy.trainer.policy(), busy.trainer.state()["epoch"]) == (2, policy(2), "1")
    lost = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Redis has lost")]
    assert len(lost) == (0 if what in HARMLESS else 1)
    caplog.clear()
    busy.trainer.check()
    assert not caplog.records
    run.do(busy.worker.register({}))
    run.finish(busy.trainer, busy.worker, 24)
    assert run.ended() | run.ended("dropped") | run.ended("dead") == set(range(24))
    assert run.ended("dropped") | run.ended("dead") <= {12, 13}


def test_what_is_queued_stays_queued_where_only_its_order_was_lost(run: Rig) -> None:
    for name in ("state", "unsettled"):
        busy = Busy(run)
        before = run.standing()
        run.raw.delete(run.keys[name])
        busy.trainer.check()
        after = run.standing()
        assert (after.popped, after.queued) == (before.popped, before.queued)
        assert {id: n for id, n in after.unsettled.items() if n > after.popped} == {6: 7, 7: 8, 8: 9}
        run.raw.delete(*run.keys.all())


def test_a_commit_whose_entries_were_lost_is_told_again(run: Rig) -> None:
    trainer, worker = run.trainer(), run.worker()
    run.feeder(2)
    run.queued(worker, 2)
    held = run.take(trainer, 2)
    trainer.publish(policy(2), held)
    run.raw.delete(run.keys["open"])
    assert trainer.commit(held) == []
    assert run.ended() == {0, 1}
    assert run.conserved()


def test_a_prompt_that_is_leased_again_to_who_works_on_it_is_not_begun_twice(real: Rig) -> None:
    real.trainer()
    feed(real, 1)

    async def scene() -> None:
        engine = Hand()
        async with at_work(real, engine, concurrency=4) as generator:
            await until(lambda: len(engine.held) == 2)
            real.raw.xgroup_destroy(real.keys["prompts"], GROUP)
            real.raw.xgroup_create(real.keys["prompts"], GROUP, "0")
            generator.wakeful = True
            generator.poke.set()
            await until(lambda: real.standing().pending == 1)
            await calm(engine)
            assert len(engine.sent) == 2
            engine.end(0)
            await until(lambda: len(real.groups()) == 1)

    real.do(scene())
    assert real.counter("pushed") == 1


def test_a_redis_that_loses_keys_again_and_again_ends_the_trainer_with_what_it_loses(run: Rig) -> None:
    trainer = run.trainer()
    trainer.stop.set()  # no back-off
    for _ in range(LOSSES):
        run.raw.delete(run.keys["config"])
        trainer.check()
    run.raw.delete(run.keys["config"])
    with pytest.raises(RedisUnusable, match=rf"again and again.*{run.keys['config']}.*maxmemory-policy"):
        trainer.check()


def test_who_was_silent_when_the_list_of_workers_was_lost_is_still_found_dead(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(2)
    dead, living = run.worker("dead"), run.worker("living")
    run.lease(dead, 1)
    run.lease(living, 1)
    run.raw.delete(run.keys["workers"])
    run.do(living.register({}))
    assert run.reap() == []
    assert run.raw.zscore(run.keys["workers"], "dead") is not None
    run.silence("dead")
    assert run.reap() == ["dead"]
    assert run.consumers() == {"living"}
    run.finish(trainer, living, 2)


def test_the_byte_cap_holds_where_the_sizes_were_lost(real: Rig) -> None:
    trainer = real.trainer(queue_max_bytes=10_000)
    real.feeder(5)
    worker = real.worker()
    leases = real.lease(worker, 5)
    assert real.push(worker, leases[:3], 3000) == ["pushed"] * 3
    real.raw.delete(real.keys["groups:sizes"])
    assert real.push(worker, leases[3:4], 3000) == ["full"]
    assert len(real.take(trainer, 3)) == 3
    assert real.push(worker, leases[3:], 3000) == ["pushed"] * 2


def test_nothing_is_leased_while_it_is_unknown_which_weights_to_sample_with(run: Rig) -> None:
    trainer, worker = run.trainer(), run.worker()
    run.feeder(1)
    for name in ("weights", "weights:version"):
        run.raw.delete(run.keys[name])
        assert run.do(worker.lease(1, 0)).why == "no weights"
        trainer.check()
    assert len(run.lease(worker, 1)) == 1


def test_a_lost_cursor_is_not_read_as_zero(run: Rig) -> None:
    trainer, feeder = run.trainer(), run.feeder(3)
    run.raw.delete(run.keys["feed"])
    feeder.patience = 0.2
    before = run.dump()
    for verb in (feeder.cursor, lambda: feeder.feed(0, records(0, 1))):
        with pytest.raises(RedisDown, match=f"LOST {run.keys['feed']}"):
            verb()
    assert run.dump() == before
    trainer.check()
    assert feeder.feed(3, records(3, 1)) == 4


def test_the_checkpoint_of_a_redis_that_lost_what_was_dropped_does_not_forget_it(run: Rig) -> None:
    trainer, worker = run.trainer(), run.worker()
    run.feeder(3)
    run.do(worker.drop(run.lease(worker, 1)[0], "zero_std"))
    trainer.ledger.dropped, trainer.ledger.cursor = run.standing().dropped, 3
    run.raw.delete(*run.keys.all())
    stand = trainer.standing()
    assert (stand.feed, ones(stand.dropped), sorted(stand.refeed)) == (3, {0}, [1, 2])


def test_leases_whose_entries_were_trimmed_away_do_not_stay(run: Rig) -> None:
    trainer, worker = run.trainer(), run.worker()
    run.feeder(5)
    leases = run.lease(worker, 5)
    run.raw.xtrim(run.keys["prompts"], maxlen=2, approximate=False)
    assert run.push(worker, leases[:2]) == ["lost", "lost"]
    assert run.do(worker.hand_back(leases[2:3], "shutdown")) == 0
    assert run.push(worker, leases[3:]) == ["pushed", "pushed"]
    assert run.standing().pending == 0
    trainer.check()
    assert run.feeder().refeed_ids(9) == [0, 1, 2]
    run.finish(trainer, worker, 5)


def test_what_nobody_has_read_is_never_trimmed(run: Rig) -> None:
    trainer = run.trainer(bound=2000, in_flight=2000)
    run.feeder(1000)
    worker = run.worker()
    assert len(run.standing().waiting) == 1000
    assert ids(run.lease(worker, 2000)) == list(range(1000))
    assert trainer.check().waiting == 1000


def test_a_generator_makes_a_lost_consumer_group_anew_without_a_trainer_and_without_haste(
    real: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    real.trainer(bound=99, in_flight=99)

    async def scene() -> int:
        async with at_work(real, EchoEngine("0.001", 4)):
            before = calls()
            for stream in ("prompts", "prompts:retry"):
                real.raw.xgroup_destroy(real.keys[stream], GROUP)
            feed(real, 8)
            await until(lambda: len(real.groups()) == 8)
            return calls() - before

    def calls() -> int:
        stats: Any = real.raw.info("commandstats")
        return sum(int(stats.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in ("eval", "evalsha"))

    assert real.do(scene()) < 100
    assert [r.getMessage()[:28] for r in caplog.records] == ["Redis has lost a prompt stre"]


# -- under a live feeder, generators and trainer


class Troubled(EchoBackend):
    """While it trains, one thing after another happens to Redis."""

    def __init__(self, troubles: Sequence[Callable[[], Any]]) -> None:
        super().__init__(0.0)
        self.troubles = list(troubles)
        self.trained: list[int] = []

    def train(self, groups: Sequence[Group], step: int, at: At | None = None) -> dict[str, float]:
        self.trained += [g.prompt.id for g in groups]
        if self.troubles and step % 2:
            self.troubles.pop(0)()
        return super().train(groups, step, at)


def goes_on(rig: Rig, folder: Path, troubles: Sequence[Callable[[], Any]]) -> None:
    """A run in which all of it happens trains each prompt exactly once, and ends."""
    rows = 8 + 4 * len(troubles)
    backend = Troubled(troubles)

    def engine() -> EchoEngine:
        return EchoEngine("lognormal:0.003:1", 4)

    with feeding(rig, folder, rows), crew(rig, engine, name="w1"), crew(rig, engine, name="w2"):
        loop = run_loop(loop_of(rig, folder, backend, max_prompt_attempts=999))
    assert not backend.troubles
    assert sorted(backend.trained) == list(range(rows))
    assert rig.ended() == set(range(rows))
    assert loop.broker.state()["status"] == "done"
    holds(audit(rig.feeder()))


KEYS = [name for name in NAMES if name not in ("groups:fenced", "wake", "alarm", "errors", "dead", "quarantine")]


@pytest.mark.parametrize("part", range(4))
def test_a_live_run_outlives_the_loss_of_each_key(real: Rig, tmp_path: Path, part: int) -> None:
    goes_on(real, tmp_path, [lambda name=name: real.raw.delete(real.keys[name]) for name in KEYS[part::4]])  # type: ignore[misc]


def test_a_live_run_outlives_the_loss_of_its_consumer_groups(real: Rig, tmp_path: Path) -> None:
    streams = ("prompts", "prompts:retry", "prompts")
    goes_on(real, tmp_path, [lambda s=s: real.raw.xgroup_destroy(real.keys[s], GROUP) for s in streams])  # type: ignore[misc]


def test_a_live_run_outlives_a_flush(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "redis", "process") as server:
        rig = Rig(server.url)
        goes_on(rig, tmp_path, [rig.raw.flushall, rig.raw.flushall])
        rig.close()


# -- real processes


def cpu(pid: int) -> float:
    """Seconds of processor time so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def commands(raw: Any) -> int:
    found: Any = raw.info("stats")
    return int(found["total_commands_processed"])


@pytest.mark.slow
def test_processes_wait_calmly_after_a_flush_and_go_on_when_the_trainer_has_told_redis_again(tmp_path: Path) -> None:
    with (
        EmbeddedServer(tmp_path / "redis", "process") as server,
        Parts(tmp_path, server.url, prompts(tmp_path, 600)) as parts,
    ):
        others = [parts.feeder("--num-epoch", 1), parts.generator(), parts.generator()]
        trainer = parts.trainer("--num-epoch", 1, "--fully-async", "--max-weight-staleness", 1)
        raw = parts.broker.client
        for _ in range(3):
            before = parts.broker.version()
            eventually(lambda before=before: parts.broker.version() > before, "it trains")  # type: ignore[misc]
            trainer.kill(signal.SIGSTOP)
            raw.flushall()
            time.sleep(2)
            asked, used = commands(raw), [cpu(one.process.pid) for one in others]
            time.sleep(5)
            assert commands(raw) - asked < 500
            spent = [cpu(one.process.pid) - was for one, was in zip(others, used, strict=True)]
            assert max(spent) < 2.5, spent
            print(f"{commands(raw) - asked} commands and {spent} s of processor time in 5 s")
            trainer.kill(signal.SIGCONT)
        for one in (trainer, *others):
            said = one.ends(0, 120)
            assert said.count("Redis has lost") <= 3
        places = parts.audit().places
        assert places["committed"] + places["dead"] == 600
