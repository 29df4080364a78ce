"""What the sampler knows of one request while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from producers.engines.base import Request
from producers.engines.stamps import Stamps

PREFILL_TOKENS = 16384
"tokens of a forward pass over prompts, padding included; bounds its memory"


def draws(seed: int, count: int) -> NDArray[np.float32]:
    """Uniform numbers in [0, 1): the t-th decides the t-th token of a request, whatever it is batched with.

    Philox is a counter-based generator: equal seeds give equal numbers on every machine (Salmon et al., SC11).
    """
    return np.random.Generator(np.random.Philox(key=seed)).random(count, dtype=np.float32)


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

    def __post_init__(self) -> None:
        self.uniforms = draws(self.request.seed, self.limit)

    @property
    def origin(self) -> int:
        """Column of its first sampled token."""
        return self.first + len(self.request.tokens)


def chunks(rows: list[Row]) -> Iterator[list[Row]]:
    """Split rows, sorted by length, so that none is above PREFILL_TOKENS where it has more than one row."""
    chunk: list[Row] = []
    for row in rows:
        if chunk and (len(chunk) + 1) * len(row.request.tokens) > PREFILL_TOKENS:
            yield chunk
            chunk = []
        chunk.append(row)
    yield chunk
