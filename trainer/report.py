"""What a training step says of itself: a line in metrics.jsonl and timeline.jsonl, a line in the log."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from consumers.drain import Batch
from pipeline import metrics
from pipeline.fenced import TrainerBroker
from pipeline.log import fields
from trainer.start import Beginning
from trainer.trackers import Trackers
from trainer.workshop import Workshop

log = logging.getLogger(__name__)


class Reporter:
    """Keeps what the figures of a step are differences to."""

    def __init__(self, path: Path, broker: TrainerBroker, step: int, trackers: Trackers | None = None) -> None:
        shop = Workshop(path.parent, broker.epoch).folder
        self.file = metrics.Records(path, step + 1, shop)
        self.trackers = trackers
        self.broker = broker
        self.before = self.counters = broker.counters()
        self.since = time.monotonic()

    def count(self) -> None:
        """What befell prompts since the step before. Before new weights are out, in lock-step nothing befalls any."""
        self.before, self.counters = self.counters, self.broker.counters()

    def step(self, now: Beginning, batch: Batch, figures: dict[str, float], trained: float) -> dict[str, Any]:
        """`trained` in seconds; the step runs from the end of the one before. Answers what does not follow from the
        groups, nor from training."""
        began, self.since = self.since, time.monotonic()
        own = {
            **metrics.fully_async(batch.queue_size, batch.staleness, batch.counts),
            **metrics.counted(self.before, self.counters),
            "train/weight_version": now.version,
        }
        perf = metrics.perf(batch.groups, trained, batch.waited, self.since - began)
        values = {**figures, **metrics.rollout(batch.groups), **own, **perf}
        self.file.write(now.step, values, self._workers())
        if self.trackers:
            self.trackers.look()
        shown = fields(
            step=now.step,
            version=now.version,
            reward=values.get("rollout/raw_reward", float("nan")),
            loss=figures.get("train/loss", float("nan")),
            staleness=batch.staleness["avg_staleness"],
            queue=batch.queue_size,
            wait=batch.waited,
            train=trained,
            tokens_per_sec=values["perf/tokens_per_sec"],
        )
        log.info("step %s", shown)
        return own

    def _workers(self) -> dict[str, list[float]]:
        keys, told = ("tokens_per_sec", "in_flight"), self.broker.worker_infos()
        return {name: [_number(info.get(key)) for key in keys] for name, info in told.items()}


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0
