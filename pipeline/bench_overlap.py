"""How well generation hides training, and how much is generated to be thrown away.

Whole runs whose engine and trainer only wait. Answers take heavy-tailed times that follow from the prompt alone, so all
runs have the same work. Several run at once: they sleep.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.bench_run import Mode, Outcome, run
from pipeline.measure import Figure
from pipeline.server import EmbeddedServer

BATCH, SAMPLES = 16, 4
TRAIN = 2.0
"seconds a training step takes"
SHARED: dict[str, Any] = {
    "engine": "echo",
    "echo_response_len": 500,
    "train_backend": "echo",
    "rm_type": "random",
    "rollout_batch_size": BATCH,
    "n_samples_per_prompt": SAMPLES,
    "server_concurrency": BATCH * SAMPLES,
    "save_interval": 5,
}


def modes(steps: int, scale: float) -> list[Mode]:
    """Training bound, but for `generation` (no training) and `generation_bound`; `tail` is heavier, its groups get one
    attempt, and in `tail_kept` nothing is cancelled early. `scale` shortens all times."""
    train = TRAIN * scale
    usual, tail = f"lognormal:{1.0 * scale}:0.6", f"lognormal:{1.0 * scale}:1.0"

    def bounded(staleness: int, train: float = train, latency: str = usual) -> dict[str, Any]:
        how = {"fully_async": True, "max_weight_staleness": staleness}
        return {**how, "echo_train_seconds": train, "echo_latency": latency}

    once = {**bounded(2, latency=tail), "max_prompt_attempts": 1}
    return [
        Mode("lock_step", {"echo_train_seconds": train, "echo_latency": usual}, max(5, steps // 3)),
        Mode("one_step_off", bounded(1), steps),
        Mode("fully_async", bounded(4), steps),
        Mode("generation", {"fully_async": True, "queue_capacity": 4 * BATCH, "echo_latency": usual}, steps),
        Mode("generation_bound", bounded(8, train / 4), steps),
        Mode("tail", once, steps),
        Mode("tail_kept", once, steps, cancels=False),
    ]


def measure(quick: bool) -> Iterator[Figure]:
    scale = 0.02 if quick else 1.0
    return figures(_outcomes(modes(5 if quick else 20, scale)), TRAIN * scale)


def figures(found: Mapping[str, Outcome], train: float) -> Iterator[Figure]:
    """`found` by the name of the mode; `train` in seconds."""
    generation = found["generation"].step
    yield Figure("train", train, "s")
    yield Figure("generation", generation, "s")
    aims = {"lock_step": None, "one_step_off": None, "fully_async": 1.05, "generation_bound": 1.05}
    for name in (*aims, "tail", "tail_kept"):
        yield Figure(f"{name}_step", found[name].step, "s")
    for name, aim in aims.items():
        longest = max(generation, train / 4 if name == "generation_bound" else train)
        yield Figure(f"{name}_over_longest", found[name].step / longest, "x", at_most=aim)
    for name in ("one_step_off", "fully_async", "tail", "tail_kept"):
        share = Figure(f"{name}_never_trained", 100 * found[name].wasted, "%")
        yield replace(share, at_most=1.0) if name == "fully_async" else share
        yield Figure(f"{name}_stale", found[name].stale, "groups")
        yield Figure(f"{name}_cancelled", found[name].cancelled, "requests")


def _outcomes(wanted: list[Mode]) -> dict[str, Outcome]:
    stop = threading.Event()
    with (
        TemporaryDirectory(prefix="millpond-bench-") as folder,
        EmbeddedServer(Path(folder) / "redis") as server,
        ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool,
    ):
        runs = {mode.name: pool.submit(run, mode, SHARED, Path(folder), server.url, stop) for mode in wanted}
        try:
            return {name: started.result() for name, started in runs.items()}
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
