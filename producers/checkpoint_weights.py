"""The weights of a Millpond checkpoint as a folder that engines can load; and what a folder of adapters says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pipeline import torchrun
from pipeline.errors import MillpondError, UsageError
from pipeline.tether import spawn
from pipeline.types import ADAPTERS

OWN = "model."
"What names of the model's tensors begin with in a checkpoint; the others are the optimizer's."


def rank_of(adapters: Path) -> int:
    """UsageError where the folder does not say."""
    rank = _said(adapters).get("r")
    if type(rank) is not int or rank < 1:
        raise UsageError(f"{adapters / ADAPTERS}: no rank of adapters (r)")
    return rank


def base_of(adapters: Path) -> Path:
    """The model that they are added to, as far as the folder says and it is on this machine. UsageError."""
    named = _said(adapters).get("base_model_name_or_path")
    if not named or not (Path(named) / "config.json").is_file():
        raise UsageError(f"{adapters} holds adapters to {named or 'a model'}: give its folder with --hf-checkpoint")
    return Path(named)


def _said(adapters: Path) -> dict[str, Any]:
    try:
        found = json.loads((adapters / ADAPTERS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{adapters / ADAPTERS}: {error}") from error
    return found if isinstance(found, dict) else {}


@contextmanager
def as_folder(checkpoint: Path, model: Path) -> Iterator[Path]:
    """A folder in the Hugging Face layout, while the block lasts: the checkpoint's tensors, all else from `model`. In
    float32; what the megatron backend wrote in the model's own types. UsageError where it cannot be read."""
    state = checkpoint / "model"
    with tempfile.TemporaryDirectory(prefix="millpond-eval-") as name:
        folder = Path(name)
        try:
            for path in model.iterdir():
                if path.suffix in (".json", ".jinja", ".model", ".txt") and not path.name.endswith(".index.json"):
                    shutil.copyfile(path, folder / path.name)
        except OSError as error:
            raise UsageError(f"--hf-checkpoint {model}: {error.strerror}; give the folder of the run's model") from None
        try:
            facts = json.loads((state / "state.json").read_text(encoding="utf-8"))
            if "megatron" not in facts:
                _take(state, facts, folder)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise UsageError(
                f"{checkpoint} holds no whole weights of the torch backend ({error}); evaluate a folder under weights/"
            ) from error
        if "megatron" in facts:
            _exported("megatron", model, checkpoint, folder)
        yield folder


def _take(state: Path, facts: dict[str, Any], folder: Path) -> None:
    if facts.get("lora"):
        raise ValueError("only adapters and what they are added to")
    places: dict[str, str] = facts["tensors"]
    for file in sorted(set(places.values())):
        with safe_open(state / file, "np") as content:
            own = [key for key in content.keys() if key.startswith(OWN)]  # noqa: SIM118 not a dict
            held = {key.removeprefix(OWN): content.get_tensor(key) for key in own}
        if held:
            save_file(held, folder / file.replace("state", "model"), metadata={"format": "pt"})


def _exported(backend: str, model: Path, checkpoint: Path, folder: Path) -> None:
    """By the backend, in a process of its own: nothing here knows training."""
    words = [backend, *map(str, (model.absolute(), checkpoint.absolute(), folder))]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "env": torchrun.without()}
    with spawn([sys.executable, "-P", "-m", "trainer.export", *words], **quiet) as process:
        _, said = process.communicate()
    if process.returncode == UsageError.exit_code:
        raise UsageError(f"{checkpoint}: {said.decode().strip().splitlines()[-1]}")
    if process.returncode:
        raise MillpondError(f"{checkpoint} could not be read ({process.returncode}):\n{said.decode().strip()}")
