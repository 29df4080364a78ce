"""Started by torchrun: trains a few steps as one of several ranks; rank 0 leaves what there is to compare."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from trainer_groups import group, random_groups, sample, sequence

from pipeline import torchrun
from pipeline.config import TrainConfig
from pipeline.types import PEFT, Group
from trainer import backends


def steps(backend: Any, out: Path, counts: list[int], adapters: bool) -> None:
    """Trains on groups of so many prompts each, saves half-way and loads that again."""
    out.mkdir()
    lines = []
    for step, count in enumerate(counts):
        lines.append(backend.train(random_groups(count, 3, seed=step), step))
        for kind in ("save", "save_weights"):
            folder = out / f"{kind}-{step}"
            folder.mkdir()
            getattr(backend, kind)(folder)
        if adapters:
            (out / f"adapter-{step}").mkdir()
            backend.save_weights(out / f"adapter-{step}", PEFT)
        sent = zip(backend.outline(), backend.pieces(), strict=True)
        save_file({piece.name: tensor for piece, tensor in sent}, out / "sent.safetensors")
    for groups in (one_left(), []):
        lines.append(backend.train(groups, len(counts)))
    backend.load(out / "save-0")
    lines.append(backend.train(random_groups(counts[1], 3, seed=1), 1))
    (out / "lines.json").write_text(json.dumps(lines))
    backend.close()


def one_left() -> list[Group]:
    """Only one rank has a token to train on."""
    q = sequence([3, 4, 5], [6, 7])
    removed = sample(1, 0.0, q, metadata={"remove_sample": True})
    return [group(0, sample(0, 1.0, q), removed, sample(2, None, q))]


def main(rules: str, out: str, counts: str) -> None:
    config = TrainConfig.model_validate({"device": "cpu", **json.loads(rules)})
    if torchrun.rank():
        backends.follow(config, True)
    else:
        steps(backends.build(config, True), Path(out), json.loads(counts), config.lora_rank > 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
