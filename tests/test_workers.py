"""Workers come and go: rolled one after the other, scaled up and down, at work for an hour, or killed by a prompt."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from make import at_work, feeding, loop_of, run, until
from processes import ECHO_RUN, PACE, Stage, audited, contiguous, own_code, steps
from rig import LIMIT, Rig

from pipeline.keys import GROUP
from producers.engines.echo import EchoEngine
from trainer.backends.echo import EchoBackend

Play = Callable[[Rig, threading.Event], Coroutine[Any, Any, "Crew"]]
STREAMS = ("prompts", "prompts:retry")


def in_flight(rig: Rig) -> int:
    return sum(rig.raw.xpending(rig.keys[name], GROUP)["pending"] for name in STREAMS)


class Crew:
    """Generators of one event loop; each retires as SIGTERM makes it."""

    def __init__(self, rig: Rig, ended: threading.Event) -> None:
        self.rig = rig
        self.ended = ended
        self.hired = 0
        self.live: list[AsyncExitStack] = []
        self.crowd = 0
        "the most consumers beyond the living that were ever seen"

    async def join(self) -> None:
        stack = AsyncExitStack()
        await stack.enter_async_context(at_work(self.rig, EchoEngine("lognormal:0.01:0.5", 4), name=f"w{self.hired}"))
        self.hired += 1
        self.live.append(stack)
        self.look()

    async def retire(self) -> None:
        await self.live.pop(0).aclose()
        self.look()

    def look(self) -> None:
        consumers = max(len(self.rig.consumers(name)) for name in STREAMS)
        self.crowd = max(self.crowd, consumers - len(self.live))

    async def scale(self, size: int) -> None:
        while len(self.live) < size:
            await self.join()
        while len(self.live) > size:
            await self.retire()


@asynccontextmanager
async def crew_of(rig: Rig, ended: threading.Event) -> AsyncIterator[Crew]:
    """Stays until the run has ended."""
    crew = Crew(rig, ended)
    try:
        yield crew
        while not ended.is_set():  # noqa: ASYNC110 (a thread sets it)
            await asyncio.sleep(0.02)
    finally:
        await crew.scale(0)


def trained(rig: Rig, folder: Path, rows: int, play: Play) -> Crew:
    """The crew, after a run that trained on each prompt once and held nothing but age against any."""
    ended = threading.Event()
    loop = loop_of(rig, folder, EchoBackend(0.005), num_epoch=1, rollout_batch_size=4, max_prompt_attempts=1000)
    with feeding(rig, folder, rows), ThreadPoolExecutor(1) as threads:
        playing = threads.submit(asyncio.run, play(rig, ended))
        try:
            run(loop)
        finally:
            ended.set()
    assert rig.conserved()
    assert rig.ended() == set(range(rows))
    strikes = {name for name in rig.feeder().counters() if name.startswith("strikes:")}
    assert strikes <= {"strikes:stale"}
    assert not any(rig.raw.xlen(rig.keys[name]) for name in STREAMS)
    return playing.result()


def test_fifty_generators_are_rolled_over_a_run_and_no_prompt_gains_a_strike(real: Rig, tmp_path: Path) -> None:
    async def roll(rig: Rig, ended: threading.Event) -> Crew:
        async with crew_of(rig, ended) as crew:
            await crew.scale(3)
            while crew.hired < 50:
                await crew.join()
                await asyncio.sleep(0.02)
                await crew.retire()
        return crew

    crew = trained(real, tmp_path, 1500, roll)
    assert crew.hired == 50
    assert crew.crowd <= 0
    assert real.counter("recycled:shutdown") > 0


def test_one_generator_becomes_six_and_one_again_with_prompts_in_flight(real: Rig, tmp_path: Path) -> None:
    busy: list[int] = []

    async def scale(rig: Rig, ended: threading.Event) -> Crew:
        async with crew_of(rig, ended) as crew:
            for size in (1, 6, 1, 6, 1):
                await crew.scale(size)
                await until(lambda: in_flight(rig) or ended.is_set())
                busy.append(in_flight(rig))
        return crew

    crew = trained(real, tmp_path, 600, scale)
    assert crew.crowd <= 0
    assert len([n for n in busy if n]) >= 2


def test_what_takes_an_hour_is_never_taken_from_a_worker_that_lives(run: Rig) -> None:
    run.trainer()
    run.feeder(1)
    worker = run.worker()
    (lease,) = run.lease(worker, 1)
    for _ in range(3):
        run.raw.xclaim(run.keys["prompts"], GROUP, "w1", 0, [lease.entry], idle=3_600_000, justid=True)
        run.silence("w1", LIMIT - 1000)
        assert run.reap() == []
        assert run.do(worker.heartbeat({}, 0)).known
    assert run.do(worker.mine()) == [lease]
    assert run.push(worker, [lease]) == ["pushed"]


DEADLY = """
import os, signal

def reward(given):
    if given.label == "7":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
"""


@pytest.mark.slow
def test_a_prompt_that_kills_its_generator_every_time_ends_dead_and_alone(tmp_path: Path) -> None:
    """Each death takes the heartbeat limit of 20 s to be seen."""
    out = tmp_path / "run"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input": f"question {n}", "label": str(n)}) + "\n" for n in range(80)))
    with Stage(tmp_path) as stage:
        run = stage.millpond(
            *("run", "--out", out, *[w for w in ECHO_RUN if w not in ("--rm-type", "random")], *PACE),
            *("--custom-rm-path", "mine.reward", "--prompt-data", rows, "--num-epoch", "1"),
            **own_code(tmp_path, DEADLY),
        )
        run.ends(0, seconds=240)
        places = audited(stage, out)
        reasons = json.loads(stage.millpond("status", out, "--json").ends(0))["prompts"]["reasons"]
    assert places == {**dict.fromkeys(places, 0), "committed": 79, "dead": 1}
    assert reasons["dead"] == {"worker_died": 1}
    assert contiguous(steps(out)) == 20
