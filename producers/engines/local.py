"""Sampling in this process: a Hugging Face causal LM on the CPU or one GPU, with continuous batching.

The event loop only passes orders and completions; all computing happens in one thread (`local_sampler`).

Randomness comes from `Request.seed` alone (`local_rows.draws`), so a request gives the same tokens under the same
weights whatever it is batched with, up to rounding: another batch may add in another order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch

from pipeline.errors import EngineDown, WeightsError
from pipeline.types import HF, Policy
from producers.engines.base import Completion, Request
from producers.engines.limits import budget, refuse_older
from producers.engines.local_model import Model, load_net, pick_device, read_config
from producers.engines.local_sampler import Done, Sampler
from producers.engines.local_weights import Base, read


class LocalEngine:
    """An `Engine`. After a bug in the compute thread every call fails with that very error.

    `close` must be called: the thread keeps the process alive.
    """

    def __init__(
        self, checkpoint: Path, device: str, max_batch: int, mode: Literal["retract", "in_place"], threads: int
    ) -> None:
        """UsageError for a folder that holds no model or a device that is not there; weights are read by `start`."""
        config = read_config(checkpoint)
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        self._checkpoint, self._device = checkpoint, pick_device(device)
        self._max_batch, self._mode, self._threads = max_batch, mode, threads
        self._executor = ThreadPoolExecutor(1, "engine")
        self._sampler: Sampler | None = None
        self._ended: asyncio.Future[None] | None = None
        self._requests: dict[str, asyncio.Future[Completion]] = {}
        self._orders: set[asyncio.Future[None]] = set()
        self._loading = asyncio.Lock()
        self._base: Base = {}

    @property
    def version(self) -> int | None:
        return self._sampler.version if self._sampler else None

    async def start(self) -> None:
        """UsageError where the model cannot be loaded or sampled from."""
        loop = asyncio.get_running_loop()
        self._sampler = await loop.run_in_executor(self._executor, self._build, loop)
        self._ended = asyncio.ensure_future(loop.run_in_executor(self._executor, self._sampler.run))
        self._ended.add_done_callback(self._on_end)

    def _build(self, loop: asyncio.AbstractEventLoop) -> Sampler:
        torch.set_num_threads(self._threads)
        model = Model(load_net(self._checkpoint, self._device), self._device)
        return Sampler(model, self._max_batch, self._mode, lambda done: loop.call_soon_threadsafe(self._on_done, done))

    async def generate(self, request: Request) -> Completion:
        limit = budget(request, self.vocab_size, self.context_length)
        sampler = self._running()
        if request.rid in self._requests:
            raise ValueError(f"request {request.rid} is in flight already")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._requests[request.rid] = future
        sampler.orders.put(lambda: sampler.submit(request, limit))
        try:
            return await future
        except asyncio.CancelledError:
            sampler.orders.put(lambda: sampler.abort(request.rid))
            raise
        finally:
            del self._requests[request.rid]

    async def abort(self, rid: str) -> None:
        sampler = self._running()
        sampler.orders.put(lambda: sampler.abort(rid))

    async def load(self, policy: Policy) -> None:
        """WeightsError where the folder cannot be read or does not fit the model; the old weights then stay."""
        async with self._loading:
            sampler = self._running()
            refuse_older(sampler.version, policy)
            if not policy.path:
                raise WeightsError(f"version {policy.version} names no weights; --engine local needs some")
            tensors = await asyncio.to_thread(read, Path(policy.path), sampler.state, self._base)
            await self._order(lambda: sampler.load(tensors, policy.version))
            if policy.format == HF:
                self._base = None

    async def pause(self) -> None:
        await self._order(self._running().pause)

    async def resume(self) -> None:
        await self._order(self._running().resume)

    async def varies(self) -> str:
        kind = self._device.type
        return "" if kind == "cpu" else f"--engine local on {kind} adds up in no fixed order; use --device cpu"

    async def close(self) -> None:
        """End the thread; requests in flight fail with EngineDown."""
        if self._sampler and self._ended:
            self._sampler.orders.put(self._sampler.close)
            await asyncio.wait([self._ended])
        self._executor.shutdown()

    async def _order(self, order: Callable[[], None]) -> None:
        """Returns when the compute thread has carried out `order`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def carry_out() -> None:
            order()
            loop.call_soon_threadsafe(_settle, future)

        self._orders.add(future)
        self._running().orders.put(carry_out)
        try:
            await future
        finally:
            self._orders.discard(future)

    def _running(self) -> Sampler:
        if self._sampler is None or self._ended is None:
            raise EngineDown("the engine has not been started")
        if self._ended.done():
            raise _reason(self._ended)
        return self._sampler

    def _on_done(self, done: Done) -> None:
        for rid, completion in done:
            future = self._requests.get(rid)
            if future and not future.done():
                future.set_result(completion)

    def _on_end(self, ended: asyncio.Future[None]) -> None:
        futures: list[asyncio.Future[Any]] = [*self._requests.values(), *self._orders]
        for future in futures:
            if not future.done():
                future.set_exception(_reason(ended))


def _reason(ended: asyncio.Future[None]) -> BaseException:
    return ended.exception() or EngineDown("the engine was closed")


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
