"""What counts as the answer in a response, and as the solution in a label: docs/rewards.md has the rule in words."""

from __future__ import annotations

import re
import unicodedata

from producers.rewards.base import RewardInput, label_text

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_TYPOGRAPHY = str.maketrans({"−": "-", "–": "-", "‐": "-", "‑": "-", "∕": "/", "×": r"\times "})


def after_thinking(response: str) -> str:
    """What follows the last `</think>`. A `<think>` that is never closed leaves what stands before it, no tag all."""
    _, closed, rest = response.rpartition("</think>")
    return rest if closed else response.partition("<think>")[0]


def last_box(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` or `\fbox{...}`, without outer white space; None where there is none.

    The last one decides: where it is not complete nothing before it counts. Linear in the length of the text; the
    braces `\{` and `\}` are characters, not groups.
    """
    starts = [box.end() for box in _BOX.finditer(text)]
    inside, depth = text[starts[-1] :] if starts else "", 1
    for brace in re.finditer(r"\\.|[{}]", inside, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return inside[: brace.start()].strip()
    return None


def answer(response: str) -> str | None:
    """The last box after the thinking part, or None."""
    return last_box(after_thinking(response))


def solution(given: RewardInput, name: str) -> str:
    """The label as text: what stands after GSM8K's `####`, or in its last box, or all of it. RewardError: no label."""
    text = label_text(given, name)
    _, mark, rest = text.rpartition("####")
    if mark:
        return rest.strip()
    boxed = last_box(text)
    return text.strip() if boxed is None else boxed


def tidy(text: str) -> str:
    """Full-width characters as ASCII, one kind of minus, no `$` around, no full stop behind."""
    text = unicodedata.normalize("NFKC", text).translate(_TYPOGRAPHY).strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    inner = re.fullmatch(r"\$([^$]+)\$|\\\((.+)\\\)", text, re.DOTALL)
    return text if inner is None else (inner[1] or inner[2]).strip()


def plain_text(text: str) -> str:
    r"""Without `\text{}` and its kin, in small letters, with single spaces."""
    return " ".join(_TEXT.sub(r" \1 ", text).casefold().split())
