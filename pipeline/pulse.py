"""The trainer's sign of life, from a thread of its own: a long training step must not look like death."""

from __future__ import annotations

import logging
import os
import threading

from redis.exceptions import RedisError

from pipeline.broker import Broker
from pipeline.connect import passing
from pipeline.fenced import TrainerBroker

log = logging.getLogger(__name__)
EVERY = 3.0
"Seconds between renewals; a trainer is dead after HEARTBEAT_LIMIT_MS without."


class TrainerPulse(threading.Thread):
    """Renews `trainer_seen` and reaps silent workers. A fence it meets is left for the trainer's next verb to raise."""

    def __init__(self, url: str, owner: TrainerBroker) -> None:
        super().__init__(name="trainer-pulse", daemon=True)
        self.broker = Broker(url, owner.keys, "trainer")
        self.owner = owner
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(EVERY):
            try:
                self.broker.script("renew", self.owner.epoch, self.owner.token, "trainer_pid", os.getpid())
                gone = self.broker.script("reap")
            except RedisError as error:
                if not passing(error):
                    raise
                continue
            if gone:
                log.warning("silent workers were declared dead, their prompts go round again: %s", gone)

    def stop(self) -> None:
        self.over.set()
        self.join(timeout=10)
        self.broker.close()
