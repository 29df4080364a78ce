"""`millpond run`: a supervisor, the processes that it keeps alive, and its embedded Redis."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from crash import log_of
from plan import Fault, Setting
from processes import PACE, Stage, Started, alive, eventually, prompts, steps
from scene import OWN, trainer_of, witnessed
from troubles import Troubles

from pipeline.audit import Audit, audit
from pipeline.broker import Broker
from pipeline.keys import Keys
from pipeline.replies import Standing
from pipeline.server import EmbeddedServer, locate

ECHO = ("--engine", "echo", *PACE, "--generators", "2", "--feed-low-water", "16")
WITNESSED = (*OWN[2:], "--rollout-sample-filter-path", "witness.handed", "--save-keep", "100000")
"For a run that has a reward."


class Troupe(Stage):
    def __init__(self, folder: Path, setting: Setting, *options: object) -> None:
        """`options` take the place of the usual ones."""
        super().__init__(folder)
        self.setting = setting
        self.troubles = Troubles()
        self.seen, self.env = witnessed(folder)
        self.out = folder / "run"
        if not options:
            options = (*ECHO, *OWN, *trainer_of(setting), "--redis-durability", setting.durability)
            options = (*options, "--prompt-data", prompts(folder, setting.rows or 0))
        self.options = options

    # -- who is there

    def start(self, *words: object) -> None:
        self.run = self.millpond("run", "--out", self.out, *words, **self.env)

    def pid(self, name: str) -> int | None:
        """None where there is no such process just now."""
        if name == "supervisor":
            return self.run.process.pid
        command, _, index = name.partition("-")
        found = [pid for pid in self.children() if _is(command, pid) and alive(pid)]
        return found[int(index or 0) % len(found)] if found else None

    def children(self) -> list[int]:
        """Pids, in the order of their births; a thread that ends meanwhile has no children."""
        found = []
        for children in Path(f"/proc/{self.run.process.pid}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
        return sorted(found)

    # -- what an episode asks for

    def begin(self) -> None:
        self.start("--max-restarts", "1000", *self.options)
        eventually(lambda: self.going() and len(steps(self.out)) >= 3, "three steps", seconds=240)

    def held(self, fault: Fault) -> list[int]:
        return []

    def inflict(self, fault: Fault) -> None:
        KINDS[fault.kind](self, fault)

    def ready(self, fault: Fault) -> bool:
        who = victim(fault)
        begun = self.pid("train") is not None  # a Redis that dies at the very start ends the command
        return begun and not self.troubles.busy & {who, "supervisor"} and self.pid(who) is not None

    def going(self) -> bool:
        self.troubles.turn()
        code = self.run.process.poll()
        if code == 0:
            return False
        assert code is None or "supervisor" in self.troubles.busy, f"the run ended with {code}:\n{self.words()}"
        return True

    def heal(self) -> None:
        self.troubles.heal()

    def audit(self) -> Audit | None:
        url = locate(self.out / "redis")
        if url is None or self.troubles.busy & {"redis", "supervisor"}:
            return None
        with closing(Broker(url, Keys(self.out.name), "test", patience=30)) as broker:
            return audit(broker)

    def finish(self) -> tuple[Audit, Standing]:
        with (
            EmbeddedServer(self.out / "redis") as server,
            closing(Broker(server.url, Keys(self.out.name), "test", patience=30)) as broker,
        ):
            return audit(broker), broker.standing()

    def words(self) -> str:
        logs = [self.run.output, *sorted((self.out / "logs").glob("*"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def _is(command: str, pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False
    if command == "redis":
        return words[0].partition(" ")[0].endswith("-server")
    return "pipeline.cli" in words and words[words.index("pipeline.cli") + 1] == command


def victim(fault: Fault) -> str:
    """`generate-1` is the second of the generators, `feed-0` the feeder."""
    word = fault.kind.split()[0]
    names = {"Redis": "redis", "generator": f"generate-{int(fault.share * 100) % 2}", "trainer": "train"}
    return {**names, "feeder": "feed"}.get(word, word)


# -- what befalls them

Act = Callable[[Troupe, Fault], None]


def _pid(troupe: Troupe, fault: Fault) -> int:
    pid = troupe.pid(victim(fault))
    assert pid is not None
    return pid


def killed(troupe: Troupe, fault: Fault) -> None:
    """The supervisor starts another."""
    pid = _pid(troupe, fault)
    os.kill(pid, signal.SIGKILL)
    troupe.troubles.until(victim(fault), lambda: not alive(pid), lambda: None)


def stopped(troupe: Troupe, fault: Fault) -> None:
    pid = _pid(troupe, fault)
    os.kill(pid, signal.SIGSTOP)
    troupe.troubles.during(victim(fault), fault.lasts, lambda: alive(pid) and os.kill(pid, signal.SIGCONT))


def forgetful(troupe: Troupe, fault: Fault) -> None:
    """Redis dies, and the end of its log is gone before the supervisor can start it again."""
    redis, supervisor = _pid(troupe, fault), troupe.run
    supervisor.kill(signal.SIGSTOP)
    os.kill(redis, signal.SIGKILL)
    eventually(lambda: not alive(redis), "the end of Redis")
    log = log_of(EmbeddedServer(troupe.out / "redis"))
    os.truncate(log, max(0, log.stat().st_size - int(1 + 50_000 * fault.share**3)))
    supervisor.kill(signal.SIGCONT)
    troupe.troubles.until("redis", lambda: troupe.pid("redis") is not None, lambda: None)


def orphaned(troupe: Troupe, fault: Fault) -> None:
    """The supervisor dies, and with it all its processes; somebody resumes the run, at once or later."""
    first: Started = troupe.run
    first.kill()
    troupe.troubles.during("supervisor", min(fault.lasts, 3.0), lambda: troupe.start("--resume"))


KINDS: dict[str, Act] = {
    **{f"{who} killed under its supervisor": killed for who in ("trainer", "feeder", "generator", "Redis")},
    **{f"{who} stopped under its supervisor": stopped for who in ("trainer", "feeder", "generator", "Redis")},
    "Redis killed under its supervisor, the end of its log lost": forgetful,
    "supervisor killed": orphaned,
    "supervisor stopped": stopped,
}
