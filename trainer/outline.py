"""What tensors a folder of weights holds, and how they come there: by files, of which one is in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.rendezvous import Piece, packed

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 2 << 30
"bytes in a file"

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
"safetensors' names, torch's names"
DTYPES |= {"I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}


def saved(folder: Path) -> list[Piece]:
    """From the heads of its safetensors files."""
    found: list[Piece] = []
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in head.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                found.append(
                    Piece(name, DTYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]), end - start)
                )
    return found


def write(folder: Path, outline: Sequence[Piece], tensors: Iterator[Tensor], largest: int = LARGEST) -> None:
    """The tensors of `outline`, in its order, in Hugging Face's layout: model.safetensors, or files of at most
    `largest` bytes (but for a tensor that is larger) with an index."""
    from safetensors.torch import save_file

    files = packed(outline, largest)
    names = [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    names = names if len(files) > 1 else ["model.safetensors"]
    for name, pieces in zip(names, files, strict=True):
        save_file({piece.name: next(tensors).cpu() for piece in pieces}, folder / name, {"format": "pt"})
    if len(files) > 1:
        places = {piece.name: name for name, pieces in zip(names, files, strict=True) for piece in pieces}
        index = {"metadata": {"total_size": sum(piece.size for piece in outline)}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
