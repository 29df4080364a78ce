"""`millpond track`: sends a run's metrics to TensorBoard or W&B, or serves them to Prometheus.

    millpond track RUN --use-tensorboard        all that metrics.jsonl and evals.jsonl hold, and ends
    millpond track RUN --prometheus-port 9100   until it is stopped

A trainer that is asked for trackers starts one such process each with `--follow`, and ends them with SIGTERM. Consumes
files and looks at Redis; what it does, and that it hangs or fails, nobody waits for.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from pipeline import tracking
from pipeline.config import PositiveFloat, Tracking, option
from pipeline.errors import UsageError
from pipeline.find import Found, Look, folder_of, found
from pipeline.flags import arguments
from pipeline.log import setup
from pipeline.modes import check
from pipeline.progress import Tail
from pipeline.trackers import TensorBoard, Tracker, WeightsAndBiases

log = logging.getLogger(__name__)

EVERY = 0.5
"Seconds between looks at the files."
FILES = ("metrics.jsonl", "evals.jsonl")


class TrackLook(Look, Tracking):
    """Sends a run's metrics elsewhere: millpond track [FOLDER or NAME] with one of --use-tensorboard, --use-wandb,
    --prometheus-port."""

    redis_patience: PositiveFloat = option(2.0, "seconds to wait for a Redis that is away before saying so")
    tracker_timeout: PositiveFloat = option(
        120.0, "seconds a tracker may take over one thing before this process says where it hangs, and ends"
    )
    follow: bool = option(False, "go on until stopped (SIGTERM, Ctrl-C)")
    since: float | None = option(None, "unix seconds: lines that are older were sent before")


def main(argv: list[str]) -> int:
    options, words = arguments(TrackLook, argv, "millpond track")
    check(options)
    kinds = tracking.asked(options)
    if len(kinds) != 1:
        raise UsageError("one tracker a process: --use-tensorboard, --use-wandb or --prometheus-port")
    if kinds == ["prometheus"]:
        with found(options, words) as run:
            _serve(run, options, _stop())
        return 0
    folder = folder_of(options, words)
    if not (folder / FILES[0]).is_file():
        raise UsageError(f"{folder} holds no {FILES[0]}")
    if options.follow:
        setup(f"track-{kinds[0]}", folder)
    _send(folder, options, _stop())
    return 0


def _stop() -> threading.Event:
    """Set when this process is told to end. From the line on that it writes, it ends in order."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    sys.stdout.write("at work\n")
    sys.stdout.flush()
    return stop


def _serve(run: Found, options: TrackLook, stop: threading.Event) -> None:
    from pipeline.exporter import serve

    with serve(run, options.prometheus_host, options.prometheus_port or 0):
        stop.wait()


def _send(folder: Path, options: TrackLook, stop: threading.Event) -> None:
    tails = [Tail(folder / name) for name in FILES]
    for tail in tails:
        tail.step = -1.0
    since = options.since or 0.0
    lines, ending = _lines(tails), False
    arm = partial(faulthandler.dump_traceback_later, options.tracker_timeout, exit=True)
    arm()
    tracker = _tracker(options, folder, max((int(x["step"]) for x in lines if x["time"] <= since), default=None))
    lines = [line for line in lines if line["time"] > since]
    while True:
        for line in lines:
            arm()
            tracker.write(line)
        if ending:
            break
        ending = not options.follow or stop.wait(EVERY)  # then one look more
        arm()
        lines = _lines(tails)
    tracker.close()
    faulthandler.cancel_dump_traceback_later()


def _lines(tails: list[Tail]) -> list[dict[str, Any]]:
    return [line for tail in tails for line in tail.read()]


def _tracker(options: TrackLook, folder: Path, seen: int | None) -> Tracker:
    if options.use_tensorboard:
        return TensorBoard(options, folder, seen)
    return WeightsAndBiases(options, folder, options.run or folder.absolute().name)
