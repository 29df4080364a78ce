"""Keys, values and tokens of the running rows in shared columns, and the cache that transformers sees.

All rows are flush right: the newest token of every row stands in the same column, so a decode step writes one column
and its attention reads one rectangle, whatever the rows' lengths. That is ordinary left padding to a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class Window:
    """What the next forward pass writes and reads."""

    rows: tuple[int, int]
    "rows a:b are written and read"
    low: int
    "cached columns low:high are read; low == high is a prefill"
    high: int
    "the first column to be written"
    even: bool
    "every row reaches back to the first column: nothing is padded"
    copies: Tensor | None = None
    "int64 [b - a]: the row of the pass that row a + i is a copy of (equal prompts are computed once)"


class Layer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, float [rows, heads, columns, dim]; a sliding window keeps all columns, masked."""

    is_sliding = False

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            x.new_zeros(self.slots.rows, x.shape[1], self.slots.columns, x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.slots.window
        (a, b), end = window.rows, window.high + key_states.shape[2]
        copies = window.copies
        self.keys[a:b, :, window.high : end] = key_states if copies is None else key_states[copies]
        self.values[a:b, :, window.high : end] = value_states if copies is None else value_states[copies]
        if window.low == window.high:
            return key_states, value_states
        return self.keys[a:b, :, window.low : end], self.values[a:b, :, window.low : end]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Older transformers give the positions of the queries instead of their number."""
        queries = len(query_length) if isinstance(query_length, Tensor) else query_length
        return self.get_seq_length() + queries, 0

    def get_seq_length(self) -> int:
        return self.slots.window.high - self.slots.window.low

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class Slots:
    """Everything that has rows and columns. Rows beyond those in use and columns left of a row's first are stale."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.rows = self.columns = 1
        self.window = Window((0, 0), 0, 0, even=True)
        self.ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        "[rows, columns] prompt and sampled tokens"
        self.uniforms = torch.zeros(1, 1, device=device)
        "[rows, columns] the draw that decides the token of that column"
        self.logprobs = torch.zeros(1, 1, device=device)
        "[rows, columns] of sampled tokens"
        self.layers = [Layer(self) for _ in range(layers)]
        self.cache = Cache(layers=self.layers)

    def grow(self, rows: int, columns: int) -> None:
        """Make room for at least so many; amortised by growing by half at least."""
        if rows > self.rows:
            rows = max(rows, self.rows + self.rows // 2)
        if columns > self.columns:
            columns = max(columns, self.columns + self.columns // 2)
        rows, columns = max(rows, self.rows), max(columns, self.columns)
        if (rows, columns) == (self.rows, self.columns):
            return

        def enlarge(x: Tensor) -> Tensor:
            shape = (rows, columns) if x.dim() == 2 else (rows, x.shape[1], columns, x.shape[3])
            larger = x.new_zeros(shape)
            larger[: self.rows].narrow(_column_dim(x), 0, self.columns).copy_(x)
            return larger

        self._each(enlarge)
        self.rows, self.columns = rows, columns

    def slide(self, low: int, end: int, by: int) -> None:
        """Move columns low:end to the right by `by` (to the left where it is negative)."""

        def shift(x: Tensor) -> Tensor:
            dim = _column_dim(x)
            x.narrow(dim, low + by, end - low).copy_(x.narrow(dim, low, end - low).clone())
            return x

        self._each(shift)

    def move(self, target: list[int], source: list[int]) -> None:
        """Copy rows `source` over rows `target`."""
        to, of = (torch.tensor(x, dtype=torch.int64, device=self.ids.device) for x in (target, source))

        def copy(x: Tensor) -> Tensor:
            x[to] = x[of]
            return x

        self._each(copy)

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.ids, self.uniforms, self.logprobs = change(self.ids), change(self.uniforms), change(self.logprobs)
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = change(layer.keys), change(layer.values)


def _column_dim(x: Tensor) -> int:
    return 1 if x.dim() == 2 else 2
