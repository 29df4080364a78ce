"""A run as separate processes, each on a way to Redis of its own, all of which can be killed, stopped and cut off."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

from crash import log_of, log_size
from link import Link
from processes import PACE, SMALL, Parts, Started, prompts

from pipeline.server import EmbeddedServer

HERE = Path(__file__).parent
OWN = (*("--custom-rm-path", "witness.score", "--dynamic-sampling-filter-path", "witness.made"),)
"What all who score must be told."
TRAINER = (
    *("--train-backend", "echo", "--rollout-sample-filter-path", "witness.handed", *SMALL, "--num-epoch", "1"),
    *("--fully-async", "--max-weight-staleness", "2", "--save-interval", "3", "--save-keep", "100000"),
)
FOREVER = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def witnessed(folder: Path) -> tuple[Path, dict[str, str]]:
    """The folder of the witnesses' files, and the environment of the processes they look into."""
    seen = folder / "witness"
    seen.mkdir()
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return seen, {"WITNESS": str(seen), "PYTHONPATH": path}


class Cast(Parts):
    """trainer, feeder, generator-0, generator-1, and the server that they meet in."""

    def __init__(self, folder: Path, server: EmbeddedServer, rows: int) -> None:
        super().__init__(folder, server.url, prompts(folder, rows))
        self.server = server
        self.seen, self.env = witnessed(folder)
        self.commands: dict[str, tuple[object, ...]] = {
            "trainer": ("train", *TRAINER, *OWN),
            "feeder": ("feed", "--prompt-data", self.data, "--num-epoch", "1", "--feed-low-water", "16"),
            **{f"generator-{i}": ("generate", "--engine", "echo", *PACE, *OWN) for i in range(2)},
        }
        self.links = {name: Link(server.url) for name in self.commands}
        self.playing: dict[str, Started] = {}
        self.busy: set[str] = set()
        "who is down or stopped just now; `redis` may be among them"
        self.later: list[tuple[float, Callable[[], None]]] = []
        "what is to be done when, monotonic"
        self.awaited: dict[int, tuple[Started, Callable[[], None]]] = {}
        "by pid: who is to end by itself, and what then"

    def play(self, name: str, *more: str) -> None:
        """Starts a process, or another in its place."""
        command, *words = self.commands[name]
        self.playing[name] = self.millpond(
            *(command, "--run", self.run, "--out", self.out, *words, *more),
            **{**self.env, "MILLPOND_REDIS_URL": self.links[name].url},
        )

    def again(self, name: str) -> None:
        self.play(name, *(("--resume", "--take-over") if name == "trainer" else ()))

    # -- time

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.later.append((time.monotonic() + seconds, act))

    def lock(self, name: str, seconds: float, heal: Callable[[], None]) -> None:
        """`name` is in trouble for so long."""
        self.busy.add(name)

        def over() -> None:
            heal()
            self.busy.discard(name)

        self.after(seconds, over)

    def ends(self, name: str, one: Started, then: Callable[[], None]) -> None:
        """`one`, which is or was called `name`, is about to end."""
        self.busy.add(name)
        self.awaited[one.process.pid] = one, then

    def no_longer(self, one: Started) -> None:
        self.awaited.pop(one.process.pid, None)

    def turn(self) -> bool:
        """Does what is due; raises when a process ended that nobody ended. False once the run is over."""
        for item in sorted(self.later, key=lambda item: item[0]):
            if item[0] <= time.monotonic():
                self.later.remove(item)
                item[1]()
        for one, then in list(self.awaited.values()):
            if one.process.poll() is not None and one.process.pid in self.awaited:
                self.no_longer(one)
                then()
        for name, one in self.playing.items():
            code = one.process.poll()
            if code == 0 and name == "trainer":
                return bool(self.awaited)
            assert code in (None, 0) or name in self.busy, f"{name} ended with {code}:\n{one.said()[-5000:]}"
        return True

    def heal(self) -> None:
        """All that is broken is mended, in the order in which it was to be."""
        for item in sorted(self.later, key=lambda item: item[0]):
            item[1]()
        self.later.clear()
        for link in self.links.values():
            link.heal()

    # -- Redis

    def stop_redis(self, seconds: float) -> None:
        pid = self.server.pid
        os.kill(pid, signal.SIGSTOP)
        self.lock("redis", seconds, lambda: os.kill(pid, signal.SIGCONT))

    def kill_redis(self, seconds: float, lost: int) -> None:
        """It stays away for so long, and comes back without the last `lost` bytes of its log."""
        self.server.kill()
        if lost:
            os.truncate(log_of(self.server), max(0, log_size(self.server) - lost))
        self.lock("redis", seconds, self.server.start)

    def fill_disk(self, seconds: float, room: int) -> None:
        """Its log cannot grow by more than `room` bytes: writes are cut short and then fail, as on a full disk."""
        pid = self.server.pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (log_size(self.server) + room, resource.RLIM_INFINITY))
        self.lock("redis", seconds, lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, FOREVER))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for link in self.links.values():
            link.close()
