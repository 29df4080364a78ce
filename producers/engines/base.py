"""What every engine offers a generator: token ids in, token ids and what they were sampled with out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipeline.types import Logprobs, Policy, Span, Tokens


@dataclass(frozen=True)
class Sampling:
    """How to sample; the same for every request of a run."""

    max_new_tokens: int
    "at least 1; fewer where the context length leaves fewer"
    temperature: float
    ">= 0; log-probabilities are taken after it; 0: always the likeliest token, with its probability at 1"
    stop_token_ids: tuple[int, ...]
    "a sequence ends with the first of these, which is part of its tokens"
    top_p: float = 1.0
    "in (0, 1]: of the likeliest tokens as few as have that much probability together; log-probabilities are as at 1"


@dataclass(frozen=True)
class Request:
    """One sequence to sample."""

    rid: str
    "of fixed length, never reused, unique among those in flight"
    tokens: Tokens
    "int32 [P], P >= 1"
    sampling: Sampling
    seed: int
    "63 bits from (run seed, prompt id, sample index): never from worker or attempt"


@dataclass(frozen=True)
class Completion:
    """What came of a request."""

    tokens: Tokens
    "int32 [R]; R may be 0 only when aborted"
    logprobs: Logprobs
    "float32 [R]"
    finish: str
    "stop | length | abort"
    versions: tuple[Span, ...]
    "over the R tokens"


class Engine(Protocol):
    """Asynchronous; one event loop.

    Errors: RequestRefused (final), EngineDown (hand the prompt back), WeightsError (from `load`), any other is a bug.
    """

    vocab_size: int
    "token ids are below it"
    context_length: int
    "prompt and response together"

    @property
    def version(self) -> int | None:
        """The weight version that the next token will be sampled with; None before the first load."""

    async def start(self) -> None: ...

    async def generate(self, request: Request) -> Completion:
        """Survives weight updates and pauses; cancelling the awaiting task aborts the request."""
        ...

    async def abort(self, rid: str) -> None:
        """The request ends soon with finish `abort`; an unknown rid is no error."""
        ...

    async def load(self, policy: Policy) -> None:
        """Returns when the next token of every sequence will come from `policy`. Never loads a lower version."""
        ...

    async def pause(self) -> None:
        """No token is sampled until `resume`; requests are kept."""
        ...

    async def resume(self) -> None: ...

    async def varies(self) -> str:
        """Why the same requests, begun together, may get other tokens another time; empty where they do not."""
        ...

    async def close(self) -> None: ...
