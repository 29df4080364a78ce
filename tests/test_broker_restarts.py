"""The broker when the trainer comes back from a checkpoint, and when Redis comes back knowing less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from crash import crash, log_size
from rig import Rig, agreed, bits, ids, policy

from pipeline.errors import Fenced
from pipeline.ledger import Ledger
from pipeline.server import EmbeddedServer

# -- restore: a trainer comes back from a checkpoint


def test_a_restored_run_has_committed_exactly_what_the_checkpoint_contains(run: Rig) -> None:
    first = run.trainer()
    run.feeder(4)
    run.queued(run.worker(), 4)
    held = run.take(first, 4)
    first.publish(policy(2), held)
    first.commit(held)
    second = run.trainer(Ledger(committed=bits(1, 3), cursor=4))
    assert run.ended() == {1, 3}
    assert run.feeder().refeed_ids(9) == [0, 2]
    assert run.conserved()
    run.finish(second, run.worker(), 4)
    assert run.ended() == {0, 1, 2, 3}


def test_what_was_trained_and_not_saved_goes_round_again_and_what_waits_stays(run: Rig) -> None:
    first = run.trainer(bound=99, in_flight=99, queue_capacity=99)
    run.feeder(12)
    worker = run.worker()
    run.queued(worker, 8)
    published = run.take(first, 2)
    first.publish(policy(2), published)
    run.take(first, 2)
    run.raw.lpop(run.keys["groups"])
    leases = run.lease(worker, 3)
    run.do(worker.drop(leases[0], "zero_std"))
    run.do(worker.hand_back(leases[1:2], "too_large", "bury"))
    second = run.trainer(Ledger(), bound=99, in_flight=99, queue_capacity=99)
    assert [(int(e["id"]), e["attempt"], e["strikes"]) for e in run.entries()] == [(i, "2", "0") for i in range(5)]
    assert run.counter("recycled:restart") == 5
    assert run.standing().unsettled == {5: 6, 6: 7, 7: 8}
    assert run.do(worker.mine()) == leases[2:]
    assert ids(run.take(second, 9)) == [5, 6, 7]
    assert run.ended("dropped") == {8}
    assert run.ended("dead") == {9}
    assert run.conserved()


def test_a_checkpoint_whose_commit_never_reached_redis_is_committed_by_the_restore(run: Rig) -> None:
    first = run.trainer()
    run.feeder(3)
    run.queued(run.worker(), 3)
    first.publish(policy(2), run.take(first, 2))
    run.trainer(Ledger(committed=bits(0, 1), cursor=3))
    stand = run.standing()
    assert (stand.open, stand.waiting, stand.unsettled) == ([2], [], {2: 3})
    assert run.conserved()


def test_a_wiped_redis_is_fed_again_all_that_the_checkpoint_does_not_contain(run: Rig) -> None:
    second = run.trainer(Ledger(committed=bits(0, 5), dropped=bytes(bits(1)), dead=bytes(bits(9)), cursor=10))
    assert run.standing().feed == 10
    assert run.feeder().refeed_ids(99) == [2, 3, 4, 6, 7, 8]
    assert (run.ended(), run.ended("dropped"), run.ended("dead")) == ({0, 5}, {1}, {9})
    run.finish(second, run.worker(), 12)
    assert run.ended() == set(range(12)) - {1, 9}


def test_a_checkpoint_that_knows_more_than_redis_wins_over_what_waits_is_leased_or_queued(run: Rig) -> None:
    """Redis came back older than the checkpoint, and worker and trainer too were away."""
    run.trainer(in_flight=99, bound=99)
    run.feeder(8)
    worker = run.worker()
    run.queued(worker, 2)
    retried, dropped, buried, leased = run.lease(worker, 4)
    run.do(worker.hand_back([retried], "aborted"))
    run.do(worker.drop(dropped, "zero_std"))
    run.do(worker.hand_back([buried], "too_large", "bury"))
    run.raw.sadd(run.keys["refeed"], 20)
    known = (0, 2, 3, 4, 5, 6, 20)
    second = run.trainer(Ledger(committed=bits(*known), cursor=21))
    assert run.ended() == set(known)
    assert run.ended("dropped") == run.ended("dead") == set()
    assert run.push(worker, [leased]) == ["pushed"]
    assert len(run.groups()) == 2
    assert ids(run.take(second, 9)) == [1]
    assert run.conserved()
    run.finish(second, worker, 21)
    assert run.ended() == set(range(21))


def test_a_restore_done_twice_is_as_good_as_once(run: Rig) -> None:
    first = run.trainer()
    run.feeder(6)
    run.queued(run.worker(), 6)
    run.take(first, 3)
    book = Ledger(committed=bits(0), cursor=9)
    assert run.trainer(book).ledger is book
    once = run.standing()
    run.trainer(book)
    assert run.standing() == once
    assert sorted(once.refeed) == [6, 7, 8]


def test_room_after_a_restore_is_what_is_leased_and_queued_leave_of_it(run: Rig) -> None:
    first = run.trainer(bound=6)
    run.feeder(20)
    worker = run.worker()
    run.queued(worker, 5)
    run.take(first, 4)
    assert run.do(worker.lease(1, 0)).room == 0
    run.trainer(Ledger(), bound=6)
    assert run.do(worker.lease(0, 0)).room == 6 - 1 - 1


# -- resync: the trainer lives, Redis comes back knowing less


def wipe(run: Rig) -> None:
    run.raw.delete(*run.keys.all())


def test_a_wiped_redis_is_told_what_the_trainer_took_trained_and_published(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(8)
    worker = run.worker()
    run.queued(worker, 6)
    held = run.take(trainer, 4)
    trainer.publish(policy(7), held[:2])
    trainer.commit(held[:1])
    leases = run.lease(worker, 2)
    wipe(run)
    assert trainer.check().lost == []
    stand = run.standing()
    assert (stand.feed, sorted(stand.open), list(stand.unsettled)) == (4, [1, 2, 3], [2, 3])
    assert run.ended() == {0}
    assert [len(run.raw.xinfo_groups(run.keys[stream])) for stream in ("prompts", "prompts:retry")] == [1, 1]
    assert trainer.version() == 7
    assert trainer.policy() == policy(7)
    assert trainer.state()["epoch"] == "1"
    assert run.conserved()
    assert run.push(worker, leases) == ["lost", "lost"]
    assert run.do(worker.lease(1, 0)).why == "reaped"
    run.do(worker.register({}))
    run.finish(trainer, worker, 9)
    assert run.ended() == set(range(9))


def test_a_wiped_redis_is_told_again_who_trains_in_what_state_and_on_what_data(run: Rig) -> None:
    trainer, feeder = run.trainer(), run.feeder()
    feeder.describe_data(10, 20, "abc")
    trainer.renew(why="step 7", doing="waiting for groups")
    before = trainer.state()
    wipe(run)
    assert not feeder.stopping()
    trainer.renew()
    after = trainer.state()
    for name in ("trainer_seen", "doing_since", "published_at"):
        for state in (before, after):
            state.pop(name, None)
    assert after == before
    assert trainer.check().feed_total == 20


VERBS: dict[str, Callable[[Any, Any], Any]] = {
    "take": lambda t, held: t.take(4),
    "check": lambda t, held: t.check(),
    "recycle": lambda t, held: t.recycle(held[:1], "stale"),
    "publish": lambda t, held: t.publish(policy(2), held),
    "commit": lambda t, held: t.commit(held),
    "renew": lambda t, held: t.renew(status="running"),
    "configure": lambda t, held: t.configure(agreed(bound=9).model_dump_json()),
}


@pytest.mark.parametrize("verb", VERBS)
def test_any_verb_of_the_trainer_meets_a_wiped_redis_and_then_takes_effect(run: Rig, verb: str) -> None:
    trainer = run.trainer()
    run.feeder(3)
    run.queued(run.worker(), 2)
    held = run.take(trainer, 2)
    wipe(run)
    VERBS[verb](trainer, held)
    stand = run.standing()
    assert run.conserved()
    assert sorted(stand.open) == {"commit": [], "recycle": [1]}.get(verb, [0, 1])
    assert len(stand.unsettled) == {"commit": 0, "publish": 0, "recycle": 1}.get(verb, 2)
    assert trainer.version() == (2 if verb == "publish" else 1)
    assert run.ended() == ({0, 1} if verb == "commit" else set())


def test_a_redis_that_forgot_a_takeover_is_told_of_it_unless_another_trainer_came(run: Rig) -> None:
    trainer = run.trainer()
    run.raw.hset(run.keys["state"], mapping={"epoch": 0, "token": "old"})
    trainer.renew(why="still here")
    assert trainer.state()["epoch"] == "1"
    wipe(run)
    other = run.new_trainer()
    other.takeover("other")
    with pytest.raises(Fenced, match="taken over by other"):
        trainer.check()


def ends(run: Rig, worker: Any, leases: Any) -> None:
    run.do(worker.drop(leases[0], "zero_std"))
    run.do(worker.hand_back(leases[1:2], "too_large", "bury"))
    run.do(worker.hand_back(leases[2:3], "aborted", "strike"))
    run.push(worker, leases[3:4])


@pytest.mark.parametrize("where", ["taken", "published", "committed"])
def test_what_workers_did_to_it_before_the_trainer_was_back_does_not_count(run: Rig, where: str) -> None:
    """Redis forgot the pushes, so prompts that the trainer has are leased again: one is dropped, one buried, ..."""
    trainer = run.trainer()
    run.feeder(5)
    worker = run.worker()
    leases = run.lease(worker, 5)
    forgotten = [lease.prompt for lease in leases]
    for prompt in forgotten:
        assert trainer.hold(prompt)
    if where != "taken":
        trainer.ledger.publish(ids(forgotten))
    if where == "committed":
        trainer.ledger.commit(ids(forgotten))
    ends(run, worker, leases)
    trainer.returned()
    assert run.conserved()
    stand = run.standing()
    assert run.ended("dropped") == run.ended("dead") == set()
    assert run.ended() == (set(range(5)) if where == "committed" else set())
    assert sorted(stand.open) == ([] if where == "committed" else [0, 1, 2, 3, 4])
    assert len(stand.unsettled) == (5 if where == "taken" else 0)
    assert run.do(worker.mine()) == []
    assert run.push(worker, leases[4:]) == ["pushed"]
    assert run.take(trainer, 9) == []
    assert trainer.check().lost == []
    run.finish(trainer, worker, 6)
    assert run.ended() == set(range(6))


def test_a_restart_before_the_config_is_written_breaks_nothing(run: Rig) -> None:
    trainer = run.new_trainer()
    trainer.takeover("trainer")
    run.feeder(2)
    run.raw.hset(run.keys["open"], "0", '{"attempt":1,"strikes":0,"push":1,"prompt":{}}')
    trainer.returned()
    assert not run.raw.exists(run.keys["config"])
    assert [e["id"] for e in run.entries()] == ["0"]


def test_what_a_redis_of_the_same_age_is_told_changes_nothing(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(12)
    worker = run.worker()
    run.queued(worker, 5)
    held = run.take(trainer, 3)
    trainer.publish(policy(2), held[:2])
    trainer.commit(held[:1])
    run.do(worker.drop(run.lease(worker, 2)[0], "zero_std"))
    before = run.dump()
    trainer.returned()
    after = run.dump()
    for dump in (before, after):
        del dump[run.keys["open"]]  # the push number of what is published is gone
    assert after == before


# -- a real restart, and a log whose end is gone


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "redis", "process") as running:
        yield running


@pytest.fixture
def own(server: EmbeddedServer) -> Iterator[Rig]:
    rig = Rig(server.url)
    yield rig
    rig.close()


@dataclass
class Life:
    """A run of ten prompts, and where the log stood before each thing that happened in it."""

    rig: Rig
    marks: dict[str, int]
    trainer: Any
    worker: Any
    leases: Any


def life(server: EmbeddedServer, rig: Rig) -> Life:
    marks: dict[str, int] = {}

    def mark(name: str) -> None:
        marks[name] = log_size(server)

    mark("all")
    trainer, worker = rig.trainer(bound=12), rig.worker()
    mark("feed")
    rig.feeder(10)
    mark("lease")
    leases = rig.lease(worker, 8)
    mark("push")
    rig.push(worker, leases[:6])
    mark("drop")
    rig.do(worker.drop(leases[6], "zero_std"))
    mark("take")
    a, b, c, d = rig.take(trainer, 4)
    mark("recycle")
    trainer.recycle([d], "stale", "strike")
    mark("publish")
    trainer.publish(policy(2), [a, b])
    mark("commit")
    trainer.commit([a])
    mark("push again")
    rig.push(worker, rig.lease(worker, 1))
    assert list(trainer.ledger.taken.values()) == [c]
    return Life(rig, marks, trainer, worker, leases)


FORGOTTEN = ["all", "feed", "lease", "push", "drop", "take", "recycle", "publish", "commit", "push again"]


@pytest.mark.parametrize("torn", [0, 5], ids=["cut", "torn"])
@pytest.mark.parametrize("since", FORGOTTEN)
def test_a_redis_that_forgot_all_since_then_is_made_to_agree(
    server: EmbeddedServer, own: Rig, since: str, torn: int
) -> None:
    was = life(server, own)
    crash(server, was.marks[since] + torn)
    if since != "all":
        assert own.conserved()
    assert was.trainer.check().foreign == []
    assert own.conserved()
    assert own.ended() == {0}
    assert was.trainer.version() == 2
    stand = own.standing()
    assert {1, 2} <= set(stand.open)
    assert stand.unsettled.keys() >= {2}
    assert not stand.unsettled.keys() & {0, 1}
    own.do(was.worker.register({}))
    own.finish(was.trainer, was.worker, 12)
    assert own.ended() | own.ended("dropped") == set(range(12))


def test_a_restart_that_lost_nothing_changes_nothing(server: EmbeddedServer, own: Rig) -> None:
    was = life(server, own)
    before = own.standing()
    crash(server)
    assert was.trainer.check().lost == []
    assert own.standing() == before
    assert own.do(was.worker.lease(1, 0)).why == "outage"
    assert was.worker.suspect
    assert own.do(was.worker.mine()) == was.leases[7:]


def test_a_worker_works_again_on_what_redis_forgot_that_it_pushed(server: EmbeddedServer, own: Rig) -> None:
    was = life(server, own)
    crash(server, was.marks["push"])
    found = own.do(was.worker.mine())
    assert found == was.leases
    assert was.worker.suspect
    assert own.push(was.worker, found[5:6]) == ["pushed"]
    was.trainer.check()
    assert own.do(was.worker.mine()) == [was.leases[i] for i in (3, 4, 6, 7)]
    assert own.conserved()
