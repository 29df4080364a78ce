"""Overlap of words with the label, from 0 to 1: the F1 of SQuAD (arXiv 1606.05250), as HotpotQA has it."""

from __future__ import annotations

import re
import string
from collections import Counter

from producers.rewards.answer import after_thinking
from producers.rewards.base import RewardInput, label_text

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = {"yes", "no", "noanswer"}
"Answers that are right or wrong as a whole."


def f1(given: RewardInput) -> float:
    """Of the words after the thinking part; case, punctuation and articles do not count."""
    found, wanted = words(after_thinking(given.response)), words(label_text(given, "f1"))
    if found == wanted:
        return 1.0
    if _CLOSED & {" ".join(found), " ".join(wanted)}:
        return 0.0
    common = (Counter(found) & Counter(wanted)).total()
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
