"""The broker's contract, the part of feeders and workers: feed, lease, push, hand back, drop, reap, leave."""

from __future__ import annotations

import pytest
from rig import LIMIT, Rig, agreed, ids, message, policy, records

from pipeline.errors import UsageError
from pipeline.glance import look
from pipeline.replies import Lease
from pipeline.types import Prompt

# -- feed


def test_a_feed_at_a_stale_cursor_feeds_nothing_and_says_where_the_cursor_is(run: Rig) -> None:
    feeder = run.feeder(3)
    assert feeder.feed(2, records(2, 5)) == 3
    assert feeder.feed(4, records(4, 5)) == 3
    assert ids_in(run, "prompts") == [0, 1, 2]
    assert run.counter("fed") == 3


def test_two_feeders_never_feed_the_same_prompt_twice(run: Rig) -> None:
    one, other = run.feeder(), run.feeder()
    at = one.cursor(), other.cursor()
    for _ in range(3):
        at = one.feed(at[0], records(at[0], 2)), other.feed(at[1], records(at[1], 2))
    assert ids_in(run, "prompts") == list(range(run.standing().feed))
    assert [e["prompt"] for e in run.entries("prompts")] == records(0, run.standing().feed)


def test_what_a_restore_found_missing_is_fed_again_once_and_before_fresh_prompts(run: Rig) -> None:
    run.trainer()
    feeder, worker = run.feeder(3), run.worker()
    run.raw.sadd(run.keys["refeed"], 7)
    assert feeder.refeed_ids(10) == [7]
    feeder.refeed({7: "{}", 8: "{}"})
    feeder.refeed({7: "{}"})
    assert run.counter("refed") == 1
    assert ids(run.lease(worker, 2)) == [7, 0]
    assert ids_in(run, "prompts:retry") == [7]


def test_a_feeder_with_other_data_is_refused_by_name(run: Rig) -> None:
    run.feeder().describe_data(10, 20, "abc")
    run.feeder().describe_data(10, 20, "abc")
    with pytest.raises(UsageError, match=r"was fed from other data \(10 rows, sha256 abc\)"):
        run.feeder().describe_data(10, 20, "abd")


# -- lease


def test_a_prompt_that_goes_round_again_is_leased_before_fresh_ones(run: Rig) -> None:
    run.trainer()
    run.feeder(6)
    worker = run.worker()
    first = run.lease(worker, 3)
    assert run.do(worker.hand_back(first[1:2], "stale", "strike")) == 1
    again, fresh = run.lease(worker, 2)
    assert (again.prompt, again.stream) == (Prompt(1, 2, 1, records(1, 1)[0]), "retry")
    assert (fresh.prompt, fresh.stream) == (Prompt(3, 1, 0, records(3, 1)[0]), "fresh")


def test_no_more_is_leased_than_bound_less_what_is_leased_or_unsettled(run: Rig) -> None:
    run.trainer(bound=5)
    run.feeder(20)
    one, other = run.worker("w1"), run.worker("w2")
    run.queued(one, 2)
    assert len(run.lease(other, 2)) == 2
    last = run.do(one.lease(10, 0))
    assert (len(last.leases), last.room) == (1, 0)
    assert run.lease(other, 10) == []


def test_a_batch_less_is_ahead_while_the_trainer_has_two(run: Rig) -> None:
    """Of 8 places: as soon as 4 groups are unsettled there are 6, and status says the same; and back at 3."""
    trainer = run.trainer(bound=8, slack=2)
    run.feeder(20)
    worker = run.worker()

    def room() -> int:
        left = run.do(worker.lease(0, 0)).room
        assert look(trainer).caps.room == left
        return left

    run.queued(worker, 3)
    assert room() == 8 - 3
    run.queued(worker, 1)
    assert room() == 6 - 4
    assert len(run.lease(worker, 9)) == 2
    assert room() == 0
    trainer.publish(policy(2), run.take(trainer, 1))
    assert room() == 8 - 3 - 2


def test_prompts_that_go_round_again_take_room_as_fresh_ones_do(run: Rig) -> None:
    run.trainer(bound=3)
    run.feeder(9)
    worker = run.worker()
    run.do(worker.hand_back(run.lease(worker, 2), "aborted"))
    assert ids(run.lease(worker, 2)) == [0, 1]
    assert ids(run.lease(worker, 9)) == [2]


def test_another_consumer_group_on_the_stream_takes_no_room(run: Rig) -> None:
    run.trainer(bound=3)
    run.feeder(9)
    for name in ("a", "z"):
        run.raw.xgroup_create(run.keys["prompts"], name, "0")
        run.raw.xreadgroup(name, "somebody", {run.keys["prompts"]: ">"}, count=9)
    assert len(run.lease(run.worker(), 9)) == 3


def test_room_comes_back_with_a_drop_and_a_hand_back_but_not_with_a_take(run: Rig) -> None:
    trainer = run.trainer(bound=4)
    run.feeder(20)
    worker = run.worker()
    a, b, c, d = run.lease(worker, 4)
    run.push(worker, [a, b])
    run.take(trainer, 2)
    assert run.do(worker.lease(9, 0)).room == 0
    run.do(worker.drop(c, "zero_std"))
    assert ids(run.lease(worker, 9)) == [4]
    run.do(worker.hand_back([d], "shutdown"))
    assert ids(run.lease(worker, 9)) == [3]


def test_no_more_is_in_flight_than_the_concurrency_of_the_whole_run(run: Rig) -> None:
    run.trainer(bound=100, in_flight=5)
    run.feeder(20)
    assert len(run.lease(run.worker("w1"), 3)) == 3
    assert len(run.lease(run.worker("w2"), 9)) == 2
    assert run.lease(run.worker("w3"), 9) == []


def test_finished_samples_of_unfinished_groups_are_counted_over_all_workers(run: Rig) -> None:
    """With n = 2: 1 and 2 spare samples are one group's worth, 1 and 3 are two."""
    run.trainer(bound=100, in_flight=4)
    run.feeder(20)
    one, other = run.worker("w1"), run.worker("w2")
    assert len(run.lease(one, 4)) == 4
    run.do(other.heartbeat({}, 1))
    assert run.lease(one, 9, spare=0) == []
    assert len(run.lease(one, 9, spare=2)) == 1
    assert len(run.lease(one, 9, spare=3)) == 1
    run.do(one.heartbeat({}, 0))
    assert run.lease(other, 9, spare=3) == []
    run.lease(one, 0, spare=3)
    run.lease(one, 0, spare=0)
    assert run.lease(other, 9, spare=3) == []


@pytest.mark.parametrize("verb", ["push", "hand back", "drop"])
def test_finished_samples_of_a_group_that_ended_are_counted_no_longer(run: Rig, verb: str) -> None:
    run.trainer(bound=100, in_flight=1)
    run.feeder(20)
    one, other = run.worker("w1"), run.worker("w2")
    (lease,) = run.lease(one, 1)
    run.do(one.heartbeat({}, 6))
    run.do(other.hand_back([lease], "not its own"))
    assert run.raw.hget(run.keys["workers:spare"], "w1") == b"6"
    if verb == "push":
        run.push(one, [lease])
    else:
        run.do(one.hand_back([lease], "reason", "drop" if verb == "drop" else "none"))
    assert len(run.lease(other, 9)) == 1


def test_a_lease_says_why_there_is_nothing(run: Rig) -> None:
    run.feeder(5)
    worker, stranger = run.worker(), run.new_worker("nobody")
    assert run.do(worker.lease(1, 0)).why == "no trainer"
    trainer = run.trainer()
    trainer.renew(paused="1")
    assert run.do(worker.lease(1, 0)).why == "paused"
    trainer.renew(paused="", status="draining")
    assert run.do(worker.lease(1, 0)).why == "draining"
    trainer.renew(status="running")
    assert run.do(stranger.lease(1, 0)).why == "reaped"
    run.raw.xgroup_destroy(run.keys["prompts:retry"], "generators")
    assert run.do(worker.lease(1, 0)).why == "no group"
    assert run.standing().pending == 0


def test_a_lease_carries_the_weight_version_of_the_same_instant(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(5)
    worker = run.worker()
    assert run.do(worker.lease(1, 0)).version == 1
    trainer.publish(policy(5), [])
    assert run.do(worker.lease(1, 0)).version == 5


def test_leases_and_heartbeats_are_signs_of_life(run: Rig) -> None:
    run.trainer()
    one, other = run.worker("w1"), run.worker("w2")
    for worker in (one, other, run.worker("w3")):
        run.silence(worker.worker)
    run.lease(one, 1)
    run.do(other.heartbeat({}, 0))
    assert run.reap() == ["w3"]


def test_a_lost_reply_to_lease_is_found_in_what_redis_says_the_worker_holds(run: Rig) -> None:
    run.trainer()
    run.feeder(6)
    worker = run.worker()
    first = run.lease(worker, 1)
    run.do(worker.hand_back(first, "aborted"))
    lost = run.lease(worker, 3)
    assert run.do(worker.mine()) == lost
    assert [lease.stream for lease in lost] == ["retry", "fresh", "fresh"]
    assert run.push(worker, run.do(worker.mine())) == ["pushed"] * 3


def test_an_entry_deleted_under_its_lease_is_no_longer_held(run: Rig) -> None:
    run.trainer()
    run.feeder(2)
    worker = run.worker()
    gone, kept = run.lease(worker, 2)
    run.raw.xdel(run.keys["prompts"], gone.entry)
    assert run.push(worker, [gone]) == ["lost"]
    assert run.do(worker.hand_back([gone], "stale")) == 0
    assert run.do(worker.mine()) == [kept]
    assert run.standing().pending == 1


@pytest.mark.spared("other error")
def test_a_worker_on_a_redis_that_lost_its_consumer_groups_makes_them_again(run: Rig) -> None:
    worker = run.worker()
    run.raw.delete(run.keys["prompts"], run.keys["prompts:retry"])
    assert run.do(worker.mine()) == []
    run.trainer()
    run.feeder(1)
    assert ids(run.lease(worker, 1)) == [0]


# -- push


def test_a_pushed_group_moves_from_the_stream_to_the_list_with_its_record_untouched(run: Rig) -> None:
    run.trainer()
    record = '{"prompt": "naïve \\u2028 \\" } ]", "label": 1e400, "metadata": {"a":  [1, 2]}}'
    run.feeder().feed(0, [record])
    worker = run.worker()
    (lease,) = run.lease(worker, 1)
    assert lease.prompt.record == record
    assert run.push(worker, [lease]) == ["pushed"]
    assert run.groups() == [message(lease.prompt)]
    assert ids_in(run, "prompts") == []
    assert run.standing().unsettled == {0: 1}
    assert run.counter("pushed") == 1
    assert run.raw.hget(run.keys["open"], "0") == (
        b'{"attempt":1,"strikes":0,"push":1,"prompt":' + record.encode() + b"}"
    )


def test_a_repeated_push_answers_pushed_and_leaves_one_group(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(2)
    worker = run.worker()
    leases = run.lease(worker, 2)
    run.push(worker, leases)
    before = run.dump()
    assert run.push(worker, leases) == ["pushed", "pushed"]
    assert run.dump() == before
    held = run.take(trainer, 2)
    assert run.push(worker, leases) == ["pushed", "pushed"]
    trainer.commit(held)
    assert run.push(worker, leases) == ["pushed", "pushed"]
    assert run.groups() == []


def test_a_full_list_takes_nothing_and_keeps_the_lease(run: Rig) -> None:
    trainer = run.trainer(bound=99, in_flight=99, queue_capacity=2)
    run.feeder(4)
    worker = run.worker()
    leases = run.lease(worker, 4)
    assert run.push(worker, leases) == ["pushed", "pushed", "full", "full"]
    assert run.groups() == [message(lease.prompt) for lease in leases[:2]]
    assert run.do(worker.mine()) == leases[2:]
    run.take(trainer, 1)
    assert run.push(worker, leases[2:]) == ["pushed", "full"]
    assert len(run.groups()) == 2


def test_a_push_waits_for_a_config_that_redis_forgot(run: Rig) -> None:
    trainer = run.trainer()
    run.feeder(1)
    worker = run.worker()
    leases = run.lease(worker, 1)
    run.raw.delete(run.keys["config"])
    assert run.push(worker, leases) == ["full"]
    assert run.groups() == []
    trainer.configure(agreed().model_dump_json())
    assert run.push(worker, leases) == ["pushed"]


def test_a_worker_that_was_reaped_pushes_in_vain_and_the_next_round_wins(run: Rig) -> None:
    run.trainer()
    run.feeder(1)
    zombie, heir = run.worker("zombie"), run.worker("heir")
    (old,) = run.lease(zombie, 1)
    run.silence("zombie")
    assert run.reap() == ["zombie"]
    assert run.push(zombie, [old]) == ["lost"]
    (new,) = run.lease(heir, 1)
    assert run.push(zombie, [old]) == ["lost"]
    assert run.groups() == []
    assert run.push(heir, [new]) == ["pushed"]
    assert run.push(zombie, [old]) == ["lost"]
    assert run.groups() == [message(new.prompt)]


def test_a_lease_is_pushed_by_its_owner_only(run: Rig) -> None:
    run.trainer()
    run.feeder(1)
    owner, other = run.worker("w1"), run.worker("w2")
    leases = run.lease(owner, 1)
    assert run.push(other, leases) == ["lost"]
    assert run.groups() == []
    assert run.push(owner, leases) == ["pushed"]


def test_an_entry_that_came_to_stand_for_another_prompt_is_not_pushed_over(run: Rig) -> None:
    """A Redis that came back older under a clock that went back may give a stream id twice."""
    run.trainer()
    run.feeder(2)
    worker = run.worker()
    leases = run.lease(worker, 2)
    mixed = Lease(leases[0].prompt, "fresh", leases[1].entry)
    assert run.push(worker, [mixed]) == ["lost"]
    assert run.do(worker.mine()) == leases
    assert run.conserved()


@pytest.mark.parametrize("bitmap", ["done:committed", "done:dropped", "done:dead"])
def test_a_prompt_that_has_ended_is_not_pushed_again(run: Rig, bitmap: str) -> None:
    run.trainer()
    run.feeder(1)
    worker = run.worker()
    leases = run.lease(worker, 1)
    run.raw.setbit(run.keys[bitmap], 0, 1)
    assert run.push(worker, leases) == ["lost"]
    assert run.groups() == []
    assert run.conserved()
    assert run.counter("refused:double") == 1


def test_the_byte_cap_is_exact_whatever_was_popped(run: Rig) -> None:
    trainer = run.trainer(bound=99, in_flight=99, queue_capacity=99, queue_max_bytes=1000)
    run.feeder(9)
    worker = run.worker()
    a, b, c, d, e, f, *_ = run.lease(worker, 9)
    assert run.push(worker, [a], 300) + run.push(worker, [b, c], 350) == ["pushed"] * 3
    assert run.push(worker, [d], 60) == ["full"]
    run.take(trainer, 1)
    assert run.push(worker, [d], 301) == ["full"]
    assert run.push(worker, [d], 300) == ["pushed"]
    run.raw.lpop(run.keys["groups"], 2)
    assert run.push(worker, [e], 701) == ["full"]
    assert run.push(worker, [e], 700) == ["pushed"]
    assert run.sizes() == [len(g) for g in run.groups()] == [300, 700]
    run.raw.lpop(run.keys["groups"], 2)
    assert run.push(worker, [f], 1000) == ["pushed"]
    assert run.sizes() == [1000]


def test_an_empty_list_takes_a_group_of_any_size(run: Rig) -> None:
    run.trainer(queue_max_bytes=1000)
    run.feeder(2)
    worker = run.worker()
    big, small = run.lease(worker, 2)
    assert run.push(worker, [big], 5000) == ["pushed"]
    assert run.push(worker, [small], 60) == ["full"]
    run.raw.lpop(run.keys["groups"])
    assert run.push(worker, [small], 60) == ["pushed"]


# -- hand back, drop, strikes


def test_only_the_owner_hands_back_or_drops_and_only_once(run: Rig) -> None:
    run.trainer()
    run.feeder(2)
    owner, other = run.worker("w1"), run.worker("w2")
    a, b = run.lease(owner, 2)
    assert run.do(other.hand_back([a], "x")) == run.do(other.drop(b, "x")) == 0
    assert run.do(owner.hand_back([a], "x")) == run.do(owner.drop(b, "zero_std")) == 1
    assert run.do(owner.hand_back([a], "x")) == run.do(owner.drop(b, "zero_std")) == 0
    assert run.counter("dropped:zero_std") == 1
    assert run.standing().dropped == b"\x40"
    assert [(e["id"], e["attempt"]) for e in run.entries()] == [("0", "2")]
    assert run.conserved()


def test_strikes_past_the_bound_bury_a_prompt_with_its_reason(run: Rig) -> None:
    run.trainer(max_prompt_attempts=3)
    run.feeder(1)
    worker = run.worker()
    for _ in range(3):
        assert run.do(worker.hand_back(run.lease(worker, 1), "stale", "strike")) == 1
    assert run.lease(worker, 1) == []
    assert run.standing().dead == b"\x80"
    (entry,) = run.entries("dead")
    assert entry == {"id": "0", "attempt": "3", "strikes": "3", "reason": "stale", "prompt": records(0, 1)[0]}
    assert (run.counter("strikes:stale"), run.counter("dead:stale"), run.counter("recycled:stale")) == (3, 1, 2)


def test_rounds_that_are_nobodys_fault_add_no_strike_however_many(run: Rig) -> None:
    run.trainer(max_prompt_attempts=1)
    run.feeder(1)
    worker = run.worker()
    for _ in range(9):
        run.do(worker.hand_back(run.lease(worker, 1), "shutdown"))
    (lease,) = run.lease(worker, 1)
    assert (lease.prompt.attempt, lease.prompt.strikes) == (10, 0)


def test_a_prompt_can_be_buried_at_once(run: Rig) -> None:
    run.trainer()
    run.feeder(1)
    worker = run.worker()
    run.do(worker.hand_back(run.lease(worker, 1), "too_large", "bury"))
    assert [e["reason"] for e in run.entries("dead")] == ["too_large"]
    assert run.conserved()


# -- reap, heartbeat, leave


def test_a_worker_is_dead_after_the_limit_and_not_before(run: Rig) -> None:
    run.trainer()
    run.feeder(2)
    worker = run.worker()
    run.lease(worker, 2)
    run.silence("w1", LIMIT - 1000)
    assert run.reap() == []
    assert run.do(worker.heartbeat({}, 0)).known
    run.silence("w1", LIMIT + 1000)
    assert run.reap() == ["w1"]
    assert [(e["id"], e["attempt"], e["strikes"]) for e in run.entries()] == [("0", "2", "1"), ("1", "2", "1")]
    assert not run.do(worker.heartbeat({}, 0)).known
    assert run.do(worker.lease(1, 0)).why == "reaped"
    assert run.do(worker.mine()) == []


def test_the_limit_is_what_the_run_agreed_on(run: Rig) -> None:
    run.trainer(heartbeat_limit_ms=3 * LIMIT)
    run.worker()
    run.silence("w1", 2 * LIMIT)
    assert run.reap() == []
    run.silence("w1", 4 * LIMIT)
    assert run.reap() == ["w1"]


def test_a_prompt_whose_workers_keep_dying_is_buried(run: Rig) -> None:
    run.trainer(max_prompt_attempts=2)
    run.feeder(1)
    for name in ("w1", "w2"):
        assert len(run.lease(run.worker(name), 1)) == 1
        run.silence(name)
        assert run.reap() == [name]
    assert [e["reason"] for e in run.entries("dead")] == ["worker_died"]
    assert run.conserved()


def test_a_dead_worker_is_forgotten_even_where_its_entry_or_its_stream_is_gone(run: Rig) -> None:
    run.trainer()
    run.feeder(2)
    gone, kept = run.lease(run.worker(), 2)
    run.raw.xdel(run.keys["prompts"], gone.entry)
    run.raw.delete(run.keys["prompts:retry"])
    run.silence("w1")
    assert run.reap() == ["w1"]
    assert [int(e["id"]) for e in run.entries()] == ids([kept])
    assert run.consumers() == set()


@pytest.mark.parametrize("gap", [LIMIT // 2 + 1000, -5000], ids=["ticks stopped", "the clock went back"])
def test_nobody_is_reaped_for_one_limit_after_time_jumped(run: Rig, gap: int) -> None:
    run.trainer()
    run.worker()
    run.silence("w1", 10 * LIMIT)
    run.ticked(gap)
    feeder = run.feeder()
    assert feeder.reap() == []
    assert feeder.reap() == []
    run.raw.hset(run.keys["state"], "grace", run.now() + 1000)
    assert feeder.reap() == []
    run.raw.hset(run.keys["state"], "grace", run.now() - 1)
    assert feeder.reap() == ["w1"]


def test_the_first_reap_of_a_run_reaps_nobody(run: Rig) -> None:
    run.trainer()
    run.worker()
    run.silence("w1")
    assert run.feeder().reap() == []


def test_a_worker_whose_last_heartbeat_lies_ahead_of_a_clock_that_went_back_is_found_dead_all_the_same(
    run: Rig,
) -> None:
    run.trainer()
    run.worker()
    run.silence("w1", -3_600_000)
    assert run.reap() == []
    last = run.raw.zscore(run.keys["workers"], "w1")
    assert last is not None
    assert last <= run.now()


def test_only_silent_workers_lose_what_they_hold(run: Rig) -> None:
    run.trainer()
    run.feeder(4)
    one, other = run.worker("w1"), run.worker("w2")
    held, lost = run.lease(one, 2), run.lease(other, 2)
    run.silence("w2")
    assert run.reap() == ["w2"]
    assert run.do(one.mine()) == held
    assert [int(e["id"]) for e in run.entries()] == ids(lost)
    assert run.conserved()


def test_a_dead_worker_with_many_entries_is_emptied_in_steps_and_deleted_at_the_last(run: Rig) -> None:
    run.trainer(bound=1000, in_flight=1000)
    run.feeder(600)
    worker = run.worker()
    run.lease(worker, 600)
    run.silence("w1")
    assert run.reap() == []
    assert run.consumers() == {"w1"}
    assert run.standing().pending == 600 - 256
    assert run.reap() == []
    assert run.reap() == ["w1"]
    assert run.consumers() == set()
    assert run.standing().pending == 0
    assert [int(e["id"]) for e in run.entries()] == list(range(600))


def test_many_dead_workers_are_all_found_in_a_few_reaps(run: Rig) -> None:
    run.trainer()
    for n in range(9):
        run.worker(f"w{n}")
        run.silence(f"w{n}")
    assert sorted(run.reap() + run.reap() + run.reap()) == [f"w{n}" for n in range(9)]
    assert run.raw.hlen(run.keys["workers:info"]) == 0


def test_spare_samples_of_a_dead_worker_are_forgotten(run: Rig) -> None:
    run.trainer(in_flight=1)
    run.feeder(9)
    run.do(run.worker("w1").heartbeat({}, 20))
    run.silence("w1")
    run.reap()
    assert len(run.lease(run.worker("w2"), 9)) == 1


def test_a_worker_leaves_only_with_empty_hands(run: Rig) -> None:
    run.trainer()
    run.feeder(1)
    worker = run.worker()
    run.do(worker.heartbeat({}, 3))
    leases = run.lease(worker, 1)
    assert not run.do(worker.leave())
    assert run.do(worker.heartbeat({}, 3)).known
    run.do(worker.hand_back(leases, "shutdown"))
    (again,) = run.lease(worker, 1)
    assert not run.do(worker.leave())
    run.push(worker, [again])
    run.do(worker.heartbeat({}, 3))
    assert run.do(worker.leave())
    assert run.consumers("prompts") == run.consumers("prompts:retry") == set()
    for name in ("workers", "workers:info", "workers:spare"):
        assert not run.raw.exists(run.keys[name])


def ids_in(run: Rig, stream: str) -> list[int]:
    return [int(e["id"]) for e in run.entries(stream)]
