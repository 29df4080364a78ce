"""Resume as its user meets it: at the very end, with leftovers, in the order of the data; and a second trainer."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from make import Hand, at_work, crew, feed, loop_of, metrics, queue, run, until
from processes import ECHO_RUN, PACE, Parts, Stage, audited, contiguous, eventually, prompts, steps
from rig import Rig, ids, policy

from pipeline.audit import audit
from pipeline.config import FeedConfig
from pipeline.errors import RunExists
from pipeline.leases import WorkerBroker
from pipeline.replies import Lease
from pipeline.types import Group
from producers import feeder
from producers.engines.echo import EchoEngine
from trainer.backends.base import At
from trainer.backends.echo import EchoBackend
from trainer.weights import versions

ASYNC = ("--fully-async", "--max-weight-staleness", "1", "--save-interval", "2")


class Kept(EchoBackend):
    """Remembers each group it was given; may die at a step."""

    def __init__(self, dies_at: int = -1) -> None:
        super().__init__(0.0)
        self.dies_at = dies_at
        self.batches: list[list[Group]] = []

    def train(self, groups: Sequence[Group], step: int, at: At | None = None) -> dict[str, float]:
        if step == self.dies_at:
            raise KeyboardInterrupt
        self.batches.append(list(groups))
        return super().train(groups, step, at)

    def ids(self) -> list[int]:
        return [group.prompt.id for batch in self.batches for group in batch]

    def records(self) -> dict[int, str]:
        return {group.prompt.id: group.prompt.record for batch in self.batches for group in batch}


def quick() -> EchoEngine:
    return EchoEngine("0.001", 4)


# -- at the very end (BB-16 d)


def left(out: Path) -> tuple[list[dict[str, float]], list[int]]:
    """What training leaves behind."""
    return steps(out), sorted(versions(out / "checkpoints"))


@pytest.mark.parametrize("limit", [(), ("--num-rollout", "2")], ids=["the data ended", "all steps are done"])
def test_a_run_resumed_at_its_very_end_trains_nothing_and_ends_well(limit: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        data = ("--prompt-data", prompts(tmp_path, 10), "--num-epoch", "1")
        stage.millpond("run", "--out", out, *ECHO_RUN, *PACE, *data, *limit).ends(0)
        before, places = left(out), audited(stage, out)
        stage.millpond("run", "--resume", "--out", out).ends(0)
        assert left(out) == before
        assert audited(stage, out)["committed"] == places["committed"] == (8 if limit else 10)


def test_a_trainer_resumed_at_its_very_end_trains_nothing_and_ends_well_all_alone(
    redis_url: str, tmp_path: Path
) -> None:
    with Parts(tmp_path, redis_url, prompts(tmp_path, 10)) as parts:
        started = [parts.trainer(*ASYNC, "--num-epoch", "1"), parts.feeder("--num-epoch", "1"), parts.generator()]
        for process in started:
            process.ends(0)
        before = left(parts.out)
        assert len(before[0]) == 3
        for steps_too in ((), ("--num-rollout", "3")):
            parts.trainer(*ASYNC, "--num-epoch", "1", *steps_too, "--resume").ends(0)
            assert left(parts.out) == before
            assert parts.broker.state()["status"] == "done"
        assert parts.audit().places["committed"] == 10


# -- a second trainer


def test_a_second_trainer_is_refused_with_a_sentence_that_names_the_first(redis_url: str, tmp_path: Path) -> None:
    with Parts(tmp_path, redis_url, prompts(tmp_path, 40)) as parts:
        first = parts.trainer(*ASYNC, "--num-epoch", "1")
        eventually(lambda: parts.broker.state().get("status") == "running", "a trainer that runs")
        name = f"{socket.gethostname()} pid {first.process.pid}"
        said = parts.trainer(*ASYNC, "--num-epoch", "1").ends(2)
        assert f"run {parts.run} is in this Redis already, trained by {name}: --resume goes on with it" in said
        said = parts.trainer(*ASYNC, "--num-epoch", "1", "--resume").ends(2)
        assert f"millpond: run {parts.run} has a trainer: {name}, seen " in said
        assert "--wait waits until it is gone, --take-over replaces it at once" in said
        assert parts.broker.state()["trainer"] == name
        others = [parts.feeder("--num-epoch", "1"), parts.generator()]
        for process in (first, *others):
            process.ends(0)
        assert parts.audit().places["committed"] == 40
        assert contiguous(steps(parts.out)) == 10


# -- the order of the data (BB-29)


def fed(rig: Rig, folder: Path, backend: Kept, **fields: object) -> None:
    """20 prompts, shuffled, three times; a generator; a trainer to its end."""
    path = folder / "20.jsonl"
    path.write_text("".join(f'{{"input": "p{n}", "label": "{n}"}}\n' for n in range(20)))
    config = FeedConfig.model_validate({"prompt_data": path, "num_epoch": 3, "rollout_shuffle": True})
    broker = rig.feeder()
    with ThreadPoolExecutor(1) as threads, crew(rig, quick):
        feeding = threads.submit(feeder.main, config, broker, broker.stop)
        try:
            run(loop_of(rig, folder, backend, **fields))
        except KeyboardInterrupt:
            assert backend.dies_at > 0
        finally:
            broker.stop.set()
            feeding.result()


@pytest.mark.parametrize("wiped", [False, True], ids=["Redis lives on", "Redis is wiped"])
def test_a_resume_in_the_middle_of_an_epoch_feeds_what_an_unbroken_run_feeds(
    wiped: bool, real: Rig, tmp_path: Path
) -> None:
    unbroken, first, second = Kept(), Kept(dies_at=15), Kept()
    (tmp_path / "unbroken").mkdir()
    other = Rig(real.url)
    fed(other, tmp_path / "unbroken", unbroken)
    other.close()
    order = unbroken.records()
    epochs = [[order[id] for id in range(at, at + 20)] for at in (0, 20, 40)]
    assert sorted(order) == list(range(60))
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]

    fed(real, tmp_path, first)
    if wiped:
        for key in real.keys.all():
            real.raw.delete(key)
    fed(real, tmp_path, second, resume=True, take_over=True)
    kept = [group.prompt.id for batch in first.batches[:14] for group in batch]  # by the checkpoint of step 14
    assert sorted(kept + second.ids()) == list(range(60))
    assert {**first.records(), **second.records()} == order
    assert second.records().items() <= order.items()


# -- leftovers (BB-30)


def killed(rig: Rig, folder: Path, *publications: int) -> tuple[WorkerBroker, list[Lease], list[Lease]]:
    """A run whose trainer is gone: two groups of version 1 wait, and two of the last of the versions after it."""
    loop, worker = loop_of(rig, folder), rig.worker()
    loop.publish(1)
    loop.broker.renew(status="running")
    first = queue(rig, worker, 1, 1)
    for version in publications:
        loop.publish(version)
    last = queue(rig, worker, loop.now.version, loop.now.version)
    loop.report.file.close()
    return worker, first, last


def test_a_resume_trains_at_once_on_the_groups_that_wait_and_leaves_alone_what_is_in_flight(
    real: Rig, tmp_path: Path
) -> None:
    """The worker does nothing meanwhile."""
    feed(real, 12)
    loop, worker = loop_of(real, tmp_path), real.worker()
    loop.publish(1)
    loop.broker.renew(status="running")
    waiting, flying = queue(real, worker, 1, 1), real.lease(worker, 2)
    loop.report.file.close()
    backend = Kept()
    run(loop_of(real, tmp_path, backend, resume=True, take_over=True, num_rollout=1))
    assert backend.ids() == ids(waiting)
    assert [group.prompt.attempt for group in backend.batches[0]] == [1, 1]
    assert real.do(worker.mine()) == flying
    assert real.push(worker, flying) == ["pushed"] * 2
    assert not [key for key in real.feeder().counters() if key.startswith(("recycled:", "strikes:"))]
    assert audit(real.feeder()).holds


def test_a_resume_uses_what_is_fresh_and_sends_round_what_belongs_to_a_branch_that_is_given_up(
    real: Rig, tmp_path: Path
) -> None:
    feed(real, 12)
    _, first, last = killed(real, tmp_path, 2, 3)
    backend = Kept()
    with crew(real, quick, name="w2"):
        run(loop_of(real, tmp_path, backend, resume=True, take_over=True, num_rollout=2))
    assert [group.prompt.id for group in backend.batches[0]] == ids(first)
    assert not {(id, 1) for id in ids(last)} & {(g.prompt.id, g.prompt.attempt) for g in backend.batches[1]}
    assert real.counter("recycled:given_up_branch") == 2
    assert not [key for key in real.feeder().counters() if key.startswith(("strikes:", "dead:"))]
    assert audit(real.feeder()).holds


def test_what_is_in_the_making_for_a_branch_that_is_given_up_begins_anew_without_a_strike(real: Rig) -> None:
    trainer = real.trainer(max_weight_staleness=1)
    for version in (2, 3):
        trainer.publish(policy(version), [])

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine):
            feed(real, 1)
            await until(lambda: engine.prompts() == [0])
            trainer.publish(replace(policy(4), lineage=((4, 1),)), [])
            await until(lambda: engine.sent.count((0, 0)) == 2)

    real.do(go())
    assert real.counter("recycled:given_up_branch") == 1
    assert not [key for key in trainer.counters() if key.startswith("strikes:")]


def test_a_new_run_on_the_same_redis_never_meets_the_old_ones_samples_or_version(real: Rig, tmp_path: Path) -> None:
    feed(real, 12)
    killed(real, tmp_path / "old", 2, 3)
    before = real.dump()
    with pytest.raises(RunExists):
        loop_of(real, tmp_path / "again")
    new, backend = Rig(real.url), Kept()
    feed(new, 4, ends=True)
    with crew(new, quick):
        loop = loop_of(new, tmp_path / "new", backend)
        assert (loop.now.step, loop.now.version, loop.broker.epoch) == (0, 1, 1)
        run(loop)
    assert sorted(backend.ids()) == [0, 1, 2, 3]
    assert {version for batch in backend.batches for group in batch for version in group.versions} <= {1, 2, 3}
    assert [line["train/weight_version"] for line in metrics(tmp_path / "new")] == [2, 3]
    assert real.dump() == before
    new.close()
