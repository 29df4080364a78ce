"""Published adapters (LoRA) alone, in peft's layout: read from a folder, checked, and added to a model's own weights.

Always to the weights that the model was loaded with, of which what has been changed is kept: sums of sums would drift.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.errors import WeightsError
from pipeline.types import ADAPTERS

PREFIX = "base_model.model."
PLAIN = {"bias": "none", "use_dora": False, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
PLAIN |= {"modules_to_save": None, "peft_type": "LORA"}
"What is added up here; another value of these means other sums."

Tensors = dict[str, Tensor]
"By name."


def merged(folder: Path, tensors: Tensors, state: Tensors, base: Tensors) -> Tensors:
    """What a model with the state dict `state` is to have in place of what it was loaded with, by name.

    `base` has that of each tensor that was ever changed, and grows here. WeightsError where the adapters are of another
    kind or another model.
    """
    scale, turned = _scale(folder)
    ups = {name: t for name, t in tensors.items() if name.endswith(".lora_B.weight")}
    downs = {name.replace(".lora_B.", ".lora_A."): name for name in ups}
    if not ups or tensors.keys() != downs.keys() | ups.keys():
        raise WeightsError(f"{folder}: its tensors are not those of plain adapters, a lora_A and a lora_B a layer")
    found = {}
    for down, up in downs.items():
        name = up.removeprefix(PREFIX).replace(".lora_B.", ".")
        if name not in state:
            raise WeightsError(f"{folder}: adapters of another kind of model, which has {name}")
        change = ups[up].float() @ tensors[down].float() * scale
        change = change.T if turned else change
        own = base.setdefault(name, state[name].cpu().clone())
        if change.shape != own.shape:
            raise WeightsError(f"{folder}: {name} is {list(own.shape)}, and its adapter {list(change.shape)}")
        found[name] = (own.float() + change).to(own.dtype)
    return {**base, **found}


def _scale(folder: Path) -> tuple[float, bool]:
    """What adapters count, and whether layers have their weights the other way round."""
    try:
        config: dict[str, Any] = json.loads((folder / ADAPTERS).read_text(encoding="utf-8"))
        other = {name: config.get(name) for name, value in PLAIN.items() if config.get(name, value) != value}
        if other:
            raise WeightsError(f"{folder}: no plain adapters (LoRA), but with {other}")
        return float(config["lora_alpha"]) / int(config["r"]), bool(config.get("fan_in_fan_out"))
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise WeightsError(f"{folder / ADAPTERS}: {error}") from error
