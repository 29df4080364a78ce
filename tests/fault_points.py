"""Trainers that die, or stop, just before a chosen touch of the outside: a command to Redis, its reply, a change to the
disk. The n-th touch is known by counting, so all of them can be gone through.

A `Forge` is a process without threads that forks them: a life costs milliseconds. Each is `millpond train` as a user
starts it, but for the backend, whose weights are a list of what it was given. Touches are seen by the interpreter's own
profiler, as calls into C, so the product knows nothing of them.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import redis
from processes import PATIENT

from pipeline.cli import main
from pipeline.keys import Keys
from pipeline.types import Group
from trainer import backends
from trainer import cli as trainer_cli
from trainer.backends.base import At
from trainer.backends.echo import EchoBackend

TOUCHES = {
    *("connect", "sendall", "recv_into"),
    *("mkdir", "rename", "replace", "chmod", "fsync", "unlink", "rmdir"),
    *("write", "writelines", "flush"),
}
IN_MEMORY = (str, bytes, io.BytesIO, io.StringIO)
"What has methods of these names and touches nothing."
PRELOADED = (trainer_cli,)
"Imported before the forks."
PRODUCT = tuple(f"{os.sep}{package}{os.sep}" for package in ("pipeline", "consumers", "trainer"))
STOPPED = "stopped"


def waits(client: redis.Redis, keys: Keys, size: int) -> bool:
    """Whether a batch is queued, or no group will come any more."""
    state: Any = client.hmget(keys["state"], "feed_total")
    if client.llen(keys["groups"]) >= size:
        return True
    left = sum(client.xlen(keys[name]) for name in ("prompts", "prompts:retry")) + client.scard(keys["refeed"])
    return left == 0 and state[0] == (client.get(keys["feed"]) or b"0")


class Points:
    """Counts the touches of this thread; before the `at`-th of those whose label holds `where` it sends this process
    the signal `number`."""

    def __init__(self, at: int, where: str, number: int, ready: Callable[[], None]) -> None:
        self.at = at
        self.where = where
        self.number = number
        self.ready = ready
        self.count = 0
        self.labels: list[str] = []

    def __call__(self, frame: FrameType, event: str, call: Any) -> None:
        if event != "c_call" or call.__name__ not in TOUCHES or isinstance(call.__self__, IN_MEMORY):
            return
        if "logging" in frame.f_code.co_filename:
            return
        if call.__name__ == "sendall" and within("TrainerBroker._pop", frame):
            self.ready()
        self.labels.append(f"{label(frame)} {call.__name__}")
        self.count += self.where in self.labels[-1]
        if self.count == self.at:
            os.kill(os.getpid(), self.number)


def within(name: str, frame: FrameType | None) -> bool:
    while frame and frame.f_code.co_qualname != name:
        frame = frame.f_back
    return frame is not None


def label(frame: FrameType | None) -> str:
    """Where in the product it is: `Loop.save Workshop.making`."""
    found: list[str] = []
    while frame:
        code = frame.f_code
        if any(part in code.co_filename for part in PRODUCT) and not code.co_name.startswith("<"):
            found.append(code.co_qualname)
        frame = frame.f_back
    return " ".join(found[-4::-1][:5])


class Recorder(EchoBackend):
    """Its weights are the list of batches that they were trained on."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.batches: list[list[int]] = []

    def train(self, groups: Sequence[Group], step: int, at: At | None = None) -> dict[str, float]:
        if step != len(self.batches):
            raise ValueError(f"step {step} on weights of step {len(self.batches)}")
        self.batches.append([g.prompt.id for g in groups])
        return super().train(groups, step, at)

    def save_weights(self, folder: Path, form: str = "hf") -> None:
        (folder / "model.safetensors").write_text(json.dumps(self.batches))

    def save(self, folder: Path) -> None:
        super().save(folder)
        self.save_weights(folder)

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.batches = trained_on(folder)


def trained_on(folder: Path) -> list[list[int]]:
    """The batches that weights of a Recorder contain."""
    batches: list[list[int]] = json.loads((folder / "model.safetensors").read_text())
    return batches


# -- the forked


def live(args: list[str], at: int, where: str, number: int, labels: str) -> int:
    """One trainer's life, in a child of the forge. It meets batches that are complete, so that each step has the same
    touches. Leaves the labels of its touches in a file, if it lives to the end."""
    words = dict(zip(args[1::2], args[2::2], strict=False))
    client, keys = redis.Redis.from_url(os.environ["MILLPOND_REDIS_URL"]), Keys(words["--run"])
    size = int(words["--rollout-batch-size"])

    def ready() -> None:
        end = time.monotonic() + 20
        while not waits(client, keys, size) and time.monotonic() < end:
            time.sleep(0.001)

    backends.BUILDERS["echo"] = lambda config, tis: (Recorder(), None)
    points = Points(at, where, number, ready)
    sys.setprofile(points)
    try:
        return main(args)
    finally:
        sys.setprofile(None)
        Path(labels).write_text(json.dumps(points.labels))


def fork(life: dict[str, Any]) -> int:
    if pid := os.fork():
        return pid
    code = 70
    try:
        os.dup2(2, 1)
        code = live(**life)
    except SystemExit as end:
        code = int(end.code or 0)
    except Exception:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def fate(pid: int) -> int | str:
    """Exit code, minus the signal's number, or STOPPED; whatever comes first."""
    _, status = os.waitpid(pid, os.WUNTRACED)
    return STOPPED if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)


def serve() -> None:
    """Forks and waits as it is told, a line at a time."""
    for line in sys.stdin:
        serial, asked = json.loads(line)
        print(json.dumps([serial, fork(asked) if isinstance(asked, dict) else fate(asked)]), flush=True)


# -- the test's side


class Forge:
    """The process that forks."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        "its working folder, and where its output goes"
        self.serial = 0
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MILLPOND_")}
        with (folder / "forge.out").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                env={**clean, "MILLPOND_REDIS_URL": url},
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )

    def ask(self, what: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.serial += 1
        self.process.stdin.write(json.dumps([self.serial, what]) + "\n")
        self.process.stdin.flush()
        answered = 0
        while answered < self.serial:  # a test that ran out of time may have left an answer behind
            answered, answer = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        self.process.communicate()


@dataclass
class Life:
    """A trainer that was started."""

    forge: Forge
    pid: int
    over: bool = False

    def fate(self) -> int | str:
        """Once it has ended or stopped."""
        found: int | str = self.forge.ask(self.pid)
        self.over = found != STOPPED
        return found

    def send(self, number: int) -> None:
        os.kill(self.pid, number)


class Trainers:
    """Those of one run over one epoch, with batches of two groups of two, a checkpoint every two steps. What is left of
    them at the end is killed."""

    def __init__(self, forge: Forge, run: str, folder: Path) -> None:
        self.forge = forge
        self.folder = folder
        self.out = folder / "run"
        self.args = ["train", "--run", run, "--out", str(self.out), "--train-backend", "echo", "--rm-type", "random"]
        self.args += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--save-interval", "2"]
        self.args += ["--num-epoch", "1", *PATIENT]
        self.lives: list[Life] = []

    def start(self, *more: object, at: int = 0, where: str = "", number: int = signal.SIGKILL) -> Life:
        """One that is sent `number` before the `at`-th touch whose label holds `where`; 0: it is left alone."""
        args = [*self.args, *map(str, more)]
        life = {"args": args, "at": at, "where": where, "number": number, "labels": str(self.folder / "labels")}
        self.lives.append(Life(self.forge, self.forge.ask(life)))
        return self.lives[-1]

    def labels(self) -> list[str]:
        """Of the touches of the last life that came to its end."""
        found: list[str] = json.loads((self.folder / "labels").read_text())
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for life in self.lives:
            if not life.over:
                life.send(signal.SIGKILL)
        if kind:
            print((self.forge.folder / "forge.out").read_text(errors="replace")[-4000:])


if __name__ == "__main__":
    serve()
