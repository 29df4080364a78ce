"""`millpond report`: one page from a run's folder, whatever stands in it."""

from __future__ import annotations

import json
import re
import stat
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pipeline import chart, report
from pipeline.chart import Axes
from pipeline.errors import UsageError

EVIL = '<script>alert("x")</script>&'
CLOSED = {"meta", "br", "img", "link"}


def line(step: int, **more: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "rollout/raw_reward": step / 10, "rollout/fully_async/queue_size": 3,
        "rollout/fully_async/staleness/count_0": 2, "rollout/fully_async/staleness/count_10": 1,
        "rollout/fully_async/staleness/count_2": 1,
        f"rollout/dynamic_filter/drop_{EVIL}": step % 2, "rollout/dead/never": 0,
        "perf/step_time": 10.0, "perf/train_time": 4.0, "perf/wait_time": 5.0, "train/loss": None,
        "train/weight_version": step + 1,
    }  # fmt: skip
    return {"step": step, "time": 1_700_000_000 + 10 * step, **values, **more}


def run_in(folder: Path, steps: int = 3, torn: str = "") -> Path:
    run = folder / f"run {EVIL.replace('/', '')}"
    run.mkdir()
    lines = [line(step) for step in range(1, steps + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + torn)
    late = {"step": 2, "time": 1_700_000_999, f"eval/{EVIL}": 0.5}
    (run / "evals.jsonl").write_text(json.dumps(late) + "\n")
    rates = [
        {"step": x["step"], "time": x["time"], "workers": {EVIL: [50.0 * x["step"], 2], "b": [1, 1]}} for x in lines
    ]
    (run / "timeline.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rates))
    (run / "config.toml").write_text(f'rm_type = "{EVIL}"\n')
    return run


class Page(HTMLParser):
    """Which elements and texts a browser sees; open and close must fit."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in CLOSED:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def written(run: Path, *flags: str) -> str:
    assert report.main([str(run), *flags]) == 0
    return (run / "report.html").read_text()


def test_a_page_is_one_file_that_asks_for_no_other(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    page = Page(written(run))
    tags = {tag for tag, _ in page.seen}
    assert not tags & {"script", "link", "img", "iframe", "object", "image", "use"}
    asked = {name for _, attributes in page.seen for name in attributes}
    assert not asked & {"src", "href", "xlink:href", "srcset", "onload", "onclick"}
    assert "@import" not in (run / "report.html").read_text()
    assert "url(" not in (run / "report.html").read_text()
    assert stat.S_IMODE((run / "report.html").stat().st_mode) == 0o600
    assert [path.name for path in run.iterdir() if path.name.endswith(".new")] == []


def test_text_of_the_run_is_text_on_the_page(tmp_path: Path) -> None:
    """The reason of a drop, an evaluation's name, a worker's, the run's own and its configuration."""
    page = Page(written(run_in(tmp_path)))
    texts = " ".join(page.texts)
    assert texts.count("<script>") >= 6
    for words in ("dynamic_filter/drop_" + EVIL, "eval/" + EVIL, f'rm_type = "{EVIL}"'):
        assert words in texts, words


def test_what_people_look_at_is_there(tmp_path: Path) -> None:
    text = written(run_in(tmp_path))
    for title in (
        "Reward", "Evaluation", "Staleness", "Groups left in the queue", "by reason", "Response length", "Seconds",
        "tokens a second", "Loss", "Gradient norm", "Timeline",
    ):  # fmt: skip
        assert re.search(f"<h2>[^<]*{title}", text), title
    for svg in re.findall(r"<svg.*?</svg>", text):
        ET.fromstring(svg)
    assert len(re.findall("<svg", text)) == 7
    assert len(re.findall("nothing yet", text)) == 4  # loss, norm, length, tokens a second
    assert "dead/never" not in text
    ages = re.search(r"by age.*?<p class=\"k\">(.*?)</p>", text)
    assert ages is not None
    assert re.findall(r"</i>(\d+)", ages[1]) == ["0", "2", "10"]


def test_evaluations_stand_at_their_steps_and_what_is_no_score_is_no_curve(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    numbers = {"eval/a": 0.5, "eval/a-pass@2": 0.75, "eval/a-truncated_ratio": 0.25, "eval/a/samples": 8}
    numbers |= {
        "eval/a/response_len/mean": 5,
        "eval/a/response_len/max": 9,
        "eval/weight_version": 3,
        "eval/seconds": 1,
    }
    late = [{"step": 3, "eval/failed": 1}, {"step": 2, **numbers}, {"step": 0, **numbers, "eval/a": 0.125}]
    (run / "evals.jsonl").write_text("".join(json.dumps({"time": 1_700_000_999, **x}) + "\n" for x in late))
    told = report.read(run)
    assert told.scores() == {"eval/a": [(0, 0.125), (2, 0.5)], "eval/a-pass@2": [(0, 0.75), (2, 0.75)]}
    text = written(run)
    assert "Evaluation: response length" in text
    assert re.search("evaluations</td><td>3 \\(failed 1\\)", text)
    assert "weight_version</span>" not in text


TORN = ('{"step": 4, "ti', "garbage\n", "[1]\n", '{"step": "x", "time": 1}\n', '{"step": NaN, "time": 1}\n')


@pytest.mark.parametrize("torn", TORN)
def test_a_live_runs_last_line_may_be_torn(torn: str, tmp_path: Path) -> None:
    told = report.read(run_in(tmp_path, torn=torn))
    assert [x["step"] for x in told.steps] == [1, 2, 3]


def test_a_run_of_one_step_and_one_without_steps(tmp_path: Path) -> None:
    run = run_in(tmp_path, steps=1)
    Page(written(run))
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(UsageError, match="holds no steps yet"):
        report.main([str(run)])
    with pytest.raises(UsageError, match="is no folder of a run"):
        report.main([str(tmp_path)])


def test_a_run_of_before_there_were_other_files(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    for name in ("evals.jsonl", "timeline.jsonl", "config.toml"):
        (run / name).unlink()
    text = written(run)
    assert "Evaluation" not in text
    assert list(report.timeline(report.read(run))) == ["trainer"]


def test_the_timeline_says_when_who_did_what(tmp_path: Path) -> None:
    rows = report.timeline(report.read(run_in(tmp_path)))
    assert list(rows) == ["trainer", EVIL, "b"]
    assert [(c.start, c.end) for c in rows["trainer"]] == [(i / 6, (i + 1) / 6) for i in range(3)]
    assert rows["trainer"][0].shares == ((0.4, 2), (0.5, 1), (pytest.approx(0.1), 5))
    assert [round(c.shares[0][0], 3) for c in rows[EVIL]] == [0.333, 0.667, 1.0]
    assert [(c.start, c.end) for c in rows[EVIL]] == [(i / 6, (i + 1) / 6) for i in range(3)]


def test_a_long_run_is_a_page_of_bounded_size(tmp_path: Path) -> None:
    for name in ("short", "long"):
        (tmp_path / name).mkdir()
    short, long = run_in(tmp_path / "short", 1000), run_in(tmp_path / "long", 10_000)
    size = len(written(short))
    assert len(written(long)) < 2 * size


def test_a_page_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    with pytest.raises(UsageError, match="No such file or directory"):
        report.main([str(run), "--to", str(tmp_path / "nowhere" / "x.html")])


def test_a_picture_needs_its_extra(tmp_path: Path) -> None:
    run, png = run_in(tmp_path), tmp_path / "run.png"
    if find_spec("matplotlib") is None:
        with pytest.raises(UsageError, match=r"pip install 'millpond\[png\]'"):
            report.main([str(run), "--png", str(png)])
    else:
        assert report.main([str(run), "--png", str(png)]) == 0
        assert png.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 5, 10]),
        (0, 1, [0, 0.5, 1]),
        (-3, 3, [-2, 0, 2]),
        (1, 1, [1]),
        (0, 4, [0, 1, 2, 3, 4]),
        (1e-9, 3e-9, [1e-9, 1.5e-9, 2e-9, 2.5e-9, 3e-9]),
    ],
)
def test_ticks_are_round_numbers_within(low: float, high: float, expected: list[float]) -> None:
    assert chart.ticks(low, high) == pytest.approx(expected, abs=1e-15)


def test_values_land_where_they_belong() -> None:
    axes = Axes((0, 10), (0, 100))
    assert axes.at(0, 0) == (chart.LEFT, chart.HEIGHT - chart.BOTTOM)
    assert axes.at(10, 100) == (chart.WIDTH - chart.RIGHT, chart.TOP)
    drawn = chart.stacked(["a", "b"], [(1, [1, 3]), (2, [0, 4])])
    heights = [float(x) for x in re.findall(r'<rect[^>]* height="([\d.]+)"', drawn)]
    assert heights == pytest.approx([154 / 4, 154 * 3 / 4, 154], abs=0.2)


def test_many_points_are_means_of_neighbours() -> None:
    points = [(float(x), float(x % 2)) for x in range(1, 1001)]
    found = chart.thinned(points, 100)
    assert len(found) == 100
    assert {y for _, y in found} == {0.5}
    assert found[0][0] == 5.5
