"""reasoning-gym's tasks as prompts without end and without a file: `--task reasoning_gym:NAME`, or with the task's own
settings, `reasoning_gym:chain_sum?min_terms=2&max_terms=3`.

A prompt's id says which item it is, so any feeder goes on where another stopped. --rm-type reasoning_gym scores them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import version
from typing import Any
from urllib.parse import parse_qsl

from pipeline.errors import UsageError

GYM = "reasoning_gym:"
BLOCK = 1000
"Items that are set up at a time: some tasks make all theirs at the start."

_BY_HASH = "its items differ from one process to the next, so a run could not go on with the same ones"
_TUPLES = "its solutions do not survive JSON"
UNFIT = {
    **dict.fromkeys(("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"), _BY_HASH),
    **dict.fromkeys(("arc_agi", "rearc"), _TUPLES),
    "composite": "name one of its tasks",
}
"Tasks that cannot be used, and why; measured with version 0.1.25."


class Gym:
    rows = None

    def __init__(self, task: str, seed: int) -> None:
        name, _, query = task.removeprefix(GYM).partition("?")
        self.name = name
        self.seed = seed
        self.options = {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}
        self._block = lru_cache(maxsize=2)(self._make)
        if name in UNFIT:
            raise UsageError(f"--task {task}: {UNFIT[name]}")
        try:
            found = version("reasoning-gym")
            self._block(0)
        except ImportError as error:
            raise UsageError(f"--task {task}: pip install 'millpond[reasoning-gym]'") from error
        except (TypeError, ValueError, AssertionError) as error:  # an unknown name, a setting it does not have
            raise UsageError(f"--task {task}: {error}") from error
        self.digest = hashlib.sha256(json.dumps([found, name, self.options, seed]).encode()).hexdigest()

    def records(self, places: Iterable[int]) -> list[str]:
        return [self._record(place) for place in places]

    def _record(self, place: int) -> str:
        item = self._block(place // BLOCK)[place % BLOCK]
        entry = {"answer": item["answer"], "metadata": item["metadata"]}
        told = {"task": self.name, "options": self.options, "entry": entry}
        return json.dumps({"prompt": item["question"], "label": item["answer"], "metadata": {"reasoning_gym": told}})

    def _make(self, block: int) -> Any:
        from reasoning_gym import create_dataset

        return create_dataset(self.name, size=BLOCK, seed=self.seed + block * BLOCK, **self.options)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
