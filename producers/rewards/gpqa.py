"""Multiple choice, as in GPQA (arXiv 2311.12022): 1 where the letter chosen is the right one, else 0.

The right letter is `metadata.correct_letter`, or the label: a letter, the place of the choice from 0, or its text as it
stands in `metadata.choices`. The letters are A, B, ... for as many `choices`, or `metadata.valid_letters`, else A to J.
"""

from __future__ import annotations

import re
import string

from pipeline.errors import RewardError
from producers.rewards.answer import after_thinking, last_box, plain_text
from producers.rewards.base import RewardInput

_SAID = re.compile(r"(?i:answer|option|choice)(?:[\s:*(\[\"']|(?i:is\b))*+([A-Z])\b")
_ALONE = re.compile(r"(?<![\w'])([A-Z])(?![\w'])")


def gpqa(given: RewardInput) -> float:
    """What counts as the choice, after the thinking part: the letter or text in the last box; else the last letter said
    to be the answer; else the last capital that stands alone. A box with something else in it is a wrong answer."""
    letters, choices = _options(given)
    right = _right(given, letters, choices)
    text = after_thinking(given.response)
    box = last_box(text)
    if box is not None:
        inner = plain_text(box).strip("().: ").upper()
        return float(inner == right or (inner in choices and letters[choices.index(inner)] == right))
    found = [letter for letter in _SAID.findall(text) if letter in letters]
    found = found or [letter for letter in _ALONE.findall(text) if letter in letters]
    return float(bool(found) and found[-1] == right)


def _options(given: RewardInput) -> tuple[list[str], list[str]]:
    """The letters, and the texts in capitals, as many where there are any."""
    raw = given.metadata.get("choices") or []
    choices = [plain_text(str(choice)).upper() for choice in (raw.values() if isinstance(raw, dict) else raw)]
    letters = [str(letter).upper() for letter in given.metadata.get("valid_letters") or []]
    return letters or list(string.ascii_uppercase[: len(choices) or 10]), choices


def _right(given: RewardInput, letters: list[str], choices: list[str]) -> str:
    named, label = given.metadata.get("correct_letter"), given.label
    if isinstance(named, str) and named.strip().upper() in letters:
        return named.strip().upper()
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
        return letters[label]
    text = plain_text(str(label)).upper()
    if text in letters:
        return text
    if text in choices:
        return letters[choices.index(text)]
    raise RewardError(
        f"reward function gpqa: prompt {given.prompt_id}: neither metadata.correct_letter nor the label "
        f"({label!r:.40}) is one of {', '.join(letters)} or of metadata.choices"
    )
