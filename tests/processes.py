"""Real processes: `millpond` commands as a user starts them, watched with a deadline, and gone with the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import redis

from pipeline.audit import Audit, audit
from pipeline.broker import Broker
from pipeline.keys import Keys
from pipeline.server import locate
from pipeline.tether import spawn

PACE = ("--echo-latency", "lognormal:0.01:0.5")
SMALL = ("--rollout-batch-size", "4", "--n-samples-per-prompt", "2")
ECHO_RUN = ("--engine", "echo", "--train-backend", "echo", "--rm-type", "random", *SMALL)
"A run that needs no model and no time."
PATIENT = ("--max-prompt-attempts", "1000")
"No prompt dies of slowness on a busy machine."


def prompts(folder: Path, rows: int) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": f"question {i}", "label": str(i)}) + "\n" for i in range(rows)))
    return path


def own_code(folder: Path, source: str) -> dict[str, str]:
    """The environment of a user with a module `mine` of such source."""
    (folder / "mine.py").write_text(source)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def eventually(met: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """What `met` answers once it is true."""
    end = time.monotonic() + seconds
    while not (found := met()):
        assert time.monotonic() < end, f"not in {seconds:.0f} s: {what}"
        time.sleep(0.05)
    return found


@dataclass
class Started:
    """One process."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    "what it said, stdout and stderr together"

    def wait(self, seconds: float = 60.0) -> int:
        """Its exit code; a process that does not end by itself fails the test."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} has not ended in {seconds:.0f} s:\n{self.said()}") from None

    def ends(self, code: int, seconds: float = 60.0) -> str:
        """What it said, once it has ended with `code`."""
        found = self.wait(seconds)
        assert found == code, f"{self.name} ended with {found}:\n{self.said()}"
        return self.said()

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def children(self) -> dict[str, int]:
        """`train`, `feed`, `generate` -> pid, of the processes that a `millpond run` has now."""
        found = {}
        for pid in _children(self.process.pid):
            words = _command(pid)
            if "pipeline.cli" in words:
                found[words[words.index("pipeline.cli") + 1]] = pid
        return found


def _children(pid: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for t in threads for child in (t / "children").read_text().split()]
    except OSError:
        return []


def family(pid: int) -> list[int]:
    """A process and all below it, the youngest first."""
    return [*(one for child in _children(pid) for one in family(child)), pid]


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Stage:
    """Starts processes; those that are left at the end are killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Started] = []

    def millpond(self, *args: object, under: tuple[str, ...] = ("-m",), **env: str) -> Started:
        """`under`: how Python is to start the module."""
        words = [str(a) for a in args]
        output = self.folder / f"{len(self.started)}-{words[0]}.out"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MILLPOND_")}
        with output.open("wb") as file:
            process = spawn(
                [sys.executable, *under, "pipeline.cli", *words],
                env={**clean, "OMP_NUM_THREADS": "1", **env},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.started.append(Started(words[0], process, output))
        return self.started[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.started:
            if one.process.poll() is None:
                one.kill()
                one.process.wait()


class Parts(Stage):
    """One run as separate processes on a Redis that is the test's."""

    def __init__(self, folder: Path, url: str, data: Path) -> None:
        super().__init__(folder)
        self.url = url
        self.run = uuid.uuid4().hex
        self.out = folder / "run"
        self.data = data
        self.broker = Broker(url, Keys(self.run), "test", patience=30)

    def feeder(self, *more: object) -> Started:
        return self._part("feed", "--prompt-data", self.data, *more)

    def generator(self, reward: str = "random") -> Started:
        return self._part("generate", "--engine", "echo", "--rm-type", reward, *PACE)

    def trainer(self, *more: object) -> Started:
        return self._part("train", "--train-backend", "echo", "--rm-type", "random", *SMALL, *more)

    def _part(self, name: str, *more: object) -> Started:
        return self.millpond(name, "--run", self.run, "--out", self.out, *more, MILLPOND_REDIS_URL=self.url)

    def committed(self) -> int:
        return self.broker.counters().get("committed", 0)

    def audit(self) -> Audit:
        return holds(audit(self.broker))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.broker.close()


def holds(found: Audit) -> Audit:
    assert found.holds, found
    return found


def audited(stage: Stage, folder: Path) -> dict[str, int]:
    """How many prompts of a run stand where, by `millpond audit`; the run's Redis may be stopped."""
    found = json.loads(stage.millpond("audit", folder, "--json").ends(0))
    assert found["holds"]
    places: dict[str, int] = found["places"]
    return places


def server_of(folder: Path) -> int:
    """The pid of a run's embedded Redis."""
    with closing(redis.Redis.from_url(locate(folder / "redis") or "")) as client:
        info: Any = client.info("server")
    return int(info["process_id"])


def steps(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl; a last one that is half written is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def contiguous(lines: list[dict[str, float]]) -> int:
    """The number of steps, each of which has one line, under versions that only grow."""
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    versions = [line["train/weight_version"] for line in lines]
    assert versions == sorted(set(versions))
    return len(lines)
