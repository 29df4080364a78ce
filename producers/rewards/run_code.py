"""Runs a program against its tests, each in a process of its own (jail.py). For the sandbox, which limits memory."""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

from pipeline.errors import UsageError
from producers.rewards.forked import OUTPUT

JAIL = Path(__file__).with_name("jail.py")
UNCONFINED = -signal.SIGUSR2
"How a jail ends that cannot be one."


def run_code(program: str, tests: list[dict[str, str]], seconds: float) -> dict[str, float]:
    """`score` 1 where all tests pass, else 0; `share` of those that do. A test is `input` and `output`, or `code` that
    runs behind the program and must come to its end."""
    passed = sum(_passes(program, test, seconds) for test in tests)
    return {"score": float(passed == len(tests)), "share": passed / len(tests)}


def _passes(program: str, test: dict[str, str], seconds: float) -> bool:
    if "code" not in test:
        code, output = _run((program, ""), test["input"], seconds)
        return code == 0 and _lines(output) == _lines(test["output"])
    word = secrets.token_hex(8)
    said = f"{test['code']}\n__import__('os').write(1, b'\\n{word}')"
    code, output = _run((program, said), "", seconds)
    return code == 0 and output.endswith(f"\n{word}")


def _run(program: tuple[str, str], text: str, seconds: float) -> tuple[int, str]:
    """Exit code and output."""
    given, source, said = (os.memfd_create(name) for name in ("input", "program", "output"))
    try:
        for fd, content in ((given, text), (source, json.dumps(program))):
            os.write(fd, content.encode("utf-8", "surrogatepass"))
            os.lseek(fd, 0, os.SEEK_SET)
        limits = json.dumps({"program": source, "seconds": math.ceil(seconds)})
        process = subprocess.Popen(
            [sys.executable, "-I", str(JAIL), limits],
            stdin=given,
            stdout=said,
            stderr=subprocess.DEVNULL,
            pass_fds=[source],
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
        )
        code = _wait(process, 2 * seconds + 1)
        if code == UNCONFINED:
            raise UsageError(
                "code: this machine cannot confine programs; it takes Linux 5.13 with Landlock and seccomp"
            )
        return code, os.pread(said, OUTPUT, 0).decode("utf-8", "replace")
    finally:
        for fd in (given, source, said):
            os.close(fd)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait() or -9


def _lines(text: str) -> list[str]:
    """White space at the end of lines, and of the text, does not count."""
    return [line.rstrip() for line in text.strip().splitlines()]
