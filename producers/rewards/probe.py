"""A grader that does what it is told: for trying out the sandbox, `tests/test_sandbox.py`."""

from __future__ import annotations

import os
import signal
import time


def probe(act: str, value: float = 1.0) -> float | None:
    """`act`: give the value, sleep so many seconds, spin, take so many MiB, raise, or die by SIGKILL."""
    if act == "sleep":
        time.sleep(value)
    elif act == "spin":
        return float(len(str(7 ** (7**12))))  # big-integer arithmetic in C, which no signal handler interrupts
    elif act == "take":
        return float(bytearray(int(value) << 20)[0])
    elif act == "raise":
        raise KeyError("no such thing")
    elif act == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif act == "pid":
        return float(os.getpid())
    return value
