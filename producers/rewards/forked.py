"""A grader: a forked process that grades one thing after the other within limits, and knows nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

from producers.rewards.frames import Frames, pack

PR_SET_PDEATHSIG = 1
OUTPUT = 1 << 20
"Bytes that a file may have which a grader, or a program it runs, writes."


@dataclass(frozen=True)
class Limits:
    """What one grading may use."""

    seconds: float
    "of processor time"
    memory: int
    "bytes of address space beyond what the process has before its first grading"


def work(link: socket.socket, grade: Callable[..., Any], limits: Limits, nice: int) -> Never:
    """The life of a grader; ends the process, whatever happens in it."""
    code = 1
    try:
        _alone(link)
        _follow()
        os.nice(nice)
        before = _most_memory()
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_FSIZE, OUTPUT)
        _limit(resource.RLIMIT_AS, before + limits.memory)
        _serve(link, grade, before + limits.memory // 2)
        code = 0
    finally:
        os._exit(code)


def _serve(link: socket.socket, grade: Callable[..., Any], plenty: int) -> None:
    frames = Frames()
    while piece := link.recv(1 << 16):
        for task in frames.take(piece):
            signal.setitimer(signal.ITIMER_PROF, task["seconds"])  # then SIGPROF, which ends whatever runs
            try:
                score = grade(**task["arguments"])
            except Exception as error:
                link.sendall(pack({"score": None, "why": f"{type(error).__name__}: {error}"[:200], "last": True}))
                raise
            signal.setitimer(signal.ITIMER_PROF, 0)
            if not score and _most_memory() > plenty:  # a MemoryError may have been taken for "not equal" on the way
                link.sendall(pack({"score": None, "why": "too much memory", "last": True}))
                return
            link.sendall(pack({"score": score}))


def _alone(link: socket.socket) -> None:
    """No file of the host's stays open but the link, and nothing is said."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(quiet, fd)
    os.closerange(3, link.fileno())
    os.closerange(link.fileno() + 1, 1024)


def _follow() -> None:
    """End when the host does; elsewhere than on Linux when it is idle, or its time is over."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit(kind: int, value: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # not every system has every limit
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _most_memory() -> int:
    """Bytes of address space at their peak; where that is unknown, of memory in use."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmPeak:"):
                return int(line.split()[1]) << 10
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used << 10
