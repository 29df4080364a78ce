"""Checkpoints, the ledger, and how a trainer begins: fresh, resumed, resumed without a checkpoint or without Redis."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from make import crew, drain_of, feed, feeding, loop_of, metrics, queue, run, train, train_config
from rig import Rig, ids, policy

from consumers.staleness import Limit
from pipeline.audit import audit
from pipeline.errors import Fenced, RunExists, Stopped, UsageError, WeightsError
from pipeline.ledger import Ledger, get_bit, set_bit
from pipeline.types import Prompt
from producers.engines.echo import EchoEngine
from trainer import checkpoint
from trainer.backends.base import At, Backend
from trainer.backends.echo import EchoBackend
from trainer.checkpoint import Checkpoint
from trainer.start import Beginning, begin
from trainer.workshop import Workshop


def prompt(id: int) -> Prompt:
    return Prompt(id, 1, 0, "{}")


def point(folder: Path, step: int, **ledger: object) -> Checkpoint:
    return Checkpoint(folder / f"{step:08d}", step, step + 1, ((5, 2),), 3, Ledger(**ledger))  # type: ignore[arg-type]


def save(point: Checkpoint, backend: Backend | None = None) -> None:
    """As a trainer at work does."""
    shop = Workshop(point.folder.parent, 1)
    shop.folder.mkdir(parents=True, exist_ok=True)
    checkpoint.save(point, backend or EchoBackend(0.0), shop)


def seen(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith(".trainer-"))


def quick() -> EchoEngine:
    return EchoEngine("0.001", 4)


def committed(rig: Rig) -> list[int]:
    bits = rig.standing().committed
    return [id for id in range(8 * len(bits)) if get_bit(bits, id)]


# -- the ledger


def test_bits_are_those_of_redis(real: Rig) -> None:
    bits, draw = bytearray(), random.Random(1)
    for id in draw.sample(range(200), 30):
        set_bit(bits, id)
        real.raw.setbit(real.keys["done:dropped"], id, 1)
    assert bytes(bits) == real.raw.get(real.keys["done:dropped"])
    assert [get_bit(bits, id) for id in range(250)] == [
        bool(real.raw.getbit(real.keys["done:dropped"], id)) for id in range(250)
    ]


def test_a_ledger_knows_what_was_taken_published_or_committed_and_nothing_else() -> None:
    book = Ledger(taken={id: prompt(id) for id in (1, 2, 3, 4)})
    book.publish([2, 3, 9])
    book.commit([3, 4, 17])
    book.release([1, 77])
    assert (sorted(book.taken), sorted(book.published)) == ([], [2])
    assert [id for id in range(30) if book.knows(id)] == [2, 3, 4, 17]


def test_a_checkpoint_says_what_was_trained_dropped_and_dead_lettered_and_how_far_was_fed(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 6)
    leases = real.lease(worker, 4)
    real.do(worker.drop(leases[1], "boring"))
    real.do(worker.hand_back([leases[2]], "too_large", "bury"))
    taken, done = {0: prompt(0), 5: prompt(5)}, bytearray(b"\0\x80")
    trainer.ledger = Ledger(taken=taken, trained={0}, published={3: prompt(3)}, committed=done)
    found = checkpoint.ledger_of(real.standing(), trainer.ledger)
    marked = {name: [id for id in range(16) if get_bit(getattr(found, name), id)] for name in checkpoint.BITS}
    assert marked == {"committed": [0, 3, 8], "dropped": [1], "dead": [2]}
    assert found.cursor == 6
    assert bytes(trainer.ledger.committed) == b"\0\x80"


# -- on disk


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    backend = EchoBackend(0.0)
    backend.train([], 0)
    ledger = {"committed": bytearray(b"\xf0\x01"), "dropped": b"\x08", "dead": b"", "cursor": 17}
    save(point(tmp_path, 20, **ledger), backend)
    found = checkpoint.read(tmp_path / "00000020")
    assert found == point(tmp_path, 20, **ledger)
    other = EchoBackend(0.0)
    other.load(found.folder / "model")
    assert other.steps == 1


def test_a_checkpoint_that_fails_on_the_way_is_not_there(tmp_path: Path) -> None:
    class Full(EchoBackend):
        def save(self, folder: Path) -> None:
            super().save(folder)
            raise OSError("no space left on device")

    save(point(tmp_path, 2))
    with pytest.raises(OSError, match="no space"):
        save(point(tmp_path, 4), Full(0.0))
    assert seen(tmp_path) == ["00000002"]
    assert checkpoint.newest(tmp_path) == tmp_path / "00000002"


def test_the_newest_is_the_highest_step_and_what_is_aside_does_not_count(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "nowhere") is None
    for step in (20, 100000000, 3):
        save(point(tmp_path, step))
    (tmp_path / ".trainer-7/999999999").mkdir(parents=True)
    assert checkpoint.newest(tmp_path) == tmp_path / "100000000"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        save(point(tmp_path, step))
    checkpoint.prune(Workshop(tmp_path, 1), 2)
    assert seen(tmp_path) == ["00000006", "00000008"]


def test_what_comes_after_a_step_can_be_put_out_of_the_way(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(point(tmp_path, step))
    assert checkpoint.give_up(Workshop(tmp_path, 1), 2) == ["00000004", "00000006"]
    assert checkpoint.newest(tmp_path) == tmp_path / "00000002"
    save(point(tmp_path, 4))
    checkpoint.prune(Workshop(tmp_path, 1), 1)
    assert checkpoint.newest(tmp_path) == tmp_path / "00000004"
    assert checkpoint.give_up(Workshop(tmp_path, 1), 2) == ["00000004"]
    assert seen(tmp_path) == ["00000004.given-up", "00000006.given-up"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", None),
        ("state.json", "{"),
        ("state.json", "{}"),
        ("state.json", "[]"),
        ("dead.bits", None),
    ],
)
def test_what_is_no_checkpoint_is_refused_with_its_path(tmp_path: Path, name: str, content: str | None) -> None:
    save(point(tmp_path, 2))
    file = tmp_path / "00000002" / name
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(UsageError, match=r"--load .*00000002: not a Millpond checkpoint"):
        checkpoint.read(tmp_path / "00000002")


# -- beginning


def test_a_fresh_run_begins_at_step_0_with_version_1_and_writes_what_all_agree_on(real: Rig, tmp_path: Path) -> None:
    feed(real, 3)
    loop = loop_of(real, tmp_path, rollout_batch_size=3)
    assert loop.now == Beginning(0, 1, ())
    assert loop.broker.epoch == 1
    agreed = json.loads(real.raw.get(real.keys["config"]) or b"")
    assert (agreed["bound"], agreed["n_samples_per_prompt"]) == (6, 2)
    assert loop.broker.state()["status"] == "starting"
    assert real.standing().waiting == [0, 1, 2]
    loop.report.file.close()


def test_nothing_is_leased_before_the_first_weights_are_published(real: Rig, tmp_path: Path) -> None:
    feed(real, 3)
    loop = loop_of(real, tmp_path)
    worker = real.worker()
    assert real.do(worker.lease(1, 0)).why == "starting"
    loop.publish(1)
    assert real.do(worker.lease(1, 0)).why == "starting"
    loop.broker.renew(status="running")
    assert ids(real.lease(worker, 1)) == [0]
    loop.report.file.close()


def test_a_run_that_is_there_is_refused_without_resume_and_left_as_it_is(real: Rig, tmp_path: Path) -> None:
    real.trainer()
    before = real.dump()
    with pytest.raises(RunExists, match=r"is in this Redis already, trained by trainer: --resume goes on"):
        loop_of(real, tmp_path)
    assert real.dump() == before


def test_a_new_run_in_a_folder_with_checkpoints_is_refused(real: Rig, tmp_path: Path) -> None:
    save(point(tmp_path / "checkpoints", 2))
    with pytest.raises(RunExists, match=r"has checkpoints of an earlier run: --resume goes on from them"):
        loop_of(real, tmp_path)
    assert not real.raw.exists(real.keys["state"])


def test_a_resume_of_nothing_is_refused(real: Rig, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--resume: there is no run"):
        loop_of(real, tmp_path / "nowhere", resume=True)
    assert not real.raw.exists(real.keys["state"])


def test_a_resume_with_groups_of_another_size_is_refused_before_anything_is_touched(real: Rig, tmp_path: Path) -> None:
    real.trainer()
    before = real.dump()
    with pytest.raises(UsageError, match=r"--n-samples-per-prompt 3: the groups that run .* have 2 samples"):
        loop_of(real, tmp_path, resume=True, take_over=True, n_samples_per_prompt=3)
    assert real.dump() == before


def test_a_living_trainer_is_not_replaced_unasked(real: Rig, tmp_path: Path) -> None:
    first = real.trainer()
    with pytest.raises(UsageError, match=r"has a trainer: trainer, seen \d+ s ago; --wait waits .* --take-over"):
        loop_of(real, tmp_path, resume=True)
    first.renew(why="still ours")
    loop_of(real, tmp_path, resume=True, take_over=True).report.file.close()
    with pytest.raises(Fenced):
        first.publish(policy(99), [])
    with pytest.raises(Fenced):
        first.check()


def test_a_resume_sends_round_what_was_taken_and_not_committed_and_queued_groups_stay(
    real: Rig, tmp_path: Path
) -> None:
    feed(real, 20)
    with crew(real, quick):
        train(real, tmp_path, num_rollout=4, save_interval=4)
    assert (len(committed(real)), checkpoint.newest(tmp_path / "checkpoints")) == (8, tmp_path / "checkpoints/00000004")
    old = loop_of(real, tmp_path, resume=True)
    old.publish(old.now.version)
    old.broker.renew(status="running")
    with crew(real, quick):
        batch = old.drain.batch(Limit(6, old.now.lineage, 1))
    assert batch is not None
    ahead = len(old.drain.hand)
    old.step(batch)
    left = len(real.groups())
    old.report.file.close()

    new = loop_of(real, tmp_path, resume=True, take_over=True)
    assert (new.now.step, new.now.version, new.now.lineage[-1]) == (4, 8, (8, 5))
    taken = {g.prompt.id: (g.prompt.attempt + 1, 0) for g in batch.groups}
    assert taken.items() <= {int(e["id"]): (int(e["attempt"]), int(e["strikes"])) for e in real.entries()}.items()
    assert real.counter("recycled:restart") == 2 + ahead
    assert len(real.groups()) == left
    assert len(committed(real)) == 8
    assert audit(new.broker).holds
    new.report.file.close()


def test_a_resume_publishes_above_the_key_the_folders_and_all_that_workers_tell(real: Rig, tmp_path: Path) -> None:
    feed(real, 4)
    with crew(real, quick):
        train(real, tmp_path, num_rollout=2)
    worker = real.worker("w9")
    real.do(worker.register({"version": 3, "loading": 41}))
    first = loop_of(real, tmp_path, resume=True)
    assert first.now.version == 42
    first.report.file.close()
    (tmp_path / "weights/00000050").mkdir()
    second = loop_of(real, tmp_path, resume=True, take_over=True)
    assert second.now.version == 51
    assert second.now.lineage == ((51, 3),)
    second.report.file.close()


def test_a_resume_without_a_checkpoint_begins_again_and_loses_no_prompt(real: Rig, tmp_path: Path) -> None:
    feed(real, 9, ends=True)

    class Killed(EchoBackend):
        def train(self, groups: object, step: int, at: At | None = None) -> dict[str, float]:
            if step == 3:
                raise KeyboardInterrupt
            return {}

    with crew(real, quick), pytest.raises(KeyboardInterrupt):
        run(loop_of(real, tmp_path, Killed(0.0), save_interval=20))
    assert committed(real) == []
    with crew(real, quick):
        loop = train(real, tmp_path, resume=True, take_over=True, save_interval=20)
    assert (loop.now.step, loop.now.lineage) == (5, ((5, 1),))
    assert committed(real) == list(range(9))
    assert all(int(e["strikes"]) == 0 for e in real.entries())
    assert audit(real.feeder()).holds


def test_the_same_command_begins_a_run_and_goes_on_with_it(real: Rig, tmp_path: Path) -> None:
    """What starts a trainer again, a container or a pod, does not know which of the two it is."""
    feed(real, 10, ends=True)
    same: dict[str, Any] = {"auto_resume": True, "take_over": True}

    class Killed(EchoBackend):
        def train(self, groups: object, step: int, at: At | None = None) -> dict[str, float]:
            if step == 4:
                raise KeyboardInterrupt
            return {}

    with crew(real, quick), pytest.raises(KeyboardInterrupt):
        run(loop_of(real, tmp_path / "new", Killed(0.0), **same))
    with crew(real, quick):
        loop = loop_of(real, tmp_path / "new", **same)
        assert loop.now.step == 4
        run(loop)
    assert committed(real) == list(range(10))
    assert audit(real.feeder()).holds


def test_a_resume_with_a_redis_that_lost_everything_feeds_again_all_that_was_not_committed(
    real: Rig, tmp_path: Path
) -> None:
    with feeding(real, tmp_path, 13), crew(real, quick):
        train(real, tmp_path, num_rollout=4)
    before, epoch = set(committed(real)), int(real.feeder().state()["epoch"])
    assert len(before) == 8
    for key in real.keys.all():
        real.raw.delete(key)
    loop = loop_of(real, tmp_path, resume=True)
    assert loop.broker.epoch > epoch
    assert set(committed(real)) == before
    assert set(real.standing().refeed) == set(range(13)) - before
    assert audit(loop.broker).holds
    trained: list[int] = []

    class Watched(EchoBackend):
        def train(self, groups: object, step: int, at: At | None = None) -> dict[str, float]:
            trained.extend(g.prompt.id for g in groups)  # type: ignore[attr-defined]
            return {}

    loop.backend = Watched(0.0)
    with feeding(real, tmp_path, 13), crew(real, quick):
        run(loop)
    assert sorted(trained) == sorted(set(range(13)) - before)
    assert committed(real) == list(range(13))


def test_a_redis_that_is_older_than_the_checkpoint_is_brought_up_to_it(real: Rig, tmp_path: Path) -> None:
    with feeding(real, tmp_path, 13), crew(real, quick):
        train(real, tmp_path, num_rollout=4)
    before = set(committed(real))
    real.raw.set(real.keys["feed"], 5)
    for name in ("done:committed", "open", "unsettled", "groups", "prompts", "prompts:retry", "weights:version"):
        real.raw.delete(real.keys[name])
    loop = loop_of(real, tmp_path, resume=True)
    assert (real.standing().feed, set(committed(real))) == (13, before)
    assert set(real.standing().refeed) == set(range(13)) - before
    loop.report.file.close()


def test_a_trainer_that_waited_for_another_goes_on_from_what_that_one_saved_last(real: Rig, tmp_path: Path) -> None:
    feed(real, 30)
    with crew(real, quick):
        first = loop_of(real, tmp_path, num_rollout=6, save_keep=1)
        first.saved = 0
        first.publish(1)
        first.broker.renew(status="running")
        steps = iter([2, 4])

        def go_on() -> None:
            for step in steps:
                while first.now.step < step:
                    first.step(first.rollout(first.drain, Limit(first.now.version, (), 1)) or pytest.fail("no batch"))
                ready.set()
                held.wait()
            first.broker.finish("draining", "enough")

        ready, held = threading.Event(), threading.Event()
        going = threading.Thread(target=go_on)
        going.start()
        ready.wait()
        waiter = threading.Timer(0.5, held.set)
        waiter.start()
        second = loop_of(real, tmp_path, resume=True, wait=True)
        going.join()
    first.report.file.close()
    second.report.file.close()
    assert second.now.step == 4


def test_going_back_to_an_older_checkpoint_gives_up_the_newer_ones(real: Rig, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with feeding(real, tmp_path, 20), crew(real, quick):
        train(real, tmp_path, num_rollout=6, save_keep=9)
        ahead = set(committed(real))
        back = loop_of(real, tmp_path, num_rollout=5, save_keep=2, resume=True, load=root / "00000002")
        assert back.now.step == 2
        assert len(committed(real)) == 4
        run(back)
    assert len(ahead) == 12
    assert len(committed(real)) == 10
    assert checkpoint.newest(root) == root / "00000005"
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert checkpoint.read(root / "00000004").version > 7
    assert audit(real.feeder()).holds


def test_a_trainer_that_waits_for_another_can_be_stopped(real: Rig, tmp_path: Path) -> None:
    real.trainer()
    loop_broker = real.new_trainer()
    loop_broker.stop.set()
    with pytest.raises(Stopped):
        begin(train_config(resume=True, wait=True), loop_broker, EchoBackend(0.0), tmp_path)


def test_a_checkpoint_whose_model_cannot_be_read_leaves_the_run_resumable(real: Rig, tmp_path: Path) -> None:
    feed(real, 20)
    with crew(real, quick):
        train(real, tmp_path, num_rollout=4)
    broken = tmp_path / "checkpoints/00000004/model/trainer.json"
    content = broken.read_text()
    broken.write_text("{")
    with pytest.raises(WeightsError):
        loop_of(real, tmp_path, resume=True)
    broken.write_text(content)
    loop = loop_of(real, tmp_path, resume=True, take_over=True)
    assert loop.now.step == 4
    assert audit(loop.broker).holds
    loop.report.file.close()


def test_a_zombie_of_the_old_trainer_gets_at_most_one_group_and_it_goes_round_again(real: Rig, tmp_path: Path) -> None:
    old = real.trainer()
    worker = real.worker()
    feed(real, 4)
    queue(real, worker, 1, 1, 1)
    new = loop_of(real, tmp_path, resume=True, take_over=True)
    with pytest.raises(Fenced):
        drain_of(old, 3).batch(Limit(1, (), 1))
    gotten = 3 - len(real.groups())
    assert gotten <= 1
    new.broker.check()
    assert len(real.entries()) == gotten
    assert audit(new.broker).holds
    new.report.file.close()
