"""Why a run does not go on, or may soon not: a pure function of an Overview, for `why`, `status` and the starved drain.

A cause that brings others about stands before them: where the trainer is gone, the list fills and room runs out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pipeline.outage import REFUSES
from pipeline.overview import Overview, Worker
from pipeline.show import ago, clean, size


@dataclass(frozen=True)
class Cause:
    """One reason."""

    name: str
    "for programs"
    kind: Literal["end", "fault", "wait", "work"]
    "the run is over in order; somebody must act; another part must go on first; it takes its time"
    what: str
    do: str = ""
    "what to do about it"
    since: float | None = None
    "seconds, where known"

    def __str__(self) -> str:
        return f"{self.what}: {self.do}" if self.do else self.what


Causes = Iterator[Cause]


def causes(view: Overview, stopped: bool = False) -> list[Cause]:
    """Root causes first. `stopped`: the Redis ran for this look only, so nobody else can be there."""
    over = list(_over(view, stopped))
    rules = (
        _redis,
        _trainer,
        _alarm,
        _paused,
        _config,
        _workers,
        _jobs,
        _engines,
        _prompts,
        _busy,
        _bounds,
        _generating,
    )
    return over or [cause for rule in rules for cause in rule(view)]


def _over(view: Overview, stopped: bool) -> Causes:
    why = f": {clean(view.why)}" if view.why else ""
    if view.status == "done":
        yield Cause("done", "end", f"the run is done{why}")
    elif view.status == "failed":
        yield Cause("failed", "fault", f"the run has failed{why}", "mend that, then go on with --resume")
    elif view.status == "draining" and not view.trainer.alive:
        yield Cause("stopped", "end", f"the run was stopped in order{why}", "--resume goes on with it")
    elif stopped:
        yield Cause(
            "stopped", "fault", "no process of the run is there, nor was its Redis", "`millpond run --resume` goes on"
        )


def _redis(view: Overview) -> Causes:
    if not view.refuses:
        return
    help = next((help for words, help in REFUSES if any(word in view.refuses for word in words)), "see its log")
    yield Cause("redis", "fault", f"Redis takes no writes ({clean(view.refuses)})", help)


def _trainer(view: Overview) -> Causes:
    trainer = view.trainer
    if not trainer.epoch:
        yield Cause("no trainer", "fault", "no trainer has ever come", "start `millpond train`")
    elif trainer.seen is None:
        yield Cause("trainer gone", "fault", "the trainer has left", "`millpond train --resume` goes on")
    elif not trainer.alive:
        doing = f" (last: {clean(trainer.doing)})" if trainer.doing else ""
        yield Cause(
            "trainer gone",
            "fault",
            f"no trainer is alive: {clean(trainer.name)} is silent for {ago(trainer.seen)}{doing}",
            "see its log; if it is dead or hangs, `millpond train --resume` takes its place",
            trainer.seen,
        )


def _alarm(view: Overview) -> Causes:
    if view.alarms:
        told = f" ({clean(view.alarm)})" if view.alarm else ""
        yield Cause(
            "alarm",
            "fault",
            f"a fatal error waits for the trainer to read it{told}",
            "the trainer ends with it; `millpond inspect errors` has the traceback",
        )


def _paused(view: Overview) -> Causes:
    if view.paused:
        yield Cause("paused", "fault", "the run is paused, and nothing is leased", "HDEL `paused` in the key `state`")
    if view.held:
        yield Cause("evaluating", "work", "an evaluation has the engines, and nothing is leased until it has ended")


def _config(view: Overview) -> Causes:
    if view.status == "running" and view.caps.bound is None:
        yield Cause("no config", "fault", "what all workers agree on is gone (key `config`)", "restart the trainer")


def _workers(view: Overview) -> Causes:
    silent = [w for w in view.workers if not w.alive]
    if not view.workers:
        none = "no generator is there" if view.pushed else "no generator has ever come"
        yield Cause("no workers", "fault", none + _said(view), "start `millpond generate`")
    elif len(silent) == len(view.workers):
        least = min(w.seen for w in silent)
        yield Cause(
            "workers silent",
            "fault",
            f"all generators are silent, the last for {ago(least)}",
            "see their logs; start others with `millpond generate`: what these hold goes round again",
            least,
        )
    elif silent:
        names = ", ".join(clean(w.name) for w in silent)
        yield Cause("some silent", "wait", f"silent, soon declared dead: {names}")


def _jobs(view: Overview) -> Causes:
    """Rewards hold generators up, evaluations nobody."""
    for queue in (queue for queue in view.jobs if queue.waiting and not queue.workers):
        yield Cause(
            f"no worker for {queue.name}",
            "fault" if queue.name == "rewards" else "wait",
            f"{queue.waiting} {queue.name} wait and no worker for them is there{_said(view)}",
            "start `millpond worker` with the trainer's options, or see the log of the one that ended",
        )


def _said(view: Overview) -> str:
    last = view.failure
    return f"; the last that ended said {ago(last.age)} ago: {clean(last.what)}" if last else ""


def _engines(view: Overview) -> Causes:
    """Of all living workers: one that works keeps the run going."""
    living = [w for w in view.workers if w.alive]
    if not living:
        return
    told = [str(w.info.get("trouble") or "") for w in living]
    if all(told):
        yield Cause("engines away", "fault", f"no engine answers ({clean(told[0])[:300]})", "see the engines' own logs")
    if all(w.info.get("ready") is False for w in living):
        since = _least(living)
        yield Cause("engines start", "work", f"the engines are not ready yet{_for(since)}", since=since)
    elif all(w.info.get("loading") is not None for w in living):
        since = _least(living)
        shown = ", ".join(sorted({clean(str(w.info["loading"])) for w in living}))
        yield Cause("loading", "work", f"all generators load weights (version {shown}){_for(since)}", since=since)


def _least(workers: list[Worker]) -> float | None:
    told = [w.info.get("busy_for") for w in workers]
    known = [float(x) for x in told if isinstance(x, int | float)]
    return min(known) if known else None


def _prompts(view: Overview) -> Causes:
    q, p = view.queues, view.prompts
    if q.fresh or q.retry:
        return
    due = q.refeed > 0 or p.total is None or p.fed < p.total
    if not due:
        if not (q.in_flight or q.queued):
            yield Cause("data ended", "work", "the data has ended: the trainer takes what is left and ends")
        return
    again = f", and {q.refeed} are to be fed again" if q.refeed else ""
    if view.feeder:
        yield Cause("feeder slow", "wait", f"no prompts wait{again}; a feeder is connected", "see its log")
    else:
        known = " no feeder is there" if view.feeder is False else " is the feeder running?"
        verb = "has ever been fed" if not p.fed else "waits"
        yield Cause("no prompts", "fault", f"no prompt {verb}{again};{known}", "start `millpond feed`")


def _busy(view: Overview) -> Causes:
    trainer = view.trainer
    if trainer.alive and trainer.doing and trainer.doing != WAITS:
        what = f"the trainer is busy {clean(trainer.doing)}{_for(trainer.doing_for)}"
        yield Cause("trainer busy", "work", what, since=trainer.doing_for)


WAITS = "waiting for groups"
"what a trainer says it does while it is not busy"


def _bounds(view: Overview) -> Causes:
    q, caps = view.queues, view.caps
    if caps.queue is not None and q.queued >= caps.queue:
        yield Cause(
            "list full", "wait", f"the list is full ({q.queued} of {caps.queue} groups): workers wait for the trainer"
        )
    elif view.full and q.queued:
        most = "?" if caps.queue_bytes is None else size(caps.queue_bytes)
        yield Cause(
            "bytes full", "wait", f"the list is full ({size(q.queued_bytes)} of {most}): workers wait for the trainer"
        )
    if caps.room is not None and caps.room <= 0:
        unsettled = q.open - q.trained
        yield Cause(
            "no room",
            "wait",
            f"no room: workers wait for the next version ({q.in_flight} groups in flight, {q.queued} queued and "
            f"{unsettled - q.queued} with the trainer, of {caps.bound})",
        )
    elif caps.in_flight is not None and q.in_flight >= caps.in_flight:
        yield Cause(
            "flight full", "work", f"as many groups are in flight as may be ({q.in_flight} of {caps.in_flight})"
        )


def _generating(view: Overview) -> Causes:
    q, living = view.queues, [w for w in view.workers if w.alive]
    if q.in_flight and living:
        rate = sum(r for w in living if isinstance(r := w.info.get("tokens_per_sec"), int | float))
        yield Cause(
            "generating",
            "work",
            f"{len(living)} generators work on {q.in_flight} groups, {rate:.4g} tokens/s{_last(view)}",
            since=view.pushed_age,
        )
    elif living and (q.fresh or q.retry) and view.status == "running" and (view.caps.room or 0) > 0 and not view.paused:
        yield Cause("idle", "wait", f"{len(living)} generators take no prompts, though some wait", "see their logs")


def _last(view: Overview) -> str:
    return "" if view.pushed_age is None else f"; the last group came {ago(view.pushed_age)} ago"


def _for(seconds: float | None) -> str:
    return "" if seconds is None else f", for {ago(seconds)}"
