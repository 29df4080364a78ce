"""A group as a message and back, beside the same values as plain lists through the same msgpack."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import msgpack
import numpy as np

from pipeline.codec import decode, encode
from pipeline.measure import Figure, ratio, turns
from pipeline.types import COMPLETED, Group, Prompt, Sample, Sequence, Span

SAMPLES, PROMPT, RESPONSE, TEXT = 8, 300, 2000, 8000
"answers in the group; tokens of a prompt and of an answer; characters of an answer"
ARRAYS = {"prompt_tokens": np.int32, "tokens": np.int32, "logprobs": np.float32, "loss_mask": np.uint8}


def measure(quick: bool) -> Iterator[Figure]:
    group = example()
    message, lists = encode(group), _as_lists(group)
    sides = {
        "encode": lambda: encode(group),
        "decode": lambda: decode(message),
        "lists_encode": lambda: _as_lists(group),
        "lists_decode": lambda: _from_lists(lists),
    }
    seconds = turns(sides, 5 if quick else 200)
    yield Figure("message", len(message), "bytes")
    for name in sides:
        yield Figure(name, median(seconds[name]) * 1e6, "us")
    yield Figure("lists_over_message", len(lists) / len(message), "x")
    for name in ("encode", "decode"):
        yield Figure(f"lists_{name}_over_{name}", ratio(seconds[f"lists_{name}"], seconds[name]), "x")


def example() -> Group:
    """8 answers of 2000 tokens to a prompt of 300: about 220 KB."""
    rng = np.random.default_rng(0)
    samples = []
    for index in range(SAMPLES):
        tokens = rng.integers(0, 150_000, RESPONSE, dtype=np.int32)
        sequence = Sequence(
            prompt_tokens=rng.integers(0, 150_000, PROMPT, dtype=np.int32),
            tokens=tokens,
            logprobs=-rng.exponential(size=RESPONSE).astype(np.float32),
            loss_mask=np.ones(RESPONSE, dtype=np.uint8),
            versions=(Span(7, 0, 1200), Span(8, 1200, RESPONSE)),
        )
        text = "".join(map(chr, rng.integers(97, 123, TEXT)))
        samples.append(Sample(index, COMPLETED, text, float(index % 2), (sequence,)))
    return Group(Prompt(123, 1, 0, '{"prompt": "How many?", "label": "4"}'), tuple(samples), "host-1-abc", 12.5)


def _as_lists(group: Group) -> bytes:
    """What a user of msgpack would write down first."""
    samples = [
        {
            "index": s.index,
            "text": s.text,
            "reward": s.reward,
            "versions": [list(span) for span in q.versions],
            **{name: getattr(q, name).tolist() for name in ARRAYS},
        }
        for s in group.samples
        for q in s.sequences
    ]
    message: bytes = msgpack.packb({"id": group.prompt.id, "record": group.prompt.record, "samples": samples})
    return message


def _from_lists(message: bytes) -> list[dict[str, Any]]:
    """With the arrays that training needs."""
    samples: list[dict[str, Any]] = msgpack.unpackb(message)["samples"]
    return [{**s, **{name: np.array(s[name], dtype) for name, dtype in ARRAYS.items()}} for s in samples]
