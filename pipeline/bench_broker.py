"""What a prompt's life costs: beside a bare list, at a deep queue, and among many waiting workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from pipeline.bench_life import Bare, Life
from pipeline.errors import MillpondError
from pipeline.measure import Figure, ratio, turns
from pipeline.server import EmbeddedServer
from pipeline.tether import spawn

KB = 1 << 10
SETTLE = 0.3
"Seconds in which waiting workers have answered an announcement."


def measure(quick: bool) -> Iterator[Figure]:
    with TemporaryDirectory(prefix="millpond-bench-") as folder:
        yield from _beside_a_list(Path(folder), "64k", 64 * KB, 2.0, (2, 2) if quick else (32, 150))
        yield from _beside_a_list(Path(folder), "1m", KB * KB, 1.5, (2, 2) if quick else (8, 40))
        yield from _deep(Path(folder), 100 if quick else 10_000, 2 if quick else 200)
        yield from _crowded(Path(folder), 10 if quick else 500, 2 if quick else 20)


def _beside_a_list(folder: Path, name: str, size: int, aim: float, plan: tuple[int, int]) -> Iterator[Figure]:
    """`plan`: prompts that go together, rounds."""
    batch, rounds = plan
    with EmbeddedServer(folder / name) as server, Life(server.url, size, batch) as life:
        bare = Bare(life)
        seconds = turns({"life": life.round, "bare": bare.round}, rounds)
        for side in seconds:
            yield Figure(f"{side}_{name}", median(seconds[side]) / batch * 1e6, "us")
        yield Figure(f"life_over_bare_{name}", ratio(seconds["life"], seconds["bare"]), "x", at_most=aim)
        for verb, times in life.phases.items():
            yield Figure(f"{verb}_{name}", median(times) / batch * 1e6, "us")


def _deep(folder: Path, depth: int, rounds: int, batch: int = 32) -> Iterator[Figure]:
    with (
        EmbeddedServer(folder / "deep") as server,
        Life(server.url, KB, batch) as shallow,
        Life(server.url, KB, batch) as deep,
    ):
        shallow.fill(10)
        deep.fill(depth)
        seconds = turns({"shallow": shallow.round, "deep": deep.round}, rounds)
    yield Figure("life_shallow", median(seconds["shallow"]) / batch * 1e6, "us")
    yield Figure("life_deep", median(seconds["deep"]) / batch * 1e6, "us")
    yield Figure("deep_over_shallow", ratio(seconds["deep"], seconds["shallow"]), "x", at_most=1.1)


def _crowded(folder: Path, workers: int, rounds: int) -> Iterator[Figure]:
    """Two servers, so that what the waiting workers take of this machine's processors slows both sides down."""
    lives: dict[int, Life] = {}
    with ExitStack() as stack:
        for count in (1, workers):
            server = stack.enter_context(EmbeddedServer(folder / f"workers-{count}"))
            life = lives[count] = stack.enter_context(Life(server.url, KB, workers))
            life.feed_ahead()
            life.fill(10)
            stack.enter_context(_waiting(server.url, life.keys.run, count))
        idle = _idle(lives[workers], 0.2 if workers < 500 else 5.0) / workers
        used: dict[str, list[float]] = {}
        sides = {str(count): _settled(life, used.setdefault(str(count), [])) for count, life in lives.items()}
        turns(sides, rounds)
    alone, many = used["1"][1:], used[str(workers)][1:]
    yield Figure("life_one_worker", median(alone) / workers * 1e6, "us")
    yield Figure("life_many_workers", median(many) / workers * 1e6, "us")
    yield Figure("many_workers_over_one", ratio(many, alone), "x", at_most=1.1)
    yield Figure("idle_worker", 100 * idle, "% of a core")


def _settled(life: Life, seconds: list[float]) -> Callable[[], None]:
    def round() -> None:
        begin = time.perf_counter()
        life.round()
        seconds.append(time.perf_counter() - begin)
        time.sleep(SETTLE)

    return round


def _idle(life: Life, seconds: float) -> float:
    """Share of a core that the server uses while nothing happens."""
    before = life.server_seconds()
    time.sleep(seconds)
    return (life.server_seconds() - before) / seconds


@contextmanager
def _waiting(url: str, run: str, count: int) -> Iterator[None]:
    """A process with `count` workers that wait, once all do."""
    command = [sys.executable, "-m", "pipeline.bench_waiters", run, str(count)]
    process = spawn(command, env={**os.environ, "MILLPOND_REDIS_URL": url}, stdout=subprocess.PIPE)
    try:
        if not process.stdout or process.stdout.readline() != b"ready\n":
            raise MillpondError("the waiting workers of the benchmark did not start")
        yield
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
