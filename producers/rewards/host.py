"""The grading host: one process beside the generator that forks graders, gives them work and kills what does not end.

Consumes gradings over a socket (frames.py); waits for its graders; produces a result for each. It imports the grader
once and is single-threaded, so a grader is forked in milliseconds, at any time, by a process that is safe to fork.

Lanes: each grading first gets a few hundredths of a second of processor time; what needs more dies and is begun again
in the next lane, with more time at a lower priority, the last time with the user's limit. So gradings that hang hold up
none but each other. The kernel counts and kills (a grader's timer); what hangs without computing meets a wall clock.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from producers.rewards.forked import Limits, work
from producers.rewards.frames import Frames, pack

TRIES = (0.03, 0.5)
"Seconds of processor time of a first and a second try; 95 of 100 answers need less than 0.01."
NICE = (0, 5, 10)
PATIENCE = 5
"Seconds of wall time for each of processor time, and one more: the machine has other things to do."
BEHIND = 1.0
"Seconds that a grading waits at most for those in lanes before its own."
TURNS = 500
"Gradings after which a grader is replaced, so that caches do not grow for ever."


@dataclass
class Item:
    """One grading."""

    id: int
    arguments: dict[str, Any]
    since: float = 0.0
    "when it came to the lane it waits in"


@dataclass(eq=False)
class Grader:
    """A forked process."""

    pid: int
    socket: socket.socket
    item: Item | None = None
    deadline: float = 0.0
    turns: int = 0
    frames: Frames = field(default_factory=Frames)


@dataclass(eq=False)
class Lane:
    """Graders that share a limit."""

    size: int
    seconds: float
    "of processor time"
    nice: int
    waiting: deque[Item] = field(default_factory=deque)
    graders: list[Grader] = field(default_factory=list)


class Host:
    def __init__(self, link: socket.socket, grade: Callable[..., Any], workers: int, limits: Limits) -> None:
        self.link = link
        self.grade = grade
        self.limits = limits
        seconds = [*(try_ for try_ in TRIES if try_ < limits.seconds), limits.seconds]
        self.lanes = [Lane(workers, limit, nice) for limit, nice in zip(seconds, NICE, strict=False)]
        self.killed: list[int] = []
        "pids that may not be gone yet: freeing a lot of memory takes a while"
        self.frames = Frames()
        self.selector = selectors.DefaultSelector()
        self.selector.register(link, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the other end of the link is closed."""
        gc.freeze()  # what is loaded now is shared by all graders and stays so
        try:
            while self._turn():
                pass
        finally:
            for lane in self.lanes:
                for grader in list(lane.graders):
                    self._end(lane, grader)

    def _turn(self) -> bool:
        self._hand_out()
        ready = {key.fd for key, _ in self.selector.select(self._pause())}
        if self.link.fileno() in ready and not self._hear():
            return False
        for lane in self.lanes:
            for grader in list(lane.graders):
                if grader.socket.fileno() in ready:
                    self._read(lane, grader)
                elif grader.item and time.monotonic() > grader.deadline:
                    self._again(lane, grader, f"not done in {PATIENCE * lane.seconds + 1:g} s")
                    self._end(lane, grader)
        return True

    def _hand_out(self) -> None:
        """Lanes in their order; while some wait in one, those after it are given nothing for a while."""
        busy = False
        for lane in self.lanes:
            ripe = time.monotonic() - (BEHIND if busy else 0)
            while lane.waiting and lane.waiting[0].since <= ripe and (grader := self._idle(lane)):
                self._give(lane, grader, lane.waiting.popleft())
            busy = busy or bool(lane.waiting)

    def _pause(self) -> float | None:
        """Seconds until somebody's time is over, or somebody has waited long enough behind others."""
        times = [grader.deadline for lane in self.lanes for grader in lane.graders if grader.item]
        times += [lane.waiting[0].since + BEHIND for lane in self.lanes[1:] if lane.waiting]
        return max(0.01, min(times) - time.monotonic()) if times else None

    def _hear(self) -> bool:
        piece = self.link.recv(1 << 16)
        for message in self.frames.take(piece):
            if "cancel" in message:
                self._cancel(message["cancel"])
            else:
                self.lanes[0].waiting.append(Item(**message))
        return bool(piece)

    def _cancel(self, id: int) -> None:
        for lane in self.lanes:
            lane.waiting = deque(item for item in lane.waiting if item.id != id)
            for grader in [grader for grader in lane.graders if grader.item and grader.item.id == id]:
                self._end(lane, grader)

    # -- graders

    def _idle(self, lane: Lane) -> Grader | None:
        free = next((grader for grader in lane.graders if grader.item is None), None)
        if free is None and len(lane.graders) < lane.size:
            free = self._fork(lane)
        return free

    def _fork(self, lane: Lane) -> Grader:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            work(theirs, self.grade, self.limits, lane.nice)
        theirs.close()
        grader = Grader(pid, ours)
        self.selector.register(ours, selectors.EVENT_READ)
        lane.graders.append(grader)
        return grader

    def _give(self, lane: Lane, grader: Grader, item: Item) -> None:
        grader.item, grader.deadline = item, time.monotonic() + PATIENCE * lane.seconds + 1
        with contextlib.suppress(BrokenPipeError):  # it has just died, which `_read` will see
            grader.socket.sendall(pack({"seconds": lane.seconds, "arguments": item.arguments}))

    def _read(self, lane: Lane, grader: Grader) -> None:
        try:
            piece = grader.socket.recv(1 << 16)
        except ConnectionResetError:
            piece = b""
        last = False
        for result in grader.frames.take(piece):
            last = result.pop("last", False)
            self._done(grader, result)
        if not piece:
            self._died(lane, grader)
        elif last or grader.turns >= TURNS:
            self._end(lane, grader)

    def _died(self, lane: Lane, grader: Grader) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(grader.pid, 0)[1])
        late = f"not done in {lane.seconds:g} s"
        self._again(lane, grader, late if code == -signal.SIGPROF else f"its process died ({code})")
        self._end(lane, grader, gone=True)

    def _again(self, lane: Lane, grader: Grader, why: str) -> None:
        """In the next lane, where there is one: what died may have done so idle, before it was given this."""
        if lane is self.lanes[-1]:
            self._done(grader, {"score": None, "why": why})
        elif grader.item is not None:
            grader.item.since = time.monotonic()
            self.lanes[self.lanes.index(lane) + 1].waiting.append(grader.item)

    def _done(self, grader: Grader, result: dict[str, Any]) -> None:
        if grader.item is not None:
            self.link.sendall(pack({"id": grader.item.id, **result}))
        grader.item = None
        grader.turns += 1

    def _end(self, lane: Lane, grader: Grader, gone: bool = False) -> None:
        lane.graders.remove(grader)
        self.selector.unregister(grader.socket)
        grader.socket.close()
        if not gone:
            os.kill(grader.pid, signal.SIGKILL)
            self.killed.append(grader.pid)
        self.killed = [pid for pid in self.killed if os.waitpid(pid, os.WNOHANG) == (0, 0)]
