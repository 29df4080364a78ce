"""`millpond run` as its user meets it: stopping and going on, what a mistake looks like, what lies in the folder."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from contextlib import closing
from pathlib import Path
from statistics import fmean

import pytest
from documented import undocumented
from processes import (
    ECHO_RUN,
    PACE,
    PATIENT,
    Parts,
    Stage,
    Started,
    alive,
    audited,
    contiguous,
    eventually,
    own_code,
    prompts,
    server_of,
    steps,
)

from pipeline.broker import Broker
from pipeline.keys import Keys
from pipeline.progress import outcome
from pipeline.server import EmbeddedServer, locate

SLOW = (*PACE, "--echo-train-seconds", "0.1", "--save-interval", "4")


def started(stage: Stage, out: Path, *more: object, rows: int = 100, **env: str) -> Started:
    """An echo run over one epoch."""
    data = ("--prompt-data", prompts(stage.folder, rows))
    return stage.millpond("run", "--out", out, *ECHO_RUN, *PATIENT, *data, "--num-epoch", "1", *more, **env)


# --- stopping


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        run = started(stage, out, *SLOW)
        eventually(lambda: len(steps(out)) >= 5, "five steps")
        run.kill(signal.SIGINT)
        said = run.ends(130, seconds=20)
        assert "the trainer saves first" in said
        assert f"`millpond run --resume --out {out}` goes on" in said
        done = len(steps(out))
        assert f"{done:08d}" in os.listdir(out / "checkpoints")
        assert audited(stage, out)["committed"] == 4 * done

        said = stage.millpond("run", "--resume", "--out", out).ends(0)
        assert f"step {done} " not in said
        assert audited(stage, out)["committed"] == 100
    assert contiguous(steps(out)) == 25


def test_a_closed_terminal_stops_a_run_in_order(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        run = started(stage, out, *PACE, "--echo-train-seconds", "0.1", "--save-interval", "100")
        eventually(lambda: len(steps(out)) >= 3, "three steps")
        run.kill(signal.SIGHUP)
        run.ends(130)
        assert (out / "checkpoints" / f"{len(steps(out)):08d}").is_dir()
        audited(stage, out)


def test_ctrl_c_twice_ends_at_once(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        run = started(stage, out, *PACE, "--echo-train-seconds", "60")
        eventually(lambda: popped(out) >= 4, "a batch in the trainer's hand")
        left = [*run.children().values(), server_of(out)]
        run.kill(signal.SIGINT)
        time.sleep(1)
        assert all(map(alive, left))
        began = time.monotonic()
        run.kill(signal.SIGINT)
        run.ends(130, seconds=20)
        assert time.monotonic() - began < 5
        assert not any(map(alive, left))


def test_a_trainer_that_is_told_to_stop_ends_the_run_in_order(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        run = started(stage, out, *SLOW)
        eventually(lambda: len(steps(out)) >= 2, "two steps")
        os.kill(run.children()["train"], signal.SIGTERM)
        assert "goes on" in run.ends(130, seconds=20)


def popped(out: Path) -> int:
    """Groups that have left the list."""
    if not (url := locate(out / "redis")):
        return 0
    with closing(Broker(url, Keys(out.name), "test")) as broker:
        return broker.standing().popped


# --- what does not heal


def test_a_reward_that_raises_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    source = """
def reward(x):
    if x.prompt_id == 30:
        raise KeyError("what I meant")
    return 1.0
"""
    with Stage(tmp_path) as stage:
        env = own_code(tmp_path, source)
        args = ["--prompt-data", prompts(tmp_path, 100), "--num-epoch", "1", "--custom-rm-path", "mine.reward"]
        plain = [a for a in ECHO_RUN if a not in ("--rm-type", "random")]
        said = stage.millpond("run", "--out", "run", *plain, *args, **env).ends(1)
        assert audited(stage, tmp_path / "run")["committed"] >= 4
    assert 'mine.py", line 4, in reward' in said
    assert "KeyError: 'what I meant'" in said
    assert said.rindex("reward 1.000") < said.index("Traceback")


def test_restarts_are_bounded(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        run = started(stage, out, *SLOW, "--max-restarts", "1")
        eventually(lambda: len(steps(out)) >= 2, "two steps")
        for _ in range(2):
            victim = eventually(lambda: run.children().get("generate"), "a generator")
            os.kill(victim, signal.SIGKILL)
            eventually(lambda victim=victim: not alive(victim), "its end")
        said = run.ends(1)
    assert "millpond: generator-0 was killed 2 times (--max-restarts 1)" in said


def test_without_checkpoints_a_killed_trainer_ends_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        run = started(stage, out, "--save-interval", "0", "--echo-train-seconds", "0.1")
        os.kill(eventually(lambda: steps(out) and run.children()["train"], "a step"), signal.SIGKILL)
        assert run.ends(1).endswith(
            "millpond: the trainer was killed, and with --save-interval 0 there is nothing to go on from\n"
        )
        assert audited(stage, out)["committed"] >= 4


def test_a_run_without_checkpoints_is_not_resumed_from_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        assert "Prompts: 8 committed\n" in started(stage, out, "--save-interval", "0", rows=8).ends(0)
        said = stage.millpond("run", "--resume", "--out", out, "--save-interval", "2", "--num-epoch", "2").ends(2)
        assert "was trained without checkpoints" in said
        assert audited(stage, out)["committed"] == 8


def test_what_a_resume_was_refused_for_is_not_asked_of_the_next(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        started(stage, out, rows=8).ends(0)
        before = (out / "config.toml").read_text()
        said = stage.millpond("run", "--resume", "--out", out, "--n-samples-per-prompt", "5", "--num-epoch", "2").ends(
            2
        )
        assert "--n-samples-per-prompt" in said
        assert (out / "config.toml").read_text() == before
        stage.millpond("run", "--resume", "--out", out, "--num-epoch", "2").ends(0)
        assert audited(stage, out)["committed"] == 16


def test_aborted_groups_are_dropped_where_that_is_asked_for(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        more = ("--echo-abort-rate", "0.3", "--async-unused-samples-handler", "drop")
        said = started(stage, tmp_path / "run", *more, rows=20).ends(0)
        assert "dropped under aborted" in said
        assert "dead" not in said


def test_a_generator_that_was_sent_away_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        run = started(stage, out, *SLOW, rows=60)
        first = eventually(lambda: len(steps(out)) >= 2 and run.children()["generate"], "two steps")
        os.kill(first, signal.SIGTERM)
        eventually(lambda: run.children().get("generate", first) != first, "another generator")
        run.ends(0)
        assert audited(stage, out)["committed"] == 60


# --- what lies in the folder


def test_all_in_the_folder_is_private_and_names_no_password(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        run = started(stage, out, *SLOW, rows=24)
        eventually(lambda: (out / "redis" / "password").exists(), "a password")
        said = run.ends(0)
    password = (out / "redis" / "password").read_text()
    paths = [out, *out.rglob("*")]
    assert {stat.S_IMODE(p.stat().st_mode) for p in paths if p.is_dir()} == {0o700}
    assert {stat.S_IMODE(p.stat().st_mode) for p in paths if p.is_file()} == {0o600}
    assert [p.name for p in paths if p.is_file() and password.encode() in p.read_bytes()] == ["password"]
    assert password not in said
    assert {p.name for p in out.iterdir()} == {
        *("config.toml", "trainer.toml", "metrics.jsonl", "evals.jsonl", "timeline.jsonl"),
        *("logs", "checkpoints", "weights", "redis"),
        ".trainer-1",
    }


def test_a_given_redis_shows_its_password_nowhere(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with EmbeddedServer(tmp_path / "redis", "process") as server, Stage(tmp_path) as stage:
        said = started(stage, out, "--redis-url", server.url, rows=8).ends(0)
        password = (tmp_path / "redis" / "password").read_text()
        again = stage.millpond("run", "--resume", "--out", out).ends(2)
        stage.millpond("run", "--resume", "--out", out, "--num-epoch", "2", "--redis-url", server.url).ends(0)
    assert contiguous(steps(out)) == 4
    assert again == f"millpond: --resume: the run in {out} is in a Redis of yours: give the same --redis-url again\n"
    assert password not in said
    assert not [p for p in out.rglob("*") if p.is_file() and password.encode() in p.read_bytes()]
    assert not (out / "redis").exists()


def test_a_start_that_failed_early_is_done_again_by_the_same_command(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        assert "no program there" in started(stage, out, rows=8, MILLPOND_REDIS_SERVER="/nowhere").ends(2)
        assert out.is_dir()
        started(stage, out, rows=8).ends(0)


def test_a_checkpoint_of_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with Stage(tmp_path) as stage:
        for out in (one, two):
            started(stage, out, "--num-rollout", "2", "--save-interval", "2").ends(0)
        other = one / "checkpoints" / "00000002"
        said = stage.millpond("run", "--resume", "--out", two, "--load", other, "--num-rollout", "4").ends(2)
        assert "that checkpoint is run one's" in said
        stage.millpond("run", "--resume", "--out", two, "--num-rollout", "3").ends(0)
        audited(stage, two)
    assert contiguous(steps(two)) == 3


def test_a_trainer_killed_after_a_load_goes_on_from_what_it_saved_since(tmp_path: Path) -> None:
    out = tmp_path / "run"
    checkpoints = out / "checkpoints"
    keep = ("--save-interval", "2", "--save-keep", "50")
    with Stage(tmp_path) as stage:
        started(stage, out, *keep, "--num-rollout", "6").ends(0)
        chosen = checkpoints / "00000004"
        how = ("--load", chosen, "--num-rollout", "400", "--echo-train-seconds", "0.1")
        run = stage.millpond("run", "--resume", "--out", out, *how)
        eventually(lambda: (checkpoints / "00000010").exists(), "six steps more")
        os.kill(run.children()["train"], signal.SIGKILL)
        eventually(lambda: (checkpoints / "00000014").exists(), "four steps more")
        run.kill(signal.SIGINT)
        run.ends(130)
        last = len(steps(out))
        assert not (checkpoints / "00000008.given-up").exists()
        stage.millpond("run", "--resume", "--out", out, "--num-rollout", last + 1).ends(0)
        assert not (checkpoints / "00000010.given-up").exists()
        assert contiguous(steps(out)) == last + 1
        audited(stage, out)


def test_a_folder_with_a_run_is_not_used_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        started(stage, out, rows=8).ends(0)
        before = (out / "config.toml").read_bytes()
        said = started(stage, out, "--num-rollout", "1").ends(2)
    assert said == f"millpond: {out} is there already: --resume goes on with that run, another --out starts a new one\n"
    assert (out / "config.toml").read_bytes() == before


def test_a_run_that_goes_on_already_is_not_resumed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        run = started(stage, out, *SLOW)
        eventually(lambda: len(steps(out)) >= 1, "a step")
        said = stage.millpond("run", "--resume", "--out", out, "--num-epoch", "9").ends(2)
        assert "a server is already running" in said
        assert "stop that run first" in said
        assert "num_epoch = 1\n" in (out / "config.toml").read_text()
        run.ends(0)


def test_a_second_trainer_is_refused_and_told_of_the_first(redis_url: str, tmp_path: Path) -> None:
    with Parts(tmp_path, redis_url, prompts(tmp_path, 100)) as run:
        first = run.trainer("--num-rollout", "3")
        eventually(lambda: run.broker.state().get("status") == "running", "a trainer")
        said = run.trainer("--num-rollout", "3", "--resume").ends(2)
        assert f"run {run.run} has a trainer: " in said
        assert f"pid {first.process.pid}" in said
        first.kill(signal.SIGTERM)
        first.ends(130, seconds=20)
        assert run.broker.state()["status"] == "draining"


@pytest.mark.parametrize("how", ["", "--resume", "--auto-resume"])
def test_the_folder_of_another_run_is_refused_and_that_run_goes_on(redis_url: str, tmp_path: Path, how: str) -> None:
    with Parts(tmp_path, redis_url, prompts(tmp_path, 100)) as run:
        first = run.trainer("--num-rollout", "3")
        eventually(lambda: run.broker.state().get("status") == "running", "a trainer")
        mine, run.run = run.run, "other"
        said = run.trainer("--num-rollout", "3", *filter(None, [how])).ends(2)
        assert f"{run.out} is the folder of run {mine}" in said
        assert first.process.poll() is None
        first.kill(signal.SIGTERM)
        first.ends(130, seconds=20)


def test_a_resume_of_a_folder_that_was_mistyped_is_refused(redis_url: str, tmp_path: Path) -> None:
    """The logs that the trainer has just begun there are no run."""
    with Parts(tmp_path, redis_url, prompts(tmp_path, 4)) as run:
        for _ in range(2):
            said = run.trainer("--num-rollout", "3", "--resume").ends(2)
            assert f"--resume: there is no run {run.run}" in said


def test_files_in_the_current_folder_take_no_modules_place(tmp_path: Path) -> None:
    """As the command itself has it, which finds nothing there; its processes are no other."""
    for name in ("pipeline", "producers", "consumers", "trainer", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user wrote this')\n")
    data, out = prompts(tmp_path, 20), tmp_path / "run"
    with Stage(tmp_path) as stage:
        stage.millpond(
            *("run", "--out", out, *ECHO_RUN, *PATIENT, "--prompt-data", data, "--num-rollout", "2"),
            *("--eval-interval", "1", "--eval-prompt-data", "a", data),
            under=("-P", "-m"),
        ).ends(0, seconds=120)
    assert contiguous(steps(out)) == 2
    assert '"eval/a"' in (out / "evals.jsonl").read_text()


def test_at_its_end_a_run_says_what_came_of_its_evaluations(tmp_path: Path) -> None:
    evals = tmp_path / "evals.jsonl"
    assert list(outcome(None, None, evals)) == []
    told = [{"step": 2, "eval/a": 0.5, "eval/a-pass@1": 0.25, "eval/a/unscored": 0, "eval/seconds": 3.0}]
    told += [{"step": 4, "eval/skipped": 1}, {"step": 6, "eval/failed": 1}, {"step": 0, "eval/a": 0.0}]
    evals.write_text("".join(json.dumps(line) + "\n" for line in told) + '{"step": 8, "ev')
    steps = [{"step": step, "rollout/raw_reward": step / 8} for step in (1, 6)]
    assert list(outcome(*steps, evals)) == [
        "Reward 0.125 at step 1, 0.750 at step 6",
        "Evaluations: 2 done, 1 failed, 1 skipped; at step 2: eval/a 0.500, eval/a-pass@1 0.250",
    ]


# --- mistakes: one sentence that says what and where, and nothing is left behind


MISTAKES = {
    "a mistyped flag": (
        ["--rollout-bach-size", "4"],
        "unknown option --rollout-bach-size; did you mean --rollout-batch-size?",
    ),
    "no such file": (
        ["--prompt-data", "nothing.jsonl", "--engine", "echo", "--train-backend", "echo", "--rm-type", "random"],
        "--prompt-data nothing.jsonl: there is no such file",
    ),
    "a model without prompts": (
        ["--hf-checkpoint", ".", "--rm-type", "random"],
        "--hf-checkpoint is given and --prompt-data is not: a file of prompts is needed, or a --task",
    ),
    "a folder without a model": (
        ["--hf-checkpoint", ".", "--task", "own.f", "--rm-type", "random", "--num-rollout", "3"],
        "--hf-checkpoint .: no Hugging Face model (it has no config.json)",
    ),
    "a name that is none": (
        ["--run", "my run", "--num-rollout", "3"],
        "--run 'my run': a run's name is 1 to 64 characters out of A-Z a-z 0-9 . _ -",
    ),
    "a bound in lock-step": (
        ["--max-weight-staleness", "1", "--no-fully-async"],
        "--max-weight-staleness does nothing here: without --fully-async a run is lock-step and on-policy; "
        "add --fully-async or leave the bound out",
    ),
    "an evaluation that nothing could make": (
        [
            *ECHO_RUN,
            "--task",
            "own.f",
            *("--num-rollout", "3", "--eval-interval", "1", "--eval-function-path", "nil.f"),
        ],
        "--eval-function-path 'nil.f': there is no module 'nil', neither installed, nor on PYTHONPATH, nor in FOLDER",
    ),
    "no run to resume": (["--resume", "--out", "nowhere"], "--resume: nowhere holds no run (no config.toml)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_leaves_nothing(mistake: str, tmp_path: Path) -> None:
    args, sentence = MISTAKES[mistake]
    with Stage(tmp_path) as stage:
        said = stage.millpond("run", *args).ends(2)
        assert said == f"millpond: {sentence.replace('FOLDER', str(tmp_path))}\n"
    assert [p.suffix for p in tmp_path.iterdir()] == [".out"]


def test_a_bad_row_of_an_evaluation_is_told_before_anything_is_started(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"input": broken\n{"input": "a", "label": "b"}\n')
    evals = ("--eval-interval", "1", "--eval-prompt-data", "a", bad, "--eval-rm-type", "exact")
    with Stage(tmp_path) as stage:
        said = started(stage, tmp_path / "run", *evals).ends(2)
        assert said.startswith("millpond: --eval-prompt-data a: 1 bad row, none is used\n")
        assert f"{bad}:1: broken JSON at column 11" in said
        bad.write_text('{"input": "a", "label": "b"}\n')
        said = started(stage, tmp_path / "run", *evals, "--eval-label-key", "lable").ends(2)
    assert said.rstrip().endswith(":1: no label under 'lable', and the reward exact needs one (--eval-label-key)")
    assert not (tmp_path / "run").exists()


def test_an_unreachable_redis_ends_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        said = started(stage, tmp_path / "run", "--redis-url", "redis://127.0.0.1:1", "--redis-patience", "0.5").ends(3)
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("millpond: Redis was away for 0 s (--redis-patience); last: Error 111")
    assert not (tmp_path / "run").exists()


def test_a_redis_that_evicts_is_refused(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "redis", "process") as server, Parts(tmp_path, server.url, tmp_path) as parts:
        parts.broker.client.config_set("maxmemory-policy", "allkeys-lru")
        said = started(parts, tmp_path / "new", "--redis-url", server.url).ends(2)
        also = parts.trainer("--num-rollout", "1").ends(2)
    assert said == also
    assert "maxmemory-policy is allkeys-lru: under memory pressure this Redis would delete" in said
    assert not (tmp_path / "new").exists()


def test_a_bad_row_ends_the_run_with_its_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"input": "a", "label": "b"}) + "\n" + '{"input": broken\n')
    with Stage(tmp_path) as stage:
        said = stage.millpond("run", "--out", "run", *ECHO_RUN, "--prompt-data", path, "--num-epoch", "1").ends(2)
        assert "Traceback" not in said
        assert f"{path}:2: broken JSON at column 11" in said
        path.write_text(json.dumps({"input": "a", "label": "b"}) + "\n")
        stage.millpond("run", "--resume", "--out", "run").ends(0)


# --- the default run learns

TRAINED = {
    *(f"train/{n}" for n in ("loss", "pg_clipfrac", "ppo_kl", "grad_norm", "entropy", "tis")),
    "train/train_rollout_logprob_abs_diff",
}


def rewards(lines: list[dict[str, float]]) -> list[float]:
    return [line["rollout/raw_reward"] for line in lines]


def test_the_default_run_learns(tmp_path: Path) -> None:
    """Of eleven runs: 0.04 over the first five steps, 0.43 to 0.51 over the last five."""
    with Stage(tmp_path) as stage:
        said = stage.millpond("run", "--num-rollout", "80").ends(0, seconds=280)
        (out,) = (tmp_path / "runs").iterdir()
        assert audited(stage, out)["committed"] == 80 * 32
    lines = steps(out)
    first, last = fmean(rewards(lines)[:5]), fmean(rewards(lines)[-5:])
    assert contiguous(lines) == 80
    assert all(line.keys() >= TRAINED for line in lines)
    assert undocumented(name for line in lines for name in line) == []
    assert max(line["rollout/fully_async/max_staleness"] for line in lines) <= 2
    assert last > 0.25
    assert last > 3 * first
    assert f"Reward {rewards(lines)[0]:.3f} at step 1, {rewards(lines)[-1]:.3f} at step 80\n" in said


@pytest.mark.slow
def test_the_default_run_learns_its_task(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.millpond("run").ends(0, seconds=290)
        (out,) = (tmp_path / "runs").iterdir()
    found = rewards(steps(out))
    assert found[0] < 0.2
    assert max(fmean(found[i : i + 10]) for i in range(len(found) - 9)) > 0.9
    assert fmean(found[-10:]) > 0.8
