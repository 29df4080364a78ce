"""Instructions that a program can check, as in IFEval (arXiv 2311.07911), in its data's form: `metadata` holds
`instruction_id_list` and, one map for each, `kwargs`. A map of

    score   1 where all are followed, else 0 (the paper's strict accuracy by prompt)
    share   the share of instructions that are followed

`score` is the reward unless --reward-key names another. The thinking part does not count; an empty
response follows nothing.
"""

from __future__ import annotations

from pipeline.errors import RewardError
from producers.rewards.answer import after_thinking
from producers.rewards.base import RewardInput, Value
from producers.rewards.ifeval_checks import CHECKS


def ifeval(given: RewardInput) -> Value:
    ids, kwargs = given.metadata.get("instruction_id_list"), given.metadata.get("kwargs")
    where = f"reward function ifeval: prompt {given.prompt_id}"
    if not isinstance(ids, list) or not ids:
        raise RewardError(f"{where}: metadata.instruction_id_list is missing or empty (--metadata-key)")
    unknown = [name for name in ids if name not in CHECKS]
    if unknown:
        raise RewardError(f"{where}: no check for {unknown[0]!r}; there are {', '.join(CHECKS)}")
    arguments = kwargs if isinstance(kwargs, list) and len(kwargs) == len(ids) else [{}] * len(ids)
    text = after_thinking(given.response).strip()
    try:
        kept = [bool(text) and CHECKS[name](text, _given(of)) for name, of in zip(ids, arguments, strict=True)]
    except KeyError as error:
        raise RewardError(f"{where}: metadata.kwargs has no {error} for one of {', '.join(ids)}") from error
    return {"score": float(all(kept)), "share": sum(kept) / len(kept)}


def _given(arguments: object) -> dict[str, object]:
    """Without the nulls that tables fill in."""
    return {k: v for k, v in arguments.items() if v is not None} if isinstance(arguments, dict) else {}
