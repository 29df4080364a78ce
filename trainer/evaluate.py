"""When weights are evaluated, what is in flight, and what came of it.

Each evaluation is a job (pipeline.jobs) pinned to one version, whose folder stays until it has ended; it ends as one
line of evals.jsonl at its step: its metrics, or `eval/failed`, `eval/missing` or `eval/skipped`. No trouble with one
ends training. What is in flight stands in evals.open.json, for who resumes the run.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from redis.exceptions import RedisError

from pipeline.config import TrainConfig
from pipeline.errors import Stopped
from pipeline.evals import HOLD, Ask, ask_of, terms_of
from pipeline.fenced import TrainerBroker
from pipeline.jobs import EVAL, Jobs, Outcome
from pipeline.metrics import Records
from pipeline.types import Policy
from trainer.flights import Flight, Line, are_metrics, read, told, write
from trainer.workshop import Workshop

log = logging.getLogger(__name__)

SAY = 30.0
"Seconds between lines about one that is waited for."
ALONE = 60.0
"Seconds after which nobody is waited for who could do one, at the end of a run."
PUTS = 2
"Times that one is asked for whose job Redis has lost."

ENDS = {
    "failed": (logging.ERROR, "%s has failed: %s"),
    "missing": (logging.ERROR, "%s is missing: %s"),
    "skipped": (logging.WARNING, "%s is left out: %s"),
}
"How one ends that has no metrics."


class Evaluations:
    """Those of one trainer. `begin` first; `ask` after each publication, `look` now and then, `finish` at the end."""

    def __init__(self, config: TrainConfig, broker: TrainerBroker, jobs: Jobs, records: Records) -> None:
        self.config, self.broker, self.jobs, self.records = config, broker, jobs, records
        self.folder = records.folder
        self.flights: list[Flight] = []
        self.lines = told(self.folder)
        "by step: what has been told"
        self.alone = ALONE
        "seconds"
        self.deaf = -SAY
        "monotonic time when the log last told that Redis does not take or give one"
        self.why = ""
        "of the last that has no metrics"

    def begin(self, step: int) -> None:
        """Goes on with what an earlier trainer has left in flight; `step` is where this one begins."""
        for ask in read(self.folder):
            flight = self._flight(ask)
            again = ask.shared and ask.step == step and self.due(step)  # the engines get these weights once more
            if again or ask.step > step or ask.step in self.lines:
                self._forget(flight)
            elif ask.shared:
                self._end(flight, "missing", "a resume has given the engines that were held for it newer weights")
            elif ask.terms != terms_of(self.config):
                self._end(flight, "missing", "evaluations have other options since the resume")
            elif ask.path and not Path(ask.path).is_dir():
                self._end(flight, "missing", f"the weights are gone ({ask.path})")
            else:
                self.flights.append(flight)
                log.info("%s was in flight and goes on", flight)
        self._write()
        self.look()

    def due(self, step: int) -> bool:
        """Whether the weights after `step` steps are to be evaluated, and have not been."""
        first = step == 0 and not self.config.skip_eval_before_train
        return (first or (step > 0 and step % (self.config.eval_interval or 1) == 0)) and not self._known(step)

    def hold(self, policy: Policy) -> None:
        """To be told of `policy` before it is published: where it is to be evaluated on shared engines, they get these
        weights and no newer ones."""
        if self.config.eval_shared_engines and self.due(policy.step):
            self._make_room(policy)
            if not self._full():
                self.broker.hold_engines(policy, HOLD)

    def ask(self, policy: Policy, last: bool = False) -> None:
        """Has `policy`, which is published, evaluated if that is due, or the `last`, and there is room for one more."""
        if self._known(policy.step) or not (last or self.due(policy.step)):
            return
        self._make_room(policy, last)
        if self.broker.stop.is_set():
            return  # whoever resumes asks
        flight = self._flight(ask_of(self.config, policy))
        if self._full():
            self._end(flight, "skipped", f"{len(self.flights)} are in flight (--eval-max-in-flight)")
            return
        if flight.ask.shared:
            self.broker.hold_engines(policy, HOLD)
        self.flights.append(flight)
        self._write()
        self.look()

    def look(self, seconds: float = 0.0) -> None:
        """Takes in what has ended; waits so long for the first."""
        self._put()
        ended, asked = {}, [flight.job for flight in self.flights if flight.job]
        try:
            ended = self.jobs.ended(asked, seconds)
        except RedisError as error:
            self._tell(error)
            asked = []
        if not asked:
            self.broker.stop.wait(seconds)
        for flight in list(self.flights):
            if flight.job in ended:
                self._land(flight, ended[flight.job])
            elif time.monotonic() > flight.until:
                self._end(flight, "missing", f"it has not ended in {flight.ask.seconds:.0f} s (--eval-timeout)")
        self._put()

    def finish(self, policy: Policy) -> None:
        """Evaluates the last weights as well, and waits for all that is in flight; Stopped where that is broken off."""
        self.ask(policy, last=True)
        self.wait(lambda: bool(self.flights), "the last evaluations", self.alone)
        if self.broker.stop.is_set() and self.flights:
            raise Stopped("asked to stop while an evaluation was waited for; --resume goes on with that")

    def wait(self, on: Callable[[], bool], what: str, alone: float = float("inf")) -> None:
        """While `on` holds; it ends by itself, as each in flight has an end. `alone`: seconds without a worker."""
        said, company = float("-inf"), time.monotonic()
        while on() and not self.broker.stop.is_set():
            if time.monotonic() - said > SAY:
                said = time.monotonic()
                self.broker.renew(doing=f"waiting for {what}")
                log.info("waiting for %s: %s", what, ", ".join(map(str, self.flights)))
            self.look(1.0)
            if self._company():
                company = time.monotonic()
            elif time.monotonic() - company > alone:
                for flight in list(self.flights):
                    self._end(flight, "missing", f"no `millpond worker` has been there for {alone:.0f} s")

    @property
    def versions(self) -> set[int]:
        """Whose folders must stay: in flight, or of the newest that have ended (--eval-keep-snapshots)."""
        ended = [int(v) for _, line in sorted(self.lines.items()) if (v := line.get("eval/weight_version"))]
        kept = ended[-self.config.eval_keep_snapshots :] if self.config.eval_keep_snapshots else []
        return {*kept, *(flight.ask.version for flight in self.flights)}

    @property
    def steps(self) -> set[int]:
        """In flight."""
        return {flight.ask.step for flight in self.flights}

    def best(self, among: set[int]) -> int | None:
        """The step out of `among` with the highest --save-best; the earliest of equals."""
        values = {s: v for s in among if (v := self.lines.get(s, {}).get(self.config.save_best or "")) is not None}
        return max(sorted(values), key=lambda step: values[step], default=None)

    # -- one of them

    def _known(self, step: int) -> bool:
        return step in self.lines or step in self.steps

    def _make_room(self, policy: Policy, last: bool = False) -> None:
        """Waits for it where that is asked for."""
        self.look()
        if self._full() and (last or self.config.eval_overflow_policy == "backpressure"):
            what = f"room for the evaluation of step {policy.step} (--eval-max-in-flight)"
            self.wait(self._full, what, self.alone if last else float("inf"))

    def _full(self) -> bool:
        return len(self.flights) >= self.config.eval_max_in_flight

    def _flight(self, ask: Ask) -> Flight:
        return Flight(ask, time.monotonic() + ask.seconds)

    def _put(self) -> None:
        """Those that are not in Redis."""
        for flight in [flight for flight in self.flights if not flight.job]:
            ask, seconds = flight.ask.model_dump(mode="json"), flight.ask.seconds
            try:
                flight.job = self.jobs.put(EVAL, flight.name, {"ask": ask}, seconds + 60, seconds)
            except RedisError as error:
                return self._tell(error)
            flight.puts += 1
            log.info("%s is asked for", flight)
        return None

    def _land(self, flight: Flight, outcome: Outcome) -> None:
        if outcome.state == "lost" and flight.puts < PUTS:
            flight.job = ""  # and is put again
        elif outcome.state == "lost":
            self._end(flight, "missing", outcome.why)
        elif outcome.state == "failed" or not are_metrics(outcome.value):
            self._end(flight, "failed", outcome.why or f"it gave no metrics but {outcome.value!r}"[:300])
        else:
            self._end(flight, "", "", outcome.value)

    def _end(self, flight: Flight, kind: str, why: str, values: Line | None = None) -> None:
        """Its line first: who dies behind it has it."""
        line = {f"eval/{kind}": 1.0} if values is None else values
        if kind:
            log.log(*ENDS[kind], flight, why[:2000])
            self.why = f"step {flight.ask.step} {kind}: {why.partition(chr(10))[0].removeprefix('failed: ')[:200]}"
        else:
            log.info("%s: %s", flight, {n: v for n, v in line.items() if n.count("/") == 1})
            if self.config.save_best and self.config.save_best not in line:
                log.warning("--save-best %s is none of its metrics", self.config.save_best)
        self.lines[flight.ask.step] = line
        self.records.late(flight.ask.step, line)
        if flight in self.flights:
            self.flights.remove(flight)
            self._write()
        if kind != "skipped":
            self._forget(flight)

    def _forget(self, flight: Flight) -> None:
        if flight.ask.shared:
            self.broker.let_go(flight.ask.version)
        try:
            self.jobs.forget([self.jobs.id(EVAL, flight.name)])
        except RedisError as error:
            self._tell(error)  # RQ deletes it in time

    def _company(self) -> bool:
        try:
            return self.jobs.workers(EVAL) > 0
        except RedisError:
            return True

    def _tell(self, error: RedisError) -> None:
        if time.monotonic() - self.deaf > SAY:
            self.deaf = time.monotonic()
            log.warning("evaluations wait for Redis: %s", error)

    def _write(self) -> None:
        """What is in flight, for who resumes; and for people."""
        ends = Counter(end for line in self.lines.values() for end in ENDS if f"eval/{end}" in line)
        told = {"in_flight": sorted(self.steps), "ended": len(self.lines), **ends}
        self.broker.renew(evals=json.dumps({**told, "why": self.why} if self.why else told))
        write(Workshop(self.folder, self.broker.epoch), self.flights)
