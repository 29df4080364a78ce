r"""1 where the last box holds the label's mathematics, else 0. docs/rewards.md has the rule and a table of examples."""

from __future__ import annotations

import re
from decimal import Decimal

from producers.rewards.answer import answer, plain_text, solution, tidy
from producers.rewards.base import Grading, RewardInput, Value

LONGEST, DEEPEST = 2000, 100
"Characters and nested brackets of an answer; past them it is unscored: no solution is like that, and parsers choke."

_NUMBER = re.compile(r"([-+]?)\s*(\d{1,3}(?:(?:,|\{,\})\d{3})+|\d+)?(\.\d*)?(?:\s*\\?%|\s+percent)?")
_MIXED = re.compile(r"(-?\d+)\s+(\d+)\s*/\s*(\d+)")
_WORD = re.compile(r"[^\W\d_]{3,}")
_COMMAND = re.compile(r"\\[a-zA-Z]+|\b(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|frac|pi|min|max|mod|gcd|lcm)\b")


def math(given: RewardInput) -> Value | Grading:
    """Numbers and words are settled here; what is neither goes to the sandbox."""
    found, wanted = answer(given.response), solution(given, "math")
    return 0.0 if not found else compare(tidy(wanted), tidy(found))


def compare(wanted: str, found: str) -> Value | Grading:
    """Whether two tidy texts are the same mathematics."""
    if len(found) > LONGEST or depth(found) > DEEPEST:
        return None
    if plain_text(wanted) == plain_text(found):
        return 1.0
    numbers = number(wanted), number(found)
    if numbers[0] is not None and numbers[1] is not None:
        return float(_equal(wanted, numbers[0]) & _equal(found, numbers[1]) != set())
    if is_words(wanted):
        return 0.0
    return Grading("math", {"solution": _mixed(wanted), "answer": _mixed(found)})


def depth(text: str) -> int:
    """How deep braces and parentheses are nested at most."""
    now = most = 0
    for mark in re.findall(r"[{}()\[\]]", text):
        now += 1 if mark in "{([" else -1
        most = max(most, now)
    return most


def number(text: str) -> Decimal | None:
    """A plain decimal number, with commas between thousands or a percent sign; else None."""
    match = _NUMBER.fullmatch(text)
    if match is None or not (match[2] or (match[3] or ".") != "."):
        return None
    digits = (match[2] or "0").replace("{,}", "").replace(",", "") + (match[3] or "")
    return Decimal(match[1] + digits)


def _equal(text: str, value: Decimal) -> set[Decimal]:
    """What a number may stand for: 28% is 28 or 0.28."""
    return {value, value / 100} if text.endswith(("%", "percent")) else {value}


def is_words(text: str) -> bool:
    r"""Has a word that is no LaTeX command and no function: a parser would take it for a product of variables, in which
    `listen` and `silent` are equal."""
    return _WORD.search(_COMMAND.sub(" ", plain_text(text))) is not None


def _mixed(text: str) -> str:
    """3 1/2 as LaTeX has it; a parser takes it for something else."""
    return _MIXED.sub(r"\1\\frac{\2}{\3}", text)
