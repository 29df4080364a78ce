"""The scorers of reasoning-gym, from 0 to 1, for prompts of `--task reasoning_gym:NAME`. They run in the sandbox."""

from __future__ import annotations

from pipeline.errors import RewardError
from producers.rewards.answer import after_thinking, last_box
from producers.rewards.base import Grading, RewardInput


def reasoning_gym(given: RewardInput) -> Grading:
    """The answer, after the thinking part: the last `<answer>...</answer>`, else the last box, else all of it."""
    item = given.metadata.get("reasoning_gym")
    if not isinstance(item, dict) or not {"task", "options", "entry"} <= item.keys():
        raise RewardError(
            f"reward function reasoning_gym: prompt {given.prompt_id} is no task of it: feed them with "
            "--task reasoning_gym:NAME, or choose another --rm-type"
        )
    text = after_thinking(given.response)
    head, closed, _ = text.rpartition("</answer>")
    _, tagged, inside = head.rpartition("<answer>")
    answer = inside if closed and tagged else last_box(text)
    return Grading("reasoning_gym", {**item, "answer": (text if answer is None else answer).strip()})
