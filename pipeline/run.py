"""`millpond run`: a whole run on one machine: starts Redis, feeder, generators and trainer as processes, watches them.

A process that was killed is started again, a bounded number of times; one that ends with an error ends the run with
that error. Ctrl-C stops in order: the trainer saves, generators hand back, Redis keeps the data; twice: at once.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from redis.exceptions import RedisError

from pipeline.broker import Broker
from pipeline.children import Child, end
from pipeline.config import RunConfig
from pipeline.connect import verify
from pipeline.errors import MillpondError, RunExists, ServerError, Stopped, UsageError
from pipeline.keys import Keys
from pipeline.log import mask, setup
from pipeline.modes import check
from pipeline.plan import make_files, make_folder, others_of, put_config, resolve, saved_since, write_config
from pipeline.progress import Progress, Tail, outcome
from pipeline.server import EmbeddedServer, cli_line

log = logging.getLogger(__name__)

GRACE = 30.0
"Seconds a process has to end by itself."


def main(argv: list[str]) -> int:
    """Train a model on this machine."""
    config = resolve(argv)
    _warn(check(config))
    mine = _meet(config, config.redis_url) if config.redis_url else None  # before anything is written
    folder = make_folder(config)
    setup("run", folder, terminal=False)
    make_files(config, folder)
    if mine:
        sys.stdout.write(f"Redis: {mask(config.redis_url or '')}\n")
        return Supervisor(config, folder, mine, config.redis_url or "", None).run()
    with EmbeddedServer(folder / "redis", config.redis_durability) as server:
        sys.stdout.write(f"Redis: {cli_line(folder / 'redis')}\n")
        return Supervisor(config, folder, _meet(config, server.url), server.url, server).run()


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        sys.stderr.write(f"millpond: warning: {warning}\n")


def _meet(config: RunConfig, url: str) -> Broker:
    """A Redis that may be used, and has no run of this name but one to be resumed."""
    keys = Keys(config.run or "")
    broker = Broker(url, keys, "run", config.redis_patience)
    _warn(broker.patiently(lambda: verify(broker.client, url)))
    if broker.exists() and not config.resume:
        raise RunExists(f"run {keys.run} is in this Redis already: --resume goes on with it, another --run is new")
    return broker


@dataclass
class Supervisor:
    """Watches the processes of one run."""

    config: RunConfig
    folder: Path
    broker: Broker
    url: str
    server: EmbeddedServer | None
    interrupts: int = 0
    redis_restarts: int = 0
    trouble: str = ""
    "what a process said that ended with an error"

    def run(self) -> int:
        path = self.folder / "config.toml"
        before = path.read_text() if path.exists() else None
        write_config(self.config, self.folder)
        self.epoch = self.broker.state().get("epoch")
        self.children = self._children()
        self.trainer = self.children[0]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._interrupt)
        sys.stdout.write(f"Run {self.broker.keys.run} in {self.folder}\n")
        sys.stdout.flush()
        try:
            for child in self.children:
                child.start()
            if self.interrupts:  # while they were started: the trainer may not have been told
                self.trainer.signal(signal.SIGTERM)
            with Progress(self.config.num_rollout) as self.progress:
                code = self._watch()
            sys.stderr.write(self.trouble)
        finally:
            end(self.children, lambda: 0.0 if self.interrupts > 1 else GRACE)
        if code == UsageError.exit_code and before is not None:
            put_config(self.folder, before)  # what was refused is not for the next resume
        self._summary(code)
        return code

    def _children(self) -> list[Child]:
        path = str(self.folder / "config.toml")
        threads = str(self.config.torch_threads)
        env = {**os.environ, "MILLPOND_REDIS_URL": self.url, "MILLPOND_SUPERVISED": "1", "OMP_NUM_THREADS": threads}
        keys = {name: getattr(self.config, name) for name in ("engine_api_key", "rm_api_key", "wandb_key")}
        env |= {f"MILLPOND_{name.upper()}": key.get_secret_value() for name, key in keys.items() if key}
        flags = {"--resume": self.config.resume, "--wait": self.config.wait, "--take-over": self.config.take_over}
        first = [flag for flag, given in flags.items() if given]

        def train(restarts: int) -> list[str]:
            """Its own dead trainer it replaces at once, and one whose Redis was in this folder is dead."""
            own = restarts > 0 or (self.server is not None and self.config.resume)
            again = "--auto-resume" if self.config.load and not self.config.resume else "--resume"
            back = ["--load", str(self.config.load)] if self.config.load and not self._has_gone_on() else []
            return ["train", "--config", path, *([again, "--take-over"] if own else first), *back]

        logs = self.folder / "logs"

        def other(name: str, command: str) -> Child:
            return Child(name, lambda _: [command, "--config", path], logs, env)

        return [Child("trainer", train, logs, env), *(other(*names) for names in others_of(self.config))]

    def _has_gone_on(self) -> bool:
        """Whether a trainer of ours has begun from --load and saved since, which must not be given up."""
        state = self.broker.state()
        if state.get("epoch") == self.epoch or state.get("status") == "starting":
            return False
        return saved_since(self.folder, self.config.load or Path())

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
                left = code in (0, Stopped.exit_code) and child is not self.trainer
                if code is None or (left and not self._running()):
                    continue
                if (left or code < 0) and not self.interrupts:
                    self._restart(child)
                    continue
                self.progress.add(tail.read(), queues)
                return self._ended(child, code)

    def _running(self) -> bool:
        """Where the run goes on, a feeder or generator that ended in order was sent away by somebody."""
        try:
            return self.broker.client.hget(self.broker.keys["state"], "status") == b"running"
        except RedisError:
            return False

    def _ended(self, child: Child, code: int) -> int:
        if self.interrupts or code in (0, Stopped.exit_code):
            return Stopped.exit_code if self.interrupts else code
        worker = next((c for c in self.children if c is not self.trainer and (c.poll() or 0) > 0), child)
        code = worker.poll() or code
        head = "" if code == UsageError.exit_code else f"millpond: {worker.name} ended with an error:\n"
        self.trouble = f"{head}{worker.last_words()}\n"
        return code

    def _restart(self, child: Child) -> None:
        if child is self.trainer and self.config.save_interval == 0:
            raise MillpondError("the trainer was killed, and with --save-interval 0 there is nothing to go on from")
        self._again(child.name, child.restarts, f"its log is {child.errors}\n{child.last_words()}")
        child.restart()

    def _again(self, name: str, restarts: int, more: str) -> None:
        """Says that `name` is started again, or ends the run."""
        if restarts >= self.config.max_restarts:
            raise MillpondError(f"{name} was killed {restarts + 1} times (--max-restarts {restarts}); {more}")
        sys.stderr.write(f"millpond: {name} was killed; it is started again ({restarts + 1})\n")
        log.warning("%s was killed; it is started again (%d)", name, restarts + 1)

    def _heal_redis(self) -> None:
        if self.server is None or self.server.poll() is None:
            return
        self._again("the embedded Redis", self.redis_restarts, f"see {self.folder / 'redis' / 'redis.log'}")
        self.redis_restarts += 1
        dead = self.server.pid
        try:
            self.server.restart()
        except ServerError:
            if self.server.pid == dead or (self.server.poll() or 0) >= 0:  # else it was killed again as it started
                raise

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1
        if self.interrupts == 1:
            self.trainer.signal(signal.SIGTERM)
            with suppress(OSError):  # a terminal that was closed
                sys.stderr.write("\nmillpond: stopping; the trainer saves first (again: at once)\n")

    def _queues(self) -> dict[str, int]:
        """Queue depth and prompts in flight; nothing where Redis is away just now."""
        client: Any = self.broker.client
        try:
            groups = [g for s in ("prompts", "prompts:retry") for g in client.xinfo_groups(self.broker.keys[s])]
            return {"queued": client.llen(self.broker.keys["groups"]), "in_flight": sum(g["pending"] for g in groups)}
        except RedisError:
            return {}

    def _ends(self) -> str:
        """How many prompts ended how."""
        self._heal_redis()
        counters = self.broker.counters()
        ends = [f"{counters.get('committed', 0)} committed"]
        ends += [
            f"{n} {k.replace(':', ' under ')}"
            for k, n in sorted(counters.items())
            if k.startswith(("dropped:", "dead:"))
        ]
        return ", ".join(ends)

    def _summary(self, code: int) -> None:
        for line in outcome(self.progress.first, self.progress.last, self.folder / "evals.jsonl"):
            sys.stdout.write(f"{line}\n")
        sys.stdout.write(f"Prompts: {self._ends()}\n")
        for name in ("metrics.jsonl", "evals.jsonl", "checkpoints", "weights", "logs"):
            if (self.folder / name).exists() and (self.folder / name).stat().st_size:
                sys.stdout.write(f"{name.partition('.')[0].capitalize()}: {self.folder / name}\n")
        if code and self.config.save_interval:
            how = "Stopped." if code == Stopped.exit_code else "When the cause is mended,"
            where = shlex.quote(str(self.folder)) + ("" if self.server else " --redis-url ...")
            sys.stdout.write(f"{how} `millpond run --resume --out {where}` goes on.\n")
