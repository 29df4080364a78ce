"""The compute thread: takes orders between two tokens, lets requests in, steps, hands completions out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from producers.engines.base import Completion, Request
from producers.engines.local_batch import Batch
from producers.engines.local_model import Model
from producers.engines.local_rows import Row
from producers.engines.local_weights import swap
from producers.engines.stamps import Stamps

Done = list[tuple[str, Completion]]

SHARE, PATIENCE = 8, 8
"""Prompts cost a forward pass of their own, so they wait until an eighth of the running rows' number can enter at once,
or for eight steps at most."""


class Sampler:
    """Lives in one thread. Others put callables into `orders`; they run there, between two tokens."""

    def __init__(self, model: Model, max_batch: int, mode: str, deliver: Callable[[Done], object]) -> None:
        self.orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.version: int | None = None
        self.state: dict[str, Tensor] = model.net.state_dict()
        self._batch = Batch(model)
        self._max_batch, self._mode, self._deliver = max_batch, mode, deliver
        self._waiting: deque[tuple[Request, int]] = deque()
        self._waited = 0
        self._paused = self._closed = False

    def run(self) -> None:
        """Until `close` is ordered. Consumes orders, waits for one where there is nothing to compute."""
        with torch.inference_mode():
            while not self._closed:
                if self._idle() or not self.orders.empty():
                    self.orders.get()()
                else:
                    self._advance()

    def _idle(self) -> bool:
        return self._paused or not (self._batch.rows or self._waiting)

    def _advance(self) -> None:
        entering = min(len(self._waiting), self._max_batch - len(self._batch.rows))
        self._waited += 1
        if entering and (entering * SHARE >= len(self._batch.rows) or self._waited > PATIENCE):
            rows = [self._waiting.popleft() for _ in range(entering)]
            self._batch.admit([Row(request, limit, Stamps(self.version)) for request, limit in rows])
            self._waited = 0
        done = self._batch.harvest()
        if self._batch.rows:
            self._batch.step()
            done += self._batch.harvest()
        if done:
            self._deliver(done)

    # Orders

    def submit(self, request: Request, limit: int) -> None:
        """Sample up to `limit` tokens."""
        self._waiting.append((request, limit))

    def abort(self, rid: str) -> None:
        """Complete the request as aborted; one that is not here has ended already."""
        completion = self._batch.abort(rid)
        if completion is None:
            entry = next((entry for entry in self._waiting if entry[0].rid == rid), None)
            if entry is None:
                return
            self._waiting.remove(entry)
            completion = Completion(np.empty(0, np.int32), np.empty(0, np.float32), "abort", ())
        self._deliver([(rid, completion)])

    def load(self, tensors: dict[str, Tensor], version: int) -> None:
        """Sample with `tensors` from the next token on. `retract` computes the cache anew, `in_place` keeps it."""
        swap(self.state, tensors)
        self.version = version
        self._batch.mark(version)
        if self._mode == "retract":
            self._batch.recompute()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def close(self) -> None:
        self._closed = True
