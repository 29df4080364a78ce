"""Some deaths by themselves, with what is said of them; tests/chaos/test_chaos.py has all of them at random."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from plan import Setting
from processes import ECHO_RUN, PACE, Parts, Stage, alive, audited, contiguous, eventually, prompts, server_of, steps
from troupe import Troupe

ASYNC = ("--fully-async", "--max-weight-staleness", "2", "--save-interval", "3", "--echo-train-seconds", "0.05")


def test_a_trainer_that_was_replaced_wakes_up_and_changes_nothing(redis_url: str, tmp_path: Path) -> None:
    with Parts(tmp_path, redis_url, prompts(tmp_path, 120)) as run:
        first = run.trainer(*ASYNC, "--num-epoch", "1")
        feeder, generator = run.feeder("--num-epoch", "1"), run.generator()
        eventually(run.committed, "a first commit")
        first.kill(signal.SIGSTOP)
        second = run.trainer(*ASYNC, "--num-epoch", "1", "--resume", "--take-over")
        eventually(
            lambda: run.broker.state()["epoch"] == "2" and run.broker.state()["status"] == "running", "a takeover"
        )
        first.kill(signal.SIGCONT)
        assert "has been taken over by" in first.ends(4)
        run.audit()
        for process in (second, feeder, generator):
            process.ends(0, seconds=240)
        found = run.audit()
    assert found.places["committed"] + found.places["dead"] == 120
    lines = steps(run.out)
    contiguous(lines)
    assert sum(line["rollout/groups"] for line in lines) == found.places["committed"]


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
        eventually(lambda: not any(map(alive, left)), "the end of its children and of Redis")
        stage.millpond("run", "--resume", "--out", out).ends(0, seconds=240)
        assert audited(stage, out)["committed"] == 120
    assert contiguous(steps(out)) == 30


def test_a_redis_that_is_killed_while_it_starts_again_is_started_once_more(tmp_path: Path) -> None:
    with Troupe(tmp_path, Setting(rows=160, pace=0.05)) as scene:
        scene.begin()
        before = set(scene.children())
        os.kill(scene.pid("redis") or 0, signal.SIGKILL)
        end = time.monotonic() + 60
        while not (born := set(scene.children()) - before):
            assert time.monotonic() < end, "no other Redis"
        os.kill(born.pop(), signal.SIGKILL)
        said = scene.run.ends(0, seconds=240)
        found, _ = scene.finish()
    assert "the embedded Redis was killed; it is started again (2)" in said
    assert found.holds
    assert found.places["committed"] + found.places["dropped"] == 160


@pytest.mark.slow
def test_a_redis_that_dies_while_the_run_ends_is_there_for_the_last_words(tmp_path: Path) -> None:
    """A generator that is stopped keeps the supervisor waiting for half a minute after the trainer has ended."""
    with Troupe(tmp_path, Setting(rows=120)) as scene:
        scene.begin()
        os.kill(scene.pid("generate-0") or 0, signal.SIGSTOP)
        eventually(lambda: sum(map(alive, scene.children())) == 2, "the end of all but Redis and this one", seconds=120)
        os.kill(scene.pid("redis") or 0, signal.SIGKILL)
        said = scene.run.ends(0, seconds=90)
        found, _ = scene.finish()
    assert f"Prompts: {found.places['committed']} committed" in said
    assert found.holds
