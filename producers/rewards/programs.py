"""Programs: 1 where the code in the answer passes its tests, else 0. A map of

    score   1 where all tests pass, else 0
    share   the share of tests that pass

The program is the last complete block between ``` and ``` after the thinking part. The tests are `metadata.tests`, else
`metadata.test_list`, else the label: a map of `inputs` and `outputs` (as APPS and verl have it; JSON text too), a list
of maps of `input` and `output`, a list of assertions (as MBPP has them), or the text of a test in Python.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pipeline.errors import RewardError
from producers.rewards.answer import after_thinking
from producers.rewards.base import Grading, RewardInput, Value

LONGEST = 100_000
"Characters of a program; a longer one is wrong."
SECONDS = 4.0
"Of processor time that a test may take; past them it has failed."
MOST = 100
"Tests that are run."

_FENCE = re.compile(r"^[ \t]*```[^\n`]*$", re.MULTILINE)


def code(given: RewardInput) -> Value | Grading:
    found = tests(given)
    program = last_block(after_thinking(given.response))
    if program is None or len(program) > LONGEST:
        return {"score": 0.0, "share": 0.0}
    return Grading("code", {"program": program, "tests": found[:MOST], "seconds": SECONDS})


def last_block(text: str) -> str | None:
    """What stands between the last two fences that belong together."""
    fences = list(_FENCE.finditer(text))
    if len(fences) < 2:
        return None
    start, end = fences[len(fences) // 2 * 2 - 2 : len(fences) // 2 * 2]
    return text[start.end() : end.start()].strip("\n")


def tests(given: RewardInput) -> list[dict[str, str]]:
    """Each a map of input and output, or of code."""
    value: Any = given.metadata.get("tests") or given.metadata.get("test_list") or given.label
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value]
    if isinstance(value, dict) and isinstance(value.get("inputs"), list) and "fn_name" not in value:
        pairs = zip(value["inputs"], value.get("outputs") or [], strict=False)
        value = [{"input": _text(one), "output": _text(other)} for one, other in pairs]
    found = [_test(item) for item in value] if isinstance(value, list) else []
    if not found or None in found:
        raise RewardError(
            f"reward function code: prompt {given.prompt_id} has no tests that can be run: metadata.tests, "
            "metadata.test_list or the label are to be inputs and outputs, or Python"
        )
    return [test for test in found if test is not None]


def _test(item: Any) -> dict[str, str] | None:
    if isinstance(item, str) and item.strip():
        return {"code": item}
    if isinstance(item, dict) and {"input", "output"} <= item.keys():
        return {"input": _text(item["input"]), "output": _text(item["output"])}
    return None


def _text(value: Any) -> str:
    """APPS has some inputs as lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
