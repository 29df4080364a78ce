"""What scores an answer to a reasoning-gym task. For the sandbox alone: some of it evaluates what the answer says."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from reasoning_gym import create_dataset


def gym_score(task: str, options: dict[str, Any], entry: dict[str, Any], answer: str) -> float:
    return float(_dataset(task, json.dumps(options)).score_answer(answer=answer, entry=entry))


@lru_cache(maxsize=8)
def _dataset(task: str, options: str) -> Any:
    return create_dataset(task, size=1, seed=0, **json.loads(options))
