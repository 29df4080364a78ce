"""Weights on disk: complete or invisible, one folder a version: ROOT/00000012/. Each is written and deleted through the
trainer's workshop (trainer.workshop)."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from pipeline.types import HF
from trainer.backends.base import Backend
from trainer.workshop import Workshop

_VERSION = re.compile(r"\d{8,}")


def save(backend: Backend, shop: Workshop, version: int, form: str = HF) -> tuple[Path, str]:
    """The backend's weights as ROOT/VERSION, durable and complete, and their digest, which is empty if it has none.

    A version that exists already is never written again: WeightsError.
    """
    name = f"{version:08d}"
    with shop.making(name) as folder:
        backend.save_weights(folder, form)
        found = digest(folder)
    return shop.root / name, found


def digest(folder: Path) -> str:
    """sha256, in hex, over the *.safetensors by name, of each: name, NUL, decimal size, NUL, bytes. No file: empty."""
    paths = sorted(folder.glob("*.safetensors"))
    total = hashlib.sha256()
    for path in paths:
        total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                total.update(block)
    return total.hexdigest() if paths else ""


def newest_version(root: Path) -> int:
    """The highest complete version under `root`, 0 where there is none."""
    return max(versions(root), default=0)


def versions(root: Path) -> dict[int, Path]:
    """All complete ones."""
    if not root.is_dir():
        return {}
    return {int(path.name): path for path in root.iterdir() if _VERSION.fullmatch(path.name)}


def clean(shop: Workshop, keep: set[int]) -> None:
    """Deletes every version but these."""
    for version, path in versions(shop.root).items():
        if version not in keep:
            shop.take_away(path)
