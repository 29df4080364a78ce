"""A model whose parameters are spread over ranks (FSDP2): each holds a slice of all, and gathers a layer to use it.

One process has it whole; every function here does what it says for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(module: nn.Module, device: torch.device) -> None:
    """Each layer by itself, then what is left. Gradients are added up, not averaged: losses are weighted as parts of
    the whole minibatch's already."""
    cuda = device.type == "cuda"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cuda else MixedPrecisionPolicy()
    for layer in (*_layers(module), module):
        fully_shard(layer, mp_policy=policy)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, gathered from all ranks where it is spread; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fill(target: Tensor, value: Tensor) -> None:
    """This rank's slice of `value` into `target`, which is spread or whole."""
    if isinstance(target, DTensor):
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None).to_local()
        target = target.to_local()
    target.copy_(value)


def named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and lasting buffers, each once: of those that are one (tied weights) the first name."""
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def _layers(module: nn.Module) -> Any:
    """The decoder's blocks: the longest list of modules there is."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=len, default=())
