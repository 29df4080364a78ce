"""Small charts as inline SVG: curves, stacked bars, strips over time. All text is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 190
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 10, 26
COLORS = ("#2a6fbb", "#d9822b", "#3a9a5b", "#b8405e", "#7b5fb0", "#7f7f7f", "#c2a83e", "#39a7b8")

Point = tuple[float, float]


@dataclass(frozen=True)
class Axes:
    """From values to pixels."""

    x: tuple[float, float]
    "least and greatest"
    y: tuple[float, float]
    height: int = HEIGHT

    def at(self, x: float, y: float) -> Point:
        return self.right(x), self.up(y)

    def right(self, x: float) -> float:
        return LEFT + (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1) * (WIDTH - LEFT - RIGHT)

    def up(self, y: float) -> float:
        return self.height - BOTTOM - (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1) * (self.height - TOP - BOTTOM)

    def marks(self, x_name: str) -> Iterator[str]:
        for y in ticks(*self.y):
            at = self.up(y)
            yield f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            yield f'<text class="y" x="{LEFT - 6}" y="{at + 4:.1f}">{y:.4g}</text>'
        yield from self.x_marks(x_name)

    def x_marks(self, name: str) -> Iterator[str]:
        for x in ticks(*self.x, 6):
            yield f'<text class="x" x="{self.right(x):.1f}" y="{self.height - 10}">{x:.6g}</text>'
        yield f'<text class="n" x="{WIDTH - RIGHT}" y="{self.height - 1}">{escape(name)}</text>'


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def thinned(points: Sequence[Point], most: int = 400) -> list[Point]:
    """At most so many: the means of equally many neighbours."""
    each = math.ceil(len(points) / most) or 1
    parts = [points[i : i + each] for i in range(0, len(points), each)]
    return [(math.fsum(x for x, _ in part) / len(part), math.fsum(y for _, y in part) / len(part)) for part in parts]


def curves(series: Mapping[str, Sequence[Point]], x_name: str = "step", zero: bool = False) -> str:
    """A line each. `zero`: the vertical axis starts there."""
    shown = {name: thinned(points) for name, points in series.items() if points}
    if not shown:
        return EMPTY
    xs, ys = [x for ps in shown.values() for x, _ in ps], [y for ps in shown.values() for _, y in ps]
    axes = Axes((min(xs), max(xs)), _room(min([0.0, *ys] if zero else ys), max(ys)))
    drawn = [_line(axes, points, color(i)) for i, points in enumerate(shown.values())]
    return _svg([*axes.marks(x_name), *drawn], HEIGHT) + legend(
        {n: f"{ps[-1][1]:.4g}" for n, ps in series.items() if ps}
    )


def _line(axes: Axes, points: Sequence[Point], paint: str) -> str:
    if len(points) == 1:
        x, y = axes.at(*points[0])
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{paint}"/>'
    path = " ".join("{:.1f},{:.1f}".format(*axes.at(*point)) for point in points)
    return f'<polyline points="{path}" stroke="{paint}"/>'


def _room(low: float, high: float) -> tuple[float, float]:
    """A flat line stands in the middle."""
    pad = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return low if low == 0 else low - pad, high + pad


def stacked(names: Sequence[str], rows: Sequence[tuple[float, Sequence[float]]], x_name: str = "step") -> str:
    """A bar for each row, (x, one value a name); neighbours are added up where they are many."""
    each = math.ceil(len(rows) / 200) or 1
    parts = [rows[i : i + each] for i in range(0, len(rows), each)]
    bars = [
        (part[0][0], part[-1][0], [math.fsum(values) for values in zip(*(v for _, v in part), strict=True)])
        for part in parts
    ]
    if not bars or not names:
        return EMPTY
    axes = Axes((bars[0][0], bars[-1][1] + 1), (0.0, max(sum(values) for *_, values in bars) or 1.0))
    drawn = [r for first, last, values in bars for r in _pile(axes, first, last + 1, values)]
    return _svg([*axes.marks(x_name), *drawn], HEIGHT) + legend(dict.fromkeys(names, ""))


def _pile(axes: Axes, start: float, end: float, values: Sequence[float]) -> Iterator[str]:
    base = 0.0
    for i, value in enumerate(values):
        if value:
            yield _box(axes.right(start), axes.right(end), axes.up(base + value), axes.up(base), color(i))
            base += value


def _box(left: float, right: float, top: float, bottom: float, paint: str) -> str:
    wide = max(0.5, right - left - (0.5 if right - left > 3 else 0))
    return f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{bottom - top:.1f}" fill="{paint}"/>'


@dataclass(frozen=True)
class Cell:
    """A while of a strip."""

    start: float
    end: float
    shares: tuple[tuple[float, int], ...]
    "(height of 1, number of the color), from the bottom"


def strips(rows: Mapping[str, Sequence[Cell]], x_name: str, keys: Mapping[int, str]) -> str:
    """A row for each name, one below the other, on one axis; `keys`: what the colors mean."""
    cells = [cell for row in rows.values() for cell in row]
    if not cells:
        return EMPTY
    high = TOP + BOTTOM + 30 * len(rows)
    axes = Axes((min(c.start for c in cells), max(c.end for c in cells)), (0.0, 1.0), high)
    drawn = list(axes.x_marks(x_name))
    for i, (name, row) in enumerate(rows.items()):
        bottom = TOP + 30 * (i + 1)
        drawn.append(f'<text class="r" x="{LEFT}" y="{bottom - 20}">{escape(name)}</text>')
        for cell in row:
            base = float(bottom)
            for share, number in cell.shares:
                drawn.append(_box(axes.right(cell.start), axes.right(cell.end), base - 16 * share, base, color(number)))
                base -= 16 * share
    return _svg(drawn, high) + legend(dict.fromkeys(keys.values(), ""), list(keys))


def color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def legend(entries: Mapping[str, str], numbers: Sequence[int] | None = None) -> str:
    """Name, and the last value where there is one."""
    shown = zip(numbers or range(len(entries)), entries.items(), strict=True)
    items = (
        f'<span><i style="background:{color(i)}"></i>{escape(name)} {escape(value)}</span>'
        for i, (name, value) in shown
    )
    return f'<p class="k">{"".join(items)}</p>'


def _svg(parts: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


EMPTY = '<p class="k">nothing yet</p>'
