"""Metrics out: event files, W&B, Prometheus, as a user starts them; and that training goes on whatever they do."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documented import undocumented
from processes import ECHO_RUN, Stage, eventually, own_code, prompts, steps
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from rig import Rig
from test_see_it import filled

from pipeline import track
from pipeline.broker import Broker
from pipeline.config import TrainConfig
from pipeline.errors import UsageError
from pipeline.exporter import Exporter
from pipeline.find import Found
from pipeline.join import Place
from pipeline.keys import Keys
from pipeline.metrics import Records
from pipeline.modes import check
from pipeline.server import EmbeddedServer
from trainer.trackers import Trackers

WANDB = """
import json, os, sys, time

def told(*what):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(what) + "\\n")

def Settings(**given):
    return given

class Run:
    def define_metric(self, name, step_metric=None):
        told("axis", name, step_metric)
    def log(self, values):
        told("log", values)
        if os.environ.get("FAIL") == "raise":
            raise OSError("no space on the tracker")
        while os.environ.get("FAIL") == "hang":
            time.sleep(1)
    def finish(self):
        told("finish")

def init(**given):
    told("init", {k: str(v) for k, v in given.items() if k in ("project", "id", "mode", "name", "resume")})
    return Run()
"""
"A stand-in for the package wandb: says in $TOLD what it was told."


def wandb_in(folder: Path, fail: str = "") -> dict[str, str]:
    """The environment of a user with the package wandb."""
    home = folder / "packages"
    home.mkdir()
    env = own_code(home, "")
    (home / "wandb.py").write_text(WANDB)
    return {**env, "TOLD": str(folder / "told"), "FAIL": fail}


def told(folder: Path) -> list[Any]:
    path = folder / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def written(folder: Path) -> Path:
    """A run's folder: 25 steps, then the evaluation of step 10."""
    records = Records(folder / "run" / "metrics.jsonl", 1, folder)
    for step in range(1, 26):
        records.write(step, {"rollout/raw_reward": step / 32, "train/loss": float("nan")}, {"w": [1.5, 2]})
    records.late(10, {"eval/math": 0.5})
    records.close()
    return folder / "run"


def events(folder: Path) -> Iterator[Any]:
    """All that event files hold, checksums checked: read by tensorboardX's own code."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    def masked(data: bytes) -> int:
        crc = crc32c(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    for path in sorted(folder.rglob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            record = data[12 : 12 + size]
            assert [masked(data[:8]), masked(record)] == [
                struct.unpack("<I", data[8:12])[0],
                struct.unpack("<I", data[12 + size : 16 + size])[0],
            ]
            yield Event.FromString(record)
            data = data[16 + size :]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Name -> (step, value)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events(folder):
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def scraped(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


# -- TensorBoard and W&B, of a folder


def test_an_event_file_holds_each_step_and_a_late_result_at_its_own(tmp_path: Path) -> None:
    folder = written(tmp_path)
    with Stage(tmp_path) as stage:
        stage.millpond("track", folder, "--use-tensorboard", "--tb-project-name", "mine").ends(0)
    first, start, *rest = events(folder / "tensorboard" / "mine")
    assert first.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (0, 1)
    assert scalars(folder / "tensorboard") == {
        "rollout/raw_reward": [(step, step / 32) for step in range(1, 26)],
        "eval/math": [(10, 0.5)],
    }
    lines = steps(folder)
    assert [event.wall_time for event in rest[:25]] == [line["time"] for line in lines]


def test_after_a_resume_what_was_sent_before_is_not_sent_again_and_what_was_given_up_is_hidden(tmp_path: Path) -> None:
    folder = written(tmp_path)
    last = max(json.loads((folder / "evals.jsonl").read_text())["time"], steps(folder)[-1]["time"])
    records = Records(folder / "metrics.jsonl", 21, tmp_path)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records.write(21, {"rollout/raw_reward": 0.75}, {})
    records.close()
    newer = steps(folder)[-1]["time"]
    assert len(lines) == 20
    with Stage(tmp_path) as stage:
        since = last if newer > last else newer - 0.0005
        stage.millpond("track", folder, "--use-tensorboard", f"--since={since}").ends(0)
    assert scalars(folder / "tensorboard") == {"rollout/raw_reward": [(21, 0.75)]}
    start = [event.step for event in events(folder / "tensorboard") if event.session_log.status == 1]
    assert start == [21]


def test_wandb_has_an_axis_of_its_own_so_that_a_late_result_stands_at_its_step(tmp_path: Path) -> None:
    folder = written(tmp_path)
    env = wandb_in(tmp_path)
    flags = ("--use-wandb", "--wandb-mode", "offline", "--wandb-project", "p")
    with Stage(tmp_path) as stage:
        for _ in range(2):
            stage.millpond("track", folder, *flags, **env).ends(0)
    calls = told(tmp_path)
    begun = [call[1] for call in calls if call[0] == "init"]
    assert begun[0] == begun[1]
    assert (begun[0]["project"], begun[0]["mode"], begun[0]["resume"]) == ("p", "offline", "allow")
    assert [call[1:] for call in calls[:3] if call[0] == "axis"] == [["step", None], ["*", "step"]]
    logged = [call[1] for call in calls if call[0] == "log"]
    assert logged[:26] == [
        *({"step": step, "rollout/raw_reward": step / 32} for step in range(1, 26)),
        {"step": 10, "eval/math": 0.5},
    ]
    assert calls[-1] == ["finish"]


def test_a_tracker_that_hangs_says_where_and_ends(tmp_path: Path) -> None:
    folder = written(tmp_path)
    with Stage(tmp_path) as stage:
        hanging = stage.millpond(
            "track", folder, "--use-wandb", "--tracker-timeout", "1", **wandb_in(tmp_path, fail="hang")
        )
        said = hanging.ends(1)
    assert "wandb.py" in said
    assert len([call for call in told(tmp_path) if call[0] == "log"]) == 1


# -- beside a trainer


def test_a_run_with_trackers_one_of_which_fails(tmp_path: Path) -> None:
    out, port = tmp_path / "run", free_port()
    with Stage(tmp_path) as stage:
        run = stage.millpond(
            *("run", "--out", out, *ECHO_RUN, "--echo-latency", "0.05", "--echo-train-seconds", "0.05"),
            *("--prompt-data", prompts(tmp_path, 200), "--num-rollout", "1000", "--prometheus-port", port),
            *("--use-tensorboard", "--use-wandb", "--wandb-mode", "offline"),
            **wandb_in(tmp_path, fail="raise"),
        )
        log = out / "logs" / "trainer.log"
        eventually(lambda: "track-wandb ended" in (log.read_text() if log.exists() else ""), "wandb's end is told of")
        text = eventually(lambda: "millpond_reward" in (found := scraped(port)) and found, "an answer with a reward")
        seen = len(steps(out))
        eventually(lambda: len(steps(out)) >= seen + 5, "five more steps")
        run.kill(2)
        run.ends(130)
    lines = steps(out)
    assert scalars(out / "tensorboard")["rollout/raw_reward"] == [
        (line["step"], pytest.approx(line["rollout/raw_reward"])) for line in lines
    ]
    (end,) = [line for line in log.read_text().splitlines() if "track-wandb" in line]
    assert "exit code 1" in end
    assert "OSError: no space on the tracker" in end
    assert len([call for call in told(tmp_path) if call[0] == "log"]) == 1
    assert undocumented(name for line in lines for name in line) == []
    values = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    assert values["millpond_trainer_up"] == 1
    assert values["millpond_steps_total"] >= 1
    assert scraped(port) == ""
    timeline = [json.loads(line) for line in (out / "timeline.jsonl").read_text().splitlines()]
    assert [line["step"] for line in timeline] == [line["step"] for line in lines]
    assert all(len(said) == 2 for line in timeline for said in line["workers"].values())


def test_a_run_that_is_over_at_once_sends_it_all(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        stage.millpond(
            *("run", "--out", out, *ECHO_RUN, "--prompt-data", prompts(tmp_path, 20), "--num-rollout", "2"),
            "--use-tensorboard",
        ).ends(0)
    assert [step for step, _ in scalars(out / "tensorboard")["rollout/raw_reward"]] == [1, 2]
    assert "track-" not in (out / "logs" / "trainer.log").read_text()


def test_a_trainer_does_not_wait_long_for_a_tracker_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = written(tmp_path)
    for name, value in wandb_in(tmp_path, fail="hang").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MILLPOND_USE_TENSORBOARD", "1")  # the trainer's own variables are not for its trackers
    config = TrainConfig(use_wandb=True, wandb_mode="offline")
    trackers = Trackers(config, Place("redis://127.0.0.1:1", "run", folder), folder, patience=0.5)
    trackers.start()
    (process,) = [child.process for child in trackers.children]
    assert process is not None
    records = Records(folder / "metrics.jsonl", 26, tmp_path)
    records.write(26, {}, {})
    records.close()
    eventually(lambda: any(call[0] == "log" for call in told(tmp_path)), "it hangs")
    trackers.look()
    assert caplog.records == []
    trackers.close()
    assert process.poll() is not None
    assert len(caplog.records) == 2  # that it is killed, and that it is gone
    trackers.look()
    assert len(caplog.records) == 2


def test_trackers_that_never_began_are_not_waited_for_and_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer has failed before: its own error is what is told."""
    Trackers(TrainConfig(use_tensorboard=True), Place("redis://127.0.0.1:1", "run", tmp_path), tmp_path).close()
    assert caplog.records == []


def test_what_is_not_installed_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(use_wandb=True, prometheus_port=9100, num_rollout=1)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError) as caught:
        check(config)
    assert str(caught.value).splitlines() == [
        "--use-wandb needs the package wandb: pip install 'millpond[wandb]'",
        "--prometheus-port needs the package prometheus_client: pip install 'millpond[prometheus]'",
    ]


def test_a_key_is_no_argument_of_a_process(tmp_path: Path) -> None:
    config = TrainConfig.model_validate({"use_wandb": True, "wandb_key": "geheim", "wandb_group": "g"})
    (child,) = Trackers(config, Place("redis://:pass@h:1", "run", tmp_path), tmp_path).children
    assert child.env["MILLPOND_WANDB_KEY"] == "geheim"
    assert "--wandb-group=g" in child.command(0)
    assert not [word for word in [*child.command(0), repr(child)] if "geheim" in word or "pass" in word]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"wandb_project": "x"}, "--wandb-project does nothing here: it belongs to --use-wandb"),
        ({"tb_project_name": "x"}, "--tb-project-name does nothing here: it belongs to --use-tensorboard"),
        ({"prometheus_host": "0.0.0.0"}, "--prometheus-host does nothing here: it belongs to --prometheus-port"),
    ],
)
def test_an_option_of_a_tracker_that_is_not_asked_for_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check(TrainConfig(num_rollout=1, **given))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "one tracker a process"),
        (["--use-tensorboard", "--prometheus-port", "9100"], "one tracker a process"),
        (["--use-tensorboard"], "holds no metrics.jsonl"),
    ],
)
def test_mistakes_are_a_sentence(tmp_path: Path, flags: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        track.main([str(tmp_path), *flags])


def test_a_port_that_cannot_be_had_is_a_sentence(redis_url: str, real: Rig, tmp_path: Path) -> None:
    real.trainer()
    with Stage(tmp_path) as stage:
        said = stage.millpond(
            *("track", "--run", real.keys.run, "--prometheus-port", "9100", "--prometheus-host", "192.0.2.1"),
            MILLPOND_REDIS_URL=redis_url,
        ).ends(2)
    assert "--prometheus-host 192.0.2.1 --prometheus-port 9100: " in said


# -- Prometheus


def exported(url: str, run: str, folder: Path | None = None) -> Exporter:
    return Exporter(Found(Broker(url, Keys(run), "look", patience=0.2), "here", folder, False))


def families(exporter: Exporter) -> dict[str, Metric]:
    """As Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(exporter)
    return {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}


def test_prometheus_reads_what_the_run_holds(redis_url: str, real: Rig, tmp_path: Path) -> None:
    filled(redis_url, real.keys.run).close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "time": 1, "rollout/raw_reward": 0.25}\n')
    exporter = exported(redis_url, real.keys.run, tmp_path)
    found = families(exporter)
    exporter.run.broker.close()
    for name, value in {
        "millpond_queue_groups": 1, "millpond_queue_capacity_groups": 8, "millpond_in_flight_groups": 4,
        "millpond_room_groups": 5, "millpond_taken_groups": 2, "millpond_unsaved_groups": 1,
        "millpond_weight_version": 3, "millpond_trainer_up": 1, "millpond_tokens_per_second": 99.5,
        "millpond_reward": 0.25, "millpond_redis_up": 1,
        "millpond_alarms": 1,
    }.items():  # fmt: skip
        assert [(s.value, s.labels) for s in found[name].samples] == [(value, {"run": real.keys.run})], name
    totals = {s.name: s for f in found.values() for s in f.samples if f.type == "counter"}
    assert (totals["millpond_prompts_fed_total"].value, totals["millpond_steps_total"].value) == (40, 7)
    assert totals["millpond_prompts_dropped_total"].labels == {"run": real.keys.run, "reason": "zero_std"}
    assert {(s.labels["state"], s.value) for s in found["millpond_workers"].samples} == {("alive", 1), ("silent", 0)}
    assert ("alarm", "fault") in {(s.labels["cause"], s.labels["kind"]) for s in found["millpond_cause"].samples}


def test_names_follow_prometheus_conventions_and_are_documented(redis_url: str, real: Rig, tmp_path: Path) -> None:
    filled(redis_url, real.keys.run).close()
    from pipeline.exporter import STEP

    line = {"step": 7, "time": 1, **dict.fromkeys(STEP, 0.5)}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    exporter = exported(redis_url, real.keys.run, tmp_path)
    found = families(exporter)
    exporter.run.broker.close()
    names = [sample.name for family in found.values() for sample in family.samples]
    assert all(name.startswith("millpond_") for name in names)
    assert all(family.documentation for family in found.values())
    counters = {sample.name for f in found.values() if f.type == "counter" for sample in f.samples}
    assert {name for name in names if name.endswith("_total")} == counters
    assert not [name for name in names if any(unit in name for unit in ("_ms", "_sec_", "_kb", "percent"))]
    assert undocumented(names) == []


def test_scrapes_share_a_look(redis_url: str, real: Rig) -> None:
    real.trainer()
    exporter = exported(redis_url, real.keys.run)
    exporter.looked = float("inf")  # no time passes
    first = exporter.collect()
    exporter.looked = float("inf")
    assert exporter.collect() is first
    exporter.run.broker.close()


def test_where_redis_does_not_answer_that_is_all_it_says(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "redis") as server:
        filled(server.url, "demo").close()
        exporter = exported(server.url, "demo")
        assert families(exporter)["millpond_redis_up"].samples[0].value == 1
    exporter.looked = float("-inf")
    found = families(exporter)
    exporter.run.broker.close()
    assert list(found) == ["millpond_redis_up"]
    assert found["millpond_redis_up"].samples[0].value == 0


# -- late results


def test_late_results_have_their_own_file_and_a_resume_keeps_those_of_steps_it_keeps(tmp_path: Path) -> None:
    folder = written(tmp_path)
    before = (folder / "metrics.jsonl").read_text()
    assert "eval" not in before
    (line,) = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    assert (line["step"], line["eval/math"]) == (10, 0.5)
    Records(folder / "metrics.jsonl", 11, tmp_path).close()
    assert len((folder / "evals.jsonl").read_text().splitlines()) == 1
    Records(folder / "metrics.jsonl", 10, tmp_path).close()
    assert (folder / "evals.jsonl").read_text() == ""
    assert [p.name for p in folder.iterdir() if os.fspath(p).endswith(".new")] == []
