"""The graders that run where they can be killed, by name; and the main function of the process that hosts them."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from pipeline.errors import UsageError
from producers.rewards.forked import Limits
from producers.rewards.frames import pack
from producers.rewards.host import Host

WARM_UP: dict[str, list[dict[str, Any]]] = {
    "math": [
        {"solution": r"\frac{1}{2}", "answer": "0.5"},
        {"solution": "(x+1)^2", "answer": "x^2 + 2x + 1"},
        {"solution": r"2\sqrt{3}", "answer": r"\sqrt{12}"},
        {"solution": "(5, 7)", "answer": r"\{5, 7\}"},
        {"solution": "[0, 1)", "answer": r"0 \le x < 1"},
    ]
}
"Gradings done before the first fork, so that what is loaded on first use is loaded once."


def load(name: str) -> Callable[..., Any]:
    """The grader of this name; UsageError where what it needs is not here."""
    try:
        if name == "math":
            from producers.rewards.symbolic import equal

            return equal
        if name == "code":
            from producers.rewards.run_code import run_code

            run_code("", [{"input": "", "output": ""}], 10.0)
            return run_code
        if name == "reasoning_gym":
            from producers.rewards.gym_scores import gym_score

            return gym_score
        if name == "probe":
            from producers.rewards.probe import probe

            return probe
    except ImportError as error:
        raise UsageError(f"{error}: pip install 'millpond[{name.replace('_', '-')}]'") from error
    raise UsageError(f"there is no grader {name!r}")


def main() -> None:
    """Serve over an inherited socket until it is closed at the other end; `sandbox.py` says in JSON what."""
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable()
    link = socket.socket(fileno=settings["link"])
    try:
        grade = load(settings["grader"])
    except UsageError as error:
        link.sendall(pack({"refused": str(error)}))
        return
    for arguments in WARM_UP.get(settings["grader"], []):
        grade(**arguments)
    link.sendall(pack({"ready": os.getpid()}))
    Host(link, grade, settings["workers"], Limits(settings["seconds"], settings["memory"])).run()
