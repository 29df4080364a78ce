"""`millpond report`: a run as one HTML page, without network or scripts: what people look at, drawn from its folder.

From metrics.jsonl, evals.jsonl, timeline.jsonl and config.toml, whether the run goes on or has ended.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pipeline import chart, show
from pipeline.chart import Cell, Point
from pipeline.config import option
from pipeline.errors import UsageError
from pipeline.find import Look, folder_of
from pipeline.flags import arguments

Line = dict[str, Any]
ROWS = 24
"Generators that the timeline shows; the busiest."
CELLS = 300
AGE = "rollout/fully_async/staleness/count_"
LENGTH = "/response_len/mean"
ENDS = ("eval/failed", "eval/missing", "eval/skipped")
BESIDE = (
    *("-truncated_ratio", "/samples", "/unscored", "/refused_prompts", "eval/weight_version", "eval/seconds", *ENDS),
    *(f"/response_len/{name}" for name in ("mean", "min", "max", "median")),
)
"Ends of names in evals.jsonl that are no scores."
LOST = ("rollout/dynamic_filter/drop_", "rollout/dead/", "rollout/recycled/")

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem;color:#222;background:#fff}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:1.2rem 2rem}
h1{font-size:1.4rem}h2{font-size:1rem;margin:0}section.w{grid-column:1/-1}svg{width:100%;display:block}
polyline{fill:none;stroke-width:1.6}.g{stroke:#e4e4e4}text{font-size:11px;fill:#666}.y,.n{text-anchor:end}
.x{text-anchor:middle}.k{margin:.1rem 0;font-size:12px}.k span{margin-right:1rem}.k i{display:inline-block;width:.8em;
height:.8em;margin-right:.35em}pre{overflow:auto;background:#f6f6f6;padding:1rem}td{padding:0 1.5rem 0 0}
"""


class ReportLook(Look):
    """Writes a run as one HTML page: millpond report [FOLDER or NAME]."""

    to: Path | None = option(None, "the page (default: report.html in the run's folder)")
    png: Path | None = option(None, "the main curves as a picture besides; needs the extra millpond[png]")


@dataclass(frozen=True)
class Told:
    """What a run's folder holds."""

    name: str
    steps: list[Line]
    evals: list[Line]
    timeline: list[Line]
    config: str

    def points(self, key: str) -> list[Point]:
        return [(x["step"], x[key]) for x in self.steps if _is_number(x.get(key))]

    def keys(self, *starts: str) -> list[str]:
        return sorted({key for line in self.steps for key in line if key.startswith(starts)}, key=_by_number)

    def scores(self, ending: str = "") -> dict[str, list[Point]]:
        """What evaluations say, by name and step: the scores, or of each set what has this ending."""
        keys = {key for line in self.evals for key in line if key.startswith("eval/") and _is_number(line[key])}
        names = sorted(key for key in keys if (key.endswith(ending) if ending else not key.endswith(BESIDE)))
        return {name: sorted((x["step"], x[name]) for x in self.evals if _is_number(x.get(name))) for name in names}


def main(argv: list[str]) -> int:
    options, words = arguments(ReportLook, argv, "millpond report")
    folder = folder_of(options, words)
    told = read(folder)
    if not told.steps:
        begun = any((folder / f"{name}.toml").is_file() for name in ("config", "trainer"))
        raise UsageError(f"{folder} {'holds no steps yet' if begun else 'is no folder of a run'} (no metrics.jsonl)")
    target = options.to or folder / "report.html"
    _write(target, page(told).encode("utf-8", "backslashreplace"))
    show.line(f"{target}")
    if options.png:
        from pipeline.picture import draw

        _write(options.png, draw(told))
        show.line(f"{options.png}")
    return 0


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, and its owner's alone: a page holds the run's configuration."""
    aside = path.with_name(path.name + ".new")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        aside.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


def read(folder: Path) -> Told:
    steps, evals, timeline = (list(_lines(folder / f"{name}.jsonl")) for name in ("metrics", "evals", "timeline"))
    config = folder / "config.toml"
    text = config.read_text(encoding="utf-8", errors="backslashreplace") if config.is_file() else ""
    return Told(folder.absolute().name, steps, evals, timeline, text)


def _lines(path: Path) -> Iterator[Line]:
    """Whole lines; the last of a live run may not be."""
    for raw in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        try:
            line = json.loads(raw)
        except ValueError:
            continue
        if isinstance(line, dict) and _is_number(line.get("step")) and _is_number(line.get("time")):
            yield line


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _by_number(key: str) -> tuple[str, int, str]:
    head, _, tail = key.rpartition("_")
    return (head, int(tail), "") if tail.isdigit() else (key, 0, key)


def page(told: Told) -> str:
    parts = "".join(
        f"<section{' class=w' if wide else ''}><h2>{escape(title)}</h2>{body}</section>"
        for title, body, wide in _sections(told)
    )
    name, config = escape(told.name), ""
    if told.config:
        config = f"<details><summary>Configuration</summary><pre>{escape(told.config)}</pre></details>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{name}: a Millpond run</title><style>{STYLE}</style></head><body><h1>{name}</h1>{_facts(told)}"
        f"<main>{parts}</main>{config}</body></html>\n"
    )


def _facts(told: Told) -> str:
    first, last = told.steps[0], told.steps[-1]
    began = first["time"] - (first.get("perf/step_time") or 0)
    reward = told.points("rollout/raw_reward")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["time"]))
    facts = {
        "steps": f"{first['step']} to {last['step']}",
        "weight version": f"{last.get('train/weight_version', '?')}",
        "last step": f"{when}, {show.ago(last['time'] - began)} after the start",
        "reward": f"{reward[0][1]:.3f} at first, {reward[-1][1]:.3f} at last" if reward else "-",
    }
    if told.evals:
        ends = {end[5:]: n for end in ENDS if (n := sum(end in line for line in told.evals))}
        facts["evaluations"] = f"{len(told.evals)}" + (f" ({show.counts(ends)})" if ends else "")
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in facts.items())
    return f"<table>{rows}</table>"


def _sections(told: Told) -> Iterator[tuple[str, str, bool]]:
    """Title, what is drawn, whether it needs the whole width."""
    length, perf, queue = "rollout/response_len/", "perf/", "rollout/fully_async/queue_size"
    yield "Reward, mean of a step", chart.curves({"reward": told.points("rollout/raw_reward")}), False
    if scores := told.scores():
        yield "Evaluation, at the step it belongs to", chart.curves(scores), False
    if sizes := told.scores(LENGTH):
        yield "Evaluation: response length, mean tokens", _from_zero(sizes), False
    yield "Staleness: groups trained on, by age in versions", _stack(told, told.keys(AGE), AGE), False
    yield "Groups left in the queue", _from_zero({"groups": told.points(queue)}), False
    names = [*told.keys(*LOST)]
    yield "Dropped, dead-lettered or sent round again, by reason", _stack(told, names, "rollout/"), False
    lengths = {name: told.points(length + name) for name in ("mean", "median", "min", "max")}
    yield "Response length, tokens", _from_zero(lengths), False
    spent = {n: told.points(f"{perf}{n}_time")[1:] for n in ("step", "wait", "train", "rollout")}
    yield "Seconds, from the second step on: step, its waiting and training, slowest group", _from_zero(spent), False
    yield "Response tokens a second", _from_zero({"tokens/s": told.points(perf + "tokens_per_sec")}), False
    yield "Loss", chart.curves({"loss": told.points("train/loss")}), False
    yield "Gradient norm", chart.curves({"norm": told.points("train/grad_norm")}), False
    keys = {2: "training", 1: "waiting for groups", 5: "publishing, saving, the rest", 0: "generating, by tokens/s"}
    yield "Timeline: trainer and generators", chart.strips(timeline(told), "minutes since the start", keys), True


def _from_zero(series: dict[str, list[Point]]) -> str:
    return chart.curves(series, zero=True)


def _stack(told: Told, keys: Sequence[str], start: str) -> str:
    """Bars of the keys that are not zero all the time."""
    keys = [key for key in keys if any(line.get(key) for line in told.steps)]
    rows = [(line["step"], [max(0, line.get(key) or 0) for key in keys]) for line in told.steps]
    return chart.stacked([key.removeprefix(start) for key in keys], rows)


def timeline(told: Told) -> dict[str, list[Cell]]:
    """The trainer's row, and one for each generator, the busiest first; in minutes."""
    each = -(-len(told.steps) // CELLS)
    began = told.steps[0]["time"] - (told.steps[0].get("perf/step_time") or 0)
    rows = {"trainer": [_trained(told.steps[i : i + each], began) for i in range(0, len(told.steps), each)]}
    told_of = [line for line in told.timeline if isinstance(line.get("workers"), dict)]
    rates = [{name: _rate(said) for name, said in line["workers"].items()} for line in told_of]
    most = max((rate for line in rates for rate in line.values()), default=0.0) or 1.0
    busy: dict[str, float] = {}
    for line in rates:
        for name, rate in line.items():
            busy[name] = busy.get(name, 0.0) + rate
    times = [began, *(line["time"] for line in told_of)]
    for name in sorted(busy, key=lambda n: -busy[n])[:ROWS]:
        cells = []
        for i in range(0, len(rates), each):
            part = rates[i : i + each]
            share = sum(line.get(name, 0.0) for line in part) / len(part) / most
            if share:
                cells.append(Cell((times[i] - began) / 60, (times[i + len(part)] - began) / 60, ((share, 0),)))
        rows[show.shorten(name, 60)] = cells
    return rows


def _trained(part: Sequence[Line], began: float) -> Cell:
    def total(name: str) -> float:
        return sum(line.get(f"perf/{name}_time") or 0 for line in part)

    whole = total("step") or 1.0
    train, wait = min(1.0, total("train") / whole), min(1.0, total("wait") / whole)
    start = part[0]["time"] - (part[0].get("perf/step_time") or 0)
    shares = ((train, 2), (wait, 1), (max(0.0, 1 - train - wait), 5))
    return Cell((start - began) / 60, (part[-1]["time"] - began) / 60, shares)


def _rate(said: object) -> float:
    return float(said[0]) if isinstance(said, list) and said and _is_number(said[0]) else 0.0
