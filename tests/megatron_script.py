"""Started by torchrun: each job is a backend that trains a few steps; rank 0 leaves what there is to compare.

All ranks do the same here; how rank 0 leads the others is the business of test_ranks and of whole runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from trainer_groups import random_groups

from pipeline.config import TrainConfig
from trainer import backends

COUNTS = (4, 1, 3)
"prompts of step 0, 1, 2, of three samples each"


def job(rules: dict[str, Any], out: str, load: str | None = None, steps: tuple[int, ...] = (0, 1, 2)) -> None:
    folder, lead = Path(out), backends.rank() == 0
    config = TrainConfig.model_validate({"device": "cpu", "lr": 0.1, "adam_eps": 1.0, **rules})
    backend, _ = backends.BUILDERS[config.train_backend](config, True)
    if load:
        backend.load(Path(load))
    lines = [backend.train(random_groups(COUNTS[step], 3, seed=step), step) for step in steps]
    for kind in ("save", "save_weights"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        getattr(backend, kind)(folder / kind)
    sent = {piece.name: tensor for piece, tensor in zip(backend.outline(), backend.pieces(), strict=True)}
    if lead:
        save_file(sent, folder / "sent.safetensors")
        (folder / "lines.json").write_text(json.dumps(lines))
    backend.close()


if __name__ == "__main__":
    for one in json.loads(sys.argv[1]):
        job(**one)
