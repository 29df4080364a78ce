"""Several processes that train as one, under torchrun: who is who, and how rank 0 tells the others what to do.

Rank 0 drains, publishes and saves. The others wait for its next command at a key of the rendezvous store, not in a
collective, so a queue that stays empty for hours outlives any time-out of the process group.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline import torchrun
from pipeline.errors import UsageError

log = logging.getLogger(__name__)

SAY = timedelta(minutes=10)
"without a command after which a rank says that it waits; a store has each such look in its own log, too"
MARGIN = timedelta(seconds=60)
"what a store may take over an answer"


@dataclass
class Ranks:
    """This process among the others; alone unless `meet` has found others."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    "where what is sent must lie"
    store: Any = None
    told: int = 0
    "commands given or followed"

    @property
    def lead(self) -> bool:
        return self.rank == 0

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, on each of them; collective."""
        if self.world > 1:
            dist.all_reduce(moved := tensor.to(self.device))
            tensor = moved.to(tensor.device)
        return tensor

    def tell(self, command: dict[str, Any], payload: bytes = b"") -> None:
        """Rank 0: what all do next, and what they need for it."""
        self.store.set(f"command/{self.told}", json.dumps({**command, "bytes": len(payload)}))
        self.store.delete_key(f"command/{self.told - 16}")  # all have answered one after it with a collective
        self.told += 1
        if payload:
            self._sent(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Where rank 0 fails in the block, others that are through it already are told to end."""
        try:
            yield
        except BaseException:
            if self.lead and self.world > 1:
                self.tell({"do": "close"})
            raise

    def commands(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The others: what rank 0 tells, for ever."""
        while True:
            command = json.loads(self._wait(f"command/{self.told}"))
            self.told += 1
            size = command.pop("bytes")
            yield command, bytes(self._sent(torch.empty(size, dtype=torch.uint8)).numpy()) if size else b""

    def _wait(self, key: str) -> bytes:
        since = time.monotonic()
        while True:
            try:
                self.store.wait([key], SAY)
                return bytes(self.store.get(key))
            except dist.DistStoreError:
                log.info("no command of rank 0 for %.0f s", time.monotonic() - since)

    def _sent(self, tensor: Tensor) -> Tensor:
        dist.broadcast(moved := tensor.to(self.device), 0)
        return moved.cpu()

    def part(self) -> None:
        """For good."""
        if self.world > 1:
            dist.destroy_process_group()


def meet(minutes: float, device: torch.device) -> Ranks:
    """All that torchrun started, NCCL between GPUs and gloo between CPUs; `minutes` bounds a collective. UsageError
    where they do not find each other."""
    rank, world = torchrun.rank(), torchrun.world()
    if world == 1:
        return Ranks()
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=MARGIN))  # type: ignore[attr-defined]
    except dist.DistError as error:
        raise UsageError(
            f"rank {rank} of {world} has met no others at {torchrun.address()}: {str(error).splitlines()[0]}"
        ) from error
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(minutes=minutes))
    return Ranks(rank, world, device, dist.PrefixStore("millpond", store))  # type: ignore[attr-defined]
