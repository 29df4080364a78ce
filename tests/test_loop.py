"""The training loop, with generators on the real server and a backend that trains nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from make import crew, feed, feeding, loop_of, metrics, run, train
from rig import Rig

from consumers.drain import Batch, Drain
from consumers.staleness import Limit
from pipeline.audit import audit
from pipeline.errors import GroupError, MillpondError, Starved, Stopped, WorkerFailed
from pipeline.fenced import TrainerBroker
from pipeline.ledger import get_bit
from pipeline.types import Group
from producers.engines.echo import EchoEngine
from trainer import checkpoint
from trainer.backends.base import At
from trainer.backends.echo import EchoBackend
from trainer.weights import versions


def quick() -> EchoEngine:
    return EchoEngine("lognormal:0.003:1", 4)


class Watched(EchoBackend):
    """Remembers what it was given; at a step it may be told to do something else first."""

    def __init__(self, **acts: Any) -> None:
        super().__init__(0.0)
        self.acts = {int(step.removeprefix("at_")): act for step, act in acts.items()}
        self.batches: list[list[int]] = []
        self.states: dict[int, tuple[int, int, int]] = {}
        "step -> (unsettled, committed, version) in Redis when it began"
        self.broker: TrainerBroker | None = None

    def train(self, groups: Sequence[Group], step: int, at: At | None = None) -> dict[str, float]:
        self.batches.append([g.prompt.id for g in groups])
        if step in self.acts:
            self.acts[step]()
        return super().train(groups, step, at)

    @property
    def trained(self) -> list[int]:
        return sorted(id for batch in self.batches for id in batch)


def status(rig: Rig) -> tuple[str, str]:
    state = rig.feeder().state()
    return state["status"], state["why"]


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in metrics(folder)]


def saved(folder: Path) -> list[int]:
    return sorted(versions(folder / "checkpoints"))


def holds(rig: Rig) -> dict[str, int]:
    """Where prompts are, all of them in one place."""
    found = audit(rig.feeder())
    assert found.holds
    return {place: count for place, count in found.places.items() if count}


# -- publish, save, commit


@pytest.mark.parametrize(("interval", "versions"), [(1, [2, 3, 4, 5, 6]), (2, [1, 2, 2, 3, 3])])
def test_new_weights_are_published_every_so_many_steps(
    real: Rig, tmp_path: Path, interval: int, versions: list[int]
) -> None:
    feed(real, 40)
    with crew(real, quick):
        train(real, tmp_path, num_rollout=5, update_weights_interval=interval, save_interval=50)
    assert [line["train/weight_version"] for line in metrics(tmp_path)] == versions


def test_what_is_trained_keeps_its_place_until_it_is_published(real: Rig, tmp_path: Path) -> None:
    seen: list[int] = []

    def look() -> None:
        standing = real.standing()
        seen.append(len(standing.unsettled) - standing.queued - len(loop.drain.hand))

    backend = Watched(at_0=look, at_1=look, at_2=look, at_3=look)
    feed(real, 40)
    with crew(real, quick):
        loop = loop_of(real, tmp_path, backend, num_rollout=4, update_weights_interval=2, save_interval=50)
        run(loop)
    assert seen == [2, 4, 2, 4]


@pytest.mark.parametrize("verb", ["counters", "publish"])
def test_a_step_that_a_stop_cut_off_from_its_publication_has_its_line_in_the_checkpoint(
    real: Rig, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to stop while Redis was away, in either of the two calls between them; it is back for the checkpoint."""
    feed(real, 40)
    away: list[str] = []
    usual = getattr(TrainerBroker, verb)

    def cut(broker: TrainerBroker, *args: Any) -> Any:
        if loop.now.step == 2 and not away:
            away.append(verb)
            raise Stopped("asked to stop while Redis was away")
        return usual(broker, *args)

    loop = loop_of(real, tmp_path, num_rollout=4, archive=True)
    monkeypatch.setattr(TrainerBroker, verb, cut)
    with crew(real, quick), pytest.raises(Stopped):
        run(loop)
    assert away == [verb]
    assert saved(tmp_path)[-1] == 2
    assert steps(tmp_path) == [1, 2]
    assert len([*(tmp_path / "archive").glob("*.msgpack")]) == 2
    assert [line["train/weight_version"] for line in metrics(tmp_path)] == [2, 3]
    assert holds(real)["committed"] == 4


def test_a_checkpoint_is_saved_every_so_many_steps_and_at_the_end_and_the_newest_are_kept(
    real: Rig, tmp_path: Path
) -> None:
    seen: list[tuple[int, list[int]]] = []

    def look() -> None:
        seen.append((real.counter("committed"), saved(tmp_path)))

    backend = Watched(**{f"at_{step}": look for step in range(7)})
    feed(real, 40)
    with crew(real, quick):
        run(loop_of(real, tmp_path, backend, num_rollout=7, save_interval=3))
    assert seen == [(0, []), (0, []), (0, []), (6, [3]), (6, [3]), (6, [3]), (12, [3, 6])]
    assert (real.counter("committed"), saved(tmp_path)) == (14, [6, 7])
    found = checkpoint.read(tmp_path / "checkpoints/00000007")
    assert (found.step, found.version, found.lineage, found.epoch) == (7, 8, (), 1)
    assert bytes(found.ledger.committed) == real.standing().committed
    assert status(real) == ("done", "all 7 steps are done")


def test_what_a_checkpoint_contains_is_published_first(real: Rig, tmp_path: Path) -> None:
    feed(real, 40)
    with crew(real, quick):
        loop = train(real, tmp_path, num_rollout=3, update_weights_interval=2, save_interval=3)
    assert loop.now.version == 3
    policy = loop.broker.policy()
    assert policy is not None
    assert (policy.version, policy.step) == (3, 3)
    assert checkpoint.read(tmp_path / "checkpoints/00000003").version == 3


def test_a_checkpoint_between_two_publications_waits_for_the_next(real: Rig, tmp_path: Path) -> None:
    seen: list[list[int]] = []
    backend = Watched(**{f"at_{step}": lambda: seen.append(saved(tmp_path)) for step in range(9)})
    feed(real, 40)
    with crew(real, quick):
        run(loop_of(real, tmp_path, backend, num_rollout=9, update_weights_interval=2, save_interval=3, save_keep=9))
    assert seen == [[], [], [], [], [4], [4], [4, 6], [4, 6], [4, 6]]
    assert saved(tmp_path) == [4, 6, 9]
    assert [line["train/weight_version"] for line in metrics(tmp_path)] == [1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_without_checkpoints_groups_are_committed_when_they_are_published(real: Rig, tmp_path: Path) -> None:
    seen: list[int] = []

    def look() -> None:
        seen.append(real.counter("committed"))

    backend = Watched(**{f"at_{step}": look for step in range(4)})
    feed(real, 40)
    with crew(real, quick):
        run(loop_of(real, tmp_path, backend, num_rollout=4, update_weights_interval=2, save_interval=0))
    assert [*seen, real.counter("committed")] == [0, 0, 4, 4, 8]
    assert saved(tmp_path) == []
    holds(real)


def test_what_no_publication_contains_at_the_end_is_published_and_committed(real: Rig, tmp_path: Path) -> None:
    feed(real, 40)
    with crew(real, quick):
        loop = train(real, tmp_path, num_rollout=3, update_weights_interval=2, save_interval=0)
    assert loop.now.version == 3
    assert holds(real)["committed"] == 6


def test_old_weights_are_deleted_but_for_those_that_workers_use(real: Rig, tmp_path: Path) -> None:
    feed(real, 40)
    with crew(real, quick):
        loop = loop_of(real, tmp_path, num_rollout=6)
        real.do(real.new_worker("slow").register({"version": 2, "loading": None}))
        run(loop)
    kept = set(versions(tmp_path / "weights"))
    assert {2, 6, 7} <= kept
    assert len(kept) <= 5  # another two where the quick worker is behind


def raising(error: Exception) -> Callable[[Batch | None], Batch | None]:
    def act(batch: Batch | None) -> Batch | None:
        raise error

    return act


@pytest.mark.parametrize(
    ("act", "committed"),
    [
        (raising(GroupError("not mine")), 4),
        (raising(Stopped("asked to stop")), 4),
        (lambda batch: None, 4),
        (raising(ZeroDivisionError("a bug")), 0),  # ends the run at once, to go on from the last checkpoint
    ],
    ids=["an error of groups", "a stop", "an end", "a bug"],
)
def test_what_a_rollout_function_took_and_did_not_hand_on_is_neither_lost_nor_counted_as_trained(
    real: Rig, tmp_path: Path, act: Callable[[Batch | None], Batch | None], committed: int
) -> None:
    backend = Watched()
    loop = loop_of(real, tmp_path, backend, num_rollout=9, save_interval=50)

    def own(source: Drain, limit: Limit) -> Batch | None:
        batch = source.batch(limit)
        return act(batch) if loop.now.step == 2 else batch

    loop.rollout = own
    feed(real, 40)
    with crew(real, quick), suppress(GroupError, Stopped, ZeroDivisionError):
        run(loop)
    assert [len(batch) for batch in backend.batches] == [2, 2]
    found = holds(real)
    assert (found.get("committed", 0), sum(found.values())) == (committed, 40)
    bits = real.standing().committed
    assert [id for id in range(40) if get_bit(bits, id)] == (backend.trained if committed else [])


# -- the end of the data (BB-16)


def test_a_one_epoch_ends_with_a_smaller_batch_and_everything_is_committed(real: Rig, tmp_path: Path) -> None:
    backend = Watched()
    with feeding(real, tmp_path, 10), crew(real, quick):
        run(loop_of(real, tmp_path, backend, rollout_batch_size=4))
    assert [len(batch) for batch in backend.batches] == [4, 4, 2]
    assert backend.trained == list(range(10))
    assert status(real) == ("done", "the data ended after 3 steps")
    assert holds(real) == {"committed": 10}


def test_b_three_epochs_train_each_row_three_times_in_batches_that_cross_epochs(real: Rig, tmp_path: Path) -> None:
    backend = Watched()
    with feeding(real, tmp_path, 10, epochs=3), crew(real, quick):
        run(loop_of(real, tmp_path, backend, rollout_batch_size=4))
    assert [len(batch) for batch in backend.batches] == [4] * 7 + [2]
    assert backend.trained == list(range(30))
    assert holds(real) == {"committed": 30}


@pytest.mark.parametrize(("most", "batches"), [(100, [4, 4, 2]), (2, [4, 4]), (3, [4, 4, 2])])
def test_c_the_smaller_of_steps_and_epochs_ends_the_run(
    real: Rig, tmp_path: Path, most: int, batches: list[int]
) -> None:
    backend = Watched()
    with feeding(real, tmp_path, 10), crew(real, quick):
        run(loop_of(real, tmp_path, backend, rollout_batch_size=4, num_rollout=most))
    assert [len(batch) for batch in backend.batches] == batches
    assert status(real)[0] == "done"
    assert holds(real)["committed"] == sum(batches)


@pytest.mark.parametrize(("most", "why"), [(3, "all 3 steps are done"), (100, "the data ended after 3 steps")])
def test_d_a_resume_exactly_at_the_end_trains_nothing(real: Rig, tmp_path: Path, most: int, why: str) -> None:
    with feeding(real, tmp_path, 10), crew(real, quick):
        train(real, tmp_path, rollout_batch_size=4, num_rollout=most)
    backend = Watched()
    with feeding(real, tmp_path, 10), crew(real, quick):
        loop = run(loop_of(real, tmp_path, backend, rollout_batch_size=4, num_rollout=most, resume=True))
    assert backend.batches == []
    assert loop.now.step == 3
    assert steps(tmp_path) == [1, 2, 3]
    assert saved(tmp_path) == [2, 3]
    assert status(real) == ("done", why)
    assert holds(real) == {"committed": 10}


def test_the_last_smaller_batch_can_be_dropped(real: Rig, tmp_path: Path) -> None:
    backend = Watched()
    with feeding(real, tmp_path, 10), crew(real, quick):
        run(loop_of(real, tmp_path, backend, rollout_batch_size=4, num_epoch=1, drop_last=True))
    assert [len(batch) for batch in backend.batches] == [4, 4]
    assert holds(real) == {"committed": 8, "dropped": 2}
    assert real.counter("dropped:last_batch") == 2


# -- other ends


def test_asked_to_stop_it_saves_what_it_trained_and_a_resume_does_the_rest_once(real: Rig, tmp_path: Path) -> None:
    first = Watched()
    with feeding(real, tmp_path, 20), crew(real, quick):
        loop = loop_of(real, tmp_path, first, save_interval=50)
        first.acts[2] = loop.broker.stop.set
        with pytest.raises(Stopped):
            run(loop)
    assert (len(first.batches), saved(tmp_path)) == (3, [3])
    assert status(real)[0] == "draining"
    assert holds(real)["committed"] == 6
    second = Watched()
    with feeding(real, tmp_path, 20), crew(real, quick):
        loop = run(loop_of(real, tmp_path, second, save_interval=50, resume=True))
    assert sorted(first.trained + second.trained) == list(range(20))
    assert steps(tmp_path) == list(range(1, 11))
    assert loop.now.step == 10
    assert holds(real) == {"committed": 20}
    assert real.counter("strikes:worker_died") == 0


def test_a_crash_between_checkpoints_repeats_what_is_in_none_and_nothing_else(real: Rig, tmp_path: Path) -> None:
    def crash() -> None:
        raise KeyboardInterrupt

    first, second = Watched(at_4=crash), Watched()
    with feeding(real, tmp_path, 20), crew(real, quick), pytest.raises(KeyboardInterrupt):
        run(loop_of(real, tmp_path, first, save_interval=3))
    assert holds(real)["committed"] == 6
    with feeding(real, tmp_path, 20), crew(real, quick):
        run(loop_of(real, tmp_path, second, save_interval=3, resume=True, take_over=True))
    kept = sorted(id for batch in first.batches[:3] for id in batch)
    assert sorted(kept + second.trained) == list(range(20))
    assert steps(tmp_path) == list(range(1, 11))
    assert holds(real) == {"committed": 20}


def test_a_failed_worker_ends_the_run_with_its_error_after_what_was_trained_is_saved(real: Rig, tmp_path: Path) -> None:
    backend = Watched(at_2=lambda: real.do(real.worker("w7").fail("Traceback: in reward", "KeyError: 'x'")))
    feed(real, 40)
    with crew(real, quick), pytest.raises(WorkerFailed, match="worker w7 failed: KeyError"):
        run(loop_of(real, tmp_path, backend, save_interval=50))
    assert (len(backend.batches), saved(tmp_path)) == (3, [3])
    kind, why = status(real)
    assert kind == "failed"
    assert why.startswith("worker w7 failed: KeyError: 'x'")
    assert holds(real)["committed"] == 6


def test_a_group_of_the_wrong_size_ends_the_run_after_what_was_trained_is_saved(real: Rig, tmp_path: Path) -> None:
    def three(groups: Sequence[Group]) -> list[Group]:
        raise GroupError("prompt 7: 3 samples")

    feed(real, 40)
    loop = loop_of(real, tmp_path, save_interval=50)
    loop.backend = Watched(at_2=lambda: setattr(loop.drain, "sample_filter", three))
    with crew(real, quick), pytest.raises(GroupError):
        run(loop)
    assert saved(tmp_path) == [3]
    assert status(real) == ("failed", "prompt 7: 3 samples")
    assert holds(real)["committed"] == 6


def test_the_groups_of_a_step_that_failed_are_in_no_checkpoint_and_not_committed(real: Rig, tmp_path: Path) -> None:
    def fail() -> None:
        raise GroupError("it must give a tensor")

    feed(real, 40)
    with crew(real, quick), pytest.raises(MillpondError, match="step 4: it must give a tensor"):
        run(loop_of(real, tmp_path, Watched(at_3=fail), save_interval=2))
    assert saved(tmp_path) == [2]
    assert holds(real)["committed"] == 4


def test_a_starved_run_ends_as_failed_and_keeps_what_it_trained(real: Rig, tmp_path: Path) -> None:
    feed(real, 5)
    with crew(real, quick), pytest.raises(Starved, match="0 prompts waiting"):
        train(real, tmp_path, save_interval=50, starve_timeout=0.5)
    assert status(real)[0] == "failed"
    places = holds(real)
    assert places["committed"] == 4
    assert "taken" not in places


# -- the whole way round


def test_generation_goes_on_during_a_long_training_step(real: Rig, tmp_path: Path) -> None:
    pushed: list[int] = []

    def long_step() -> None:
        pushed.append(real.counter("pushed"))
        time.sleep(2)
        pushed.append(real.counter("pushed"))

    feed(real, 60)
    backend = Watched(at_1=long_step)
    engine = EchoEngine("0.25", 4)
    with crew(real, lambda: engine):
        run(loop_of(real, tmp_path, backend, num_rollout=2, max_weight_staleness=9))
    assert pushed[1] - pushed[0] >= 3


@pytest.mark.parametrize("staleness", [0, 1, 3, None])
def test_the_whole_way_round_each_prompt_is_trained_once_and_none_is_older_than_allowed(
    real: Rig, tmp_path: Path, staleness: int | None
) -> None:
    backend = Watched()
    with ExitStack() as stack:
        stack.enter_context(feeding(real, tmp_path, 31))
        for name in ("w1", "w2"):
            stack.enter_context(crew(real, quick, name=name))
        slow = {"max_prompt_attempts": 1000}  # a prompt whose answers always take long is not to die here
        run(loop_of(real, tmp_path, backend, max_weight_staleness=staleness, save_interval=4, **slow))
    assert backend.trained == list(range(31))
    assert [len(batch) for batch in backend.batches] == [2] * 15 + [1]
    assert all(batch == sorted(batch) for batch in backend.batches)
    assert holds(real) == {"committed": 31}
    lines = metrics(tmp_path)
    worst = max(line["rollout/fully_async/max_staleness"] for line in lines)
    assert worst <= (4 if staleness is None else staleness)
    assert staleness == 0 or worst > 0
    if staleness == 0:
        assert sum(line["rollout/fully_async/stale_groups_filtered"] for line in lines) == 0


def test_lock_step_is_the_mode_without_flags(real: Rig, tmp_path: Path) -> None:
    with feeding(real, tmp_path, 12), crew(real, quick):
        train(real, tmp_path, fully_async=False, max_weight_staleness=None)
    lines = metrics(tmp_path)
    assert len(lines) == 6
    assert {line["rollout/fully_async/max_staleness"] for line in lines} == {0}
    assert {line["rollout/fully_async/queue_size"] for line in lines} == {0}
    assert holds(real) == {"committed": 12}
