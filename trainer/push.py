"""A publication whose weights engines can also have from the trainer itself, over a process group.

The folder is written first, always, and then published: the version key is never ahead of weights that anybody who
comes late, is left out or fails half-way can load, and a trainer may die at any instruction here without taking a
version with it. Nobody stands still while it is written: engines go on with the weights they have. What the group
saves is their pause: tensors come from the trainer's memory at the network's pace, not to each from the shared folder.

Whoever is not done within --update-weight-timeout of the roster is left out: the group is torn down, which ends the
waiting of all its members, and they load the folder. The next update has a group of its own. `pipeline.rendezvous` has
what is said before and after, `producers.party` the other side.

Consumes answers; waits for them, for the members and for their reports, each with an end; produces a publication.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config import TrainConfig
from pipeline.errors import UsageError
from pipeline.fenced import TrainerBroker
from pipeline.rendezvous import ANSWER, Engines, Piece, Rendezvous, Roster, packed, seat, seated
from pipeline.types import Policy, Prompt
from trainer.backends.base import Backend
from trainer.outline import saved
from trainer.process_group import BROKEN, Group

log = logging.getLogger(__name__)

GRACE = 2.0
"Seconds that a group which is given up stays open: who was just told to join must find it, and see it close."
STEP = 0.01
"Seconds between looks at what workers say."


class Failed(Exception):
    """This update goes by the folder; why."""


class Push:
    """In place of `TrainerBroker.publish`."""

    def __init__(self, config: TrainConfig, broker: TrainerBroker, backend: Backend, device: str) -> None:
        self._config, self._broker, self._backend = config, broker, backend
        self._way = "nccl" if device == "cuda" else "gloo"
        self._outline: list[Piece] = []

    def __call__(self, policy: Policy, trained: Sequence[Prompt]) -> None:
        """Publishes; returns when all members have reported or are given up. UsageError for a --update-weight-host
        that is not this machine's, and for a model whose tensors are not those of its folder."""
        able = set() if self._broker.stop.is_set() else self._broker.able()
        if not self._outline:
            self._outline = self._checked(Path(policy.path))
        if not able:
            self._broker.publish(policy, trained)
            return
        group = self._listen()
        try:
            name = f"{self._broker.epoch}-{policy.version}-{uuid.uuid4().hex[:12]}"
            offer = Rendezvous(name, group.host, group.port, self._way, self._config.update_weight_timeout)
            self._broker.invite()
            self._broker.publish(replace(policy, rendezvous=offer), trained)
            self._update(Update(self._broker, offer, policy.version), group, able)
        finally:
            _aside(group.close)

    def _listen(self) -> Group:
        host = self._config.update_weight_host
        try:
            return Group(host, self._way)
        except OSError as error:
            raise UsageError(f"--update-weight-host {host}: this machine cannot listen there: {error}") from error

    def _checked(self, folder: Path) -> list[Piece]:
        """What is sent must be what is saved, or engines would get other weights by one way than by the other."""
        mine = self._backend.outline()
        if sorted(mine) != sorted(saved(folder)):
            raise UsageError(
                "--update-weight-transport distributed: this model's tensors have other names or shapes in its folder "
                "than in memory, and engines know those of the folder; use --update-weight-transport disk"
            )
        return mine

    def _update(self, update: Update, group: Group, able: set[str]) -> None:
        began = time.monotonic()
        seats, world = seated(update.gather(able))
        buckets = packed(self._outline, self._config.update_weight_buffer_size)
        self._broker.seat(update.version, Roster(update.offer.group, world, seats, buckets))
        if not seats:
            return
        try:
            update.begin(set(seats))
            update.run(lambda: group.form(update.offer.group, world, update.left))
            self._send(update, group, buckets)
            update.finish()
        except Failed as error:
            log.warning("version %d goes to engines by its folder: %s", update.version, error)
            self._broker.seat(update.version, Roster(update.offer.group, world, {}, ()))
            time.sleep(GRACE)
        else:
            log.info("version %d went to %d engines in %.1f s", update.version, len(seats), time.monotonic() - began)

    def _send(self, update: Update, group: Group, buckets: Sequence[Sequence[Piece]]) -> None:
        pieces = self._backend.pieces()
        try:
            for bucket in buckets:
                tensors = [next(pieces) for _ in bucket]
                update.run(lambda tensors=tensors: group.send(tensors))  # type: ignore[misc]
        finally:
            for _ in pieces:  # other ranks gather what is left
                pass


class Update:
    """What is heard of one update, and how long it may still take."""

    def __init__(self, broker: TrainerBroker, offer: Rendezvous, version: int) -> None:
        self.offer, self.version = offer, version
        self._broker = broker
        self._waiting: set[str] = set()
        self._end = 0.0

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def gather(self, able: set[str]) -> dict[str, Engines]:
        """Answers of all who can, or of those who were in time."""
        answers: dict[str, Engines] = {}
        end = time.monotonic() + ANSWER
        while able - answers.keys() and time.monotonic() < end:
            for word in self._said():
                if isinstance(word.get("engines"), dict):
                    answers[word["worker"]] = word["engines"]
            time.sleep(STEP)
        if late := able - answers.keys():
            log.warning("no answer to the offer of version %d in %.0f s: %s", self.version, ANSWER, sorted(late))
        return answers

    def begin(self, seats: set[str]) -> None:
        self._waiting = seats
        self._end = time.monotonic() + self.offer.seconds

    def run(self, call: Callable[[], None]) -> None:
        """The call, beside which reports are heard; not waited for past the end, or once a member failed."""
        over, errors = _aside(call)
        while not over.wait(STEP):
            self._look()
        if errors:
            raise Failed(errors[0])

    def finish(self) -> None:
        """Returns when all have reported."""
        while self._waiting:
            self._look()
            time.sleep(STEP)

    def _look(self) -> None:
        for word in self._said():
            engine = seat(word.get("worker", ""), word.get("engine", ""))
            if word.get("why"):
                raise Failed(f"{engine}: {word['why']}")
            self._waiting.discard(engine)
        if self.left <= 0:
            late = ", ".join(sorted(self._waiting))
            raise Failed(f"not done in {self.offer.seconds:.0f} s (--update-weight-timeout): {late}")

    def _said(self) -> list[dict[str, Any]]:
        return [word for word in self._broker.answers() if word.get("group") == self.offer.group]


def _aside(call: Callable[[], None]) -> tuple[threading.Event, list[str]]:
    """Called in a thread that nobody has to wait for: NCCL can block for ever where a member has gone. What broke is in
    the list when the event is set; a bug is raised in the thread."""
    over, errors = threading.Event(), list[str]()

    def work() -> None:
        try:
            call()
        except BROKEN as error:
            errors.append(str(error).partition("\n")[0][:300])
        finally:
            over.set()

    threading.Thread(target=work, daemon=True, name="weights").start()
    return over, errors
