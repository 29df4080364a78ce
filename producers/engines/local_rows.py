"""What the sampler knows of one request while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from producers.engines.base import Request
from producers.engines.local_sampling import draws
from producers.engines.stamps import Stamps

PREFILL_TOKENS = 16384
"tokens of a forward pass over prompts, padding included; bounds its memory"


@dataclass
class Row:
    """A request that runs."""

    request: Request
    limit: int
    "tokens it may sample, at least 1"
    stamps: Stamps
    first: int = 0
    "column of its first prompt token; columns move"
    uniforms: NDArray[np.float32] = field(init=False)
    stops: frozenset[int] = field(init=False)
    size: int = field(init=False)
    "prompt tokens"

    def __post_init__(self) -> None:
        self.uniforms = draws(self.request.seed, self.limit)
        self.stops = frozenset(self.request.sampling.stop_token_ids)
        self.size = len(self.request.tokens)

    @property
    def origin(self) -> int:
        """Column of its first sampled token."""
        return self.first + self.size

    @property
    def last(self) -> int:
        """Column of the last token it may sample."""
        return self.first + self.size + self.limit - 1


def chunks(rows: list[Row]) -> Iterator[list[Row]]:
    """Split rows, sorted by length, so that none is above PREFILL_TOKENS where it has more than one row."""
    chunk: list[Row] = []
    for row in rows:
        if chunk and (len(chunk) + 1) * row.size > PREFILL_TOKENS:
            yield chunk
            chunk = []
        chunk.append(row)
    yield chunk
