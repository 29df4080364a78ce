"""A model on several ranks: spread, so that each holds a slice of all and gathers a layer to use it (FSDP2), or whole
on each, with gradients added up (DDP).

One process has it whole; every function here does what it says for all of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.ranks import Ranks

BUCKET = 64 << 20
"numbers that are added up at once"


def shard(module: nn.Module, bf16: bool) -> None:
    """Each layer by itself, then what is left. Gradients are added up, not averaged: losses are weighted as parts of
    the whole minibatch's already."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for layer in (*layers(module), module):
        fully_shard(layer, mp_policy=policy)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


def add_up(parameters: Iterable[nn.Parameter], ranks: Ranks, bucket: int = BUCKET) -> None:
    """Gradients of parameters that each rank has whole become their sums over all ranks; collective. What no rank has
    used stays without one."""
    trained = [p for p in parameters if p.requires_grad]
    used = ranks.total(torch.tensor([float(p.grad is not None) for p in trained])).tolist()
    held: list[Tensor] = []
    for parameter in (p for p, count in zip(trained, used, strict=True) if count):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if sum(map(Tensor.numel, held)) + parameter.numel() > bucket:
            _added(held, ranks)
            held = []
        held.append(parameter.grad)
    _added(held, ranks)


def _added(held: list[Tensor], ranks: Ranks) -> None:
    if held:
        flat = ranks.total(torch.cat([tensor.flatten() for tensor in held]))
        for tensor, part in zip(held, torch.split(flat, [tensor.numel() for tensor in held]), strict=True):
            tensor.copy_(part.view_as(tensor))


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


def layers(module: nn.Module) -> list[nn.Module]:
    """The model's blocks: what it says must not be split, or else the list of modules that weighs most."""
    if found := [*_outermost(module, {*(getattr(module, "_no_split_modules", None) or ())})]:
        return found
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return [*max(lists, key=lambda part: sum(p.numel() for p in part.parameters()), default=())]


def _outermost(module: nn.Module, kinds: set[str]) -> Iterator[nn.Module]:
    """Modules of these classes that are in no other of them."""
    for part in module.children():
        if type(part).__name__ in kinds:
            yield part
        else:
            yield from _outermost(part, kinds)
