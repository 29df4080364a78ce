"""SIGTERM to a stage started as in a container, without a shell: it says so and ends in time, whatever it does."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from make import feed
from processes import ECHO_RUN, PACE, Parts, Stage, Started, alive, eventually, prompts, server_of
from rig import Rig
from test_run_sglang import model

from pipeline.causes import causes
from pipeline.code import digest
from pipeline.config import GenerateConfig
from pipeline.flags import parse
from pipeline.glance import look
from pipeline.join import Place
from producers import cli

GRACE = 60.0
"Seconds; orchestrators give 30, on machines that are less busy."
GENERATE = ("generate", "--engine", "echo", "--rm-type", "random", *PACE)


def stopped(started: Started, code: int) -> str:
    """What it said, once it was asked to stop and has ended."""
    started.kill(signal.SIGTERM)
    return started.ends(code, GRACE)


def test_who_waits_for_redis_ends(tmp_path: Path) -> None:
    data = prompts(tmp_path, 4)
    train = ("--train-backend", "echo", "--rm-type", "random", "--num-rollout", "1")
    commands: tuple[tuple[Any, ...], ...] = (
        ("feed", "--run", "x", "--prompt-data", data),
        (*GENERATE, "--run", "x"),
        ("train", "--run", "x", "--out", tmp_path / "trained", *train),
        ("run", "--out", tmp_path / "run", *ECHO_RUN, "--prompt-data", data, "--num-epoch", "1"),
        ("status", "--run", "x", "--redis-patience", "300"),
    )
    with Stage(tmp_path) as stage:
        url = f"unix://{tmp_path}/none"
        for one in [stage.millpond(*words, MILLPOND_REDIS_URL=url) for words in commands]:
            eventually(lambda one=one: "Redis is away" in one.said(), f"{one.name} waits")
            assert "asked to stop" in stopped(one, 130)
    assert not (tmp_path / "run").exists()


def test_who_waits_for_a_trainer_or_for_groups_ends(redis_url: str, tmp_path: Path) -> None:
    with Parts(tmp_path, redis_url, prompts(tmp_path, 40)) as run:
        generator, feeder = run.generator(), run.feeder()
        eventually(lambda: run.broker.cursor() > 0, "prompts")
        eventually(lambda: connected(run, "worker"), "a generator")
        stopped(generator, 0)
        stopped(feeder, 0)
        trainer = run.trainer("--num-rollout", "3")
        eventually(lambda: run.broker.state().get("doing") == "waiting for groups", "a trainer that waits")
        assert "asked to stop" in stopped(trainer, 130)
        assert run.broker.state()["status"] == "draining"


def test_a_stop_before_there_was_anything_to_tell_is_heard(real: Rig) -> None:
    """A signal that came between a process's first connection and its event loop."""
    words = [*GENERATE[1:], "--run", real.keys.run, "--redis-url", real.url]
    asked = threading.Event()
    asked.set()
    generating = cli._generate(parse(GenerateConfig, words, {}, "test"), Place(real.url, real.keys.run, None), asked)
    assert asyncio.run(asyncio.wait_for(generating, 30)) == 0


def connected(run: Parts, role: str) -> bool:
    return any(c["name"] == f"millpond:{run.run}:{role}" for c in run.broker.client.client_list())


def test_who_waits_for_space_in_the_list_hands_back_and_ends(real: Rig, tmp_path: Path) -> None:
    real.trainer(queue_capacity=1, code={"rm_type": digest("random")})
    feed(real, 6)
    with Stage(tmp_path) as stage:
        generator = stage.millpond(*GENERATE, "--run", real.keys.run, MILLPOND_REDIS_URL=real.url)
        eventually(lambda: real.raw.hget(real.keys["state"], "full"), "a full list")
        said = stopped(generator, 0)
    assert "everything is handed back" in said
    assert real.standing().pending == 0
    assert not real.raw.exists(real.keys["workers"])
    assert {e["strikes"] for e in real.entries()} <= {"0"}
    assert real.conserved()


@pytest.mark.slow
def test_who_waits_for_an_engine_is_seen_to_and_ends(real: Rig, tmp_path: Path) -> None:
    trainer = real.trainer(code={"rm_type": digest("random")})
    feed(real, 2)
    engine = ("--engine", "sglang", "--engine-url", "http://127.0.0.1:9", "--hf-checkpoint", model(tmp_path / "model"))
    with Stage(tmp_path) as stage:
        words = ("generate", *engine, "--rm-type", "random", "--run", real.keys.run)
        generator = stage.millpond(*words, MILLPOND_REDIS_URL=real.url)
        eventually(lambda: "engines start" in [c.name for c in causes(look(trainer))], "an engine to wait for", 200)
        assert "asked to stop" in stopped(generator, 130)
    assert not real.raw.exists(real.keys["workers"])


def test_a_trainer_ends_its_step_saves_and_ends(redis_url: str, tmp_path: Path) -> None:
    with Parts(tmp_path, redis_url, prompts(tmp_path, 40)) as run:
        run.feeder()
        run.generator()
        trainer = run.trainer("--echo-train-seconds", "1.5", "--save-interval", "50", "--num-rollout", "9")
        eventually(lambda: run.broker.state().get("doing", "").startswith("training"), "a step")
        assert "asked to stop" in stopped(trainer, 130)
        assert run.committed() == 4
        assert run.broker.state()["status"] == "draining"
        run.audit()


@pytest.mark.parametrize("when", ["at once", "at work"])
def test_a_run_ends_with_all_it_has_started(tmp_path: Path, when: str) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        data = prompts(tmp_path, 400)
        pace = (*PACE, "--echo-train-seconds", "0.2", "--num-epoch", "1")
        run = stage.millpond("run", "--out", out, *ECHO_RUN, "--prompt-data", data, *pace)
        eventually(lambda: (out / "redis" / "socket").exists(), "its Redis")
        left = []
        if when == "at work":
            eventually(lambda: (out / "metrics.jsonl").exists(), "a step")
            left = [*run.children().values(), server_of(out)]
        said = stopped(run, 130)
    assert ("asked to stop" if when == "at once" else "the trainer saves first") in said or "stopping" in said
    assert not any(map(alive, left))
