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
from itertools import count
from typing import Any

from pipeline.agreed import Agreed
from pipeline.broker import Broker
from pipeline.config import WorkerConfig
from pipeline.errors import MillpondError, RedisDown, Starved, Stopped, UsageError
from pipeline.evals import agree
from pipeline.flags import parse
from pipeline.jobs import EVAL, KINDS, REWARD, Kind
from pipeline.join import Place, join
from pipeline.keys import Keys
from pipeline.leases import new_worker_id
from pipeline.log import setup
from pipeline.modes import check
from producers.claim import servers
from producers.cli import same_code, verified
from producers.evaluate import try_out
from producers.hand import Hand
from producers.jobs import JOBS, Desk

log = logging.getLogger(__name__)

LOOK = 1.0
"Seconds between looks whether the run is over, and whether answers hang."
SLOW = 1.0
"Seconds after which an answer counts as one that hangs, until it is scored."
QUIET = 60.0
"Seconds without a job after which a spare hand leaves."


def main(argv: list[str]) -> int:
    """Do a run's jobs until told to stop or the run is over."""
    config = parse(WorkerConfig, argv, os.environ, "millpond worker")
    check(config)
    if config.worker_jobs != "rewards":
        try_out(config)
    found = join(config)
    setup(f"worker-{os.getpid()}", found.folder)
    for name in ("rq.worker", "rq.job", "rq.registry"):  # a line a job
        logging.getLogger(name).setLevel(logging.WARNING)
    broker = verified(found, "jobs", config.redis_patience)
    try:
        while (rules := agreed(broker)) is not None:
            same_code(rules, config)
            if not Crew(config, found, rules, broker).work():
                break
            log.warning("the trainer has other settings now: the hands begin anew with them")
    except Exception as error:
        _tell(broker, error)
        raise
    finally:
        broker.close()
    return 0


def agreed(broker: Broker) -> Agreed | None:
    """What the trainer has written for all workers, waited for; None when told to stop before there was anything."""
    began = time.monotonic()
    said = began - 28  # the first soon
    while (rules := written(broker)) is None:
        now = time.monotonic()
        if broker.stop.wait(0.2):
            return None
        if now - began > broker.patience:
            raise Starved(f"run {broker.keys.run} has had no trainer for {now - began:.0f} s; start `millpond train`")
        if now - said > 30:
            said = now
            log.warning("run %s has no trainer yet; waiting", broker.keys.run)
    return rules


def written(broker: Broker) -> Agreed | None:
    text: Any = broker.patiently(lambda: broker.client.get(broker.keys["config"]))
    return Agreed.model_validate_json(text) if text else None


def _tell(broker: Broker, error: Exception) -> None:
    """Notes why this worker ends. Others may go on: the run does not end with it."""
    if isinstance(error, Stopped | RedisDown):
        return
    what = str(error) if isinstance(error, MillpondError) else f"{type(error).__name__}: {error}"
    broker.note(f"worker-{os.getpid()}", what, traceback.format_exc())


@dataclass
class Crew:
    """The hands of one process: --rm-workers for rewards and one for evaluations, as far as the run has such jobs.

    While answers hang in some, more are started, so that those which do not hang go on: so many that --rm-workers are
    free, and as many again, since starting one takes seconds; at most --rm-spares. They leave when all is quiet.
    """

    config: WorkerConfig
    place: Place
    rules: Agreed
    broker: Broker
    id: str = field(default_factory=new_worker_id)
    numbers: Iterator[int] = field(default_factory=count)
    hands: dict[threading.Thread, Hand | None] = field(default_factory=dict)
    "None: it is starting"
    stop: threading.Event = field(default_factory=threading.Event)
    "for the hands: no more jobs are to be taken"
    trouble: list[BaseException] = field(default_factory=list)
    "what hands ended with"

    def work(self) -> bool:
        """Returns when all hands have; True where the trainer has other settings by now, and who goes on begins anew
        with them. Raises what a hand ended with."""
        if self.differs and self.wanted:
            log.warning("this worker leaves evaluations to others: %s", self.differs)
            self.broker.note(f"worker-{os.getpid()}", f"it leaves evaluations to others: {self.differs}")
        for kind, hands in self.wanted.items():
            for _ in range(hands):
                self._start(kind)
        log.info("worker %s takes jobs with %d hands", self.id, len(self.hands))
        changed = False
        try:
            while not (changed or self.broker.stop.wait(LOOK) or self.stop.is_set() or self._over()):
                self._help()
                changed = self._changed()
        finally:
            self.stop.set()
            for thread in list(self.hands):
                thread.join()
        if self.trouble:
            raise self.trouble[0]
        return changed

    @property
    def differs(self) -> str:
        """Why this worker evaluates nothing for the run; empty where it does, or is not to."""
        if self.rules.evals is None or self.config.worker_jobs == "rewards":
            return ""
        try:
            agree(self.rules.evals, self.config)
        except UsageError as error:
            return str(error)
        return ""

    @property
    def wanted(self) -> dict[Kind, int]:
        """Hands by kind, where there are any; UsageError where there is none."""
        own = {REWARD: self.config.rm_workers if self.rules.rm_place == "worker" else 0, EVAL: int(not self.differs)}
        kinds = [kind for kind in KINDS.values() if self.config.worker_jobs in ("all", kind.queue)]
        found = {kind: hands for kind in kinds if (hands := own[kind])}
        if not found and self.differs:
            raise UsageError(f"nothing to do for this worker: {self.differs}")
        if not found:
            raise UsageError("--worker-jobs rewards: this run's answers are scored by its generators (--rm-place)")
        return found

    def _start(self, kind: Kind, spare: bool = False) -> None:
        name = f"{self.id}-{kind.queue}-{next(self.numbers)}"
        thread = threading.Thread(target=self._run, args=(kind, name, spare), name=name)
        self.hands[thread] = None
        thread.start()

    def _run(self, kind: Kind, name: str, spare: bool) -> None:
        broker = Broker(self.place.url, self.broker.keys, "job", self.config.redis_patience)
        broker.stop = self.stop
        desk = Desk(self.config, self.rules, self.place.run, self.place.url, self.place.folder)
        try:
            used = servers(self.config) if kind is EVAL else ()
            hand = broker.patiently(lambda: Hand(broker, kind, name, JOBS[kind.name], desk, used))
            hand.leaves_after = QUIET if spare else None
            self.hands[threading.current_thread()] = hand
            hand.run()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - `work` raises it
            self.trouble.append(error)
            self.stop.set()
        finally:
            broker.close()

    def _help(self) -> None:
        now = time.monotonic()
        for gone in [thread for thread in self.hands if not thread.is_alive()]:
            del self.hands[gone]
        there = [hand for hand in self.hands.values() if hand is None or hand.kind is REWARD]
        held = sum(hand is not None and 0 < hand.since < now - SLOW for hand in there)
        if held and self.broker.patiently(lambda: self.broker.client.exists(_waiting(self.broker.keys, REWARD))):
            most = self.config.rm_workers + self.config.rm_spares
            for _ in range(len(there), min(most, 2 * self.config.rm_workers + held)):
                self._start(REWARD, spare=True)

    def _changed(self) -> bool:
        """As generators are leased nothing by old settings, no job is done by them."""
        now = written(self.broker)
        if now is None or not self.rules.digest:
            return False
        return (self.rules.digest, self.rules.evals) != (now.digest, now.evals)

    def _over(self) -> bool:
        """The run has ended, and nothing of ours waits any more that somebody may still want to read."""
        if not self.broker.stopping():
            return False
        waiting = [_waiting(self.broker.keys, kind) for kind in self.wanted]
        return not self.broker.patiently(lambda: self.broker.client.exists(*waiting))


def _waiting(keys: Keys, kind: Kind) -> str:
    return f"rq:queue:{keys.queue(kind.queue)}"
