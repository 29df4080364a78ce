"""DAPO's rule (arXiv 2503.14476; verl and slime have it as `math_dapo`): the last `Answer: ...` of the last 300
characters, normalised as Minerva's appendix says (arXiv 2206.14858, D.1), is the label or is not. A map of

    score   1 or -1
    acc     whether it is right
    pred    what was taken for the answer

`score` is the reward unless --reward-key names another.
"""

from __future__ import annotations

import re

from producers.rewards.answer import solution
from producers.rewards.base import RewardInput, Value

TAIL = 300
"Characters in which the answer must stand."

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
    *("<|im_end|>", "<|endoftext|>"),
)
_UNWRAPPED = re.compile(r"\\(?:text|textbf|overline)\{(.*?)\}")


def dapo(given: RewardInput) -> Value:
    found = _ANSWER.findall(given.response[-TAIL:])
    pred = normalised(found[-1]) if found else "[INVALID]"
    right = pred == _integer(normalised(solution(given, "dapo")))
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def normalised(text: str) -> str:
    text = text.rpartition("=")[2]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for word in _REMOVED:
        text = text.replace(word, "")
    math = re.search(r"\$(.*?)\$", text)
    text = _UNWRAPPED.sub(r"\1", math[1] if math else text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)  # \frac12 and \sqrt3, as TeX allows them
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def _integer(text: str) -> str:
    """The labels of DAPO's data are integers: 34.0 is 34."""
    return text.partition(".")[0] if re.fullmatch(r"-?\d+\.0+", text) else text
