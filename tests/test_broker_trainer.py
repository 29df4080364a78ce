"""The broker's contract, the trainer's part: take, check, recycle, publish, commit, and the fence."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rig import LIMIT, Rig, agreed, ids, message, policy, prompt_of, records

from pipeline.errors import Fenced, MillpondError, UsageError
from pipeline.fenced import TrainerBroker
from pipeline.replies import Lease
from pipeline.types import Policy, Prompt

# -- take


def test_groups_are_taken_oldest_first_and_no_more_than_asked_for(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(8)
    made = run.queued(run.worker(), 5)
    assert trainer.take(2) == ([message(p) for p in made[:2]], None)
    assert trainer.take(2, block=False) == ([message(p) for p in made[2:4]], None)
    assert trainer.take(2) == ([message(made[4])], None)
    assert trainer.take(2, block=False) == ([], None)


def test_a_take_from_an_empty_list_comes_back_with_nothing(run: Rig) -> None:
    assert run.trainer().take(4) == ([], None)


def test_an_alarm_is_read_before_any_group(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(3)
    worker = run.worker()
    run.queued(worker, 3)
    run.do(worker.fail("Traceback ...\nZeroDivisionError", "reward f"))
    before = run.groups()
    assert trainer.take(3, block=False) == ([], None)
    assert run.groups() == before
    messages, alarm = trainer.take(3)
    assert messages == []
    assert json.loads(alarm or b"")["what"] == "reward f"
    assert run.groups() == before
    assert len(trainer.take(3)[0]) == 3
    assert run.entries("errors")[0]["trace"] == "Traceback ...\nZeroDivisionError"


def test_the_take_of_a_server_that_takes_no_transaction_when_full_is_as_good(run: Rig) -> None:
    """Redis 7.0 queues nothing for a MULTI at maxmemory; TrainerBroker.take falls back to this script there."""
    trainer = run.trainer()
    run.feeder(3)
    worker = run.worker()
    made = run.queued(worker, 3)

    def take(count: int) -> Any:
        return trainer.script("take_full", trainer.epoch, trainer.token, count)

    assert take(2) == [b"ok", [message(p) for p in made[:2]]]
    run.do(worker.fail("trace", "what"))
    assert take(1) == [b"ok", []]
    run.raw.delete(run.keys["alarm"])
    assert take(2) == [b"ok", [message(made[2])]]
    assert take(2) == [b"ok", []]


def test_a_group_of_a_prompt_that_is_held_or_committed_already_is_discarded_and_counted(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(2)
    run.queued(run.worker(), 2)
    a, b = run.take(trainer, 2)
    assert not trainer.hold(a)
    trainer.publish(policy(2), [a, b])
    assert not trainer.hold(a)
    trainer.commit([a])
    assert not trainer.hold(a)
    assert not trainer.hold(b)
    assert run.counter("discarded:double") == 4


# -- check


def test_a_group_popped_for_nobody_is_found_and_goes_round_again_without_a_strike(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(4)
    run.queued(run.worker(), 4)
    held = run.take(trainer, 1)
    run.raw.lpop(run.keys["groups"], 2)
    found = trainer.check()
    assert (found.lost, found.foreign, found.queued, found.waiting) == ([1, 2], [], 1, 2)
    assert [(e["id"], e["attempt"], e["strikes"]) for e in run.entries()] == [("1", "2", "0"), ("2", "2", "0")]
    assert trainer.check().lost == []
    assert list(trainer.ledger.taken) == ids(held)
    assert run.conserved()


def test_a_check_finds_nothing_lost_while_groups_wait_or_are_held(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(4)
    run.queued(run.worker(), 4)
    assert trainer.check().lost == []
    run.take(trainer, 2)
    before = run.dump()
    assert trainer.check().lost == []
    assert run.dump() == before


def test_a_quarantined_message_is_found_by_the_next_check(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(1)
    run.queued(run.worker(), 1)
    (raw,), _ = trainer.take(1)
    trainer.quarantine(raw * 1000, "version: unknown")
    assert trainer.check("quarantined", "strike").lost == [0]
    assert [(e["id"], e["strikes"]) for e in run.entries()] == [("0", "1")]
    (entry,) = run.entries("quarantine")
    assert (len(entry["head"]), entry["length"]) == (4096, str(1000 * len(raw)))


def test_messages_that_never_decode_bury_their_prompt_in_the_end(run: Rig) -> None:
    trainer = run.trainer(max_prompt_attempts=2)
    run.feeder(1)
    for _ in range(2):
        run.queued(run.worker(), 1)
        trainer.take(1)
        assert trainer.check("quarantined", "strike").lost == [0]
    assert [e["reason"] for e in run.entries("dead")] == ["quarantined"]
    assert run.conserved()


def test_a_held_group_that_is_not_open_under_its_attempt_is_foreign_and_let_go(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(3)
    worker = run.worker()
    (old,) = run.queued(worker, 1)
    run.take(trainer, 1)
    trainer.recycle([old], "aborted")
    (new,) = run.queued(worker, 1)
    assert (new.id, new.attempt) == (0, 2)
    trainer.ledger.taken[0] = old
    stranger = Prompt(99, 1, 0, "{}")
    trainer.ledger.taken[99] = stranger
    found = trainer.check()
    assert sorted(found.foreign) == [0, 99]
    assert found.lost == []
    assert trainer.ledger.taken == {}
    assert run.take(trainer, 1) == [new]


def test_the_data_is_exhausted_when_nothing_waits_is_leased_queued_or_fed_again(run: Rig) -> None:
    trainer = run.trainer()
    feeder, worker = run.feeder(2), run.worker()
    feeder.describe_data(2, 2, "abc")

    def exhausted() -> bool:
        return trainer.check().exhausted

    assert not exhausted()
    leases = run.lease(worker, 2)
    assert not exhausted()
    run.push(worker, leases)
    assert not exhausted()
    run.take(trainer, 2)
    assert exhausted()
    run.raw.sadd(run.keys["refeed"], 1)
    assert not exhausted()
    run.raw.delete(run.keys["refeed"])
    feeder.describe_data(2, 3, "abc")
    assert not exhausted()
    feeder.describe_data(2, None, "abc")
    assert not exhausted()


# -- recycle, publish, commit


def test_recycle_and_commit_go_by_id_and_attempt(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(2)
    run.queued(run.worker(), 2)
    run.take(trainer, 2)
    wrong = [Prompt(0, 2, 0, ""), Prompt(1, 9, 0, "")]
    before = run.dump()
    trainer.recycle(wrong, "stale", "strike")
    assert trainer.commit(wrong) == [0, 1]
    assert run.dump() == before


def test_a_recycled_group_waits_again_with_its_record_and_gives_room_at_once(run: Rig) -> None:
    trainer = run.trainer(bound=2)
    run.feeder(4)
    worker = run.worker()
    made = run.queued(worker, 2)
    run.take(trainer, 2)
    assert run.lease(worker, 9) == []
    trainer.recycle(made[:1], "stale", "strike")
    assert [lease.prompt for lease in run.lease(worker, 9)] == [Prompt(0, 2, 1, records(0, 1)[0])]
    assert trainer.ledger.taken == {1: made[1]}
    assert run.conserved()


def test_a_group_that_is_stale_again_and_again_is_buried(run: Rig) -> None:
    trainer = run.trainer(max_prompt_attempts=2)
    run.feeder(1)
    worker = run.worker()
    for _ in range(2):
        run.queued(worker, 1)
        trainer.recycle(run.take(trainer, 1), "stale", "strike")
    assert [e["reason"] for e in run.entries("dead")] == ["stale"]
    assert run.conserved()


def test_recycling_the_same_round_twice_is_done_once(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(1)
    made = run.queued(run.worker(), 1)
    run.take(trainer, 1)
    trainer.recycle(made, "stale", "strike")
    trainer.recycle(made, "stale", "strike")
    assert [(e["attempt"], e["strikes"]) for e in run.entries()] == [("2", "1")]
    assert run.counter("recycled:stale") == 1


def test_a_trainer_can_drop_a_group_under_a_reason(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(2)
    made = run.queued(run.worker(), 2)
    run.take(trainer, 2)
    trainer.recycle(made, "last_batch", "drop")
    stand = run.standing()
    assert (stand.dropped, stand.open, stand.unsettled) == (b"\xc0", [], {})
    assert run.counter("dropped:last_batch") == 2


def test_room_opens_with_the_publication_and_not_before(run: Rig) -> None:
    trainer = run.trainer(bound=4)
    run.feeder(20)
    worker = run.worker()
    run.queued(worker, 4)
    held = run.take(trainer, 4)
    assert run.do(worker.lease(9, 0)).room == 0
    trainer.publish(policy(2), held[:3])
    leased = run.do(worker.lease(9, 0))
    assert (len(leased.leases), leased.version) == (3, 2)
    assert list(trainer.ledger.taken) == [3]
    assert list(trainer.ledger.published) == [0, 1, 2]
    assert run.standing().unsettled == {3: 4}
    assert run.conserved()


def test_versions_only_grow_and_the_same_publication_twice_is_one(run: Rig) -> None:
    trainer = run.trainer()
    five = Policy(5, "weights/5", "hf", "d", 7, 1.5, ((5, 2),))
    trainer.publish(five, [])
    assert run.feeder().policy() == five
    trainer.publish(five, [])
    for behind in (policy(4), policy(5, "weights/other")):
        with pytest.raises(MillpondError, match="was to be published, but 5 stands already"):
            trainer.publish(behind, [])
    assert run.feeder().policy() == five
    assert run.raw.get(run.keys["weights:version"]) == b"5"


def test_a_refused_publication_opens_no_room(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(1)
    run.queued(run.worker(), 1)
    held = run.take(trainer, 1)
    with pytest.raises(MillpondError):
        trainer.publish(policy(0), held)
    assert run.standing().unsettled == {0: 1}
    assert list(trainer.ledger.taken) == [0]


def test_a_committed_prompt_is_committed_once_and_for_good(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(2)
    run.queued(run.worker(), 2)
    held = run.take(trainer, 2)
    trainer.publish(policy(2), held)
    assert trainer.commit(held[:1]) == []
    before = run.dump()
    assert trainer.commit(held[:1]) == []
    assert run.dump() == before
    trainer.recycle(held[:1], "stale")
    assert run.dump() == before
    assert run.counter("committed") == 1
    assert run.standing().committed == b"\x80"
    assert trainer.ledger.published == {1: held[1]}
    assert bytes(trainer.ledger.committed) == b"\x80"


def test_a_commit_over_a_bit_that_is_set_is_refused_and_counted(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(1)
    run.queued(run.worker(), 1)
    held = run.take(trainer, 1)
    run.raw.setbit(run.keys["done:committed"], 0, 1)
    trainer.commit(held)
    assert (run.counter("refused:double"), run.counter("committed")) == (1, 0)
    assert run.conserved()


@pytest.mark.parametrize("bitmap", ["done:committed", "done:dropped", "done:dead"])
def test_what_has_ended_never_goes_round_again(run: Rig, bitmap: str) -> None:
    trainer = run.trainer()
    run.feeder(3)
    worker = run.worker()
    run.queued(worker, 2)
    leases = run.lease(worker, 1)
    held = run.take(trainer, 1)
    run.raw.lpop(run.keys["groups"])
    for id in range(3):
        run.raw.setbit(run.keys[bitmap], id, 1)
    trainer.recycle(held, "stale", "strike")
    assert trainer.check().lost == [1]
    run.do(worker.hand_back(leases, "stale", "drop"))
    assert run.entries() == []
    assert run.counter("refused:double") == 3
    assert run.conserved()


# -- the fence


def test_a_trainer_that_lives_is_not_replaced_and_is_named(run: Rig) -> None:
    first = run.trainer()
    first.takeover("trainer on node-7", force=True)
    second = run.new_trainer()
    before = run.dump()
    with pytest.raises(UsageError, match="trainer on node-7, seen 0 s ago; --wait waits until it is gone, --take-over"):
        second.takeover("second")
    assert run.dump() == before
    first.renew()


@pytest.mark.parametrize("ago", [LIMIT + 1000, -LIMIT - 1000], ids=["silent", "seen ahead of a clock that went back"])
def test_a_trainer_that_is_gone_is_replaced_without_force(run: Rig, ago: int) -> None:
    first = run.trainer()
    run.raw.hset(run.keys["state"], "trainer_seen", run.now() - ago)
    second = run.new_trainer()
    second.takeover("second")
    assert second.epoch == first.epoch + 1
    with pytest.raises(Fenced, match="taken over by second"):
        first.renew()


@pytest.mark.parametrize("ago", [LIMIT - 1000, -1000], ids=["seen of late", "the clock went back a little"])
def test_a_trainer_seen_of_late_is_not_replaced(run: Rig, ago: int) -> None:
    run.trainer()
    run.raw.hset(run.keys["state"], "trainer_seen", run.now() - ago)
    with pytest.raises(UsageError):
        run.new_trainer().takeover("second")


def test_a_trainer_that_finished_may_be_followed_at_once(run: Rig) -> None:
    run.trainer().finish("done", "all steps")
    second = run.new_trainer()
    second.takeover("second")
    assert second.state()["status"] == "starting"


def test_a_renewal_keeps_the_trainer_alive_and_sets_what_it_says(run: Rig) -> None:
    trainer = run.trainer()
    run.raw.hset(run.keys["state"], "trainer_seen", 1)
    trainer.renew(why="step 3")
    trainer.renew()
    assert trainer.state()["why"] == "step 3"
    with pytest.raises(UsageError):
        run.new_trainer().takeover("second")


def test_a_takeover_clears_old_alarms_and_stops_the_leasing_until_the_new_trainer_is_ready(run: Rig) -> None:
    run.trainer()
    run.feeder(3)
    worker = run.worker()
    run.do(worker.fail("trace", "what"))
    second = run.new_trainer()
    second.takeover("second", force=True)
    assert not run.raw.exists(run.keys["alarm"])
    assert run.do(worker.lease(1, 0)).why == "starting"


def test_an_epoch_can_be_asked_to_be_above_one_that_redis_forgot(run: Rig) -> None:
    trainer = run.new_trainer()
    trainer.takeover("t", above=41)
    assert trainer.epoch == 42
    assert [len(run.raw.xinfo_groups(run.keys[stream])) for stream in ("prompts", "prompts:retry")] == [1, 1]


ZOMBIE: dict[str, Callable[[TrainerBroker, list[Prompt]], Any]] = {
    "take": lambda t, held: t.take(4, block=False),
    "take, waiting": lambda t, held: t.take(4),
    "check": lambda t, held: t.check(),
    "recycle": lambda t, held: t.recycle(held, "stale", "strike"),
    "publish": lambda t, held: t.publish(policy(9), held),
    "commit": lambda t, held: t.commit(held),
    "configure": lambda t, held: t.configure("{}"),
    "renew": lambda t, held: t.renew(status="done"),
    "finish": lambda t, held: t.finish("done", ""),
    "restore": lambda t, held: t.restore(t.ledger),
    "resync": lambda t, held: t.returned(),
}


@pytest.mark.parametrize("verb", ZOMBIE)
def test_a_replaced_trainer_can_change_nothing(run: Rig, verb: str) -> None:
    zombie = run.trainer()
    run.feeder(8)
    worker = run.worker()
    run.queued(worker, 4)
    run.lease(worker, 1)
    held = run.take(zombie, 2)
    run.raw.lpop(run.keys["groups"])
    second = run.new_trainer()
    second.takeover("the second", force=True)
    before = run.dump()
    with pytest.raises(Fenced, match="taken over by the second"):
        ZOMBIE[verb](zombie, held)
    assert run.dump() == before


@pytest.mark.parametrize(
    "script", ["missing", "renew", "configure", "check", "recycle", "publish", "commit", "take_full"]
)
def test_a_script_of_the_trainer_refuses_a_wrong_token_before_it_does_anything(run: Rig, script: str) -> None:
    trainer = run.trainer()
    run.feeder(2)
    run.queued(run.worker(), 2)
    run.take(trainer, 1)
    run.raw.lpop(run.keys["groups"])
    before = run.dump()
    args = {"publish": (9, 1, "path", "x", 0), "configure": ("{}",), "take_full": (1,), "check": ("lost", "none")}
    assert trainer.script(script, trainer.epoch, "wrong", *args.get(script, (0, 1)))[0] == b"fenced"
    assert trainer.script(script, trainer.epoch + 1, trainer.token, *args.get(script, (0, 1)))[0] == b"older"
    assert run.dump() == before


@pytest.mark.spared("no connections")
def test_a_trainer_that_waits_for_a_group_when_it_is_replaced_gets_none(run: Rig) -> None:
    zombie = run.trainer()
    run.feeder(2)
    worker = run.worker()
    leases = run.lease(worker, 2)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(zombie.take, 4)
        while not any(
            c["cmd"] == "blpop" and c["name"].startswith(run.keys.prefix[:-1]) for c in run.raw.client_list()
        ):
            time.sleep(0.001)
        second = run.new_trainer()
        second.takeover("second", force=True)
        run.push(worker, leases)
        assert waiting.result() == ([], None)
    with pytest.raises(Fenced):
        zombie.take(4)
    assert [prompt_of(g).id for g in second.take(4)[0]] == [0, 1]


def test_a_trainer_of_the_same_epoch_with_another_token_is_fenced(run: Rig) -> None:
    trainer, other = run.trainer(), run.new_trainer()
    other.epoch = trainer.epoch
    with pytest.raises(Fenced):
        other.renew()


def test_a_fenced_take_leaves_a_list_that_grows_on(run: Rig) -> None:
    zombie = run.trainer()
    run.feeder(6)
    worker = run.worker()
    run.queued(worker, 2)
    second = run.new_trainer()
    second.takeover("second", force=True)
    with pytest.raises(Fenced):
        zombie.take(4, block=False)
    second.renew(status="running")
    run.queued(worker, 2)
    assert [prompt_of(g).id for g in second.take(9)[0]] == [0, 1, 2, 3]
    assert not run.raw.exists(run.keys["groups:fenced"])


# -- who is woken


def lost(run: Rig, trainer: TrainerBroker, leases: list[Lease]) -> None:
    run.raw.lpop(run.keys["groups"])
    trainer.check()


def dies(run: Rig, trainer: TrainerBroker, leases: list[Lease]) -> None:
    run.silence("w2")
    run.reap()


FREES: dict[str, Callable[[Rig, TrainerBroker, list[Lease]], Any]] = {
    "recycle": lambda run, trainer, leases: trainer.recycle(run.take(trainer, 1), "stale"),
    "drop by the trainer": lambda run, trainer, leases: trainer.recycle(run.take(trainer, 1), "last_batch", "drop"),
    "hand back": lambda run, trainer, leases: run.do(run.new_worker("w2").hand_back(leases, "shutdown")),
    "drop": lambda run, trainer, leases: run.do(run.new_worker("w2").drop(leases[0], "zero_std")),
    "a lost group": lost,
    "a dead worker": dies,
}


@pytest.mark.parametrize("bound", [3, 4])
@pytest.mark.parametrize("verb", FREES)
def test_room_is_announced_when_it_opens_and_not_while_it_is_there(run: Rig, verb: str, bound: int) -> None:
    trainer = run.trainer(bound=3)
    run.feeder(9)
    run.queued(run.worker("w1"), 2)
    leases = run.lease(run.worker("w2"), 1)
    trainer.configure(agreed(bound=bound).model_dump_json())
    listener = run.raw.pubsub()
    listener.subscribe(run.keys["wake"])
    listener.get_message(timeout=1)
    FREES[verb](run, trainer, leases)
    heard = [m["data"] for m in iter(lambda: listener.get_message(timeout=0.02), None)]
    assert heard == ([] if bound == 4 else [b"room"])
    listener.close()


@pytest.mark.parametrize("verb", ["check", "reap", "recycle", "hand back"])
def test_what_frees_nothing_announces_nothing(run: Rig, verb: str) -> None:
    trainer = run.trainer(bound=2)
    run.feeder(9)
    worker = run.worker()
    run.queued(worker, 2)
    other = run.worker("w2")
    listener = run.raw.pubsub()
    listener.subscribe(run.keys["wake"])
    listener.get_message(timeout=1)
    if verb == "check":
        trainer.check()
    elif verb == "reap":
        run.silence("w2")
        run.reap()
    elif verb == "recycle":
        trainer.recycle([Prompt(7, 1, 0, "")], "stale")
    else:
        run.do(other.hand_back([Lease(Prompt(7, 1, 0, ""), "fresh", "7-7")], "shutdown"))
    assert listener.get_message(timeout=0.02) is None
    listener.close()


def test_waiting_workers_are_told_of_room_space_prompts_and_versions_and_of_nothing_else(run: Rig) -> None:
    trainer = run.trainer(bound=3, queue_capacity=1)
    listener = run.raw.pubsub()
    listener.subscribe(run.keys["wake"])

    def heard(act: Callable[[], Any]) -> list[bytes]:
        act()
        found = (listener.get_message(ignore_subscribe_messages=True, timeout=0.05) for _ in range(4))
        return [m["data"] for m in found if m]

    feeder, worker = run.feeder(), run.worker()
    assert heard(lambda: feeder.feed(0, records(0, 2))) == [b"prompts"]
    assert heard(lambda: feeder.feed(2, records(2, 1))) == []
    a, b, c = run.lease(worker, 3)
    assert heard(lambda: feeder.feed(3, records(3, 8))) == [b"prompts"]
    assert heard(lambda: run.push(worker, [a, b])) == []
    assert heard(lambda: trainer.take(1, block=False)) == [b"space"]
    assert heard(lambda: run.do(worker.hand_back([b], "stale"))) == [b"room"]
    assert heard(lambda: run.do(worker.drop(c, "zero_std"))) == []
    assert heard(lambda: trainer.publish(policy(2), [])) == [b"version"]
    run.raw.sadd(run.keys["refeed"], 30)
    assert heard(lambda: feeder.refeed({30: "{}"})) == [b"prompts"]
    assert heard(lambda: feeder.refeed({30: "{}"})) == []
    assert heard(lambda: trainer.take(1, block=False)) == []
    listener.close()
