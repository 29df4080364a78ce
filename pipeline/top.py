"""`millpond top`: a run on the whole terminal, live, readable at 80 columns; without a terminal, one look."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline import show, status
from pipeline.config import PositiveFloat, option
from pipeline.entries import oldest_lag
from pipeline.errors import RedisDown
from pipeline.find import Found, Look, found
from pipeline.flags import arguments
from pipeline.glance import look
from pipeline.overview import Overview
from pipeline.progress import Tail
from pipeline.server import locate
from pipeline.why import judge

CURVES = {
    "reward": "rollout/raw_reward",
    "staleness": "rollout/fully_async/avg_staleness",
    "tokens/s": "perf/tokens_per_sec",
    "wait s": "perf/wait_time",
}
"name -> what of metrics.jsonl is drawn, of the latest steps"
STEPS = 48
BARS = "▁▂▃▄▅▆▇█"
STILL_AFTER = 600.0
"Seconds, as `millpond why` has it."
LEAVE = (b"q", b"Q", b"\x1b", b"\x04", b"")
"The last: the terminal is gone."

Keys = Callable[[float], bytes | None]
"waits so many seconds for a key; None: none came"


class TopLook(Look):
    """Shows a run live: millpond top [FOLDER or NAME]; q leaves."""

    every: PositiveFloat = option(1.0, "seconds between looks")


def main(argv: list[str]) -> int:
    options, words = arguments(TopLook, argv, "millpond top")
    with found(options, words) as run:
        picture = Picture(run)
        if run.stopped or not (sys.stdin.isatty() and sys.stdout.isatty()):
            Console().print(picture.draw(10_000))
            return 0
        with pressed(sys.stdin.fileno()) as key, Live(screen=True, auto_refresh=False) as live:
            while _again(picture, live):
                if key(options.every) in LEAVE:
                    break
    return 0


def _again(picture: Picture, live: Live) -> bool:
    """False where a local run's Redis has ended with the run."""
    try:
        live.update(Group(picture.draw(live.console.height), Text("q leaves", "dim")), refresh=True)
    except RedisDown as error:
        folder = picture.run.folder
        if folder and not locate(folder / "redis") and (folder / "redis").is_dir():
            return False
        live.update(Text(f"Redis does not answer: {show.clean(str(error))}", "red"), refresh=True)
    return True


@contextmanager
def pressed(fd: int) -> Iterator[Keys]:
    """Keys as they are pressed; the terminal is as it was afterwards. A signal to end is a KeyboardInterrupt where keys
    are waited for, and nowhere else: raised while the screen is drawn, it could leave it half drawn for ever."""
    before = termios.tcgetattr(fd)
    heard, tells = os.pipe()

    def key(seconds: float) -> bytes | None:
        ready = select.select([fd, heard], [], [], seconds)[0]
        if heard in ready:
            raise KeyboardInterrupt
        return os.read(fd, 1) if ready else None

    usual = {name: signal.signal(name, lambda *_: os.write(tells, b"!")) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        tty.setcbreak(fd)
        yield key
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        for name, handler in usual.items():
            signal.signal(name, handler)
        os.close(heard)
        os.close(tells)


class Picture:
    """What is shown, from one look after another."""

    def __init__(self, run: Found) -> None:
        self.run = run
        self.before: Overview | None = None
        self.tail = Tail(run.folder / "metrics.jsonl") if run.folder else None
        self.steps: deque[dict[str, Any]] = deque(maxlen=STEPS)

    def draw(self, height: int) -> RenderableType:
        view = look(self.run.broker, status.save_interval(self.run.folder))
        verdict = judge(self.before or view, view, self.run.stopped, STILL_AFTER)
        self.before = view
        if self.tail:
            self.steps.extend(self.tail.read())
        last: dict[str, Any] = self.steps[-1] if self.steps else {}
        rows = [
            *status.progress(view, last),
            *status.flow(view, oldest_lag(self.run.broker, view.policy)),
            *status.fates(view),
            *self._curves(),
        ]
        head = Text(f"run {self.run.run} in {self.run.where}: {view.status}", "bold", no_wrap=True, overflow="ellipsis")
        do = f" To do: {verdict.do}." if verdict.do else ""
        why = Text(f"{verdict.sentence}{do}", "red" if verdict.stands else "green")
        room = max(3, height - len(rows) - 10)
        return Group(head, why, Text(), _pairs(rows), Text(), _workers(view, room))

    def _curves(self) -> Iterator[tuple[str, str]]:
        for name, key in CURVES.items():
            values = [v for line in self.steps if isinstance(v := line.get(key), int | float)]
            if values:
                yield name, f"{bars(values)} {values[-1]:.4g}"


def bars(values: Sequence[float]) -> str:
    """A curve in one line, from the least to the greatest of `values`."""
    low, high = min(values), max(values)
    return "".join(BARS[int((v - low) / ((high - low) or 1) * (len(BARS) - 1) + 0.5)] for v in values)


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, text in rows:
        grid.add_row(Text(name, "cyan", no_wrap=True), Text(text))
    return grid


def _workers(view: Overview, room: int) -> RenderableType:
    if not view.workers:
        return Text("no generators", "yellow")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in status.WORKERS:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for worker in view.workers[:room]:
        table.add_row(*map(Text, status.row(worker)), style="" if worker.alive else "red")
    more = len(view.workers) - room
    return Group(table, Text(f"and {more} more")) if more > 0 else table
