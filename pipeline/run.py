"""`millpond run`: a whole run on one machine: starts Redis, feeder, generators and trainer as processes, watches them.

A process that was killed is started again, a bounded number of times; one that ends with an error ends the run with
that error. Ctrl-C stops in order: the trainer saves, generators hand back, Redis keeps the data; twice: at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline.broker import Broker
from pipeline.children import Child, end
from pipeline.config import RunConfig
from pipeline.connect import verify
from pipeline.errors import MillpondError, RunExists, ServerError
from pipeline.flags import dump
from pipeline.keys import Keys
from pipeline.log import setup
from pipeline.modes import check, idle
from pipeline.plan import make_files, make_folder, resolve
from pipeline.progress import Progress, Tail
from pipeline.server import EmbeddedServer, cli_line, masked

log = logging.getLogger(__name__)

GRACE = 30.0
"Seconds a process has to end by itself."


def main(argv: list[str]) -> int:
    """Train a model on this machine."""
    config = resolve(argv)
    for warning in check(config):
        sys.stderr.write(f"millpond: warning: {warning}\n")
    folder = make_folder(config)
    make_files(config, folder)
    (folder / "config.toml").touch(mode=0o600)
    (folder / "config.toml").write_text(dump(config, idle(config)))
    setup("run", folder, terminal=False)
    with _redis(config, folder) as (url, server):
        return Supervisor(config, folder, url, server).run()


@contextlib.contextmanager
def _redis(config: RunConfig, folder: Path) -> Iterator[tuple[str, EmbeddedServer | None]]:
    """The URL given, or an embedded server for as long as the run lasts."""
    if config.redis_url:
        sys.stdout.write(f"Redis: {masked(config.redis_url)}\n")
        yield config.redis_url, None
        return
    with EmbeddedServer(folder / "redis", config.redis_durability) as server:
        sys.stdout.write(f"Redis: {cli_line(folder / 'redis')}\n")
        yield server.url, server


@dataclass
class Supervisor:
    """Watches the processes of one run."""

    config: RunConfig
    folder: Path
    url: str
    server: EmbeddedServer | None
    interrupts: int = 0
    redis_restarts: int = 0

    def run(self) -> int:
        keys = Keys(self.config.run or "")
        self.broker = Broker(self.url, keys, "run", self.config.redis_patience)
        for warning in verify(self.broker.client):
            sys.stderr.write(f"millpond: warning: {warning}\n")
        if self.broker.exists() and not self.config.resume:
            raise RunExists(f"run {keys.run} is in this Redis already: --resume goes on with it, another --run is new")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)
        sys.stdout.write(f"Run {keys.run} in {self.folder}\n")
        sys.stdout.flush()
        self.children = self._children()
        self.trainer = self.children[0]
        for child in self.children:
            child.start()
        try:
            with Progress(self.config.num_rollout) as self.progress:
                code = self._watch()
        finally:
            end(self.children, 0.0 if self.interrupts > 1 else GRACE)
        self._summary(code)
        return code

    def _children(self) -> list[Child]:
        path = str(self.folder / "config.toml")
        threads = str(self.config.torch_threads)
        env = {**os.environ, "MILLPOND_REDIS_URL": self.url, "MILLPOND_SUPERVISED": "1", "OMP_NUM_THREADS": threads}
        resumed = ["--resume"] if self.config.resume else []

        def train(restarts: int) -> list[str]:
            again = ["--resume", "--take-over"] if restarts else [*resumed, "--take-over"]
            return ["train", "--config", path, *again]

        logs = self.folder / "logs"
        generators = [
            Child(f"generator-{i}", lambda _: ["generate", "--config", path], logs, env)
            for i in range(self.config.generators)
        ]
        feeder = Child("feeder", lambda _: ["feed", "--config", path], logs, env)
        return [Child("trainer", train, logs, env), feeder, *generators]

    def _watch(self) -> int:
        """Until the trainer has ended, or something that will not heal has happened."""
        tail, looked, queues = Tail(self.folder / "metrics.jsonl"), 0.0, {}
        self.progress.skip(tail.read())
        while True:
            time.sleep(0.1)
            if time.monotonic() - looked > 1.0:
                looked, queues = time.monotonic(), self._queues()
            self.progress.add(tail.read(), queues)
            self._heal_redis()
            if self.interrupts > 1:
                return 130
            for child in self.children:
                code = child.poll()
                if code is None or (code == 0 and child is not self.trainer):
                    continue
                if code >= 0 or self.interrupts:
                    self.progress.add(tail.read(), queues)
                    return self._ended(child, code)
                self._restart(child, -code)

    def _ended(self, child: Child, code: int) -> int:
        if code == 0 or self.interrupts:
            return 130 if self.interrupts else 0
        worker = next((c for c in self.children if c is not self.trainer and (c.poll() or 0) > 0), child)
        sys.stderr.write(f"millpond: {worker.name} ended with an error:\n{worker.last_words()}\n")
        return worker.poll() or code

    def _restart(self, child: Child, number: int) -> None:
        if child.restarts >= self.config.max_restarts:
            raise MillpondError(
                f"{child.name} was killed by signal {number} for the {child.restarts + 1}th time (--max-restarts); "
                f"its log is {child.errors}\n{child.last_words()}"
            )
        child.restart()

    def _heal_redis(self) -> None:
        if self.server is None or self.server.poll() is None:
            return
        if self.redis_restarts >= self.config.max_restarts:
            raise ServerError(f"the embedded Redis died {self.redis_restarts + 1} times; see {self.folder / 'redis'}")
        self.redis_restarts += 1
        log.warning("the embedded Redis was killed; started again (%d)", self.redis_restarts)
        self.server.restart()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1
        if self.interrupts == 1:
            sys.stderr.write("\nmillpond: stopping; the trainer saves first (again: at once)\n")
            self.trainer.signal(signal.SIGTERM)

    def _queues(self) -> dict[str, int]:
        """Queue depth and prompts in flight; nothing where Redis is away just now."""
        from redis.exceptions import RedisError

        client: Any = self.broker.client
        try:
            groups = [g for s in ("prompts", "prompts:retry") for g in client.xinfo_groups(self.broker.keys[s])]
            return {"queued": client.llen(self.broker.keys["groups"]), "in_flight": sum(g["pending"] for g in groups)}
        except RedisError:
            return {}

    def _summary(self, code: int) -> None:
        first, last = self.progress.first, self.progress.last
        if first and last and "rollout/raw_reward" in last:
            sys.stdout.write(
                f"Reward {first.get('rollout/raw_reward', 0):.3f} at step {first['step']}, "
                f"{last['rollout/raw_reward']:.3f} at step {last['step']}\n"
            )
        places = {"Metrics": "metrics.jsonl", "Checkpoints": "checkpoints", "Weights": "weights", "Logs": "logs"}
        for what, name in places.items():
            sys.stdout.write(f"{what}: {self.folder / name}\n")
        if code == 130:
            sys.stdout.write(f"Stopped. `millpond run --resume --out {self.folder}` goes on.\n")
