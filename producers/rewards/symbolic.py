"""Whether two answers are the same mathematics, by math-verify. Can hang and eat memory: for the sandbox alone."""

from __future__ import annotations

from math_verify import parse, verify


def equal(solution: str, answer: str) -> bool:
    """Each is what would stand in a box. The time limits of the package work by alarm signals, which cannot stop
    arithmetic on big integers and fail in threads; they are off."""
    gold, found = (parse(rf"\\boxed{{{text}}}", parsing_timeout=None) for text in (solution, answer))
    return bool(verify(gold, found, timeout_seconds=None))
