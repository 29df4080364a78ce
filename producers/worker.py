"""`millpond worker`: does the run's jobs, evaluations and rewards that must hold nobody up (pipeline.jobs).

Consumes RQ's queues of the run; waits for jobs, and first for the trainer to say what all agree on; leaves when it is
told to, or the run is over. A hand (hand.py) is one RQ worker in a thread with a process of its own (horse.py): one for
evaluations, --rm-workers for rewards, so that neither waits for the other.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.broker import Broker
from pipeline.config import Agreed, WorkerConfig
from pipeline.errors import MillpondError, RedisDown, Starved, Stopped
from pipeline.flags import parse
from pipeline.jobs import KINDS, REWARD, Kind
from pipeline.join import Place, join
from pipeline.leases import new_worker_id
from pipeline.log import setup
from pipeline.modes import check
from producers.cli import same_code, verified
from producers.hand import Hand
from producers.jobs import JOBS, Desk

log = logging.getLogger(__name__)

LOOK = 2.0
"Seconds between looks whether the run is over."


def main(argv: list[str]) -> int:
    """Do a run's jobs until told to stop or the run is over."""
    config = parse(WorkerConfig, argv, os.environ, "millpond worker")
    check(config)
    found = join(config)
    setup(f"worker-{os.getpid()}", found.folder)
    for name in ("rq.worker", "rq.job", "rq.registry"):  # a line a job
        logging.getLogger(name).setLevel(logging.WARNING)
    broker = verified(found, "jobs", config.redis_patience)
    try:
        rules = agreed(broker)
        same_code(rules, config)
        Crew(config, found, rules, broker).work()
    except Exception as error:
        _tell(broker, error)
        raise
    finally:
        broker.close()
    return 0


def agreed(broker: Broker) -> Agreed:
    """What the trainer has written for all workers, waited for; Stopped, Starved."""
    began = said = time.monotonic()
    while True:
        text: Any = broker.patiently(lambda: broker.client.get(broker.keys["config"]))
        if text:
            return Agreed.model_validate_json(text)
        now = time.monotonic()
        if broker.stop.wait(0.2):
            raise Stopped("asked to stop before there was a trainer")
        if now - began > broker.patience:
            raise Starved(f"run {broker.keys.run} has had no trainer for {now - began:.0f} s; start `millpond train`")
        if now - said > 30:
            said = now
            log.warning("run %s has no trainer yet; waiting", broker.keys.run)


def _tell(broker: Broker, error: Exception) -> None:
    """Notes why this worker ends. Others may go on: the run does not end with it."""
    if isinstance(error, Stopped | RedisDown):
        return
    what = str(error) if isinstance(error, MillpondError) else f"{type(error).__name__}: {error}"
    broker.note(f"worker-{os.getpid()}", what, traceback.format_exc())


@dataclass
class Crew:
    """The hands of one process."""

    config: WorkerConfig
    place: Place
    rules: Agreed
    broker: Broker
    trouble: list[BaseException] = field(default_factory=list)
    "what hands ended with"

    def work(self) -> None:
        """Returns when all hands have; raises what one of them ended with."""
        hands = [threading.Thread(target=self._run, args=made, name=made[1]) for made in self._hands()]
        for hand in hands:
            hand.start()
        log.info("worker %s: %d hands for %s", new_worker_id(), len(hands), self.config.worker_jobs)
        try:
            while not self.broker.stop.wait(LOOK) and not self._over():
                pass
        finally:
            self.broker.stop.set()
            for hand in hands:
                hand.join()
        if self.trouble:
            raise self.trouble[0]

    def _hands(self) -> Iterator[tuple[Kind, str]]:
        id = new_worker_id()
        for kind in KINDS.values():
            if kind.name not in JOBS or self.config.worker_jobs not in ("all", kind.queue):
                continue
            if kind is not REWARD or self.rules.rm_place == "worker":
                for n in range(self.config.rm_workers if kind is REWARD else 1):
                    yield kind, f"{id}-{kind.queue}-{n}"

    def _run(self, kind: Kind, name: str) -> None:
        broker = Broker(self.place.url, self.broker.keys, "job", self.config.redis_patience)
        broker.stop = self.broker.stop
        desk = Desk(self.config, self.rules, self.place.run, self.place.url, self.place.folder)
        try:
            broker.patiently(lambda: Hand(broker, kind, name, JOBS[kind.name], desk)).run()
        except Stopped:
            pass
        except BaseException as error:
            self.trouble.append(error)
            self.broker.stop.set()
            raise
        finally:
            broker.close()

    def _over(self) -> bool:
        """The run has ended, and nothing waits any more that somebody may still want to read."""
        if not self.broker.stopping():
            return False
        waiting = [f"rq:queue:{self.broker.keys.queue(kind.queue)}" for kind in KINDS.values()]
        return not self.broker.patiently(lambda: self.broker.client.exists(*waiting))
