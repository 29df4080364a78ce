"""Progress of a run on the terminal: a live table, or a line now and then where nobody watches."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVERY = 5.0
"Seconds between lines without a terminal."

Line = dict[str, float]


class Tail:
    """The steps that metrics.jsonl has gained since the last look. A resume puts another file there: what was seen of
    it before is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = -1
        self.at = 0
        self.rest = b""
        self.step = 0.0
        "the last that was read"

    def read(self) -> list[Line]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            if another := (found := os.fstat(file.fileno()).st_ino) != self.file:
                self.file, self.at, self.rest = found, 0, b""
            file.seek(self.at)
            data = file.read()
        self.at += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        read: list[Line] = [json.loads(line) for line in lines if line]
        new = [line for line in read if not another or line["step"] > self.step]
        self.step = read[-1]["step"] if read else self.step
        return new


def columns(line: Line, queues: dict[str, int], total: int | None) -> dict[str, str]:
    """What is shown of a step."""

    def number(name: str, digits: int = 3) -> str:
        value = line.get(name)
        return "-" if value is None else f"{value:.{digits}f}"

    step = f"{int(line['step'])}" + (f"/{total}" if total else "")
    return {
        "step": step,
        "reward": number("rollout/raw_reward"),
        "queue": str(queues.get("queued", "-")),
        "in flight": str(queues.get("in_flight", "-")),
        "staleness": number("rollout/fully_async/avg_staleness", 2),
        "tokens/s": number("perf/tokens_per_sec", 0),
        "wait s": number("perf/wait_time"),
        "train s": number("perf/train_time"),
    }


class Progress:
    """Shows steps as they come. `queues` is looked up at most once a second by the caller."""

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.rows: list[dict[str, str]] = []
        self.first: Line | None = None
        self.last: Line | None = None
        self.said = -1.0
        "step of the last line"
        self.when = 0.0
        self.live: Any = None

    def __enter__(self) -> Progress:
        if sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(self._table(), refresh_per_second=4, transient=False)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.last is not None and (not self.live and self.said < self.last["step"]):
            self._line()
        if self.live:
            self.live.stop()

    def skip(self, lines: list[Line]) -> None:
        """Steps of before a resume."""
        self.first, self.last = (lines[0], lines[-1]) if lines else (None, None)
        self.said = lines[-1]["step"] if lines else -1.0

    def add(self, lines: list[Line], queues: dict[str, int]) -> None:
        if not lines:
            return
        self.first = self.first or lines[0]
        self.last = lines[-1]
        self.rows = [*self.rows, columns(self.last, queues, self.total)][-12:]
        if self.live:
            self.live.update(self._table())
        elif time.monotonic() - self.when >= EVERY:
            self._line()

    def _line(self) -> None:
        sys.stdout.write("  ".join(f"{name} {value}" for name, value in self.rows[-1].items()) + "\n")
        sys.stdout.flush()
        self.when = time.monotonic()
        self.said = self.last["step"] if self.last else -1.0

    def _table(self) -> Any:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for name in columns({"step": 0}, {}, None):
            table.add_column(name, justify="right")
        for row in self.rows:
            table.add_row(*row.values())
        return table


def outcome(first: Line | None, last: Line | None, evals: Path) -> Iterator[str]:
    """What came of a run, a sentence a line. A torn line of `evals` is left out."""
    if first and last and "rollout/raw_reward" in last:
        begun, reached = first.get("rollout/raw_reward", 0), last["rollout/raw_reward"]
        yield f"Reward {begun:.3f} at step {first['step']}, {reached:.3f} at step {last['step']}"
    told: list[Line] = []
    for raw in evals.read_text().splitlines() if evals.exists() else ():
        with contextlib.suppress(ValueError):
            told.append(json.loads(raw))
    ends = Counter(end for line in told for end in ("failed", "missing", "skipped") if f"eval/{end}" in line)
    done = sorted((line for line in told if not any(f"eval/{end}" in line for end in ends)), key=lambda x: x["step"])
    if told:
        counts = ", ".join([f"{len(done)} done", *(f"{n} {end}" for end, n in sorted(ends.items()))])
        rest = {"eval/seconds", "eval/weight_version"}
        scores = [f"{n} {v:.3f}" for n, v in done[-1].items() if n[:5] == "eval/" and n not in rest] if done else []
        heads = ", ".join(score for score in scores if score.count("/") == 1 and "-truncated_ratio" not in score)
        yield f"Evaluations: {counts}" + (f"; at step {done[-1]['step']}: {heads}" if heads else "")
