"""Continuous batching: the rows that run, one step of all of them, rows that leave and rows that enter."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.errors import EngineError
from producers.engines.base import Completion
from producers.engines.local_cache import Slots, Window
from producers.engines.local_model import Model
from producers.engines.local_rows import PREFILL_TOKENS, Row, chunks
from producers.engines.local_sampling import pick


class Batch:
    """Rows 0 to n of the slots. Column `end` holds each row's newest token, which no forward pass has seen yet."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.slots = Slots(model.layers, model.device)
        self.rows: list[Row] = []
        self.end = 0
        self._low = 0
        self._finished: list[int] = []

    def admit(self, rows: list[Row]) -> None:
        """Compute the prompts of `rows` and sample the first token of each."""
        rows = sorted(rows, key=lambda row: row.size)
        longest = rows[-1].size
        if not self.rows:
            self.end = longest
        self._grow(len(self.rows) + len(rows), max(self.end, longest) + 1)
        if longest > self.end:
            self._slide(longest - self.end)
        for chunk in chunks(rows):
            self._prefill(chunk)

    def _prefill(self, rows: list[Row]) -> None:
        a, b, low = len(self.rows), len(self.rows) + len(rows), self.end - rows[-1].size
        unique: dict[bytes, int] = {}
        copies = [unique.setdefault(row.request.tokens.tobytes(), len(unique)) for row in rows]
        ids = np.zeros((len(rows), self.end - low), np.int64)
        for i, row in enumerate(rows):
            row.first = self.end - row.size
            ids[i, row.first - low :] = row.request.tokens
        self.slots.ids[a:b, low : self.end] = self._device(ids)
        self.rows += rows
        self._changed()
        self._draw(a, b)
        index = self._device(np.array(copies))
        once = self._device(np.array([copies.index(i) for i in range(len(unique))])) + a
        even = rows[0].size == rows[-1].size
        window = Window((a, b), low, low, even, copies=index)
        logits = self.model.forward(self.slots.ids[once, low : self.end], self._first[once], self.slots, window)
        self._sample(a, b, logits[index])

    def step(self) -> None:
        """Sample one token of every row."""
        if self.end + 2 > self.slots.columns:
            self._make_columns()
        n, end = len(self.rows), self.end
        window = Window((0, n), self._low, end, self._even)
        logits = self.model.forward(self.slots.ids[:n, end : end + 1], self._first, self.slots, window)
        self.end += 1
        self._sample(0, n, logits)

    def _sample(self, a: int, b: int, logits: Tensor) -> None:
        """Sample column `end` of rows a:b."""
        column = slice(self.end, self.end + 1)
        temperature = None if self._temperature is None else self._temperature[a:b]
        top_p = None if self._top_p is None else self._top_p[a:b]
        tokens, chosen = pick(logits, temperature, self.slots.uniforms[a:b, column], top_p)
        self.slots.ids[a:b, column], self.slots.logprobs[a:b, column] = tokens, chosen
        rows = self.rows[a:b]
        values: list[float] = chosen.view(-1).tolist()
        if not math.isfinite(sum(values)):
            row = rows[[math.isfinite(value) for value in values].index(False)]
            raise EngineError(
                f"the model gives no finite probability to a token of request {row.request.rid}: weights of version "
                f"{row.stamps.version} are broken"
            )
        self._finished += [
            i
            for i, (row, token) in enumerate(zip(rows, tokens.view(-1).tolist(), strict=True), a)
            if token in row.stops or row.last == self.end
        ]

    def harvest(self) -> list[tuple[str, Completion]]:
        """Rows that have ended, by request id; they leave the batch."""
        done = [(self.rows[i].request.rid, self._completion(i)) for i in self._finished]
        self._remove(self._finished)
        self._finished = []
        return done

    def abort(self, rid: str) -> Completion | None:
        """Take a row out; None where it does not run."""
        for i, row in enumerate(self.rows):
            if row.request.rid == rid:
                completion = self._completion(i, "abort")
                self._remove([i])
                return completion
        return None

    def mark(self, version: int | None) -> None:
        """Tokens sampled from now on come from `version`."""
        for row in self.rows:
            row.stamps.mark(version, self.end + 1 - row.origin)

    def recompute(self) -> None:
        """Compute all keys and values anew, with the weights as they are now."""
        height = max(1, PREFILL_TOKENS // max(1, self.end - self._low))
        for a in range(0, len(self.rows), height):
            b = min(a + height, len(self.rows))
            window = Window((a, b), self._low, self._low, self._even)
            self.model.forward(self.slots.ids[a:b, self._low : self.end], self._first[a:b], self.slots, window)

    def _completion(self, i: int, finish: str | None = None) -> Completion:
        row, columns = self.rows[i], slice(self.rows[i].origin, self.end + 1)
        tokens = self.slots.ids[i, columns].to(torch.int32).cpu().numpy()
        logprobs = self.slots.logprobs[i, columns].cpu().numpy().copy()
        if finish is None:
            finish = "stop" if int(tokens[-1]) in row.stops else "length"
        return Completion(tokens, logprobs, finish, row.stamps.spans(len(tokens)))

    def _remove(self, gone: list[int]) -> None:
        """Close the gaps with rows from the end."""
        if not gone:
            return
        n, left = len(self.rows) - len(gone), set(gone)
        holes = [i for i in gone if i < n]
        movers = [i for i in range(n, len(self.rows)) if i not in left]
        if holes:
            self.slots.move(holes, movers)
            for hole, mover in zip(holes, movers, strict=True):
                self.rows[hole] = self.rows[mover]
        del self.rows[n:]
        self._changed()

    def _make_columns(self) -> None:
        """Move everything to the left where that frees enough columns to be worth it, else grow."""
        if self._low >= max(64, (self.end - self._low) // 4):
            self._slide(-self._low)
        else:
            self._grow(len(self.rows), self.end + 64)

    def _grow(self, rows: int, columns: int) -> None:
        before = self.slots.columns
        self.slots.grow(rows, columns)
        if self.slots.columns > before:
            self._draw(0, len(self.rows))

    def _slide(self, by: int) -> None:
        self.slots.slide(self._low, self.end + 1, by)
        self.end += by
        for row in self.rows:
            row.first += by
        self._changed()
        self._draw(0, len(self.rows))

    def _draw(self, a: int, b: int) -> None:
        """Put the draws of the tokens still to come where their columns are."""
        values = np.zeros((b - a, self.slots.columns - self.end), np.float32)
        for i, row in enumerate(self.rows[a:b]):
            rest = row.uniforms[max(0, self.end - row.origin) :][: values.shape[1]]
            values[i, : len(rest)] = rest
        self.slots.uniforms[a:b, self.end :] = self._device(values)

    def _changed(self) -> None:
        """Gather what a step needs of all rows."""
        rows = self.rows
        self._first = self._device(np.array([row.first for row in rows], np.int64))
        how = [row.request.sampling for row in rows]
        warm = np.array([[s.temperature or 1] for s in how], np.float32)
        self._temperature = None if (warm == 1).all() else self._device(warm)
        whole = np.array([[s.top_p if s.temperature else 0] for s in how], np.float32)
        self._top_p = None if (whole == 1).all() else self._device(whole)
        self._low = min((row.first for row in rows), default=0)
        self._even = all(row.first == self._low for row in rows)

    def _device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.model.device)
