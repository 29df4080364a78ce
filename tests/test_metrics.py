from __future__ import annotations

import io
import json
import logging
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline import log
from pipeline.metrics import Metrics, counted, fully_async, perf, rollout
from pipeline.progress import Tail
from pipeline.types import COMPLETED, TRUNCATED, Group, Prompt, Sample, Sequence, Span


def sequence(sampled: int, masked: int = 0) -> Sequence:
    size = sampled + masked
    mask = np.array([1] * sampled + [0] * masked, np.uint8)
    tokens, logprobs = np.arange(size, dtype=np.int32), np.zeros(size, np.float32)
    return Sequence(np.array([1], np.int32), tokens, logprobs, mask, (Span(1, 0, size),))


def group(*answers: tuple[float | None, int], status: str = COMPLETED, seconds: float = 1.0) -> Group:
    samples = tuple(Sample(i, status, "", reward, (sequence(n),)) for i, (reward, n) in enumerate(answers))
    return Group(Prompt(0, 1, 0, "{}"), samples, "w", seconds)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_step_is_a_line_that_only_the_owner_may_read(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.write(0, {"rollout/raw_reward": np.float32(0.5), "perf/step_time": 2.0})
    line = json.loads(path.read_text())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (line["step"], line["rollout/raw_reward"], line["perf/step_time"]) == (0, 0.5, 2)
    metrics.close()


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.write(0, {"train/loss": float("nan"), "train/grad_norm": float("inf")})
    metrics.close()
    assert "NaN" not in (tmp_path / "m.jsonl").read_text()
    assert json.loads((tmp_path / "m.jsonl").read_text())["train/loss"] is None


@pytest.mark.parametrize("torn", ['{"step": 2, "half', '{"step": 2}'])
def test_a_resume_cuts_the_branch_that_was_given_up(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "m.jsonl"
    first = Metrics(path)
    for step in range(5):
        first.write(step, {})
    first.close()
    path.write_text(path.read_text() + torn)
    again = Metrics(path, step=3)
    assert steps(path) == [0, 1, 2]
    again.write(3, {})
    again.close()
    assert steps(path) == [0, 1, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_new_run_starts_a_new_history(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n')
    Metrics(path).close()
    assert path.read_text() == ""


def test_rollout_metrics_have_slimes_names() -> None:
    found = rollout([group((1.0, 2), (0.0, 4)), group((0.25, 6), (0.25, 8), status=TRUNCATED)])
    assert found == {
        "rollout/raw_reward": 0.375,
        "rollout/unscored": 0,
        "rollout/groups": 2,
        "rollout/response_len/mean": 5,
        "rollout/response_len/min": 2,
        "rollout/response_len/max": 8,
        "rollout/response_len/median": 5,
        "rollout/truncated_ratio": 0.5,
        "rollout/zero_std/ratio": 0.5,
        "rollout/zero_std/count_0.2": 1,
    }


def test_an_unscored_sample_is_not_a_zero() -> None:
    found = rollout([group((1.0, 1), (None, 1)), group((None, 1), (None, 1))])
    assert found["rollout/raw_reward"] == 1.0
    assert found["rollout/unscored"] == 3
    assert found["rollout/zero_std/ratio"] == 0
    assert "rollout/raw_reward" not in rollout([group((None, 1))])


def test_only_sampled_tokens_count_and_all_turns_do() -> None:
    sample = Sample(0, COMPLETED, "", 1.0, (sequence(3, masked=10), sequence(4)))
    both = [Group(Prompt(0, 1, 0, "{}"), (sample,), "w", 1.0)]
    assert rollout(both)["rollout/response_len/max"] == 7
    assert perf(both, train=1, wait=0, step=2)["perf/tokens_per_sec"] == 3.5


def test_fully_async_metrics_have_miles_names() -> None:
    found = fully_async(5, {"avg_staleness": 1.5, "max_staleness": 2}, {"stale": 3, "unknown_version": 1})
    assert found == {
        "rollout/fully_async/queue_size": 5,
        "rollout/fully_async/aborted_groups_filtered": 0,
        "rollout/fully_async/stale_groups_filtered": 3,
        "rollout/fully_async/unknown_version_groups_filtered": 1,
        "rollout/fully_async/avg_staleness": 1.5,
        "rollout/fully_async/max_staleness": 2,
    }


def test_counters_become_what_a_step_added() -> None:
    before = {"dropped:zero_std": 2, "fed": 10}
    after = {"dropped:zero_std": 5, "dropped:long": 1, "recycled:stale": 4, "dead:strikes": 1, "fed": 20}
    assert counted(before, after) == {
        "rollout/dynamic_filter/drop_zero_std": 3,
        "rollout/dynamic_filter/drop_long": 1,
        "rollout/recycled/stale": 4,
        "rollout/dead/strikes": 1,
    }


@pytest.mark.parametrize(("wait", "overlap"), [(4.0, 0.0), (1.0, 0.75), (0.0, 1.0), (9.0, 0.0)])
def test_overlap_is_the_share_of_generation_that_was_not_waited_for(wait: float, overlap: float) -> None:
    batch = [group((1.0, 3), seconds=4.0), group((1.0, 5), seconds=2.0)]
    assert perf(batch, train=3.0, wait=wait, step=8.0) == {
        "perf/rollout_time": 4.0,
        "perf/train_time": 3.0,
        "perf/step_time": 8.0,
        "perf/wait_time": wait,
        "perf/tokens_per_sec": 1.0,
        "perf/overlap": overlap,
    }


def test_a_record_is_a_line_and_its_traceback_is_indented(tmp_path: Path) -> None:
    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        log.setup("trainer", tmp_path)
        try:
            raise RuntimeError("cannot reach redis://me:s3c@ret@host/0")
        except RuntimeError:
            logging.getLogger("x").exception("step %s", log.fields(step=3, reward=0.123456, why="no room"))
        text = sys.stderr.getvalue()
    finally:
        log.setup("none", None, "WARNING", terminal=False)
        sys.stderr = stderr
    path = tmp_path / "logs" / "trainer.log"
    assert path.read_text() == text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first, *more = text.splitlines()
    assert first.endswith(' ERROR trainer step step=3 reward=0.1235 why="no room"')
    assert all(line.startswith("    ") for line in more)
    assert more[-1] == "    RuntimeError: cannot reach redis://me:***@host/0"


def test_the_progress_reads_another_file_from_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    tail = Tail(path)
    assert [line["step"] for line in tail.read()] == [1, 2]
    (tmp_path / "other").write_text('{"step": 1, "more": 0}\n{"step": 3}\n{"step": 4}\n')
    (tmp_path / "other").replace(path)
    assert [line["step"] for line in tail.read()] == [3, 4]
    assert tail.read() == []
