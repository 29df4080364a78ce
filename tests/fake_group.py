"""A member of a process group as SGLang is one: it finds the trainer under the same keys, and receives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed
LONG = timedelta(seconds=25)
"What waits for a trainer that has gone; half an hour in the real server, and more than any test waits."


class Joined:
    def __init__(self, body: dict[str, Any]) -> None:
        """Returns when all are there; RuntimeError where the trainer gave up."""
        assert body["backend"] == "gloo"
        store = dist.TCPStore(body["master_address"], body["master_port"], body["world_size"], False, LONG)
        for prefix in (name := body["group_name"], f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self._group = dist.ProcessGroupGloo(store, body["rank_offset"], body["world_size"], LONG)

    def receive(self, body: dict[str, Any]) -> dict[str, torch.Tensor]:
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        found = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True)
        }
        for work in [self._group.broadcast([tensor], options) for tensor in found.values()]:
            work.wait()
        return found

    def close(self) -> None:
        self._group.abort()
