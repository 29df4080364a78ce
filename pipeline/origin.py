"""Weights that a new run begins with, where they are not those of --hf-checkpoint: what --load may name."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.errors import UsageError


def weights_in(folder: Path) -> Path:
    """What the backend loads: a model in Hugging Face's layout, or the training state in a checkpoint of ours.
    UsageError, with what to do, for all else."""
    if (folder / "model" / "state.json").is_file():
        return folder / "model"
    if not folder.is_dir():
        raise UsageError(f"--load {folder}: there is no such folder")
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
    if (folder / "adapter_config.json").is_file():
        return "adapters alone; merge them into their model (peft's merge_and_unload) and give that as --hf-checkpoint"
    iterations = [path for path in folder.glob("*") if path.name == "release" or path.name.startswith("iter_")]
    if (folder / "latest_checkpointed_iteration.txt").is_file() or iterations:
        return f"a Megatron checkpoint; {CONVERT}"
    if (folder / "common.pt").is_file() or (folder / ".metadata").is_file() or any(folder.glob("mp_rank_*")):
        return f"a distributed checkpoint, as Megatron writes them; {CONVERT}"
    return ""


CONVERT = (
    "convert it to Hugging Face's layout where it was made (slime: tools/convert_torch_dist_to_hf.py; Megatron Bridge: "
    "export_ckpt) and give that folder"
)
