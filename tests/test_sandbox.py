"""Grading where it can be killed: what hangs, eats memory or dies is unscored, and costs its siblings nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import GenerateConfig
from pipeline.errors import RewardError, UsageError
from producers.rewards import RewardInput, opened
from producers.rewards.forked import Limits
from producers.rewards.frames import HEAD, LARGEST, Frames, length, pack
from producers.rewards.sandbox import Sandbox
from producers.rewards.self_test import KNOWN, self_test

ROOT = Path(__file__).parents[1]
POWER_TOWER = "9^{9^{9^{9}}}"


@asynccontextmanager
async def sandbox(grader: str, workers: int, seconds: float, mib: int) -> AsyncIterator[Sandbox]:
    made = Sandbox(grader, workers, Limits(seconds, mib << 20))
    try:
        yield made
    finally:
        await made.close()


def run(work: Callable[[Sandbox], Awaitable[None]], **how: Any) -> None:
    async def main() -> None:
        chosen = {"grader": "probe", "workers": 2, "seconds": 0.2, "mib": 256, **how}
        async with asyncio.timeout(60), sandbox(**chosen) as made:
            await work(made)

    asyncio.run(main())


@pytest.mark.parametrize(("act", "value"), [("spin", 1), ("sleep", 60), ("take", 2000), ("raise", 1), ("die", 1)])
def test_what_does_not_end_well_is_unscored_and_the_next_is_graded(act: str, value: float) -> None:
    async def work(made: Sandbox) -> None:
        assert await made.grade(act=act, value=value) is None
        assert await made.grade(act="give", value=7.0) == 7.0
        assert made.unscored == 1

    run(work)


def test_one_that_ran_out_of_memory_is_not_taken_for_wrong() -> None:
    """A parser that swallows MemoryError says "not equal"."""

    async def work(made: Sandbox) -> None:
        assert await made.grade(act="take", value=100) == 0.0
        assert await made.grade(act="take", value=200) is None

    run(work, mib=300, seconds=2.0)


def test_hanging_answers_hold_up_none_but_each_other() -> None:
    """10 of 200 hang, with 2 workers and a limit that one of them alone would use up before the others were done."""

    async def work(made: Sandbox) -> None:
        async def grade(n: int) -> tuple[bool, float]:
            hangs = n % 20 == 5
            score = await made.grade(act="spin" if hangs else "give", value=float(n))
            assert score == (None if hangs else n)
            return hangs, time.monotonic()

        ends = await asyncio.gather(*(grade(n) for n in range(200)))
        hung = sorted(end for hangs, end in ends if hangs)
        assert max(end for hangs, end in ends if not hangs) < hung[4]
        assert len(hung) == made.unscored == 10

    run(work, seconds=0.4)


def test_what_nobody_waits_for_any_more_is_stopped() -> None:
    async def work(made: Sandbox) -> None:
        await made.start()
        waiting = [asyncio.create_task(made.grade(act="sleep", value=1000.0)) for _ in range(8)]
        await asyncio.sleep(0.1)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert await made.grade(act="give", value=3.0) == 3.0

    run(work, workers=1, seconds=1000.0)


def test_graders_are_replaced_after_a_while_and_when_killed_from_outside() -> None:
    async def work(made: Sandbox) -> None:
        pids = {await made.grade(act="pid") for _ in range(1001)}
        assert len(pids) == 3
        last = await made.grade(act="pid")
        os.kill(int(last or 0), signal.SIGKILL)
        assert await made.grade(act="give", value=2.0) == 2.0

    run(work, workers=1)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # a zombie has none
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_a_host_that_dies_is_started_again_and_what_it_had_is_graded_once_more() -> None:
    async def work(made: Sandbox) -> None:
        first = await made.grade(act="pid")
        (host,) = [pid for pid in children(os.getpid()) if int(first or 0) in children(pid)]
        waiting = asyncio.create_task(made.grade(act="sleep", value=1.0))
        await asyncio.sleep(0.1)
        os.kill(host, signal.SIGKILL)
        assert await waiting == 1.0
        assert not await asyncio.to_thread(alive, int(first or 0))

    run(work, seconds=20.0)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_a_host_and_what_it_grades_end_with_the_generator_however_that_ends() -> None:
    program = """
import asyncio
from producers.rewards.forked import Limits
from producers.rewards.sandbox import Sandbox
async def main():
    made = Sandbox("probe", 1, Limits(1000.0, 1 << 28))
    print(int(await made.grade(act="pid")), flush=True)
    await made.grade(act="spin")
asyncio.run(main())
"""
    generator = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    with generator, generator.stdout or nullcontext() as said:
        grader = int(said.readline())  # type: ignore[union-attr]
        (host,) = children(generator.pid)
        assert children(host) == [grader]
        generator.kill()
    deadline = time.monotonic() + 20
    while (alive(host) or alive(grader)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(host)
    assert not alive(grader)


def test_a_host_that_keeps_dying_is_an_error_and_no_endless_wait() -> None:
    async def work(made: Sandbox) -> None:
        for _ in range(5):
            await made.start()
            (host,) = children(os.getpid())
            os.kill(host, signal.SIGKILL)
            while await asyncio.to_thread(alive, host):  # noqa: ASYNC110 (a process)
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
        with pytest.raises(RewardError, match="probe: the grading host died 5 times without one result"):
            await made.grade(act="give")

    run(work)


def test_a_grader_that_is_none_is_refused() -> None:
    async def work(made: Sandbox) -> None:
        await made.start()

    with pytest.raises(UsageError, match="there is no grader 'nonsense'"):
        run(work, grader="nonsense")


def given(response: str, label: object, **metadata: object) -> RewardInput:
    return RewardInput("q", label, dict(metadata), response, "completed", 0, 1)  # type: ignore[arg-type]


def test_a_power_tower_in_a_group_leaves_the_others_their_rewards() -> None:
    answers = [r"\boxed{\frac{10}{2}}", rf"\boxed{{{POWER_TOWER}}}", r"\boxed{\frac{9}{2}}", r"\boxed{10^{10^{10}}}"]

    async def main() -> None:
        async with opened(GenerateConfig(rm_type="math", rm_timeout=0.3), False) as scorer:
            assert await scorer.score_group([given(a, 5) for a in answers]) == [1.0, None, 0.0, None]

    asyncio.run(main())


class Wrong:
    """A scorer that finds everything wrong, as graders do whose alarm signals fail in a thread."""

    async def score_group(self, inputs: list[RewardInput]) -> list[float | None]:
        return [0.0] * len(inputs)


@pytest.mark.parametrize("name", KNOWN)
def test_a_grader_that_fails_its_self_test_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"--rm-type {name}: the self-test fails: .* should give 1.0, and gives 0.0"):
        asyncio.run(self_test(name, Wrong()))


def test_frames_come_apart_as_they_were_put_together() -> None:
    values = [1, {"a": [None, "é\ud800"]}, "x" * 100_000]
    frames, data = Frames(), b"".join(pack(value) for value in values)
    assert [value for at in range(0, len(data), 7) for value in frames.take(data[at : at + 7])] == values
    with pytest.raises(ValueError, match="a frame of"):
        length((LARGEST + 1).to_bytes(HEAD, "big"))
