"""What tensors a folder of weights holds."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.rendezvous import Piece

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
