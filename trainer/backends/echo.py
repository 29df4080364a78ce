"""Trains nothing and takes its time over it: for tests and benchmarks of everything around training."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import WeightsError
from pipeline.rendezvous import Piece
from pipeline.types import HF, Group
from trainer.backends.base import At

STATE = "trainer.json"


class EchoBackend:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.steps = 0

    def train(self, groups: Sequence[Group], step: int, at: At | None = None) -> dict[str, float]:
        time.sleep(self.seconds)
        self.steps += 1
        return {"train/loss": 0.0, "train/grad_norm": 0.0, "train/skipped": 0.0}

    def save_weights(self, folder: Path, form: str = HF) -> None:
        """There are none."""

    def outline(self) -> list[Piece]:
        return []

    def pieces(self) -> Iterator[Any]:
        return iter(())

    def save(self, folder: Path) -> None:
        (folder / STATE).write_text(json.dumps({"steps": self.steps}), encoding="utf-8")

    def load(self, folder: Path) -> None:
        try:
            self.steps = int(json.loads((folder / STATE).read_text(encoding="utf-8"))["steps"])
        except (OSError, ValueError, KeyError) as error:
            raise WeightsError(f"{folder / STATE}: no state of the echo backend: {error}") from error

    def load_weights(self, folder: Path) -> None:
        """There are none."""

    def close(self) -> None:
        pass
