"""The feeder keeps the prompt stream fed: `millpond feed`.

Consumes prompts of a source and the cursor; waits while enough prompts wait; is unblocked by workers that use them up,
and by a restore that names ids to be fed again; produces stream entries. It keeps no state: the cursor in Redis says
where to go on, so any feeder of the same data continues for any other, and two at once feed nothing twice.

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
from producers.dataset import row_of
from producers.sources import Source, open_source

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

    def describe_data(self, rows: int | None, total: int | None, digest: str) -> None:
        """UsageError when the run was fed from other data; None is without end."""
        ...

    def stopping(self) -> bool:
        """The run is done, failed or draining: it needs no more prompts."""
        ...


class Feeder:
    def __init__(self, source: Source, config: FeedConfig, broker: FeedBroker) -> None:
        self.source = source
        self.config = config
        self.broker = broker
        self.total = source.rows * config.num_epoch if source.rows and config.num_epoch else None
        "Prompts of the whole run; None is without end."

    @property
    def digest(self) -> str:
        """Two runs with equal digests give each id the same record: same source, keys, and order."""
        config = self.config
        keys = [config.input_key, config.label_key, config.metadata_key, config.tool_key]
        order = ["shuffled", config.rollout_seed] if config.rollout_shuffle else ["as in the file"]
        return hashlib.sha256(json.dumps([self.source.digest, keys, order]).encode()).hexdigest()

    def run(self, stop: threading.Event) -> None:
        """Feed until `stop` is set or the run is stopping."""
        rows = self.source.rows
        self.broker.describe_data(rows, self.total, self.digest)
        log.info("feeding rows=%s total=%s from=%d", rows, self.total or "endless", self.broker.cursor())
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
        config, rows = self.config, self.source.rows
        if rows is None:
            return self.source.records(ids)
        order = [row_of(id, config.rollout_seed, rows, config.rollout_shuffle) for id in ids]
        return self.source.records(id // rows * rows + row for id, row in zip(ids, order, strict=True))


def main(config: FeedConfig, broker: FeedBroker, stop: threading.Event) -> int:
    """`millpond feed`: checks every row before it touches Redis. Returns the exit code."""
    source = open_source(config)
    if source.rows is None and (config.num_epoch or config.rollout_shuffle):
        flag = "--num-epoch" if config.num_epoch else "--rollout-shuffle"
        raise UsageError(f"{flag}: --task {config.task} has no end; bound the run with --num-rollout")
    Feeder(source, config, broker).run(stop)
    return 0
