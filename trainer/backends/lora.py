"""Adapters (LoRA, arXiv:2106.09685) on a model's linear layers: only they are trained; engines get them merged, or
alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config import TrainConfig
from pipeline.errors import UsageError
from trainer.backends.sharded import named, whole

NAME = "default"
"peft's, of the one adapter there is"
OWN = re.compile(r"\.lora_[AB]\.")
STACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
"Layers that engines run as one. SGLang 0.5.23 passes over an adapter on some of them where the others have none."


@dataclass(frozen=True)
class Adapters:
    """What they are; a training state belongs to these alone."""

    rank: int
    alpha: float
    targets: str
    "names of layers with commas between, or all-linear"


def adapters_of(config: TrainConfig) -> Adapters | None:
    if config.lora_rank == 0:
        return None
    return Adapters(config.lora_rank, config.lora_alpha, config.lora_target_modules)


def adapt(module: Any, wanted: Adapters) -> None:
    """From here on all is frozen but the adapters, which begin as nothing. Errors: UsageError."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    layers = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear | Conv1D)}
    rule = LoraConfig(
        r=wanted.rank,
        lora_alpha=wanted.alpha,
        target_modules=_targets(module, layers, [name.strip() for name in wanted.targets.split(",")]),
        fan_in_fan_out=any(isinstance(part, Conv1D) for part in layers.values()),
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(rule, module)


def slim(module: Any, dtype: torch.dtype) -> None:
    """Frozen linear layers in the checkpoint's dtype, not in float32: passes in bfloat16 give the same to the bit. The
    embeddings and norms stay in float32, and with them what layers add to."""
    shared = module.get_input_embeddings().weight
    for part in module.modules():
        if isinstance(part, nn.Linear) and part.weight is not shared and not part.weight.requires_grad:
            part.to(dtype)


def adapted(module: nn.Module) -> dict[str, Any]:
    """Layers with an adapter, by name."""
    return {name: part for name, part in module.named_modules() if hasattr(part, "lora_A")}


def own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The adapters' tensors, by name."""
    return ((name, tensor) for name, tensor in named(module) if OWN.search(name))


def export(module: Any, folder: Path, lead: bool, base: Path) -> None:
    """The adapters by themselves in peft's layout, into an existing folder, with the folder of the model that they are
    of. Collective; the lead writes."""
    from safetensors.torch import save_file

    tensors = {name.replace(f".{NAME}.", "."): whole(tensor).cpu().contiguous() for name, tensor in own(module)}
    if not lead:
        return
    rule = copy(module.peft_config[NAME])
    blank = dict(_blank(module, rule.r))
    tensors |= {f"{layer}.{part}.weight": t for layer, parts in blank.items() for part, t in parts.items()}
    save_file({f"base_model.model.{name}": t for name, t in tensors.items()}, folder / "adapter_model.safetensors")
    rule.target_modules = sorted({*adapted(module), *blank})
    rule.base_model_name_or_path, rule.inference_mode = str(base.resolve()), True
    rule.save_pretrained(folder)


def _blank(module: Any, rank: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Adapters that do nothing, for layers without one that are stacked with some that have one."""
    found = adapted(module)
    for name in found:
        parent, _, own_name = name.rpartition(".")
        for other in (word for stack in STACKS if own_name in stack for word in stack):
            layer = getattr(module.get_submodule(parent), other, None)
            if f"{parent}.{other}" not in found and isinstance(layer, nn.Linear):
                size = {"lora_A": (rank, layer.in_features), "lora_B": (layer.out_features, rank)}
                yield f"{parent}.{other}", {part: torch.zeros(shape) for part, shape in size.items()}


def published(module: nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    """What `named` gives of the model without adapters, under its names there, each with the layer to merge or None."""
    found = {f"{name}.base_layer.weight": layer for name, layer in adapted(module).items()}
    for name, tensor in named(module):
        if not OWN.search(name):
            yield name.replace(".base_layer.", "."), tensor, found.get(name)


def merged(tensor: Tensor, layer: Any) -> Tensor:
    """Whole, with what the layer's adapter adds; collective where it is spread."""
    found = whole(tensor)
    if layer is None:
        return found
    down, up = (whole(part[NAME].weight.detach()) for part in (layer.lora_A, layer.lora_B))
    change = up @ down * float(layer.scaling[NAME])
    return found + (change.T if layer.fan_in_fan_out else change)


@contextmanager
def without(module: nn.Module) -> Iterator[None]:
    """While it lasts, the model is what it was before it had adapters. Not by peft's own switch, which would change
    what has a gradient."""
    found = adapted(module).values()
    try:
        for layer in found:
            layer._disable_adapters = True
        yield
    finally:
        for layer in found:
            layer._disable_adapters = False


def _targets(module: Any, layers: dict[str, nn.Module], wanted: list[str]) -> list[str]:
    """Full names of the layers. UsageError for what is no linear layer, and where the weights are another's as well."""
    head = module.get_output_embeddings()
    if wanted == ["all-linear"]:
        return [name for name, part in layers.items() if part is not head]
    found = {name for name in layers if name.endswith(tuple(f".{word}" for word in wanted)) or name in wanted}
    ends = {name.rpartition(".")[2] for name in layers}
    for word in wanted:
        if not any(name == word or name.endswith(f".{word}") for name in found):
            there = ", ".join(sorted(ends))
            raise UsageError(f"--lora-target-modules: there is no linear layer {word!r}; there are: {there}")
    if any(layers[name] is head for name in found) and head.weight is module.get_input_embeddings().weight:
        raise UsageError(
            "--lora-target-modules: the head has the embeddings' weights, and an adapter would change only one of the "
            "two; leave it out"
        )
    return sorted(found)
