"""`millpond purge`: deletes what a finished run left in Redis. Nothing on disk is touched."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from pipeline import show
from pipeline.broker import Broker
from pipeline.config import option
from pipeline.errors import UsageError
from pipeline.fence import HEARTBEAT_LIMIT_MS
from pipeline.find import Found, Look, found
from pipeline.flags import arguments
from pipeline.job_queues import leave_sets, queues, rq_keys


class PurgeLook(Look):
    """Deletes a finished run's keys in Redis, after asking; its folder stays: millpond purge [FOLDER or NAME]."""

    yes: bool = option(False, "do not ask")


def main(argv: list[str]) -> int:
    options, words = arguments(PurgeLook, argv, "millpond purge")
    with found(options, words, start=False) as run:
        _refuse_if_alive(run)
        keys = _keys(run.broker)
        if not options.yes and not _agreed(run, len(keys)):
            show.line("nothing was deleted")
            return 0
        _refuse_if_alive(run)
        deleted = _delete(run.broker)
        stays = f"; the folder {run.folder} stays, with checkpoints, weights and metrics" if run.folder else ""
        show.line(f"run {run.run}: {deleted} keys deleted in {run.where}{stays}")
    return 0


def _refuse_if_alive(run: Found) -> None:
    if alive := living(run.broker):
        raise UsageError(
            f"run {run.run} is alive: {', '.join(alive)}; stop it first (a process that was killed counts as alive "
            f"for {HEARTBEAT_LIMIT_MS // 1000} s)"
        )


def living(broker: Broker) -> list[str]:
    """Trainer and workers with a recent sign of life, and feeders, which give none but are connected."""

    def ask() -> list[Any]:
        pipe = broker.client.pipeline(transaction=True)
        pipe.time()
        pipe.hmget(broker.keys["state"], "trainer", "trainer_seen")
        pipe.zrange(broker.keys["workers"], 0, -1, withscores=True)
        return pipe.execute()

    (seconds, micros), (trainer, seen), workers = broker.patiently(ask)
    since = seconds * 1000 + micros // 1000 - HEARTBEAT_LIMIT_MS
    clients = broker.patiently(broker.client.client_list)
    return [
        *([f"trainer {show.text(trainer or b'?')}"] if int(seen or 0) > since else []),
        *(f"worker {show.text(name)}" for name, beat in workers if beat > since),
        *(f"{jobs.workers} workers for {jobs.name}" for jobs in queues(broker) if jobs.workers),
        *(f"feeder (connected as client {c['id']})" for c in clients if c["name"] == f"{broker.keys.prefix}feeder"),
    ]


def _keys(broker: Broker) -> list[bytes]:
    """Every key under the run's prefix, those that `pipeline.keys` does not know, too, and those of its jobs."""

    def scan() -> set[bytes]:
        return {*broker.client.scan_iter(match=f"{broker.keys.prefix}*", count=1000), *rq_keys(broker)}

    return list(broker.patiently(scan))


def _agreed(run: Found, count: int) -> bool:
    if not sys.stdin.isatty():
        raise UsageError(f"purge deletes {count} keys of run {run.run}, and there is no terminal to ask on: give --yes")
    return input(f"delete {count} keys of run {run.run} in {run.where}? [y/N] ").strip().lower() in ("y", "yes")


def _delete(broker: Broker) -> int:
    keys = _keys(broker)
    for start in range(0, len(keys), 100):
        broker.patiently(partial(broker.client.unlink, *keys[start : start + 100]))
    broker.patiently(lambda: leave_sets(broker))
    return len(keys)
