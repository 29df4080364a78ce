"""Signs of life, each from a thread of its own: a long training step or a busy event loop must not look like death.

Now and then the trainer's also looks whether Redis has become one that deletes queued groups.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from pipeline.broker import Broker
from pipeline.connect import eviction
from pipeline.fenced import TrainerBroker
from pipeline.keys import Keys
from pipeline.outage import passing
from pipeline.replies import Pulse, pulse_of

log = logging.getLogger(__name__)

EVERY = 3.0
"Seconds between signs; dead is who gave none for Agreed.heartbeat_limit_ms."
LOOK = 30.0
"Seconds between looks at the eviction policy."
STUCK = 60.0
"Seconds after which a worker whose event loop has not turned stops giving signs."


class _Beat(threading.Thread):
    """Calls `beat` every few seconds and reaps silent workers. An outage is for the owner's verbs to wait out; any
    other error of Redis ends the owner."""

    def __init__(self, url: str, keys: Keys, name: str) -> None:
        super().__init__(name=f"{name}-pulse", daemon=True)
        self.broker = Broker(url, keys, name)
        self.over = threading.Event()

    def beat(self) -> None:
        raise NotImplementedError

    def fail(self, error: RedisError) -> None:
        """Called in this thread before it ends with an error; the owner must end, too."""
        raise NotImplementedError

    def run(self) -> None:
        try:
            while not self.over.wait(EVERY):
                self._once()
        except RedisError as error:
            log.error("no more signs of life: %s: %s", type(error).__name__, error)
            self.fail(error)

    def _once(self) -> None:
        try:
            self.beat()
            gone = self.broker.script("reap")
        except RedisError as error:
            if not passing(error):
                raise
            return
        if gone:
            log.warning("silent workers are declared dead, their prompts go round again: %s", gone)

    def stop(self) -> None:
        self.over.set()
        self.join(timeout=15)
        self.broker.close()


class TrainerPulse(_Beat):
    """Renews `trainer_seen`. A fence it meets is left for the trainer's next verb to raise."""

    def __init__(self, url: str, owner: TrainerBroker) -> None:
        super().__init__(url, owner.keys, "trainer")
        self.owner = owner
        self.looked = time.monotonic()
        self.evicts = ""
        "what is wrong with the eviction policy"

    def beat(self) -> None:
        self.broker.script("renew", self.owner.epoch, self.owner.token, "trainer_pid", os.getpid())
        if time.monotonic() - self.looked >= LOOK:
            self.look()

    def look(self) -> None:
        """Tells of an eviction policy that was changed, when it was and when it is well again."""
        self.looked = time.monotonic()
        before, self.evicts = self.evicts, eviction(self.broker.client.info("memory"))
        if self.evicts != before:
            log.error(self.evicts or "maxmemory-policy is noeviction again")

    def fail(self, error: RedisError) -> None:
        self.owner.trouble = error


class WorkerPulse(_Beat):
    """A worker's heartbeat; `info` gives what to say, `turned` when its event loop last turned (monotonic)."""

    def __init__(
        self,
        url: str,
        keys: Keys,
        worker: str,
        info: Callable[[], tuple[dict[str, Any], int, float]],
        hear: Callable[[Pulse | RedisError], None],
    ) -> None:
        super().__init__(url, keys, "worker")
        self.worker = worker
        self.info = info
        "() -> (info, spare samples, turned)"
        self.hear = hear
        "called in this thread with each answer, and with the error that ends it"

    def fail(self, error: RedisError) -> None:
        self.hear(error)

    def beat(self) -> None:
        info, spare, turned = self.info()
        if time.monotonic() - turned < STUCK:
            self.hear(pulse_of(self.broker.script("heartbeat", self.worker, json.dumps(info), spare)))
        else:
            log.error("the event loop has not turned for %.0f s: no heartbeat", time.monotonic() - turned)
