"""Being the run's one trainer: epoch, token, and agreement with Redis.

A trainer that was replaced can change nothing. One that meets a Redis which knows less than it does (restarted with a
cut tail, or flushed) tells it again: its ledger is the truth about what was taken and trained.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from redis.exceptions import RedisError, ResponseError

from pipeline.broker import Broker
from pipeline.errors import Fenced, MillpondError, RedisUnusable, UsageError
from pipeline.keys import Keys
from pipeline.ledger import Ledger
from pipeline.outage import Outage, passing
from pipeline.replies import fields_of
from pipeline.scripts import Arg
from pipeline.types import Policy

log = logging.getLogger(__name__)
T = TypeVar("T")

HEARTBEAT_LIMIT_MS = 20_000
"A trainer not seen for so long is dead."


LOSSES, WITHIN = 10, 60.0
"So many times in so many seconds may Redis lose what it knew; after that something does it on purpose."


class Older(MillpondError):
    """Redis knows less than we do: it came back without the end of its log, was flushed, or lost a key. Says what."""


class Fence(Broker):
    """What every verb of the trainer goes through."""

    def __init__(self, url: str, keys: Keys, patience: float = 300.0) -> None:
        super().__init__(url, keys, "trainer", patience)
        self.token = uuid.uuid4().hex
        self.epoch = 0
        self.ledger = Ledger()
        self.config = ""
        "JSON for the key `config`"
        self.said: dict[str, str] = {}
        "fields of `state` that are ours"
        self.latest: Policy | None = None
        "what we published last"
        self.losses: deque[float] = deque(maxlen=LOSSES)
        "monotonic times"
        self.trouble: BaseException | None = None
        "what ended our pulse: the next verb raises it"

    def patiently(self, verb: Callable[[], T]) -> T:
        while True:
            if self.trouble:
                raise self.trouble
            try:
                return super().patiently(verb)
            except Older as loss:
                self.tell_again(loss)

    def fenced(self, name: str, *args: Arg) -> Any:
        """One fenced script, once; its answer without the fence."""
        answer = self.script(name, self.epoch, self.token, *args)
        return answer[1:] if self.passes(answer) else None

    def passes(self, answer: Sequence[Any]) -> bool:
        """`answer` begins with what the fence said."""
        if answer[0] == b"older":
            raise Older(b", ".join(answer[1:]).decode() or f"{self.keys['state']}, or came back older")
        if answer[0] == b"fenced":
            holder = self.state().get("trainer", "another trainer")
            raise Fenced(f"run {self.keys.run} has been taken over by {holder}; this trainer can change nothing more")
        return True

    def durable(self) -> None:
        """Waits until the last write is on disk, where the server can say so (WAITAOF)."""
        try:
            if self._flushes:
                self.client.execute_command("WAITAOF", 1, 0, 2000)
        except RedisError as error:
            if passing(error):
                self.outage(error)

    @cached_property
    def _flushes(self) -> bool:
        """Whether the server brings its log to the disk in time; where it does not, WAITAOF waits in vain."""
        try:
            return self.client.config_get("appendfsync").get("appendfsync") != "no"
        except ResponseError:
            return True  # not for us to ask

    # -- the fence itself

    def takeover(self, name: str, force: bool = False, above: int = 0) -> None:
        """Makes this the run's trainer; UsageError naming the other one while that is alive."""
        answer = self.patiently(
            lambda: self.script("takeover", self.token, name, HEARTBEAT_LIMIT_MS, int(force), above)
        )
        if answer[0] == b"held":
            raise UsageError(
                f"run {self.keys.run} has a trainer: {answer[1].decode()}, seen {int(answer[2]) / 1000:.0f} s ago; "
                "--wait waits until it is gone, --take-over replaces it at once"
            )
        self.epoch = int(answer[1])
        self.said = {"trainer": name}
        self.patiently(self._kill_others)
        self.durable()

    def _kill_others(self) -> None:
        me = self.client.client_id()
        for client in self.client.client_list():
            if client["name"] == f"millpond:{self.keys.run}:trainer" and int(client["id"]) != me:
                self.client.client_kill_filter(_id=client["id"])

    def renew(self, **fields: str) -> None:
        """Sign of life; also sets fields of `state`."""
        self.said.update(fields)
        flat = [x for pair in fields.items() for x in pair]
        self.patiently(lambda: self.fenced("renew", *flat))

    def finish(self, status: str, why: str) -> None:
        """The last word on this run for now; another trainer may take over at once."""
        self.renew(status=status, why=why, trainer_seen="0")

    def configure(self, config: str) -> None:
        self.config = config
        self.patiently(lambda: self.fenced("configure", config))

    # -- agreeing again

    def restore(self, ledger: Ledger) -> int:
        """At a resume: Redis is made to agree with a checkpoint. Answers how many prompts are fed again."""
        self.ledger = ledger
        return self._reconcile("restart")

    def tell_again(self, loss: Older) -> None:
        """Redis knows less than before, and nobody restarted it: it is told again, with back-off where that goes on."""
        now = time.monotonic()
        recent = sum(now - when < WITHIN for when in self.losses)
        if recent == LOSSES:
            raise RedisUnusable(
                f"Redis loses keys again and again, {LOSSES} times in {WITHIN:.0f} s, last: {loss}; find out who "
                "deletes them (CLIENT LIST, MONITOR), or whether it evicts (CONFIG GET maxmemory-policy)"
            )
        self.losses.append(now)
        log.error("Redis has lost: %s (FLUSHALL, DEL or eviction?)", loss)
        self.stop.wait(min(0.02 * 2**recent, 1.0))
        self.returned()

    def returned(self) -> None:
        """Resync: Redis came back, maybe older, and is told all that we took."""
        if not self.epoch:
            return
        missing = self._reconcile("redis_restart")
        log.warning("told Redis again what this trainer holds; %d prompts are fed again", missing)

    def _reconcile(self, reason: str) -> int:
        book, policy = self.ledger, self.latest
        fields = fields_of(policy) if policy else []
        held: list[Arg] = []
        for where, prompts in (("taken", book.taken), ("published", book.published)):
            for p in prompts.values():
                held += [p.id, p.attempt, p.strikes, where, p.record]
        head: list[Arg] = [reason, book.cursor, bytes(book.committed), book.dropped, book.dead, self.config]
        head += [policy.version if policy else 0, len(fields) // 2, *fields]
        with Outage(self.seen, self.patience, self.stop) as outage:
            while True:
                try:
                    return self._agree([*head, *held])
                except Older:
                    time.sleep(0.1)
                except RedisError as error:
                    if not passing(error):
                        raise
                    outage.wait(self.client, error)
                    self.seen.restarted = False

    def _agree(self, args: list[Arg]) -> int:
        """Once through it: Redis is told, and ids that then stand nowhere are to be fed again. Answers how many."""
        self.passes(self.script("reconcile", self.epoch, self.token, *args))
        self.fenced("renew", *(x for pair in self.said.items() for x in pair))
        missing = [int(i) for i in np.flatnonzero(Broker.standing(self).places() == 0)]
        for start in range(0, len(missing), 1000):
            self.fenced("missing", *missing[start : start + 1000])
        return len(missing)
