"""The task that ships with Millpond: shift each digit by one, `A:3907=` -> `4018`.

From a random start a model of 85,000 parameters learns it in a hundred steps on one core: each digit of the answer
stands at a fixed distance from the digit it follows from.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

DIGITS = 4
"In a prompt, and in its answer."


def write_prompts(path: Path, seed: int, rows: int = 4096) -> Path:
    """Write `rows` different prompts, the same for the same seed, unless the file is there; at most 10,000."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(seed).sample(range(10**DIGITS), rows)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text("".join(_row(f"{number:0{DIGITS}d}") for number in numbers), encoding="utf-8")
    aside.replace(path)
    return path


def _row(digits: str) -> str:
    answer = "".join(str((int(digit) + 1) % 10) for digit in digits)
    return json.dumps({"input": f"A:{digits}=", "label": answer}) + "\n"
