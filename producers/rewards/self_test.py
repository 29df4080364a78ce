"""Known answers, graded at the start in the place where all others will be: a grader that is broken there would give
plausible rewards, and the run would learn from them.
"""

from __future__ import annotations

from typing import Any

from pipeline.errors import UsageError
from pipeline.types import COMPLETED
from producers.rewards.base import RewardInput, Scorer

_SPLIT = {"reasoning_gym": {"task": "chain_sum", "options": {}, "entry": {"answer": "4", "metadata": {}}}}

KNOWN: dict[str, list[tuple[str, Any, dict[str, Any], float]]] = {
    "math": [
        (r"so \boxed{\frac{3}{6}}", "0.5", {}, 1.0),
        (r"so \boxed{x^2 + 2x + 1}", "(x+1)^2", {}, 1.0),
        (r"so \boxed{\frac{3}{7}}", "0.5", {}, 0.0),
        (r"so \boxed{12}", 12, {}, 1.0),
        ("so 12", 12, {}, 0.0),
    ],
    "deepscaler": [
        (r"</think> \boxed{\sqrt{12}}", r"2\sqrt{3}", {}, 1.0),
        (r"</think> \boxed{\sqrt{13}}", r"2\sqrt{3}", {}, 0.0),
    ],
    "dapo": [("so\nAnswer: $34$", "34", {}, 1.0), (r"so \boxed{34}", "34", {}, -1.0)],
    "gsm8k": [("so\n#### 1,200", "#### 1200", {}, 1.0), ("so 1200", "#### 1200", {}, 0.0)],
    "code": [
        ("```python\nprint(int(input()) + 1)\n```", None, {"tests": {"inputs": ["1"], "outputs": ["2"]}}, 1.0),
        ("```python\nprint(1)\n```", None, {"tests": {"inputs": ["1"], "outputs": ["2"]}}, 0.0),
        ("```python\nimport socket; socket.socket()\nprint(2)\n```", None, {"tests": ["pass"]}, 0.0),
        ("```python\nopen('millpond-self-test', 'w')\n```", None, {"tests": ["pass"]}, 0.0),
    ],
    "reasoning_gym": [("<answer>4</answer>", "4", _SPLIT, 1.0), ("<answer>5</answer>", "4", _SPLIT, 0.0)],
}
"By name: response, label, metadata, reward. Cheap rewards without a parser have none."


async def self_test(name: str, scorer: Scorer) -> None:
    """UsageError where a known answer gets another reward than it should. A judge's answers are not known."""
    for response, label, metadata, expected in KNOWN.get(name, []):
        given = RewardInput("self-test", label, metadata, response, COMPLETED, 0, -1)
        (found,) = await scorer.score_group([given])
        if found != expected:
            raise UsageError(
                f"--rm-type {name}: the self-test fails: {response!r} with label {label!r} should give {expected}, and "
                f"gives {'no score' if found is None else found}; nothing is graded here until that is mended"
            )
