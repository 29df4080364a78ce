"""kill -9 of every process and of Redis, at random moments; then to the end, then the audit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from processes import ECHO_RUN, PACE, Parts, Stage, alive, audited, contiguous, eventually, prompts, server_of, steps

from pipeline.server import EmbeddedServer

ASYNC = ("--fully-async", "--max-weight-staleness", "2", "--save-interval", "3", "--echo-train-seconds", "0.05")
GO_ON = ("--resume", "--take-over")


def seeded() -> random.Random:
    """Random moments; pytest shows the seed of a failing test."""
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    return random.Random(seed)


def ended(run: Parts, fed: int) -> None:
    """All of the epoch was trained once, or stands under a reason; each step has one line."""
    found = run.audit()
    assert found.feed == fed
    assert found.places["committed"] + found.places["dropped"] + found.places["dead"] == fed
    lines = steps(run.out)
    contiguous(lines)
    assert sum(line["rollout/groups"] for line in lines) == found.places["committed"]


def chaos(folder: Path, victims: str, rows: int) -> None:
    """Separate processes on a Redis of their own, killed in random order: t(rainer), f(eeder), g(enerator), r(edis)."""
    dice = seeded()
    feed = ("--num-epoch", "2", "--feed-low-water", "16")
    with EmbeddedServer(folder / "redis") as server, Parts(folder, server.url, prompts(folder, rows)) as run:
        trainer, feeder = run.trainer(*ASYNC, "--num-epoch", "2"), run.feeder(*feed)
        generators = [run.generator() for _ in range(2)]
        eventually(run.committed, "a first commit")
        for victim in dice.sample(victims, len(victims)):
            time.sleep(dice.uniform(0, 0.7))
            if victim == "t":
                trainer.kill()
                trainer = run.trainer(*ASYNC, "--num-epoch", "2", *GO_ON)
            elif victim == "f":
                feeder.kill()
                feeder = run.feeder(*feed)
            elif victim == "g":
                generators.pop(0).kill()
                generators.append(run.generator())
            else:
                server.kill()
                server.restart()
            run.audit()
        for process in (trainer, feeder, *generators):
            process.ends(0)
        ended(run, 2 * rows)


def test_any_process_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    chaos(tmp_path, "ttffggr", 300)


@pytest.mark.slow
@pytest.mark.parametrize("more", range(5))
def test_any_process_may_be_killed_again_and_again(more: int, tmp_path: Path) -> None:
    chaos(tmp_path, "ttttttfffggggrrr", 900)


def test_a_run_heals_what_is_killed(tmp_path: Path) -> None:
    """The generator's prompts come back after its heartbeat limit of 20 s; by then the other three were killed too."""
    dice, out = seeded(), tmp_path / "run"
    with Stage(tmp_path) as stage:
        run = stage.millpond(
            *("run", "--out", out, *ECHO_RUN, *PACE, "--save-interval", "3", "--echo-train-seconds", "0.05"),
            *("--prompt-data", prompts(tmp_path, 400), "--num-epoch", "1"),
        )
        eventually(lambda: len(steps(out)) >= 3, "three steps")
        for victim in ["generate", *dice.sample(["train", "feed", "redis"], 3)]:
            kill = run.children()[victim] if victim != "redis" else server_of(out)
            os.kill(kill, signal.SIGKILL)
            eventually(lambda kill=kill: not alive(kill), f"the end of {victim}")
            time.sleep(dice.uniform(0, 0.5))
        said = run.ends(0)
        found = audited(stage, out)
    assert found["committed"] + found["dead"] == 400
    assert contiguous(steps(out)) >= 90
    for name in ("generator-0", "trainer", "feeder", "the embedded Redis"):
        assert f"millpond: {name} was killed; it is started again (1)" in said


def test_a_trainer_that_was_replaced_wakes_up_and_changes_nothing(redis_url: str, tmp_path: Path) -> None:
    with Parts(tmp_path, redis_url, prompts(tmp_path, 120)) as run:
        first = run.trainer(*ASYNC, "--num-epoch", "1")
        feeder, generator = run.feeder("--num-epoch", "1"), run.generator()
        eventually(run.committed, "a first commit")
        first.kill(signal.SIGSTOP)
        second = run.trainer(*ASYNC, "--num-epoch", "1", *GO_ON)
        eventually(
            lambda: run.broker.state()["epoch"] == "2" and run.broker.state()["status"] == "running", "a takeover"
        )
        first.kill(signal.SIGCONT)
        assert "has been taken over by" in first.ends(4, seconds=20)
        run.audit()
        for process in (second, feeder, generator):
            process.ends(0)
        ended(run, 120)


def test_nothing_outlives_a_killed_supervisor_and_the_run_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        run = stage.millpond(
            *("run", "--out", out, *ECHO_RUN, *PACE, "--save-interval", "3", "--echo-train-seconds", "0.05"),
            *("--prompt-data", prompts(tmp_path, 120), "--num-epoch", "1"),
        )
        eventually(lambda: len(steps(out)) >= 4, "four steps")
        left = [*run.children().values(), server_of(out)]
        assert len(left) == 4
        run.kill()
        eventually(lambda: not any(map(alive, left)), "the end of its children and of Redis", seconds=15)
        stage.millpond("run", "--resume", "--out", out).ends(0)
        assert audited(stage, out)["committed"] == 120
    assert contiguous(steps(out)) == 30
