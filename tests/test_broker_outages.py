"""The broker when replies are lost, memory is full, or Redis goes away and comes back knowing less."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from lossy import Lossy
from redis.exceptions import AuthenticationError
from rig import Rig, agreed, bits, ids, message, policy, records

from pipeline.errors import RedisDown, Stopped
from pipeline.ledger import Ledger
from pipeline.outage import passing
from pipeline.server import EmbeddedServer

# -- a reply is lost: the verb is sent again, and that must be as good as once


@pytest.fixture
def lossy(redis_url: str) -> Iterator[Lossy]:
    with Lossy(redis_url) as relay:
        yield relay


class Scene:
    """A run with something of everything; its processes speak through `url`."""

    rig: Rig
    trainer: Any
    feeder: Any
    worker: Any
    leases: Any
    held: Any

    def __init__(self, rig: Rig, url: str) -> None:
        rig.trainer()
        self.feeder, self.worker = rig.feeder(12), rig.worker()
        rig.raw.sadd(rig.keys["refeed"], 99)
        rig.queued(self.worker, 3)
        self.leases = rig.lease(self.worker, 3)
        through = Rig(url, rig.keys.run)
        self.trainer = through.new_trainer()
        self.trainer.takeover("trainer", force=True)
        self.trainer.configure(agreed().model_dump_json())
        self.held = through.take(self.trainer, 2)
        rig.raw.lpop(rig.keys["groups"])
        self.feeder, self.worker = through.feeder(), through.new_worker("w1")
        self.rig = through


VERBS: dict[str, tuple[bytes, Callable[[Scene], Any]]] = {
    "feed": (b"EVALSHA", lambda s: s.feeder.feed(12, records(12, 3))),
    "refeed": (b"EVALSHA", lambda s: s.feeder.refeed({99: "{}"})),
    "register": (b"EVALSHA", lambda s: s.rig.do(s.worker.register({"a": 1}))),
    "heartbeat": (b"EVALSHA", lambda s: s.rig.do(s.worker.heartbeat({"a": 1}, 3))),
    "push": (b"EXEC", lambda s: s.rig.push(s.worker, s.leases[:1])),
    "hand back": (b"EVALSHA", lambda s: s.rig.do(s.worker.hand_back(s.leases[1:2], "stale", "strike"))),
    "drop": (b"EVALSHA", lambda s: s.rig.do(s.worker.drop(s.leases[2], "zero_std"))),
    "check": (b"EVALSHA", lambda s: s.trainer.check()),
    "recycle": (b"EVALSHA", lambda s: s.trainer.recycle(s.held[:1], "stale", "strike")),
    "publish": (b"EVALSHA", lambda s: s.trainer.publish(policy(2), s.held)),
    "commit": (b"EVALSHA", lambda s: s.trainer.commit(s.held)),
    "configure": (b"EVALSHA", lambda s: s.trainer.configure(agreed(bound=3).model_dump_json())),
    "renew": (b"EVALSHA", lambda s: s.trainer.renew(why="x")),
    "restore": (b"EVALSHA", lambda s: s.trainer.restore(s.trainer.ledger)),
    "takeover": (b"EVALSHA", lambda s: s.trainer.takeover("again", force=True)),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_whose_reply_was_lost_is_sent_again_and_is_done_once(real: Rig, lossy: Lossy, verb: str) -> None:
    word, act = VERBS[verb]
    with_loss = Scene(real, lossy.url)
    twin = Rig(real.url)
    without = Scene(twin, real.url)
    act(without)  # also makes sure that the server knows the script
    lossy.lose(word)
    act(with_loss)
    assert lossy.lost == 1
    assert plain(real) == plain(twin)
    for scene in (with_loss, without):
        scene.rig.close()
    twin.close()


def plain(rig: Rig) -> dict[str, Any]:
    """A dump to be compared with another run's: without names of runs, times and stream ids."""
    stand = rig.standing()
    streams = {s: rig.entries(s) for s in ("prompts", "prompts:retry", "dead")}
    hashes: dict[str, Any] = {h: rig.raw.hgetall(rig.keys[h]) for h in ("open", "counters", "weights", "workers:info")}
    state: Any = rig.raw.hgetall(rig.keys["state"])
    for name in (b"trainer_seen", b"token", b"tick", b"grace", b"doing_since", b"pushed_at", b"published_at"):
        state.pop(name, None)
    return {"standing": stand, "groups": rig.groups(), "state": state, **streams, **hashes}


def test_a_takeover_whose_reply_was_lost_does_not_refuse_itself(real: Rig, lossy: Lossy) -> None:
    real.trainer().finish("done", "")
    through = Rig(lossy.url, real.keys.run)
    trainer = through.new_trainer()
    lossy.lose(b"EVALSHA")
    trainer.takeover("me")
    assert (lossy.lost, trainer.epoch) == (1, 2)
    trainer.renew()
    through.close()


def test_groups_whose_reply_was_lost_on_the_way_to_the_trainer_are_found(real: Rig, lossy: Lossy) -> None:
    real.trainer()
    real.feeder(6)
    real.queued(real.worker(), 6)
    through = Rig(lossy.url, real.keys.run)
    trainer = through.new_trainer()
    trainer.takeover("trainer", force=True)
    trainer.configure(agreed().model_dump_json())
    held = through.take(trainer, 1)
    lossy.lose(b"LPOP")
    assert trainer.take(4) == ([], None)
    assert trainer.check().lost == [1, 2, 3, 4]
    assert list(trainer.ledger.taken) == ids(held)
    assert real.conserved()
    through.close()


def test_a_worker_whose_lease_was_lost_is_told_and_finds_its_prompts(real: Rig, lossy: Lossy) -> None:
    real.trainer()
    real.feeder(6)
    real.worker("w1")
    through = Rig(lossy.url, real.keys.run)
    worker = through.new_worker("w1")
    held = through.lease(worker, 1)
    lossy.lose(b"EVALSHA")
    answer = through.do(worker.lease(3, 0))
    assert (answer.leases, answer.why, worker.suspect) == ([], "outage", True)
    mine = through.do(worker.mine())
    assert mine[:1] == held
    assert ids(mine) == [0, 1, 2, 3]
    through.close()


# -- a server of one's own


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "redis", "process") as running:
        yield running


@pytest.fixture
def own(server: EmbeddedServer) -> Iterator[Rig]:
    rig = Rig(server.url)
    yield rig
    rig.raw = rig.connect()
    rig.close()


# -- memory is full


class Busy:
    """A run with something of everything: 0-1 published, 2-3 taken, 4 popped for nobody, 5-6 queued, 7-9 leased."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.trainer: Any = rig.trainer(bound=12, in_flight=12)
        self.feeder, self.worker = rig.feeder(20), rig.worker()
        rig.queued(self.worker, 7)
        self.published = rig.take(self.trainer, 2)
        self.trainer.publish(policy(2), self.published)
        self.taken = rig.take(self.trainer, 2)
        rig.raw.lpop(rig.keys["groups"])
        self.leases = rig.lease(self.worker, 3)


@pytest.fixture
def full(own: Rig) -> Busy:
    busy = Busy(own)
    own.raw.config_set("maxmemory", 1)
    return busy


def replaced(busy: Busy) -> int:
    second = busy.rig.new_trainer()
    second.takeover("second", force=True)
    second.configure(agreed().model_dump_json())
    return second.restore(Ledger(committed=bits(0, 1)))


WORKS_WHEN_FULL: dict[str, Callable[[Busy], Any]] = {
    "take": lambda b: b.trainer.take(2, block=False)[0],
    "take, waiting": lambda b: b.trainer.take(2)[0],
    "check": lambda b: b.trainer.check().lost == [4],
    "recycle": lambda b: not b.trainer.recycle(b.taken, "stale", "strike"),
    "drop by the trainer": lambda b: not b.trainer.recycle(b.taken, "stale", "drop"),
    "publish": lambda b: not b.trainer.publish(policy(3), b.taken),
    "commit": lambda b: b.trainer.commit(b.published) == [],
    "discard": lambda b: not b.trainer.hold(b.published[0]),
    "renew": lambda b: not b.trainer.renew(status="draining"),
    "configure": lambda b: not b.trainer.configure(agreed().model_dump_json()),
    "takeover and restore": lambda b: replaced(b) == 0,
    "quarantine": lambda b: not b.trainer.quarantine(b"x", "bad"),
    "heartbeat": lambda b: b.rig.do(b.worker.heartbeat({}, 1)).known,
    "hand back": lambda b: b.rig.do(b.worker.hand_back(b.leases, "shutdown")) == 3,
    "bury": lambda b: b.rig.do(b.worker.hand_back(b.leases, "too_large", "bury")) == 3,
    "drop": lambda b: b.rig.do(b.worker.drop(b.leases[0], "zero_std")) == 1,
    "mine": lambda b: b.rig.do(b.worker.mine()) == b.leases,
    "look": lambda b: b.feeder.standing().queued == 2,
    "backlog": lambda b: b.feeder.backlog() == 10,
}


@pytest.mark.parametrize("verb", WORKS_WHEN_FULL)
def test_what_frees_memory_or_keeps_order_works_when_memory_is_full(full: Busy, verb: str) -> None:
    for broker in (full.trainer, full.worker, full.feeder):
        broker.patience = 0.5
    assert WORKS_WHEN_FULL[verb](full)
    assert full.rig.conserved()


def test_dead_workers_are_reaped_when_memory_is_full(own: Rig) -> None:
    busy = Busy(own)
    own.silence("w1")
    own.ticked()
    own.raw.config_set("maxmemory", 1)
    assert busy.feeder.reap() == ["w1"]
    assert own.conserved()


DENIED_WHEN_FULL: dict[str, Callable[[Busy], Any]] = {
    "feed": lambda b: b.feeder.feed(20, records(20, 1)),
    "push": lambda b: b.rig.push(b.worker, b.leases),
}


@pytest.mark.parametrize("verb", DENIED_WHEN_FULL)
def test_what_takes_memory_waits_for_it_and_leaves_no_trace_in_vain(
    full: Busy, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = full.rig.dump()
    full.feeder.patience = full.worker.patience = 1.0
    with pytest.raises(RedisDown, match="used memory > 'maxmemory'"):
        DENIED_WHEN_FULL[verb](full)
    assert full.rig.dump() == before
    assert len(caplog.records) < 3


def test_nothing_is_leased_when_memory_is_full(full: Busy) -> None:
    before = full.rig.dump()
    assert full.rig.lease(full.worker, 3) == []
    assert full.rig.dump() == before


# -- Redis is away


def test_an_outage_ends_when_redis_is_back_and_the_verb_is_sent_again(server: EmbeddedServer, own: Rig) -> None:
    trainer, feeder, worker = own.trainer(), own.feeder(3), own.worker()
    (lease,) = own.lease(worker, 1)
    server.kill()
    server.start()
    assert own.push(worker, [lease]) == ["pushed"]
    assert worker.suspect
    assert feeder.feed(3, records(3, 1)) == 4
    assert own.take(trainer, 1) == []
    assert own.take(trainer, 1) == [lease.prompt]


def test_an_outage_that_outlasts_patience_says_so(server: EmbeddedServer, own: Rig) -> None:
    trainer, worker = own.trainer(), own.worker()
    server.kill()
    trainer.patience = worker.patience = 0.3
    with pytest.raises(RedisDown, match="--redis-patience"):
        trainer.renew()
    with pytest.raises(RedisDown, match="--redis-patience"):
        own.do(worker.heartbeat({}, 0))
    server.start()


def test_who_is_told_to_stop_does_not_wait_for_redis(server: EmbeddedServer, own: Rig) -> None:
    trainer, worker = own.trainer(), own.worker()
    server.kill()
    for broker in (trainer, worker):
        broker.patience = 300
        broker.stop.set()
    with pytest.raises(Stopped, match="while Redis was away"):
        trainer.renew()
    with pytest.raises(Stopped, match="while Redis was away"):
        own.do(worker.heartbeat({}, 0))
    server.start()


def test_an_outage_is_told_once_however_many_wait_for_its_end(
    server: EmbeddedServer, own: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    own.trainer()
    own.feeder(8)
    worker = own.worker()
    leases = own.lease(worker, 8)
    server.kill()

    async def all_push() -> list[str]:
        pushes = [asyncio.create_task(worker.push(lease, message(lease.prompt))) for lease in leases]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.start)
        return await asyncio.gather(*pushes)

    caplog.clear()
    assert own.do(all_push()) == ["pushed"] * 8
    assert [r.getMessage().split(" (")[0][:14] for r in caplog.records] == ["Redis is away", "Redis is back "]


@pytest.mark.parametrize("error", [AuthenticationError("WRONGPASS"), redis.exceptions.AuthorizationError("no")])
def test_a_wrong_password_is_no_outage(error: redis.RedisError) -> None:
    assert not passing(error)
