"""Groups for the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from pipeline.types import COMPLETED, Group, Prompt, Sample, Sequence, Span


def sequence(prompt: Many[int], tokens: Many[int], mask: Many[int] | None = None, logprob: float = -3.0) -> Sequence:
    length = len(tokens)
    return Sequence(
        np.array(prompt, dtype=np.int32),
        np.array(tokens, dtype=np.int32),
        np.full(length, logprob, dtype=np.float32),
        np.array([1] * length if mask is None else mask, dtype=np.uint8),
        (Span(1, 0, length),),
    )


def sample(index: int, reward: float | None, *sequences: Sequence, **changes: object) -> Sample:
    fields: dict[str, object] = {"status": COMPLETED, "text": "", "metadata": {}} | changes
    return Sample(index=index, reward=reward, sequences=sequences, **fields)  # type: ignore[arg-type]


def group(id: int, *samples: Sample) -> Group:
    return Group(Prompt(id, 1, 0, "{}"), samples, "worker", 0.1)


def random_groups(count: int, size: int, seed: int = 0, vocabulary: int = 22) -> list[Group]:
    """Prompts of 3 to 7 tokens, answers of 1 to 5, rewards of 0 to 1 in fifths, log-probabilities around -3."""
    rng = np.random.default_rng(seed)

    def one(prompt: Many[int], index: int) -> Sample:
        tokens = rng.integers(0, vocabulary, rng.integers(1, 6)).tolist()
        return sample(
            index, float(rng.integers(0, 6)) / 5, sequence(prompt, tokens, logprob=-3 + 0.3 * float(rng.normal()))
        )

    prompts = [rng.integers(3, vocabulary, rng.integers(3, 8)).tolist() for _ in range(count)]
    return [group(id, *(one(prompt, index) for index in range(size))) for id, prompt in enumerate(prompts)]
