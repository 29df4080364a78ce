"""`millpond status`: what waits where, who works, how far the run is, and, where it stands still, why."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import show
from pipeline.causes import Cause, causes
from pipeline.config import PositiveFloat, option
from pipeline.entries import oldest_lag
from pipeline.errors import RedisDown
from pipeline.find import Found, Look, found, settings
from pipeline.flags import arguments
from pipeline.glance import look
from pipeline.overview import Overview, Worker
from pipeline.server import locate

METRICS = {
    "rollout/raw_reward": "reward {:.3g}",
    "rollout/fully_async/avg_staleness": "staleness {:.3g}",
    "rollout/fully_async/max_staleness": "at most {:.3g}",
    "perf/tokens_per_sec": "{:.4g} tokens/s",
    "perf/step_time": "{:.3g} s",
    "perf/wait_time": "{:.3g} s of it waiting",
}
"what of the last line of metrics.jsonl is shown, and how"

WORKERS = ("host", "pid", "engine", "version", "in flight", "samples", "tokens/s", "seen")
"columns of their table"


class StatusLook(Look):
    """What waits where, who works, how far the run is: millpond status [FOLDER or NAME]."""

    json_: bool = option(False, "one JSON document instead of text; with --watch one line each")
    watch: PositiveFloat | None = option(None, "seconds: look again and again, until the run is stopped")


def main(argv: list[str]) -> int:
    options, words = arguments(StatusLook, argv, "millpond status")
    with found(options, words) as run:
        _show(run, options)
        while options.watch is not None and not run.stopped:
            time.sleep(options.watch)
            try:
                _show(run, options)
            except RedisDown:
                if not run.folder or locate(run.folder / "redis"):
                    raise
                break  # a local run's Redis ends with the run
    return 0


def _show(run: Found, options: StatusLook) -> None:
    view = look(run.broker, save_interval(run.folder))
    step = last_step(run.folder) if run.folder else {}
    behind = oldest_lag(run.broker, view.policy)
    if options.json_:
        show.document(document(run, view, step, behind), None if options.watch else 2)
    else:
        if options.watch and sys.stdout.isatty():
            sys.stdout.write("\x1b[H\x1b[2J")
        report(run, view, step, behind)
    sys.stdout.flush()


def save_interval(folder: Path | None) -> int | None:
    """As the run's folder has it."""
    interval = settings(folder).get("save_interval")
    return interval if isinstance(interval, int) else None


def document(run: Found, view: Overview, step: dict[str, Any], behind: int | None) -> dict[str, Any]:
    """For programs. `behind`: publications between the oldest queued group and the current weights."""
    return {
        "run": run.run,
        "where": run.where,
        "stopped": run.stopped,
        **asdict(view),
        "oldest_queued_lag": behind,
        "metrics": step,
        "notes": list(notes(view, run.stopped)),
    }


def report(run: Found, view: Overview, step: dict[str, Any], behind: int | None) -> None:
    """For people, in 80 columns."""
    saves = run.folder is None or settings(run.folder).get("save_interval") != 0
    go_on = f" (go on: millpond run --resume --out {run.folder})" if saves else ""
    stopped = f"; stopped{go_on}" if run.stopped else ""
    why = f" ({show.clean(view.why)})" if view.why else ""
    show.line(f"run {run.run} in {run.where}: {view.status}{why}{stopped}\n")
    show.pairs([*progress(view, step), *flow(view, behind), *fates(view)])
    if view.workers:
        show.line()
        show.table(WORKERS, [row(worker) for worker in view.workers])
    sentences = list(notes(view, run.stopped))
    if sentences:
        show.line()
    for sentence in sentences:
        show.pairs([("!", sentence)])


def progress(view: Overview, step: dict[str, Any]) -> Iterator[tuple[str, str]]:
    policy, trainer = view.policy, view.trainer
    if policy:
        age = "" if view.policy_age is None else f", {show.ago(view.policy_age)} old"
        restored = ", ".join(f"{n} restored {r}" for n, r in policy.lineage)
        yield (
            "version",
            f"{policy.version}, step {policy.step}{age}" + (f"; lineage: {restored}" if restored else ""),
        )
    else:
        yield "version", "none published yet"
    if trainer.epoch:
        seen = "has left" if trainer.seen is None else f"seen {show.ago(trainer.seen)} ago"
        by = f", settings {show.clean(trainer.settings)}" if trainer.settings else ""
        yield "trainer", f"{show.clean(trainer.name)}, epoch {trainer.epoch}, {seen}{by}"
    shown = [form.format(step[name]) for name, form in METRICS.items() if isinstance(step.get(name), int | float)]
    if shown:
        yield "last step", f"{step.get('step')}: {', '.join(shown)}"


def flow(view: Overview, behind: int | None) -> Iterator[tuple[str, str]]:
    q, caps, p = view.queues, view.caps, view.prompts
    again = f", {q.refeed} to be fed again" if q.refeed else ""
    yield "prompts", f"{p.fed} fed{_of(p.total)}; {q.fresh} fresh and {q.retry} retried wait{again}"
    rate = sum(r for w in view.workers if isinstance(r := w.info.get("tokens_per_sec"), int | float))
    yield "in flight", f"{q.in_flight}{_of(caps.in_flight)} groups; workers: {len(view.workers)}, {rate:.4g} tokens/s"
    size = f"{show.size(q.queued_bytes)}{_of(caps.queue_bytes, show.size)}"
    lag = "" if behind is None else f"; the oldest lags by {behind}"
    yield "queue", f"{q.queued}{_of(caps.queue)} groups, {size}{lag}"
    yield "trainer has", f"{q.taken} taken, {q.trained} trained and not in a checkpoint"
    limit = "unbounded" if caps.max_staleness is None else f"max staleness {caps.max_staleness}"
    yield "room", "?" if caps.room is None else f"{max(0, caps.room)}{_of(caps.bound)} groups may be leased ({limit})"
    for jobs in view.jobs:
        yield jobs.name, f"{jobs.waiting} wait, {jobs.running} run, {jobs.failed} failed; workers: {jobs.workers}"
    if view.evals:
        yield "evaluated", evaluated(view.evals)
    yield "open", f"{q.open}{_of(caps.open)} groups pushed and not committed"


def evaluated(told: dict[str, Any]) -> str:
    """How many evaluations have ended, how many of them badly, and which are in flight."""
    ends = {name: n for name in ("failed", "missing", "skipped") if isinstance(n := told.get(name), int)}
    steps = told.get("in_flight")
    flying = ", ".join(map(str, steps)) if isinstance(steps, list) else ""
    bad = f" ({show.counts(ends)})" if ends else ""
    why = f"; {show.clean(str(told['why']))}" if told.get("why") else ""
    return f"{told.get('ended', 0)}{bad}" + (f"; in flight: step {show.clean(flying)}" if flying else "") + why


def _of(limit: int | None, form: Any = str) -> str:
    return "" if limit is None else f" of {form(limit)}"


def fates(view: Overview) -> Iterator[tuple[str, str]]:
    p = view.prompts
    yield "committed", str(p.committed)
    for name, count in (("dropped", p.dropped), ("dead", p.dead)):
        reasons = show.counts(p.reasons.get(name, {}))
        yield name, f"{count}{f': {reasons}' if reasons else ''}"
    for name in ("recycled", "strikes", *sorted(set(p.reasons) - {"dropped", "dead", "recycled", "strikes"})):
        if reasons := show.counts(p.reasons[name]):
            yield show.clean(name), reasons


def row(worker: Worker) -> tuple[str, ...]:
    info = worker.info
    version = info.get("version")
    loading = f">{info['loading']}" if info.get("loading") is not None else ""
    cells = (
        show.shorten(str(info.get("host") or worker.name), 20),
        info.get("pid", "?"),
        info.get("engine", "?"),
        f"{'none' if version is None else version}{loading}",
        worker.leased,
        info.get("samples", "?"),
        info.get("tokens_per_sec", "?"),
        f"{show.ago(worker.seen)} ago",
    )
    return tuple(show.clean(str(cell)) for cell in cells)


def notes(view: Overview, stopped: bool = False) -> Iterator[str]:
    """What keeps a run from going on, as far as one look can tell; `millpond why` takes two."""
    if not stopped:
        yield from (str(cause) for cause in causes(view) if cause.kind == "wait" or _fault(cause))


def _fault(cause: Cause) -> bool:
    return cause.kind == "fault" and cause.name != "failed"  # that stands on the first line


def last_step(folder: Path) -> dict[str, Any]:
    """The last whole line of the run's metrics.jsonl; nothing where there is none."""
    with suppress(OSError, ValueError), (folder / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - (1 << 16)))
        lines = [line for line in file.read().split(b"\n")[:-1] if line]
        value = json.loads(lines[-1]) if lines else {}
        return value if isinstance(value, dict) else {}
    return {}
