"""Signs of life, each from a thread of its own: a long training step or a busy event loop must not look like death."""

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
from pipeline.connect import passing
from pipeline.fenced import TrainerBroker
from pipeline.keys import Keys
from pipeline.replies import Pulse, pulse_of

log = logging.getLogger(__name__)

EVERY = 3.0
"Seconds between signs; dead is who gave none for Agreed.heartbeat_limit_ms."
STUCK = 60.0
"Seconds after which a worker whose event loop has not turned stops giving signs."


class _Beat(threading.Thread):
    """Calls `beat` every few seconds and reaps silent workers; an outage is for the owner's verbs to wait out."""

    def __init__(self, url: str, keys: Keys, name: str) -> None:
        super().__init__(name=f"{name}-pulse", daemon=True)
        self.broker = Broker(url, keys, name)
        self.over = threading.Event()

    def beat(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        while not self.over.wait(EVERY):
            try:
                self.beat()
                gone = self.broker.script("reap")
            except RedisError as error:
                if not passing(error):
                    raise
                continue
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

    def beat(self) -> None:
        self.broker.script("renew", self.owner.epoch, self.owner.token, "trainer_pid", os.getpid())


class WorkerPulse(_Beat):
    """A worker's heartbeat; `info` gives what to say, `turned` when its event loop last turned (monotonic)."""

    def __init__(
        self,
        url: str,
        keys: Keys,
        worker: str,
        info: Callable[[], tuple[dict[str, Any], int, float]],
        hear: Callable[[Pulse], None],
    ) -> None:
        super().__init__(url, keys, "worker")
        self.worker = worker
        self.info = info
        "() -> (info, spare samples, turned)"
        self.hear = hear
        "called in this thread with each answer"

    def beat(self) -> None:
        info, spare, turned = self.info()
        if time.monotonic() - turned < STUCK:
            self.hear(pulse_of(self.broker.script("heartbeat", self.worker, json.dumps(info), spare)))
        else:
            log.error("the event loop has not turned for %.0f s: no heartbeat", time.monotonic() - turned)
