"""Weights that a new run begins with, where they are not those of --hf-checkpoint: what --load may name."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.types import ADAPTERS


def weights_in(folder: Path, backend: str) -> Path:
    """What the backend of that name loads: a model in Hugging Face's layout, the training state in a checkpoint of
    ours, or a distributed checkpoint of Megatron's. UsageError, with what to do, for all else."""
    if (folder / "model" / "state.json").is_file():
        return folder / "model"
    if not folder.is_dir():
        raise UsageError(f"--load {folder}: there is no such folder")
    if backend == "megatron" and (found := _iteration(folder)):
        return found
    if problem := _known(folder):
        raise UsageError(f"--load {folder}: {problem}")
    if (folder / "config.json").is_file():
        return folder
    raise UsageError(
        f"--load {folder}: neither a checkpoint of Millpond nor a model in Hugging Face's layout (no config.json)"
    )


def _known(folder: Path) -> str:
    """What is wrong with a folder of a kind that people try; empty where it is none of them."""
    for place in (folder, folder / "checkpoints"):
        if found := [path for path in place.glob("*/state.json") if re.fullmatch(r"\d{8,}", path.parent.name)]:
            return f"it holds checkpoints; give one of them, such as {max(found).parent}"
    if (folder / ADAPTERS).is_file():
        return (
            "adapters alone; merge them into their model (peft's merge_and_unload; a run that ended has done so in its "
            "folder, `merged-STEP`) and give that as --hf-checkpoint, or go on from a checkpoint of the run"
        )
    if (folder / TRACKER).is_file() or any(folder.glob("iter_*")) or any(folder.glob("mp_rank_*")):
        return f"a Megatron checkpoint; {CONVERT}"
    if (folder / "release").is_dir() or (folder / "common.pt").is_file() or (folder / ".metadata").is_file():
        return f"a Megatron checkpoint; {CONVERT}"
    return ""


def _iteration(folder: Path) -> Path | None:
    """The folder of a distributed checkpoint: `folder`, or in it the one that Megatron's tracker names."""
    if (folder / TRACKER).is_file():
        word = (folder / TRACKER).read_text().strip()
        folder /= f"iter_{int(word):07d}" if word.isdecimal() else word
    return folder if (folder / ".metadata").is_file() and (folder / "common.pt").is_file() else None


TRACKER = "latest_checkpointed_iteration.txt"
CONVERT = (
    "--train-backend megatron takes it where it is a distributed one (torch_dist), else convert it to Hugging Face's "
    "layout where it was made (slime: tools/convert_torch_dist_to_hf.py; Megatron Bridge: "
    "export_ckpt) and give that folder"
)
