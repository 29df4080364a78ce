"""The drain on the real server: whole batches of fresh groups, or an error that says who is missing."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from make import ABORT, drain_of, feed, group, push, queue, record
from rig import LIMIT, Rig, policy

from consumers.drain import Batch, drain
from consumers.filters import remove, removed, rollout_sample_filter
from consumers.staleness import Limit
from pipeline.codec import encode
from pipeline.errors import GroupError, Starved, Stopped, WorkerFailed
from pipeline.fenced import TrainerBroker
from pipeline.types import Group, Prompt

AT_1 = Limit(1, (), 1)


def ids(batch: Batch | None) -> list[int]:
    assert batch is not None
    return [g.prompt.id for g in batch.groups]


def again(rig: Rig) -> list[tuple[int, int, int]]:
    """(id, attempt, strikes) of what waits in the retry stream."""
    return [(int(e["id"]), int(e["attempt"]), int(e["strikes"])) for e in rig.entries()]


# -- whole batches


@pytest.mark.parametrize(("staleness", "left"), [(0, 3), (1, 1), (None, 3)])
def test_a_batch_is_exactly_the_batch_size_sorted_by_prompt_and_the_rest_waits(
    real: Rig, staleness: int | None, left: int
) -> None:
    """Where groups can grow too old, up to a batch less one is taken ahead."""
    trainer, worker = real.trainer(), real.worker()
    feed(real, 6)
    leases = real.lease(worker, 6)
    for at in (3, 0, 4, 1, 2, 5):
        push(real, worker, leases[at], 1)
    source = drain_of(trainer, 3)
    batch = source.batch(Limit(1, (), staleness))
    assert ids(batch) == [0, 3, 4]
    assert batch is not None
    assert (batch.queue_size, batch.last) == (3, False)
    assert batch.staleness == {"avg_staleness": 0.0, "max_staleness": 0.0, "staleness/count_0": 3.0}
    assert [len(g.samples) for g in batch.groups] == [2, 2, 2]
    assert len(real.groups()) == left
    assert real.conserved()
    assert ids(source.batch(Limit(1, (), staleness))) == [1, 2, 5]


def test_a_slow_group_that_others_overtook_is_trained_on_while_it_is_fresh_enough(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    trainer.publish(policy(4), [])
    feed(real, 7)
    queue(real, worker, 4, 3, 4, 4, 2, 2, 4)  # 2 is due now, 3 is due next
    source = drain_of(trainer, 3)
    assert ids(source.batch(Limit(4, (), 2))) == [0, 1, 4]
    assert source.handed() == [0, 1, 4]
    assert list(source.hand) == [2, 3]
    assert real.conserved()


def test_what_was_taken_ahead_is_judged_again(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    trainer.publish(policy(3), [])
    feed(real, 5)
    queue(real, worker, 3, 3, 2)
    source = drain_of(trainer, 2)
    assert ids(source.batch(Limit(3, (), 1))) == [0, 2]
    trainer.publish(policy(5), [])
    queue(real, worker, 5, 5)
    assert ids(source.batch(Limit(5, (), 1))) == [3, 4]
    assert again(real) == [(1, 2, 1)]
    assert real.conserved()


def test_the_drain_function_is_the_drains_batch(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 1)
    queue(real, worker, 1)
    assert ids(drain(drain_of(trainer, 1), AT_1)) == [0]


def test_a_batch_waits_for_its_last_group(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 2)
    first, second = real.lease(worker, 2)
    push(real, worker, second, 1)
    late = threading.Timer(0.3, lambda: push(real, worker, first, 1))
    late.start()
    assert ids(drain_of(trainer, 2, starve_timeout=30).batch(AT_1)) == [0, 1]
    late.join()


def test_what_was_trained_on_stays_in_the_ledger_until_published(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 2)
    queue(real, worker, 1, 1)
    source = drain_of(trainer)
    source.batch(AT_1)
    trainer.ledger.trained.update(source.handed())
    source.release()
    assert sorted(trainer.ledger.taken) == [0, 1]
    assert again(real) == []


def test_what_is_handed_over_and_not_trained_on_goes_round_again_when_it_is_released(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 2)
    queue(real, worker, 1, 1)
    source = drain_of(trainer)
    source.batch(AT_1)
    source.release()
    assert again(real) == [(0, 2, 0), (1, 2, 0)]
    assert trainer.ledger.taken == {}


def test_what_is_in_hand_goes_round_again_without_a_strike_when_it_is_released(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 2)
    queue(real, worker, 1)
    source = drain_of(trainer)
    with pytest.raises(Starved):
        source.batch(AT_1)
    assert again(real) == []
    source.release()
    assert again(real) == [(0, 2, 0)]
    assert trainer.ledger.taken == {}


# -- judged at hand-over


@pytest.mark.parametrize("k", [0, 1, 2])
def test_at_the_limit_a_group_is_trained_on_and_beyond_it_the_prompt_goes_round_again(real: Rig, k: int) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 4)
    current = 5
    trainer.publish(policy(current), [])
    queue(real, worker, current - k - 1, current + 1, current - k, current)
    batch = drain_of(trainer).batch(Limit(current, (), k))
    assert ids(batch) == [2, 3]
    assert batch is not None
    assert (batch.counts["stale"], batch.counts["future_version"]) == (1, 1)
    assert (batch.staleness["avg_staleness"], batch.staleness["max_staleness"]) == (k / 2, float(k))
    assert sorted(again(real)) == [(0, 2, 1), (1, 2, 0)]
    assert real.conserved()


def test_a_group_is_judged_when_it_is_handed_over_not_when_it_is_popped(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 3)
    source = drain_of(trainer)
    queue(real, worker, 1)
    with pytest.raises(Starved):
        source.batch(Limit(1, (), 0))
    assert list(source.hand) == [0]
    trainer.publish(policy(2), [])
    queue(real, worker, 2, 2)
    batch = source.batch(Limit(2, (), 0))
    assert ids(batch) == [1, 2]
    assert again(real) == [(0, 2, 1)]


def test_the_oldest_token_over_all_samples_decides(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 2)
    trainer.publish(policy(3), [])
    old, fresh = real.lease(worker, 2)
    push(real, worker, old, 1, 3, 3, 3)
    push(real, worker, fresh, 2, 3)
    assert ids(drain_of(trainer, 1).batch(Limit(3, (), 1))) == [1]
    assert again(real) == [(0, 2, 1)]


def test_a_group_of_unknown_version_is_never_fresh_and_counts_by_itself(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 2)
    unknown, known = real.lease(worker, 2)
    push(real, worker, unknown, 1, None)
    push(real, worker, known, 1)
    batch = drain_of(trainer, 1).batch(Limit(1, (), None))
    assert ids(batch) == [1]
    assert batch is not None
    assert batch.counts["unknown_version"] == 1
    assert "stale" not in batch.counts
    assert again(real) == [(0, 2, 1)]


def test_a_version_above_the_key_is_an_error_in_the_log_and_not_a_negative_staleness(
    real: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 2)
    queue(real, worker, 9, 1)
    batch = drain_of(trainer, 1).batch(AT_1)
    assert ids(batch) == [1]
    assert batch is not None
    assert batch.staleness["avg_staleness"] == 0.0
    assert "versions above 1, which was never published" in caplog.text


def test_after_a_resume_the_lineage_decides_how_old_a_group_is(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 3)
    trainer.publish(policy(8), [])
    queue(real, worker, 4, 5, 3)
    assert ids(drain_of(trainer).batch(Limit(8, ((6, 3),), 3))) == [0, 2]
    assert again(real) == [(1, 2, 0)]  # the branch that was given up is to blame, not the prompt


def test_an_aborted_group_goes_round_again_with_a_strike(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 2)
    aborted, whole = real.lease(worker, 2)
    push(real, worker, aborted, 1, **ABORT)
    push(real, worker, whole, 1)
    batch = drain_of(trainer, 1).batch(AT_1)
    assert ids(batch) == [1]
    assert batch is not None
    assert batch.counts["aborted"] == 1
    assert again(real) == [(0, 2, 1)]


# -- round again


def test_the_pristine_record_goes_round_byte_for_byte(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    odd = r'{"prompt" : "caf\u00e9 \ud800 <|x|>",  "label":1e2, "metadata":{"b":1,"a":[ ]}}'
    feeder = real.feeder()
    feeder.feed(0, [odd, record(1)])
    queue(real, worker, 1, 2)
    trainer.publish(policy(2), [])
    drain_of(trainer, 1).batch(Limit(2, (), 0))
    (entry,) = real.entries()
    assert entry["prompt"] == odd
    (lease,) = real.lease(worker, 1)
    assert lease.prompt == Prompt(0, 2, 1, odd)


def test_a_prompt_that_is_always_stale_is_dead_at_the_bound_with_its_reason(real: Rig) -> None:
    trainer, worker = real.trainer(max_prompt_attempts=3), real.worker()
    feed(real, 4)
    trainer.publish(policy(3), [])
    source = drain_of(trainer, 1)
    for round in range(3):
        old, fresh = real.lease(worker, 2)
        assert (old.prompt.id, old.prompt.attempt, old.prompt.strikes) == (0, round + 1, round)
        push(real, worker, old, 1)
        push(real, worker, fresh, 3)
        assert ids(source.batch(Limit(3, (), 1))) == [round + 1]
    assert again(real) == []
    (dead,) = real.entries("dead")
    assert (dead["id"], dead["reason"], dead["strikes"], dead["prompt"]) == ("0", "stale", "3", record(0))
    assert (real.counter("recycled:stale"), real.counter("dead:stale")) == (2, 1)
    assert real.conserved()


@pytest.mark.parametrize(("versions", "how", "reason"), [([1, 2], {}, "stale"), ([2, 2], ABORT, "aborted")])
def test_the_drop_handler_ends_what_may_not_be_trained_on_under_its_reason(
    real: Rig, versions: list[int], how: dict[str, Any], reason: str
) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 2)
    trainer.publish(policy(2), [])
    bad, good = real.lease(worker, 2)
    push(real, worker, bad, versions[0], **how)
    push(real, worker, good, versions[1])
    batch = drain_of(trainer, 1, handler="drop").batch(Limit(2, (), 0))
    assert ids(batch) == [1]
    assert batch is not None
    assert batch.counts[reason] == 1
    assert again(real) == []
    assert real.counter(f"dropped:{reason}") == 1
    assert real.conserved()


def test_the_drop_handler_still_sends_round_what_is_nobodys_fault(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 3)
    unknown, future, good = real.lease(worker, 3)
    push(real, worker, unknown, None)
    push(real, worker, future, 7)
    push(real, worker, good, 1)
    drain_of(trainer, 1, handler="drop").batch(AT_1)
    assert sorted(again(real)) == [(0, 2, 1), (1, 2, 0)]


def test_what_goes_round_again_hands_its_place_back_at_once(real: Rig) -> None:
    trainer, worker = real.trainer(bound=2), real.worker()
    feed(real, 6)
    queue(real, worker, 1, 1)
    assert real.lease(worker, 1) == []
    trainer.publish(policy(3), [])
    with pytest.raises(Starved):
        drain_of(trainer, 2).batch(Limit(3, (), 0))
    assert [lease.prompt.id for lease in real.lease(worker, 4)] == [0, 1]


# -- messages that must not be trained on


def test_a_message_that_will_not_decode_is_quarantined_and_its_prompt_goes_round_with_a_strike(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 3)
    bad, *good = real.lease(worker, 3)
    assert real.do(worker.push(bad, b"no msgpack")) == "pushed"
    for lease in good:
        push(real, worker, lease, 1)
    batch = drain_of(trainer, 2).batch(AT_1)
    assert ids(batch) == [1, 2]
    assert batch is not None
    assert batch.counts["quarantined"] == 1
    (entry,) = real.entries("quarantine")
    assert (entry["head"], entry["length"], len(entry["sha256"])) == ("no msgpack", "10", 64)
    assert entry["problem"]
    assert again(real) == [(0, 2, 1)]
    assert real.counter("recycled:quarantined") == 1
    assert real.conserved()


def test_a_prompt_whose_groups_never_decode_is_dead_at_the_bound(real: Rig) -> None:
    trainer, worker = real.trainer(max_prompt_attempts=2), real.worker()
    feed(real, 3)
    source = drain_of(trainer, 1)
    for round in range(2):
        bad, good = real.lease(worker, 2)
        assert bad.prompt.id == 0
        assert real.do(worker.push(bad, b"")) == "pushed"
        push(real, worker, good, 1)
        assert ids(source.batch(AT_1)) == [round + 1]
    assert [e["reason"] for e in real.entries("dead")] == ["quarantined"]


def test_a_group_of_the_wrong_size_is_an_error_that_names_prompt_worker_and_sizes(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 1)
    (lease,) = real.lease(worker, 1)
    push(real, worker, lease, 1, n=3)
    with pytest.raises(GroupError, match=r"prompt 0: worker w1 pushed 3 samples where --n-samples-per-prompt is 2"):
        drain_of(trainer, 1).batch(AT_1)
    assert issubclass(GroupError, ValueError)


OPTIMISED = """
import sys
sys.path[:0] = ["tests"]
from make import drain_of
from rig import Rig
from consumers.staleness import Limit
from pipeline.errors import GroupError
rig = Rig(sys.argv[1], sys.argv[2])
try:
    drain_of(rig.trainer(), 1).batch(Limit(1, (), 1))
except GroupError as error:
    sys.stdout.write(f"{__debug__} {error}")
"""


def test_a_group_of_the_wrong_size_is_an_error_under_python_o_too(real: Rig) -> None:
    real.trainer()
    worker = real.worker()
    feed(real, 1)
    (lease,) = real.lease(worker, 1)
    push(real, worker, lease, 1, n=1)
    done = subprocess.run(
        [sys.executable, "-O", "-c", OPTIMISED, real.url, real.keys.run],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("False prompt 0: worker w1 pushed 1 samples")


def test_a_second_copy_of_a_message_is_discarded_and_counted(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 2)
    one, other = real.lease(worker, 2)
    message = push(real, worker, one, 1)
    real.raw.rpush(real.keys["groups"], message)
    push(real, worker, other, 1)
    batch = drain_of(trainer, 2).batch(AT_1)
    assert ids(batch) == [0, 1]
    assert batch is not None
    assert batch.counts["double"] == 1
    assert real.counter("discarded:double") == 1
    assert real.conserved()


def test_a_copy_of_what_was_trained_or_committed_is_discarded(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 3)
    leases = real.lease(worker, 3)
    messages = [push(real, worker, lease, 1) for lease in leases[:2]]
    source = drain_of(trainer, 2)
    batch = source.batch(AT_1)
    assert batch is not None
    trainer.publish(policy(2), [g.prompt for g in batch.groups])
    trainer.commit([batch.groups[0].prompt])
    real.raw.rpush(real.keys["groups"], *messages)
    push(real, worker, leases[2], 2)
    source.rules = replace(source.rules, size=1)
    assert ids(source.batch(Limit(2, (), 1))) == [2]
    assert real.counter("discarded:double") == 2


def test_a_group_of_an_earlier_round_of_its_prompt_is_not_trained_on(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 2)
    (lease,) = real.lease(worker, 1)
    real.do(worker.hand_back([lease], "test"))
    real.raw.rpush(real.keys["groups"], encode(group(lease.prompt, 1)))
    again_0, other = real.lease(worker, 2)
    assert (again_0.prompt.id, again_0.prompt.attempt) == (0, 2)
    push(real, worker, other, 1)
    batch = drain_of(trainer, 1).batch(AT_1)
    assert ids(batch) == [1]
    assert batch is not None
    assert batch.counts["foreign"] == 1
    push(real, worker, again_0, 1)
    second = drain_of(trainer, 1).batch(AT_1)
    assert second is not None
    assert [g.prompt.attempt for g in second.groups] == [2]
    assert real.conserved()


def test_a_group_that_was_popped_and_never_arrived_goes_round_again_without_a_strike(
    real: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 3)
    queue(real, worker, 1, 1, 1)
    real.raw.lpop(real.keys["groups"])
    batch = drain_of(trainer, 2).batch(AT_1)
    assert ids(batch) == [1, 2]
    assert batch is not None
    assert batch.counts["lost"] == 1
    assert again(real) == [(0, 2, 0)]
    assert "1 popped groups never arrived" in caplog.text


# -- the sample filter


def test_the_sample_filter_runs_last_on_the_whole_sorted_batch(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 3)
    trainer.publish(policy(3), [])
    queue(real, worker, 1, 3, 3)
    seen: list[list[int]] = []

    def mark(groups: list[Group]) -> list[Group]:
        seen.append([g.prompt.id for g in groups])
        return [replace(g, samples=(remove(g.samples[0]), *g.samples[1:])) for g in groups]

    source = drain_of(trainer, 2)
    source.sample_filter = lambda groups: rollout_sample_filter(mark, list(groups))
    batch = source.batch(Limit(3, (), 1))
    assert seen == [[1, 2]]
    assert batch is not None
    assert [[removed(s) for s in g.samples] for g in batch.groups] == [[True, False]] * 2


def test_a_sample_filter_that_shrinks_the_batch_is_an_error(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 2)
    queue(real, worker, 1, 1)
    source = drain_of(trainer, 2)
    source.sample_filter = lambda groups: rollout_sample_filter(lambda found: found[:1], list(groups))
    with pytest.raises(GroupError, match="gave 1 groups for 2"):
        source.batch(AT_1)


# -- alarms


def test_an_alarm_is_raised_before_waiting_groups_with_the_workers_traceback(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 2)
    queue(real, worker, 1, 1)
    real.do(worker.fail("Traceback: line 7, in my_reward", "KeyError: 'label'"))
    with pytest.raises(WorkerFailed, match=r"(?s)worker w1 failed: KeyError: 'label'\nTraceback: line 7, in my_reward"):
        drain_of(trainer, 2).batch(AT_1)
    assert len(real.groups()) == 2
    (entry,) = real.entries("errors")
    assert (entry["worker"], entry["epoch"], entry["trace"]) == ("w1", "1", "Traceback: line 7, in my_reward")


def test_an_alarm_that_comes_while_the_drain_waits_is_raised(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    late = threading.Timer(0.2, lambda: real.do(worker.fail("trace", "what")))
    late.start()
    with pytest.raises(WorkerFailed, match="worker w1 failed: what"):
        drain_of(trainer, 2, starve_timeout=30).batch(AT_1)
    late.join()


def test_a_stop_in_the_alarm_is_a_stop(real: Rig) -> None:
    trainer = real.trainer()
    real.raw.rpush(real.keys["alarm"], json.dumps({"kind": "stop", "what": "someone typed purge"}))
    with pytest.raises(Stopped, match="someone typed purge"):
        drain_of(trainer).batch(AT_1)


@pytest.mark.parametrize("alarm", ["no json", "[]", "{}", '"text"', "7"])
def test_an_alarm_that_nobody_understands_is_raised_as_it_stands(real: Rig, alarm: str) -> None:
    trainer = real.trainer()
    real.raw.rpush(real.keys["alarm"], alarm)
    with pytest.raises(WorkerFailed) as caught:
        drain_of(trainer).batch(AT_1)
    assert alarm in str(caught.value)


# -- waiting


def test_a_drain_that_waits_says_who_is_missing_and_then_starves(real: Rig, caplog: pytest.LogCaptureFixture) -> None:
    trainer = real.trainer()
    feed(real, 3)
    with pytest.raises(Starved, match=r"no group for \d+ s .*no generator has ever come: start `millpond generate`"):
        drain_of(trainer, starve_timeout=1.5, warn_after=0.5).batch(AT_1)
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "no generator has ever come" in warning.message
    assert "3 prompts waiting" in warning.message


def test_a_starved_drain_names_silent_workers_and_what_is_queued_and_unsettled(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    real.worker("w2")
    feed(real, 3)
    queue(real, worker, 1)
    real.silence("w1", 3 * LIMIT)
    real.silence("w2", 2 * LIMIT)
    with pytest.raises(Starved, match=r"all generators are silent, the last for \d+ s") as caught:
        drain_of(trainer, 2).batch(AT_1)
    for fact in ("0 live workers of 2", "2 prompts waiting", "0 groups queued", "1 unsettled", "endless"):
        assert fact in str(caught.value)


def test_a_starved_drain_with_live_workers_says_so_and_keeps_what_it_holds(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 1)
    queue(real, worker, 1)
    source = drain_of(trainer, 2)
    with pytest.raises(Starved, match="1 live workers of 1; 0 prompts waiting"):
        source.batch(AT_1)
    assert list(source.hand) == [0]
    assert real.conserved()


def test_groups_that_come_keep_a_drain_from_starving(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 2)
    leases, pause = real.lease(worker, 2), threading.Event()

    def trickle() -> None:
        for lease in leases:
            pause.wait(1.3)
            push(real, worker, lease, 1)

    thread = threading.Thread(target=trickle)
    thread.start()
    assert ids(drain_of(trainer, 2, starve_timeout=2).batch(AT_1)) == [0, 1]
    thread.join()


def test_a_drain_that_is_told_to_stop_stops(real: Rig) -> None:
    trainer = real.trainer()
    trainer.stop.set()
    with pytest.raises(Stopped):
        drain_of(trainer).batch(AT_1)


# -- the end of the data


def ended(real: Rig, prompts: int) -> tuple[TrainerBroker, list[int]]:
    """A run whose whole data are so many groups in the list."""
    trainer, worker = real.trainer(), real.worker()
    feed(real, prompts, ends=True)
    queue(real, worker, *[1] * prompts)
    return trainer, list(range(prompts))


def test_the_last_batch_of_the_data_is_smaller(real: Rig) -> None:
    trainer, _ = ended(real, 5)
    source = drain_of(trainer, 3)
    first, last = source.batch(AT_1), source.batch(AT_1)
    assert (ids(first), ids(last)) == ([0, 1, 2], [3, 4])
    assert first is not None
    assert last is not None
    assert (first.last, last.last) == (False, True)


def test_the_last_smaller_batch_is_dropped_under_its_reason_when_asked(real: Rig) -> None:
    trainer, _ = ended(real, 5)
    source = drain_of(trainer, 3, drop_last=True)
    assert ids(source.batch(AT_1)) == [0, 1, 2]
    assert source.batch(AT_1) is None
    assert real.counter("dropped:last_batch") == 2
    assert real.conserved()


def test_drop_last_does_not_touch_a_last_batch_that_is_whole(real: Rig) -> None:
    trainer, _ = ended(real, 4)
    source = drain_of(trainer, 2, drop_last=True)
    assert [ids(source.batch(AT_1)), ids(source.batch(AT_1))] == [[0, 1], [2, 3]]
    assert source.batch(AT_1) is None
    assert real.counter("dropped:last_batch") == 0


def test_where_data_end_with_a_whole_batch_nothing_follows(real: Rig) -> None:
    trainer, _ = ended(real, 4)
    source = drain_of(trainer, 2)
    assert [ids(source.batch(AT_1)), ids(source.batch(AT_1))] == [[0, 1], [2, 3]]
    assert source.batch(AT_1) is None


@pytest.mark.parametrize("where", ["waiting", "leased", "stale", "to be fed again"])
def test_data_have_not_ended_while_a_prompt_is_still_on_its_way(real: Rig, where: str) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 3, ends=True)
    queue(real, worker, 1, 1)
    if where == "leased":
        real.lease(worker, 1)
    elif where == "stale":
        queue(real, worker, 1)
    elif where == "to be fed again":
        real.raw.delete(real.keys["prompts"])
        real.raw.sadd(real.keys["refeed"], 2)
    with pytest.raises(Starved):
        drain_of(trainer, 3).batch(Limit(9, (), 7) if where == "stale" else AT_1)


def test_data_without_an_end_never_end(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 1)
    queue(real, worker, 1)
    with pytest.raises(Starved):
        drain_of(trainer, 2).batch(AT_1)
