"""What evaluates in the tests, in a worker's own process: reads the weights it is given; a file says when it ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from safetensors.numpy import load_file

from producers.eval_function import EvalInput


def weigh(x: EvalInput) -> dict[str, float]:
    """The weight in the folder, once the set `gate` says go; not at all where it says fail, or kill."""
    gate = x.sets.get("gate")
    for _ in range(12_000):
        word = (gate.read_text() if gate else "go").split()
        if word and word[0] == "fail":
            raise RuntimeError("the judge is out")
        if word and word[0] == "kill":
            mark = Path(f"{gate}.killed")
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            word = ["go"]
        if word and word[0] == "go":
            break
        time.sleep(0.01)
    weights = load_file(x.weights / "model.safetensors") if x.weights else {}
    return {"w": float(weights["w"][0]), "version": float(x.version), "again": float(x.samples)}
