"""The whole way round with the echo engine: prompt file, stream, generator, group list, drain, trainer, weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import ECHO_RUN, PACE, PATIENT, Parts, Stage, audited, contiguous, eventually, own_code, prompts, steps

from trainer.weights import versions

NAMES = {
    *(f"rollout/fully_async/{n}" for n in ("queue_size", "avg_staleness", "max_staleness")),
    *(f"rollout/fully_async/{n}_groups_filtered" for n in ("aborted", "stale")),
    *(f"rollout/response_len/{n}" for n in ("mean", "min", "max", "median")),
    *(f"rollout/{n}" for n in ("raw_reward", "truncated_ratio", "zero_std/ratio")),
    *(f"perf/{n}" for n in ("rollout_time", "train_time", "step_time", "wait_time", "tokens_per_sec", "overlap")),
    "train/loss",
    "train/grad_norm",
}
"Of mission 30: all that an echo trainer can say."

MODES = {
    "0": ["--no-fully-async"],
    "1": ["--max-weight-staleness", "1"],
    "3": ["--max-weight-staleness", "3"],
    "none": ["--max-weight-staleness", "none"],
}


@pytest.mark.parametrize("staleness", MODES)
def test_a_run_goes_the_whole_way_round(staleness: str, tmp_path: Path) -> None:
    """27 prompts twice: 13 batches of 4, and a last one of 2."""
    out = tmp_path / "run"
    pace = (*PACE, *PATIENT, "--echo-train-seconds", "0.05")
    with Stage(tmp_path) as stage:
        run = stage.millpond(
            *("run", "--out", out, *ECHO_RUN, *MODES[staleness], *pace, "--save-interval", "5"),
            *("--prompt-data", prompts(tmp_path, 27), "--num-epoch", "2"),
        )
        said = run.ends(0)
        places = audited(stage, out)
    lines = steps(out)
    assert contiguous(lines) == 14
    assert [line["rollout/groups"] for line in lines] == [4] * 13 + [2]
    assert all(line.keys() >= NAMES for line in lines)
    oldest = max(line["rollout/fully_async/max_staleness"] for line in lines)
    assert oldest == 0 if staleness == "0" else 0 < oldest <= int(staleness.replace("none", "99"))
    assert ("staleness is unbounded" in said) == (staleness == "none")
    assert places == {**dict.fromkeys(places, 0), "committed": 54}
    assert sorted(versions(out / "checkpoints")) == [10, 14]


FILTER = """
from producers.filters import Verdict

def fifth(group):
    return Verdict(group.prompt.id % 5 != 0, "fifth")
"""


def test_what_is_not_trained_stands_under_its_reason(tmp_path: Path) -> None:
    """A filter drops every fifth group, some prompts fail each time, and the last, smaller batch is dropped."""
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        run = stage.millpond(
            *("run", "--out", out, *ECHO_RUN, "--prompt-data", prompts(tmp_path, 40), "--num-epoch", "1"),
            *("--echo-failure-rate", "0.05", "--max-prompt-attempts", "2", "--drop-last", *MODES["none"]),
            *("--dynamic-sampling-filter-path", "mine.fifth"),
            **own_code(tmp_path, FILTER),
        )
        run.ends(0)
        places = audited(stage, out)
        reasons = json.loads(stage.millpond("status", out, "--json").ends(0))["prompts"]["reasons"]
    lines = steps(out)
    assert contiguous(lines) > 0
    assert all(line["rollout/groups"] == 4 for line in lines)
    assert places["committed"] == 4 * len(lines)
    assert places["committed"] + places["dropped"] + places["dead"] == 40
    assert reasons["dropped"].keys() == {"fifth", "last_batch"}
    assert sum(reasons["dropped"].values()) == places["dropped"]
    assert reasons["dead"] == {"bad_sample": places["dead"]}
    assert places["dead"] > 0
    assert sum(line.get("rollout/dynamic_filter/drop_fifth", 0) for line in lines) > 0


def test_separate_processes_end_by_themselves_with_the_steps(redis_url: str, tmp_path: Path) -> None:
    with Parts(tmp_path, redis_url, prompts(tmp_path, 100)) as run:
        trainer = run.trainer("--num-rollout", "6", "--fully-async", "--max-weight-staleness", "1")
        generators = [run.generator(), run.generator()]
        assert "--rm-type is length here" in run.generator("length").ends(2)  # and nobody else minds
        eventually(lambda: run.broker.client.zcard(run.broker.keys["workers"]) == 2, "two workers")
        feeder = run.feeder("--num-epoch", "2")
        for process in (trainer, feeder, *generators):
            process.ends(0, seconds=30)
        assert run.audit().places["committed"] == 24
        assert run.broker.state()["why"] == "all 6 steps are done"
        assert contiguous(steps(run.out)) == 6
