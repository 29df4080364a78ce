r"""DeepScaleR's rule (agentica's reward of that name; slime has it as `deepscaler`): 1 where the box after the thinking
part equals the label, else 0; a response without `</think>` (or `###Response`) is 0.

Equal are texts that are the same as the MATH data set's authors normalise them (arXiv 2103.03874), or as PRM800K's
grader does (arXiv 2305.20050); else, part by part of a tuple: where neither is an integer, both are not fractions and
there are no powers, the same mathematics. That last is decided by math-verify, in the sandbox; the original evaluates
the answer as Python.
"""

from __future__ import annotations

import math
import re

from producers.rewards.answer import last_box, solution
from producers.rewards.base import Grading, RewardInput, Value
from producers.rewards.math import DEEPEST, LONGEST, depth

_UNITS = "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard"
_UNIT = re.compile(rf"(?:{_UNITS})(?:es)?s? *(?:\^[0-9]+)?")
_DROPPED = re.compile(r"\\[%$]|[%$]|\^ *(?:\{ *\\circ *\}|\\circ)|,\\! *")
_LARGE = (("trillion", "*10^12"), ("billion", "*10^9"), ("million", "*10^6"))
_POWER = re.compile(r"\^[{(]|\^\d+\^|\^\d\d+")
_FRACTION = re.compile(r"-?\d+/0*[1-9]\d*")
_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")


def deepscaler(given: RewardInput) -> Value | Grading:
    _, thought, text = given.response.rpartition("</think>")
    if not thought:
        _, thought, text = given.response.partition("###Response")
    found, wanted = last_box(text) if thought else None, solution(given, "deepscaler")
    if found is None or not wanted:
        return 0.0
    if len(found) > LONGEST or depth(found) > DEEPEST:
        return None
    if math_text(found) == math_text(wanted):
        return 1.0
    if prm_text(found) == prm_text(wanted):
        return 1.0
    return Grading("math", {"solution": wanted, "answer": found}) if _may_be_equal(found, wanted) else 0.0


def _may_be_equal(found: str, wanted: str) -> bool:
    """Whether two answers of different text are worth a closer look: the rules that spare integers and fractions it."""
    parts, expected = _parts(prm_text(found)), _parts(prm_text(wanted))
    if len(parts) != len(expected) or (len(parts) > 1 and parts[0] != expected[0]):
        return False
    for one, other in zip(parts, expected, strict=True):
        fractions = _FRACTION.fullmatch(one) and _FRACTION.fullmatch(other)
        if one != other and (fractions or _whole(one) != _whole(other) or _POWER.search(one) or _POWER.search(other)):
            return False
    return True


def _parts(text: str) -> list[str]:
    """Of a tuple or an interval, its brackets with the first and last; else the one text."""
    inner = re.fullmatch(r"([(\[])([^()\[\]]+)([)\]])", text)
    if inner is None:
        return [text]
    return [inner[1] + inner[3], *inner[2].split(",")]


def _whole(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    return math.isfinite(value) and abs(value - round(value)) <= 1e-7


def math_text(text: str) -> str:
    """As `is_equiv` of the MATH data set compares: LaTeX of one form, without units, percent signs and spaces."""
    inner = re.fullmatch(r"\\text\{(.+?)\}", text.strip())
    text = (inner[1] if inner else text).strip().replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = re.sub(r"[td]frac", "frac", text).replace("\\left", "").replace("\\right", "")
    text = re.sub(r"\^\{?\\circ\}?|\\\$|\\%", "", text).partition("\\text{ ")[0]
    text = re.sub(r"(^| |\{)\.", r"\g<1>0.", text)
    name, equals, value = text.partition("=")
    text = value if equals and len(name) <= 2 and "=" not in value else text
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = r"\frac{1}{2}" if text == "0.5" else _braced(text)
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def _braced(text: str) -> str:
    r"""`\frac12` as `\frac{1}{2}`, `\frac1{72}` as `\frac{1}{72}`."""
    text = re.sub(r"\\frac(\w)(?=[\w{])", r"\\frac{\1}", text)
    return re.sub(r"(\\frac\{[^{}]*\})(\w)", r"\1{\2}", text)


def prm_text(text: str) -> str:
    """As PRM800K's grader compares: plain text in small letters, numbers without units, commas and needless zeros."""
    inner = re.fullmatch(r"\\text\{(.+?)\}", text)
    text = re.sub(" (?:or|and) ", " , ", _DROPPED.sub("", inner[1] if inner else text))
    for word, power in _LARGE:
        text = text.replace(word, power)
    text = _braced(re.sub(r"[td]frac", "frac", _UNIT.sub("", text)))
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r" \1/\2", text)
    text = re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", text).replace("\\", "")
    text = re.sub(r"(\d) +(\d)", r"\1+\2", re.sub(r"- *", "-", text.strip()))
    text = _GROUPED.sub("", re.sub(r"[ {}]", "", text).lower())
    return str(round(float(text))) if _whole(text) else text
