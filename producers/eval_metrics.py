"""What an evaluation says of one set, under slime's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pipeline.metrics import Values, response_len, statistics
from pipeline.types import TRUNCATED, Group
from producers.pass_at_k import rates

RIGHT = 1.0
"An answer with this reward, or a higher one, is right."


@dataclass(frozen=True)
class Answers:
    """What counts of the answers to one prompt."""

    rewards: tuple[float | None, ...]
    "None: unscored"
    lengths: tuple[int, ...]
    "tokens that the model sampled"
    truncated: int
    "how many a length limit has cut"

    @classmethod
    def of(cls, group: Group) -> Answers:
        samples = group.samples
        cut = sum(sample.status == TRUNCATED for sample in samples)
        return cls(tuple(s.reward for s in samples), tuple(map(response_len, samples)), cut)


def values(name: str, answers: Sequence[Answers], refused: int) -> Values:
    """`eval/NAME` and what belongs to it; `refused` prompts had no room. What is unscored counts nowhere but there."""
    rewards = [[reward for reward in one.rewards if reward is not None] for one in answers]
    lengths = [length for one in answers for length in one.lengths]
    scored = [reward for some in rewards for reward in some]
    counts = [(len(some), sum(reward >= RIGHT for reward in some)) for some in rewards]
    head = f"eval/{name}"
    found = {f"{head}-pass@{k}": rate for k, rate in rates(counts)}
    if scored:
        found = {head: fmean(scored), **found}
    if lengths:
        found |= statistics(f"{head}/response_len", lengths)
        found[f"{head}-truncated_ratio"] = sum(one.truncated for one in answers) / len(lengths)
    counted = {"samples": len(lengths), "unscored": len(lengths) - len(scored), "refused_prompts": refused}
    return {**found, **{f"{head}/{what}": count for what, count in counted.items()}}
