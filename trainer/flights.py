"""Evaluations in flight, and those that were told: the files evals.open.json and evals.jsonl."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.evals import Ask
from trainer.workshop import Workshop

log = logging.getLogger(__name__)

OPEN = "evals.open.json"

Line = dict[str, float]
"What is told of one: metrics, or how it ended without."


@dataclass
class Flight:
    """One that has been asked for and not ended."""

    ask: Ask
    until: float
    "monotonic time at which it is given up"
    job: str = ""
    "empty until it is in Redis"
    puts: int = 0

    @property
    def name(self) -> str:
        """Of its job."""
        return f"{self.ask.step}-{self.ask.version}"

    def __str__(self) -> str:
        return f"the evaluation of step {self.ask.step} (version {self.ask.version})"


def told(folder: Path) -> dict[int, Line]:
    """What evals.jsonl tells, by step."""
    path = folder / "evals.jsonl"
    lines = [json.loads(raw) for raw in path.read_text().splitlines()] if path.exists() else []
    return {int(line["step"]): line for line in lines}


def read(folder: Path) -> list[Ask]:
    """What was in flight; nothing where that cannot be read any more."""
    try:
        return [Ask(**fields) for fields in json.loads((folder / OPEN).read_text())]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError) as error:
        log.error("%s: what was in flight cannot be read: %s", folder / OPEN, error)
        return []


def write(shop: Workshop, flights: Sequence[Flight]) -> None:
    """Whole or not at all, and by the one trainer only."""
    aside = shop.folder / OPEN
    aside.touch(mode=0o600)
    aside.write_text(json.dumps([flight.ask.model_dump(mode="json") for flight in flights]))
    aside.replace(shop.root / OPEN)


def are_metrics(value: object) -> bool:
    return isinstance(value, dict) and all(type(v) in (int, float) and math.isfinite(v) for v in value.values())
