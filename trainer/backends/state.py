"""All that the next training step depends on, in safetensors files and a JSON: the same for any number of ranks.

FOLDER/state-00001.safetensors ...   tensors by name, at most 5 GB a file
FOLDER/state.json                    numbers, and the file of each tensor
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.errors import WeightsError

LARGEST = 5 << 30
"bytes in a file"


def write(folder: Path, tensors: Iterable[tuple[str, Tensor]], facts: dict[str, Any], largest: int = LARGEST) -> None:
    """Holds one file's tensors at a time, at most `largest` bytes (but for one tensor that is larger)."""
    held: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    files = 0

    def put() -> None:
        nonlocal files
        files += 1
        name = f"state-{files:05d}.safetensors"
        save_file(held, folder / name)
        places.update(dict.fromkeys(held, name))
        held.clear()

    for name, tensor in tensors:
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > largest:
            put()
        held[name] = tensor.detach().to("cpu").contiguous()
    put()
    (folder / "state.json").write_text(json.dumps({**facts, "tensors": places}), encoding="utf-8")


class Saved:
    """What `write` wrote. WeightsError where it is missing, damaged or of something else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.facts: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            if "megatron" in self.facts:
                raise WeightsError(
                    f"{folder}: a training state of --train-backend megatron; go on with that, or give weights that it "
                    "published"
                )
            self._places: dict[str, str] = self.facts["tensors"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"{folder}: no training state: {error}") from error

    def has(self, name: str) -> bool:
        return name in self._places

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """In the shape that `like` has as a whole."""
        if name not in self._places:
            raise WeightsError(f"{self.folder}: not a training state of this model: it has no {name}")
        path = self.folder / self._places[name]
        try:
            with safe_open(path, "pt") as file:
                found: Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path}: missing or damaged: {error}") from error
        if found.shape != like.shape:
            raise WeightsError(f"{path}: not a training state of this model: {name} is {tuple(found.shape)}")
        return found
