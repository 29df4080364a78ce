"""One whole run for the benchmark of overlap: a feeder, a generator and a trainer that only wait, as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.agreed import Agreed
from pipeline.broker import Broker
from pipeline.errors import MillpondError
from pipeline.keys import Keys
from pipeline.ledger import get_bit
from pipeline.tether import spawn

LIMIT = 600.0
"Seconds after which a run is given up."


@dataclass(frozen=True)
class Mode:
    """What is run."""

    name: str
    options: Mapping[str, Any]
    "by field, over those that all runs share"
    steps: int
    "batches of prompts"
    cancels: bool = True
    "workers cancel early what can no longer be fresh enough"


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    step: float
    "seconds of a step, over the middle of the run"
    wasted: float
    "share of the sampled tokens that were never trained on"
    stale: int
    "groups that the trainer found too old"
    cancelled: int
    "requests"


def run(mode: Mode, shared: Mapping[str, Any], root: Path, url: str, stop: threading.Event) -> Outcome:
    """All of `mode.steps` batches, from the start to the end of the data. MillpondError when a process fails or is
    late, and soon after `stop` is set."""
    options = {**shared, **mode.options}
    folder = root / mode.name
    folder.mkdir()
    rows = mode.steps * options["rollout_batch_size"]
    prompts, config = folder / "prompts.jsonl", folder / "config.toml"
    prompts.write_text("".join(json.dumps({"input": _prompt(i)}) + "\n" for i in range(rows)))
    options |= {"run": mode.name, "out": str(folder), "prompt_data": str(prompts), "num_epoch": 1}
    config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items()))
    with closing(Broker(url, Keys(mode.name), "bench")) as broker:
        _processes(mode, folder, broker, url, stop)
        bits: Any = broker.client.get(broker.keys["done:committed"])
    return _outcome(folder, bits or b"", rows)


def _processes(mode: Mode, folder: Path, broker: Broker, url: str, stop: threading.Event) -> None:
    """From the first process to the end of the last."""
    config = ("--config", str(folder / "config.toml"))
    with _child(folder, url, "pipeline.cli", "train", *config) as trainer:
        _until(lambda: broker.state().get("status") == "running", trainer, folder, stop)
        if not mode.cancels:
            _never_cancel(broker)
        counting = ("producers.engines.echo_count", str(folder / "sampled.json"))
        with _child(folder, url, *counting, *config) as generator, _child(folder, url, "pipeline.cli", "feed", *config):
            _until(lambda: trainer.poll() == 0, trainer, folder, stop)
            _until(lambda: generator.poll() == 0, generator, folder, stop)


def _prompt(id: int) -> str:
    return f"prompt {id}"


@contextmanager
def _child(folder: Path, url: str, module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m module arguments`, ended with the block."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MILLPOND_")}
    env = {**own, "MILLPOND_REDIS_URL": url, "MILLPOND_SUPERVISED": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *arguments]
    with (folder / "errors").open("ab") as errors:
        child = spawn(command, env=env, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _until(met: Callable[[], bool], process: subprocess.Popen[bytes], folder: Path, stop: threading.Event) -> None:
    """Returns when `met` says so; MillpondError when `process` has ended before, or time is over."""
    until = time.monotonic() + LIMIT
    while True:
        code = process.poll()  # before `met`, which may be about its end
        if met():
            return
        if code is not None or time.monotonic() > until or stop.is_set():
            how = "is not done" if code is None else f"ended with {code}"
            said = (folder / "errors").read_text(errors="replace")[-2000:]
            raise MillpondError(f"a process of the benchmark's run {folder.name} {how}:\n{said}")
        stop.wait(0.1)


def _never_cancel(broker: Broker) -> None:
    """Only workers read the bound from the key `config`: the trainer has its own, and room was computed before."""
    text: Any = broker.client.get(broker.keys["config"])
    rules = Agreed.model_validate_json(text).model_copy(update={"max_weight_staleness": None})
    broker.client.set(broker.keys["config"], rules.model_dump_json())


def _outcome(folder: Path, committed: bytes, rows: int) -> Outcome:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    edge = max(1, len(lines) // 5)
    middle = lines[edge:-edge] if len(lines) > 3 else lines
    count = json.loads((folder / "sampled.json").read_text())
    trained = sum(count["prompts"][_prompt(i)] for i in range(rows) if get_bit(committed, i))
    return Outcome(
        step=(middle[-1]["time"] - middle[0]["time"]) / max(1, len(middle) - 1),
        wasted=round(1 - trained / count["sampled"], 6) + 0.0,  # never -0.0
        stale=sum(line["rollout/fully_async/stale_groups_filtered"] for line in lines),
        cancelled=count["cancelled"],
    )
