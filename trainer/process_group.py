"""Rank 0 of a process group that engines join for one update. It is no part of torch's global state and of no other
group: trainer ranks have theirs, each update has one of its own.

The keys under which members find each other are those of torch's `_new_process_group_helper`, which SGLang joins by.
Nothing that is received here is code: the store holds addresses, the group carries tensors one way.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed
from torch import Tensor

dist: Any = torch.distributed

BROKEN = (RuntimeError, OSError, ValueError)
"What torch raises where a group cannot be had or breaks; its own errors are RuntimeErrors."
WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"Left alone, it ends the whole trainer when a member dies."
STEP = 0.001
"Seconds between looks whether a tensor is out; NCCL's own wait does not wait for that."


class Group:
    """Listens from the start, at an address of ours and no other; torch alone would listen at all of them."""

    def __init__(self, host: str, backend: str) -> None:
        """OSError where `host` is no address of this machine."""
        self.host, self.backend = host, backend
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, 0), family=family)
        self.port: int = listening.getsockname()[1]
        self._server: Any = dist.TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            use_libuv=True,
        )
        self._group: Any = None

    def form(self, name: str, world: int, seconds: float) -> None:
        """Returns when all are there. gloo fails after `seconds`; NCCL connects when it first sends."""
        limit = timedelta(seconds=max(seconds, 1.0))
        store = dist.TCPStore(self.host, self.port, is_master=False, timeout=limit)  # which `close` breaks
        for prefix in (name, f"{name}/", "cuda/" if self.backend == "nccl" else "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self._group = (_nccl if self.backend == "nccl" else self._gloo)(store, world, limit)

    def _gloo(self, store: Any, world: int, limit: timedelta) -> Any:
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = limit
        options._devices = [gloo.create_device(hostname=self.host)]
        return gloo(store, 0, world, options)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """One after the other, all under way at once; returns when they are out."""
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
            while not work.is_completed():
                time.sleep(STEP)
            work.wait()

    def close(self) -> None:
        """All that still wait for something get an error, we too."""
        self._server = None
        with suppress(*BROKEN):
            if self._group is not None:
                self._group.abort()
        self._group = None


def _nccl(store: Any, world: int, limit: timedelta) -> Any:
    nccl = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = 10 * limit  # the caller's patience ends first
    before = os.environ.get(WATCHDOG)
    os.environ[WATCHDOG] = "0"
    try:
        return nccl(store, 0, world, options)
    finally:
        if before is None:
            del os.environ[WATCHDOG]
        else:
            os.environ[WATCHDOG] = before
