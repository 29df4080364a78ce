"""The feeder keeps the prompt stream fed: `millpond feed`.

Consumes a prompt file and the cursor; waits while enough prompts wait; is unblocked by workers that use them up, and by
a restore that names ids to be fed again; produces stream entries. It keeps no state: the cursor in Redis says where to
go on, so any feeder of the same data continues for any other, and two at once feed nothing twice.

The data ends after rows x --num-epoch prompts; whether the run ends then, or earlier by its steps, is the trainer's to
say. The feeder stays until the run no longer needs prompts, because ids may still have to be fed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from typing import Protocol

from pipeline.config import FeedConfig
from pipeline.errors import UsageError
from producers.dataset import Dataset, row_of

log = logging.getLogger(__name__)

BATCH = 256
"Prompts in one call: bounds how long a script holds Redis up."

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 1.0
"Seconds between looks while there is nothing to do; grows from the one to the other."


class FeedBroker(Protocol):
    """What the feeder needs of Redis."""

    def feed(self, cursor: int, records: list[str]) -> int:
        """Feed `records` if the cursor stands at `cursor`; where it stands afterwards, fed or not."""
        ...

    def cursor(self) -> int: ...

    def backlog(self) -> int:
        """Entries in both prompt streams."""
        ...

    def refeed_ids(self, limit: int) -> list[int]: ...

    def refeed(self, records: dict[int, str]) -> None: ...

    def describe_data(self, rows: int, total: int | None, digest: str) -> None:
        """UsageError when the run was fed from other data; `total` None is without end."""
        ...

    def stopping(self) -> bool:
        """The run is done, failed or draining: it needs no more prompts."""
        ...


class Feeder:
    def __init__(self, dataset: Dataset, config: FeedConfig, broker: FeedBroker) -> None:
        self.dataset = dataset
        self.config = config
        self.broker = broker
        self.total = len(dataset) * config.num_epoch if config.num_epoch else None
        "Prompts of the whole run; None is without end."

    @property
    def digest(self) -> str:
        """Two runs with equal digests give each id the same record: same file, keys, and order."""
        order = ["shuffled", self.config.rollout_seed] if self.config.rollout_shuffle else ["as in the file"]
        return hashlib.sha256(json.dumps([self.dataset.digest, self.dataset.keys, order]).encode()).hexdigest()

    def run(self, stop: threading.Event) -> None:
        """Feed until `stop` is set or the run is stopping."""
        self.broker.describe_data(len(self.dataset), self.total, self.digest)
        log.info("feeding rows=%d total=%s from=%d", len(self.dataset), self.total or "endless", self.broker.cursor())
        pause = FIRST_PAUSE
        while not stop.is_set() and not self.broker.stopping():
            if self._refeed() or self._top_up(stop):
                pause = FIRST_PAUSE
            elif not stop.wait(pause):
                pause = min(pause * 1.5, LONGEST_PAUSE)
        log.info("feeder ends")

    def _refeed(self) -> bool:
        ids = self.broker.refeed_ids(BATCH)
        if ids:
            self.broker.refeed(dict(zip(ids, self._records(ids), strict=True)))
            log.info("fed again ids=%d", len(ids))
        return bool(ids)

    def _top_up(self, stop: threading.Event) -> bool:
        """Fill up to twice the low-water mark once it is passed, never beyond the end of the data.

        The cursor is read each time: a Redis that lost the end of its log went back with it.
        """
        waiting, low = self.broker.backlog(), self.config.feed_low_water
        if waiting >= low:
            return False
        start = cursor = self.broker.cursor()
        end = start + 2 * low - waiting
        end = end if self.total is None else min(end, self.total)
        while cursor < end and not stop.is_set():
            cursor = self.broker.feed(cursor, self._records(range(cursor, min(end, cursor + BATCH))))
        return cursor > start

    def _records(self, ids: range | list[int]) -> list[str]:
        config, rows = self.config, len(self.dataset)
        return self.dataset.records(row_of(id, config.rollout_seed, rows, config.rollout_shuffle) for id in ids)


def main(config: FeedConfig, broker: FeedBroker, stop: threading.Event) -> int:
    """`millpond feed`: checks every row before it touches Redis. Returns the exit code."""
    if config.prompt_data is None:
        raise UsageError("--prompt-data is missing: a JSONL file of prompts")
    dataset = Dataset.open(config.prompt_data, config.input_key, config.label_key, config.metadata_key)
    Feeder(dataset, config, broker).run(stop)
    return 0
