"""What crosses a process, in the order of life: Prompt, Sequence, Sample, Group, Policy. All frozen."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import MessageError
from pipeline.rendezvous import Rendezvous

Tokens = NDArray[np.int32]
Logprobs = NDArray[np.float32]
Mask = NDArray[np.uint8]

COMPLETED, TRUNCATED, ABORTED = "completed", "truncated", "aborted"

HF, PEFT = "hf", "peft"
"What a folder of weights holds: a model in Hugging Face's layout, or adapters (LoRA) alone in peft's."
ADAPTERS = "adapter_config.json"
"In a folder of adapters alone, and in no other."


class Span(NamedTuple):
    """Response tokens `start:end` were sampled with the weights `version`; None is an unknown version."""

    version: int | None
    start: int
    end: int


@dataclass(frozen=True)
class Prompt:
    """One round of one prompt, as the feeder or a recycle put it into a stream."""

    id: int
    "feed number, from 0; epoch and row follow from it"
    attempt: int
    "from 1; grows by one each time the prompt goes round again; only fences"
    strikes: int
    "how often the prompt itself was at fault"
    record: str
    "the pristine JSON record: prompt, label, metadata; never re-encoded on the way"

    @property
    def fields(self) -> dict[str, Any]:
        """The record decoded: `prompt` (text or chat messages), `label`, `metadata`. MessageError where it is none.

        Anew each time: whoever asks may change what is in it."""
        try:
            value = json.loads(self.record)
        except (ValueError, RecursionError) as error:
            raise MessageError("record", f"no JSON: {error}") from None
        if not isinstance(value, dict) or not isinstance(value.get("metadata", {}), dict):
            raise MessageError("record", "no map of prompt, label and metadata")
        if not isinstance(value.get("prompt"), str | list):
            raise MessageError("record.prompt", "neither text nor messages")
        return {"label": None, "metadata": {}, **value}


@dataclass(frozen=True)
class Sequence:
    """One trainable sequence: a prompt and what followed it."""

    prompt_tokens: Tokens
    "int32 [P]: exactly what was sent to the engine"
    tokens: Tokens
    "int32 [R]: exactly what the engine returned, the stop token included, and what was seen between an agent's turns"
    logprobs: Logprobs
    "float32 [R]: log-probability of each token, after temperature, before top-p; 0 where it was not sampled"
    loss_mask: Mask
    "uint8 [R]: 1 where the model sampled the token and may be trained on it"
    versions: tuple[Span, ...]
    "weight versions over the R response tokens, in order, without gaps; what was only seen counts to the one before"


@dataclass(frozen=True)
class Sample:
    """One answer. Several sequences where an agent took several turns."""

    index: int
    "0 <= index < n_samples_per_prompt; with run seed and prompt id it seeds the sampler"
    status: str
    "completed | truncated (length limit) | aborted (never trained on)"
    text: str
    "the decoded answer, for rewards and people; training uses the tokens"
    reward: float | None
    "finite, or None: unscored, which is never 0"
    sequences: tuple[Sequence, ...]
    "at least one"
    metadata: dict[str, Any] = field(default_factory=dict)
    "JSON values with string keys; whatever the generate function wants to pass on"


@dataclass(frozen=True)
class Group:
    """The n samples of one round of one prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    worker: str
    "id of the worker that made it"
    seconds: float
    "from lease to push"

    @property
    def aborted(self) -> bool:
        return any(s.status == ABORTED for s in self.samples)

    @property
    def versions(self) -> set[int | None]:
        """Every weight version that sampled a token of the group, over all samples and sequences."""
        return {span.version for s in self.samples for q in s.sequences for span in q.versions}


@dataclass(frozen=True)
class Policy:
    """Published weights: what the `weights` hash in Redis says."""

    version: int
    "grows by at least one with each publication, over restarts too"
    path: str
    "folder, complete before it is named here; empty where no weights exist (echo)"
    format: str
    "hf | peft"
    digest: str
    "sha256 over the weight files"
    step: int
    "optimizer steps (rollout ids) these weights have seen"
    time: float
    "unix seconds, for people"
    lineage: tuple[tuple[int, int], ...] = ()
    "(version it was published under, version it restored) for each resume, oldest first"
    rendezvous: Rendezvous | None = None
    "where engines can have them from the trainer as well"

    @property
    def restored_from(self) -> int | None:
        return self.lineage[-1][1] if self.lineage else None
