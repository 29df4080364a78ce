"""What --rm-type says: `math`, or several with weights, `math:0.9,length:0.1`; and which reward a data source has."""

from __future__ import annotations

import difflib
import math

from producers.rewards.built_in import BOXED, BUILT_IN

ROW, REMOTE = "row", "remote_rm"
"No reward but that of each row; the one that is not in BUILT_IN."

SOURCES = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "dapo",
    "math": "dapo",
    "aime": "dapo",
}
"Rewards of verl's data sources (`default_compute_score`); a name that begins with `aime` is `aime`."


def parse(text: str) -> list[tuple[str, float]]:
    """Names and weights; a weight that is not given is 1. ValueError says what is wrong."""
    terms = [term.strip().rpartition(":") for term in text.split(",")]
    found = [(name or weight, weight if name else "1") for name, _, weight in terms]
    for name, weight in found:
        if name.removeprefix(BOXED) not in BUILT_IN and name != REMOTE:
            near = difflib.get_close_matches(name, [*BUILT_IN, REMOTE, ROW], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{text!r}: there are {', '.join([*BUILT_IN, REMOTE, ROW])}{hint}")
        if not _is_number(weight):
            raise ValueError(f"{text!r}: the weight {weight!r} of {name} is no number; write NAME:WEIGHT,NAME:WEIGHT")
    if len({name for name, _ in found}) < len(found):
        raise ValueError(f"{text!r}: a reward stands in it twice")
    return [(name, float(weight)) for name, weight in found]


def chosen(run: str, own: object, source: object) -> str:
    """The reward of a row: its own, else the run's --rm-type, else that of its source. ValueError: there is none."""
    if isinstance(own, str) and own.strip():
        return own.strip()
    if run != ROW:
        return run
    name = source if isinstance(source, str) else ""
    found = SOURCES.get("aime" if name.startswith("aime") else name)
    if found is None:
        raise ValueError(
            "--rm-type row, and the row names no reward: no metadata.rm_type, and its data_source is none of "
            + ", ".join(SOURCES)
        )
    return found


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
