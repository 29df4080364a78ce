"""A trainer dies, or stops and is replaced, just before any touch of the outside; then the run goes on to its end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fault_points import STOPPED, Forge, Trainers, trained_on
from make import crew, feeding, metrics
from processes import eventually
from rig import Rig, ones

from pipeline.audit import audit
from pipeline.keys import GROUP
from producers.engines.echo import EchoEngine
from trainer import checkpoint
from trainer.weights import versions

KILLED, FENCED = -signal.SIGKILL, 4
MODES: dict[str, tuple[tuple[object, ...], int]] = {
    "one step off": (("--fully-async", "--max-weight-staleness", 1), 4),
    "lock-step": (("--no-fully-async",), 2),
    "two steps a publication": (("--fully-async", "--max-weight-staleness", 0, "--update-weights-interval", 2), 4),
    "three steps a publication": (("--fully-async", "--max-weight-staleness", 1, "--update-weights-interval", 3), 12),
}
"Flags, and the groups that may be leased or unsettled at once."
ASYNC, BOUND = MODES["one step off"]
GO_ON = ("--auto-resume", "--take-over")


@pytest.fixture(scope="module")
def forge(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    forge = Forge(redis_url, tmp_path_factory.mktemp("forge"))
    yield forge
    forge.close()


@contextmanager
def world(forge: Forge, rig: Rig, folder: Path, rows: int, engine: EchoEngine | None = None) -> Iterator[Trainers]:
    """A feeder of one epoch, a generator, and who may train."""
    with (
        Trainers(forge, rig.keys.run, folder) as trainers,
        feeding(rig, folder, rows),
        crew(rig, lambda: engine or EchoEngine("0.001", 4)),
    ):
        yield trainers


# -- what must hold


def ids(batches: list[list[int]]) -> list[int]:
    return sorted(id for batch in batches for id in batch)


LOAD = """
local load = redis.call('ZCARD', KEYS[1])
for i = 2, 3 do
  local found = redis.pcall('XPENDING', KEYS[i], ARGV[1])
  if not found.err then load = load + found[1] end
end
return load
"""


def leased_or_unsettled(rig: Rig) -> int:
    names = [rig.keys[name] for name in ("unsettled", "prompts", "prompts:retry")]
    found: Any = rig.raw.eval(LOAD, 3, *names, GROUP)
    return int(found)


@contextmanager
def no_burst(rig: Rig, bound: int) -> Iterator[None]:
    """Never more groups leased or unsettled than a fresh run may have; looked at all the time."""
    over, most = threading.Event(), [0]

    def look() -> None:
        watcher = Rig(rig.url, rig.keys.run)
        while not over.wait(0.005):
            most[0] = max(most[0], leased_or_unsettled(watcher))
        watcher.close()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()
    assert 0 < most[0] <= bound


def examine(rig: Rig, out: Path) -> int:
    """After any death: what is there is complete, and all agrees. Answers the step of the newest checkpoint."""
    found = audit(rig.feeder())
    assert found.holds, found
    committed, saved = rig.ended(), set[int]()
    for step, path in sorted(versions(out / "checkpoints").items()):
        point, batches = checkpoint.read(path), trained_on(path / "model")
        assert len(batches) == point.step == step
        saved = ones(point.ledger.committed)
        assert ids(batches) == sorted(saved)
    assert committed <= saved
    weights = {version: trained_on(path) for version, path in versions(out / "weights").items()}
    policy = rig.feeder().policy()
    assert policy is None or len(weights[policy.version]) == policy.step
    lines = [line["step"] for line in metrics(out)] if (out / "metrics.jsonl").exists() else []
    assert lines == list(range(1, len(lines) + 1))
    newest = max(versions(out / "checkpoints"), default=0)
    assert len(lines) >= newest
    return newest


def finished(rig: Rig, out: Path, rows: int) -> None:
    """The last weights contain each prompt once, Redis agrees, each step has a line, under versions that only grow."""
    step = examine(rig, out)
    assert ids(trained_on(out / f"checkpoints/{step:08d}/model")) == list(range(rows))
    assert rig.ended() == set(range(rows))
    lines = metrics(out)
    assert len(lines) == step
    seen = [line["train/weight_version"] for line in lines]
    assert seen == sorted(seen)
    strikes = {key for key in rig.feeder().counters() if key.startswith(("strikes:", "dead:", "dropped:"))}
    assert strikes <= {"strikes:stale"}  # by slowness of this machine


def finish(forge: Forge, rig: Rig, folder: Path, rows: int, mode: tuple[object, ...] = ASYNC) -> None:
    with world(forge, rig, folder, rows) as trainers:
        assert trainers.start(*mode, *GO_ON).fate() == 0
    finished(rig, folder / "run", rows)


# -- deaths


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


@pytest.mark.parametrize(("mode", "stride"), [("one step off", 4), *(slow(mode, 1) for mode in MODES)])
def test_a_trainer_may_die_before_any_touch_of_the_outside(
    mode: str, stride: int, forge: Forge, real: Rig, tmp_path: Path
) -> None:
    """A chain of resumes of one run: each lives a touch (or a few) longer than the one before, the last for four steps.
    So it also dies anywhere in the resume after a death."""
    (flags, bound), rows = MODES[mode], 60 + 560 // stride
    with world(forge, real, tmp_path, rows) as trainers, no_burst(real, bound):
        assert trainers.start(*flags, "--num-rollout", 4, at=120).fate() == KILLED
        step, version, fate, at = examine(real, trainers.out), 0, KILLED, 1
        while fate == KILLED:
            recycled = real.counter("recycled:restart")
            fate = trainers.start(*flags, *GO_ON, "--num-rollout", step + 4, at=at).fate()
            before, older = step, version
            step, version, at = examine(real, trainers.out), real.feeder().version(), at + stride
            assert fate in (KILLED, 0)
            assert step >= before
            assert version >= older
            assert real.counter("recycled:restart") - recycled <= 8  # only what the dead one had and no checkpoint has
        assert at > 150
        assert step == before + 4
    finish(forge, real, tmp_path, rows, flags)


@pytest.mark.parametrize("stride", [9, slow(1)])
def test_a_trainer_may_die_anywhere_in_its_first_life(stride: int, forge: Forge, real: Rig, tmp_path: Path) -> None:
    fate, at = KILLED, 1
    while fate == KILLED:
        rig, folder = Rig(real.url), tmp_path / str(at)
        folder.mkdir()
        with world(forge, rig, folder, 6) as trainers:
            fate = trainers.start(*ASYNC, "--num-rollout", 1, at=at).fate()
            assert fate in (KILLED, 0)
            examine(rig, trainers.out)
            assert trainers.start(*ASYNC, *GO_ON, "--num-rollout", 3).fate() == 0
        finished(rig, trainers.out, 6)
        rig.close()
        at += stride
    assert at > 80


BETWEEN = (
    "Drain._take recv_into",
    "Drain._judge sendall",
    "Drain._judge recv_into",
    "Loop.step Loop.publish save mkdir",
    "Loop.step Loop.publish save rename",
    "Loop.step Loop.publish TrainerBroker.publish sendall",
)
"Popped, and not in Redis's or in the reply's hands any more; in hand; trained."


def test_fifty_kills_between_pop_and_step_lose_no_group(forge: Forge, real: Rig, tmp_path: Path) -> None:
    rows = 80
    with world(forge, real, tmp_path, rows) as trainers, no_burst(real, BOUND):
        for n in range(50):
            more = GO_ON if n else ()
            assert trainers.start(*ASYNC, *more, where=BETWEEN[n % 6], at=1 + n % 2).fate() == KILLED
            examine(real, trainers.out)
        assert real.counter("recycled:restart") > 50
    finish(forge, real, tmp_path, rows)


def test_a_hard_stop_at_step_7_of_200_prompts_skips_none_of_them_however_long_they_take(
    forge: Forge, real: Rig, tmp_path: Path
) -> None:
    rows = 200
    uneven = EchoEngine("lognormal:0.002:1", 4)
    with (
        Trainers(forge, real.keys.run, tmp_path) as trainers,
        feeding(real, tmp_path, rows),
        crew(real, lambda: uneven),
    ):
        assert trainers.start(*ASYNC, where="Loop.step Loop.publish save mkdir", at=7).fate() == KILLED
        assert examine(real, trainers.out) == 6
        assert trainers.start(*ASYNC, *GO_ON).fate() == 0
    finished(real, tmp_path / "run", rows)


# -- zombies


def still(rig: Rig) -> bool:
    """No room, and nothing in flight: workers have nothing to do."""
    standing = rig.standing()
    return leased_or_unsettled(rig) == len(standing.unsettled) == BOUND


def everything(rig: Rig, out: Path) -> dict[str, Any]:
    """All keys and files that anybody reads, but for signs of life and logs."""
    found = rig.dump()
    found.pop(rig.keys["workers:info"])
    state = rig.keys["state"]
    found[state] = [field for field in found[state] if not field.startswith((b"tick=", b"grace="))]
    files = [path for path in out.rglob("*") if path.is_file() and not path.relative_to(out).match("logs/*")]
    here = {str(path.relative_to(out)): path.read_bytes() for path in files if ".trainer-" not in str(path)}
    return {**found, **here}


def points(labels: list[str], stride: int) -> list[int]:
    """Numbers of touches after the takeover: every `stride`-th, and all that put something in place or take it away."""
    first = next(n for n, label in enumerate(labels, 1) if "_take_over" in label and "recv_into" in label)
    last = max(n for n, label in enumerate(labels, 1) if "Drain.batch" in label)
    seen, found = set[str](), []
    for n in range(first + 1, last):
        moves = labels[n - 1].endswith((" rename", " replace", " mkdir"))
        if n % stride == 0 or (moves and labels[n - 1] not in seen):
            found.append(n)
        seen.add(labels[n - 1])
    return found


@pytest.mark.parametrize("stride", [20, slow(1)])
def test_a_trainer_that_was_replaced_before_any_touch_wakes_up_and_changes_nothing(
    stride: int, forge: Forge, real: Rig, tmp_path: Path
) -> None:
    rows = 3000  # more than can be trained on
    with world(forge, real, tmp_path, rows) as trainers:
        assert trainers.start(*ASYNC, "--num-rollout", 4).fate() == 0
    with world(forge, real, tmp_path, rows) as trainers:
        assert trainers.start(*ASYNC, *GO_ON, "--num-rollout", 8).fate() == 0
        at = points(trainers.labels(), stride)
    with world(forge, real, tmp_path, rows) as trainers:
        for n in at:
            zombie = trainers.start(*ASYNC, *GO_ON, at=n, number=signal.SIGSTOP)
            assert zombie.fate() == STOPPED
            new = trainers.start(*ASYNC, *GO_ON, where="Drain._take sendall", at=3, number=signal.SIGSTOP)
            assert new.fate() == STOPPED  # two steps and a checkpoint later
            step = examine(real, trainers.out)
            eventually(lambda: still(real), "workers that have nothing to do")
            before = everything(real, trainers.out)
            zombie.send(signal.SIGCONT)
            assert zombie.fate() == FENCED
            assert everything(real, trainers.out) == before
            new.send(signal.SIGKILL)
            assert new.fate() == KILLED
            assert examine(real, trainers.out) == step
