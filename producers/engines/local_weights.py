"""Published weights: read from a folder in the Hugging Face layout, checked, and put into a running model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.errors import WeightsError
from pipeline.types import ADAPTERS
from producers.engines import local_adapters
from producers.engines.local_adapters import Tensors
from producers.engines.local_model import open_net

Base = Tensors | None
"What a model was loaded with, of what adapters have changed; None where all has been replaced."


def read(folder: Path, state: dict[str, Tensor], base: Base = None) -> dict[str, Tensor]:
    """What is to change in a model with the state dict `state`, on the CPU: the tensors of all `*.safetensors` in
    `folder`, or its own with the adapters there added.

    WeightsError where the folder cannot be read, or its names and shapes are not the model's. Of tensors that the model
    ties, one is enough; where all are there, they must agree.
    """
    tensors = _read(folder)
    if (folder / ADAPTERS).is_file():
        if base is None:
            raise WeightsError(f"{folder}: adapters alone, and the model they are of was replaced; start anew with it")
        return local_adapters.merged(folder, tensors, state, base)
    if not tensors.keys() <= state.keys():
        tensors = _converted(folder)
    _check(folder, tensors, state)
    return tensors


def _read(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder}: no *.safetensors there (was the folder deleted meanwhile?)")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as content:
                tensors.update({name: content.get_tensor(name) for name in content.keys()})  # noqa: SIM118 not a dict
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{file}: {error}") from error
    return tensors


def _converted(folder: Path) -> dict[str, Tensor]:
    """For models that transformers saves under other names than it runs them with (experts fused into one tensor)."""
    try:
        net, report = open_net(folder)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{folder}: {error}") from error
    for problem in ("unexpected_keys", "missing_keys", "mismatched_keys"):
        if report[problem]:
            raise WeightsError(f"{folder}: {problem.replace('_', ' ')}: {_some(set(map(str, report[problem])))}")
    state: dict[str, Tensor] = net.state_dict()
    return state


def _check(folder: Path, tensors: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    unexpected = tensors.keys() - state.keys()
    if unexpected:
        raise WeightsError(f"{folder}: another kind of model, with {_some(unexpected)}")
    stored: dict[tuple[int, int], str] = {}
    for name in tensors:
        if tensors[name].shape != state[name].shape:
            raise WeightsError(
                f"{folder}: {name} has the shape {list(tensors[name].shape)}, the model's has {list(state[name].shape)}"
            )
        twin = stored.setdefault(_place(state[name]), name)
        if twin != name and not torch.equal(tensors[twin], tensors[name]):
            raise WeightsError(f"{folder}: {twin} and {name} are tied in the model but differ")
    missing = {name for name in state.keys() - tensors.keys() if _place(state[name]) not in stored}
    if missing:
        raise WeightsError(f"{folder}: tensors missing: {_some(missing)}")


def _place(x: Tensor) -> tuple[int, int]:
    """Equal for tied tensors."""
    return x.data_ptr(), x.numel()


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def swap(state: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Copy `tensors`, already checked, over the model's own."""
    for name, tensor in tensors.items():
        state[name].copy_(tensor)
