"""The groups of one training step, or an error that says who is missing.

Consumes finished groups; waits for a whole batch, a second at a time; is unblocked by a group, an alarm or the end of
the data; produces a `Batch` whose every group is fresh enough at the moment it is handed over. Where staleness is
bounded it looks almost a batch ahead and hands over the oldest first: in the list, a slow group stands behind those of
later versions that overtook it, and would be due one step too late.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from consumers.staleness import ABORTED, FRESH, FUTURE, GIVEN_UP, STALE, Limit, by_verdict, statistics
from pipeline.causes import WAITS, causes
from pipeline.codec import decode
from pipeline.errors import GroupError, MessageError, Starved, Stopped, WorkerFailed
from pipeline.fenced import TrainerBroker
from pipeline.glance import look
from pipeline.replies import Checked
from pipeline.types import Group

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """What one training step trains on."""

    groups: list[Group]
    "sorted by prompt id; rollout_batch_size of them, fewer only at the end of the data"
    waited: float
    "seconds the drain took"
    counts: dict[str, int]
    "groups not handed over, by reason, since the last batch"
    staleness: dict[str, float]
    queue_size: int
    "finished groups left for later batches"
    last: bool
    "the data has ended"


@dataclass(frozen=True)
class DrainRules:
    size: int
    "groups in a batch"
    n_samples: int
    handler: str
    "what becomes of stale and aborted groups: retry or drop"
    starve_timeout: float
    drop_last: bool
    warn_after: float = 30.0
    "seconds without a group before the log says who is missing; again each time that many have passed"


class Drain:
    """Takes, judges, sends round again."""

    def __init__(
        self,
        broker: TrainerBroker,
        rules: DrainRules,
        sample_filter: Callable[[Sequence[Group]], list[Group]] = list,
    ) -> None:
        self.broker = broker
        self.rules = rules
        self.sample_filter = sample_filter
        self.hand: dict[int, Group] = {}
        "decoded groups that are not handed over yet"
        self.counts: Counter[str] = Counter()
        self.queued = 0

    def batch(self, limit: Limit) -> Batch | None:
        """The next batch; None when the data has ended and nothing is left to train on."""
        began = time.monotonic()
        self.heard = self.warned = self.broker.clock()
        self.broker.renew(doing=WAITS)
        enough = 2 * self.rules.size - 1 if limit.max_staleness else self.rules.size
        while True:
            ended = False
            while len(self.hand) < self.rules.size and not ended:
                if not self._take(enough - len(self.hand)):
                    ended = self._check().exhausted
                    if not ended:
                        self._patience()
            if self._judge(limit):
                self.broker.renew(doing=f"training upon version {limit.current}")
                return self._hand_over(limit, began, ended)

    def _hand_over(self, limit: Limit, began: float, ended: bool) -> Batch | None:
        oldest = sorted(self.hand, key=lambda id: -(limit.age(self.hand[id]) or 0))
        groups = [self.hand[id] for id in sorted(oldest[: self.rules.size])]
        if ended and (not groups or self.rules.drop_last):
            self.broker.recycle([g.prompt for g in groups], "last_batch", "drop")
            self.hand.clear()
            return None
        ages = [age for age in map(limit.age, groups) if age is not None]
        filtered = self.sample_filter(groups)  # while they are in hand: what fails here is trained on nowhere
        counts, self.counts = dict(self.counts), Counter()
        for group in groups:
            del self.hand[group.prompt.id]
        return Batch(
            groups=filtered,
            waited=time.monotonic() - began,
            counts=counts,
            staleness=statistics(ages),
            queue_size=self.queued + len(self.hand),
            last=ended,
        )

    def release(self) -> None:
        """What was taken and will not be trained on goes round again."""
        if unused := self.broker.ledger.unused():
            self.broker.recycle(unused, "unused")
        self.hand.clear()

    def handed(self) -> list[int]:
        """What has been handed over and not been released, trained on or not."""
        return [id for id in self.broker.ledger.taken if id not in self.hand]

    # -- taking

    def _take(self, need: int) -> bool:
        """Whether anything came."""
        if self.broker.stop.is_set():
            raise Stopped("asked to stop")
        messages, alarm = self.broker.take(need)
        if alarm is not None:
            raise_alarm(alarm)
        spoiled, odd = 0, []
        for message in messages:
            try:
                group = decode(message)
            except MessageError as error:
                spoiled += 1
                log.error("a message would not decode and is in quarantine: %s", error)
                self.broker.quarantine(message, str(error))
                continue
            if len(group.samples) != self.rules.n_samples or any(not s.sequences for s in group.samples):
                odd.append(group)
            if self.broker.hold(group.prompt):
                self.hand[group.prompt.id] = group
            else:
                self.counts["double"] += 1
        if spoiled:
            self.counts["quarantined"] += spoiled
            self._check("quarantined", "strike")
        if odd:
            self._check()
            self._refuse([group for group in odd if self.hand.get(group.prompt.id) is group])
        if messages:
            self.heard = self.broker.clock()
        return bool(messages)

    def _refuse(self, odd: Sequence[Group]) -> None:
        """Groups of a wrong shape that a worker of this run has pushed; those that nobody leased are let go."""
        for group in odd:
            raise GroupError(
                f"prompt {group.prompt.id}: worker {group.worker} pushed {len(group.samples)} samples where "
                f"--n-samples-per-prompt is {self.rules.n_samples}, or one without a sequence"
            )

    # -- judging

    def _judge(self, limit: Limit) -> bool:
        """Whether all in hand may be trained on now; what may not is sent away."""
        held = len(self.hand)
        for verdict, groups in by_verdict(self.hand.values(), limit).items():
            if verdict == FRESH:
                continue
            self.counts[verdict] += len(groups)
            if verdict == FUTURE:
                log.error("groups carry versions above %d, which was never published", limit.current)
            drops = self.rules.handler == "drop" and verdict in (STALE, ABORTED)
            fault = "drop" if drops else "none" if verdict in (FUTURE, GIVEN_UP) else "strike"
            self.broker.recycle([g.prompt for g in groups], verdict, fault)
            for group in groups:
                del self.hand[group.prompt.id]
        self._check()
        return len(self.hand) == held

    def _check(self, reason: str = "lost", fault: str = "none") -> Checked:
        found = self.broker.check(reason, fault)
        self.queued = found.queued
        for id in found.foreign:
            self.hand.pop(id, None)
        self.counts["foreign"] += len(found.foreign)
        self.counts["lost"] += len(found.lost) if reason == "lost" else 0
        if found.lost:
            log.warning("%d popped groups never arrived (%s); their prompts go round again", len(found.lost), reason)
        return found

    # -- waiting

    def _patience(self) -> None:
        now = self.broker.clock()
        silent = now - self.heard
        if silent >= min(self.rules.starve_timeout, self.rules.warn_after) and self.broker.held():
            log.info("an evaluation has the engines: no group for %.0f s", silent)
            self.heard = self.warned = now
            return
        if silent >= self.rules.starve_timeout:
            raise Starved(f"no group for {silent:.0f} s (--starve-timeout): {missing(self.broker)}")
        if silent >= self.rules.warn_after and now - self.warned >= self.rules.warn_after:
            self.warned = now
            log.warning("no group for %.0f s: %s", silent, missing(self.broker))


def raise_alarm(alarm: bytes) -> None:
    """An alarm as the error it tells of."""
    try:
        told = json.loads(alarm)
        kind = told["kind"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise WorkerFailed(f"an alarm that nobody understands: {alarm[:500]!r}") from None
    if kind == "stop":
        raise Stopped(str(told.get("what", "asked to stop")))
    raise WorkerFailed(f"worker {told.get('worker')} failed: {told.get('what')}\n{told.get('trace', '')}")


def missing(broker: TrainerBroker) -> str:
    """Who or what keeps groups from coming, from Redis alone."""
    view = look(broker)
    q, p = view.queues, view.prompts
    facts = [
        *(str(cause) for cause in causes(view) if cause.kind in ("fault", "wait")),
        f"{sum(w.alive for w in view.workers)} live workers of {len(view.workers)}",
        f"{q.fresh + q.retry} prompts waiting",
        f"{q.queued} groups queued",
        f"{q.open - q.trained} unsettled",
        f"{p.total or 'endless'} prompts to feed, {p.fed} fed",
    ]
    ended = {f"{kind}:{name}": n for kind in ("dropped", "dead") for name, n in p.reasons[kind].items()}
    return "; ".join([*facts, *(f"{n} {name}" for name, n in sorted(ended.items()))])


def drain(source: Drain, limit: Limit) -> Batch | None:
    """The rollout function of a run that brings none of its own (pipeline.modes.resolve_rollout)."""
    return source.batch(limit)
