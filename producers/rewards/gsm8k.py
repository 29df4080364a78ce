"""GSM8K's own form: 1 where the number behind the last `####` is the label's, else 0.

The strict rule of verl's gsm8k reward and of the data set's authors (arXiv 2110.14168): no `####`, no answer.
"""

from __future__ import annotations

import re

from producers.rewards.answer import after_thinking, solution, tidy
from producers.rewards.base import RewardInput
from producers.rewards.math import number

_ANSWER = re.compile(r"####\s*+(?:\$\s*+)?([-+]?[\d.,]+)")


def gsm8k(given: RewardInput) -> float:
    found = _ANSWER.findall(after_thinking(given.response))
    wanted = number(tidy(solution(given, "gsm8k").removeprefix("$")))
    value = number(tidy(found[-1].rstrip(".,"))) if found else None
    return float(value is not None and value == wanted)
