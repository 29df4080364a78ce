"""Started by torchrun: each job is a backend that trains a few steps; rank 0 leaves what there is to compare.

All ranks do the same here; how rank 0 leads the others is the business of test_ranks and of whole runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from trainer_groups import random_groups

from pipeline import torchrun
from pipeline.config import TrainConfig
from trainer import backends
from trainer.backends.base import Backend

COUNTS = (4, 1, 3)
"prompts of step 0, 1, 2, of three samples each"


def job(rules: dict[str, Any], out: str, load: str | None = None, steps: tuple[int, ...] = (0, 1, 2)) -> None:
    """In one process, to the end."""
    config = configured(rules)
    backend, _ = backends.BUILDERS[config.train_backend](config, True)
    train(backend, Path(out), load, steps)
    backend.close()


def configured(rules: dict[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate({"device": "cpu", "lr": 0.1, "adam_eps": 1.0, **rules})


def train(backend: Backend, folder: Path, load: str | None = None, steps: tuple[int, ...] = (0, 1, 2)) -> None:
    if load:
        backend.load(Path(load))
    lines = [backend.train(random_groups(COUNTS[step], 3, seed=step), step) for step in steps]
    for kind in ("save", "save_weights"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        getattr(backend, kind)(folder / kind)
    sent = {piece.name: tensor for piece, tensor in zip(backend.outline(), backend.pieces(), strict=True)}
    if torchrun.rank() == 0:
        save_file(sent, folder / "sent.safetensors")
        (folder / "lines.json").write_text(json.dumps(lines))


def main(jobs: list[dict[str, Any]]) -> None:
    from trainer.backends.megatron import MegatronBackend
    from trainer.backends.megatron_mesh import mesh
    from trainer.ranks import meet

    device = torch.device("cpu")
    ranks = meet(5, device)
    for one in jobs:
        config = configured(one.pop("rules"))
        order = mesh(config, ranks, device)
        train(MegatronBackend(config, True, order), Path(one.pop("out")), **one)
        order.dissolve()
    ranks.part()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
