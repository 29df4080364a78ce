"""A run as separate processes, each on a way to Redis of its own, all of which can be killed, stopped and cut off."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import faults
from crash import log_of, log_size
from link import Link
from plan import Fault, Setting
from processes import PACE, Parts, Started, eventually, prompts
from scene import OWN, trainer_of, witnessed
from troubles import Troubles

from pipeline.audit import Audit, audit
from pipeline.replies import Standing
from pipeline.server import EmbeddedServer

FOREVER = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class Cast(Parts):
    """trainer, feeder, generator-0, generator-1, and the server that they meet in."""

    def __init__(self, folder: Path, server: EmbeddedServer, setting: Setting) -> None:
        super().__init__(folder, server.url, prompts(folder, setting.rows or 0))
        self.setting = setting
        self.server = server
        self.troubles = Troubles()
        self.seen, self.env = witnessed(folder)
        self.commands: dict[str, tuple[object, ...]] = {
            "trainer": ("train", *trainer_of(setting), *OWN),
            "feeder": ("feed", "--prompt-data", self.data, "--num-epoch", "1", "--feed-low-water", "16"),
            **{f"generator-{i}": ("generate", "--engine", "echo", *PACE, *OWN) for i in range(2)},
        }
        self.links = {name: Link(server.url) for name in self.commands}
        self.playing: dict[str, Started] = {}

    def play(self, name: str, *more: str) -> Started:
        """Starts a process, or another in its place."""
        command, *words = self.commands[name]
        self.playing[name] = self.millpond(
            *(command, "--run", self.run, "--out", self.out, *words, *more),
            **{**self.env, "MILLPOND_REDIS_URL": self.links[name].url},
        )
        return self.playing[name]

    def again(self, name: str) -> Started:
        return self.play(name, *(("--auto-resume", "--take-over") if name == "trainer" else ()))

    # -- what an episode asks for

    def begin(self) -> None:
        for name in self.commands:
            self.play(name)
        eventually(lambda: self.going() and self.committed(), "a first commit", seconds=240)

    def held(self, fault: Fault) -> list[int]:
        if fault.kind != "generator killed" or "redis" in self.troubles.busy:
            return []
        pid = self.playing[faults.who("generator", fault)].process.pid
        leases = self.broker.patiently(lambda: self.broker.script("leased"))
        return [int(lease[4]) for lease in leases if f"-{pid}-" in lease[2].decode() and lease[4]]

    def inflict(self, fault: Fault) -> None:
        faults.KINDS[fault.kind](self, fault)

    def ready(self, fault: Fault) -> bool:
        return faults.ready(self, fault)

    def going(self) -> bool:
        self.troubles.turn()
        for name, one in self.playing.items():
            code = one.process.poll()
            if code == 0 and name == "trainer":
                return bool(self.troubles.awaited)
            assert code in (None, 0) or name in self.troubles.busy, f"{name} ended with {code}:\n{one.said()[-5000:]}"
        return True

    def heal(self) -> None:
        self.troubles.heal()
        for link in self.links.values():
            link.heal()

    def audit(self) -> Audit | None:  # type: ignore[override]
        return None if "redis" in self.troubles.busy else audit(self.broker)

    def finish(self) -> tuple[Audit, Standing]:
        for one in self.playing.values():
            if "a resume is waited for" in one.said():  # it came when all was done
                one.kill(signal.SIGTERM)
            one.ends(0)
        return audit(self.broker), self.broker.standing()

    def words(self) -> str:
        return "\n".join(f"--- {name}\n{one.said()[-3000:]}" for name, one in self.playing.items())

    # -- Redis

    def stop_redis(self, seconds: float) -> None:
        pid = self.server.pid
        os.kill(pid, signal.SIGSTOP)
        self.troubles.during("redis", seconds, lambda: os.kill(pid, signal.SIGCONT))

    def kill_redis(self, seconds: float, lost: int) -> None:
        """It stays away for so long, and comes back without the last `lost` bytes of its log."""
        self.server.kill()
        if lost:
            os.truncate(log_of(self.server), max(0, log_size(self.server) - lost))
        self.troubles.during("redis", seconds, self.server.start)

    def fill_disk(self, seconds: float, room: int) -> None:
        """Its log cannot grow by more than `room` bytes: writes are cut short and then fail, as on a full disk."""
        pid = self.server.pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (log_size(self.server) + room, resource.RLIM_INFINITY))
        self.troubles.during("redis", seconds, lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, FOREVER))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for link in self.links.values():
            link.close()
