"""`millpond why`: the sentence for each cause, and runs brought to a stand in each way by real parts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from make import Hand, at_work, drain_of, feed, push, queue, until
from processes import ECHO_RUN, Stage, Started, eventually, prompts
from rig import LIMIT, Rig

from consumers.staleness import Limit
from pipeline import why
from pipeline.causes import WAITS, causes
from pipeline.errors import EngineDown, UsageError
from pipeline.overview import Caps, Failure, Overview, Prompts, Queues, Trainer, Worker
from pipeline.server import EmbeddedServer
from pipeline.types import Policy
from pipeline.why import judge

Capture = pytest.CaptureFixture[str]

WORKER = Worker("w1", 1.0, True, 4, {"host": "a", "ready": True, "loading": None, "tokens_per_sec": 50.0})
HEALTHY = Overview(
    status="running",
    why="",
    paused=False,
    alarms=0,
    alarm="",
    failure=None,
    refuses="",
    feeder=True,
    full=False,
    pushed=20,
    pushed_age=3.0,
    queues=Queues(fresh=9, retry=1, in_flight=4, refeed=0, queued=2, queued_bytes=100, taken=2, trained=4, open=8),
    caps=Caps(queue=8, queue_bytes=1000, in_flight=8, bound=12, room=4, open=92, max_staleness=1),
    policy=Policy(5, "/5", "hf", "d", 4, 0.0),
    policy_age=12.0,
    trainer=Trainer("host pid 7", 1, 0.5, True, WAITS, 1.0),
    workers=[WORKER],
    prompts=Prompts(40, 100, 10, 0, 0, {"dropped": {}, "dead": {}, "recycled": {}, "strikes": {}}),
)


def view(**changes: Any) -> Overview:
    """HEALTHY with other values; a dict changes fields of what is there."""
    made = {n: replace(getattr(HEALTHY, n), **v) if isinstance(v, dict) else v for n, v in changes.items()}
    return replace(HEALTHY, **made)


def workers(count: int = 2, **info: Any) -> list[Worker]:
    return [replace(WORKER, name=f"w{i}", info={**WORKER.info, **info}) for i in range(count)]


DRY = {"fresh": 0, "retry": 0}
IDLE = {"fresh": 0, "retry": 0, "in_flight": 0, "queued": 0}
SILENT = [replace(WORKER, alive=False, seen=45.0), replace(WORKER, name="w2", alive=False, seen=30.0)]
GONE = {"alive": False, "seen": 50.0, "doing": "training upon version 5", "doing_for": 50.0}
TRAINS = {"doing": "training upon version 5", "doing_for": 34.0}
FULL = {"queued": 8, "in_flight": 4, "open": 12}
FAILURE = Failure("w9", "UsageError: --rm-type is math here", 8.0)

TABLE: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "done": ({"status": "done", "why": "all 50 steps are done"}, "done", "the run is done: all 50 steps", ""),
    "failed": ({"status": "failed", "why": "boom"}, "failed", "the run has failed: boom", "--resume"),
    "stopped in order": (
        {"status": "draining", "why": "asked to stop", "trainer": {"alive": False, "seen": None}},
        "stopped",
        "was stopped in order: asked to stop",
        "--resume",
    ),
    "memory": ({"refuses": "OOM command not allowed"}, "redis", "takes no writes (OOM command", "maxmemory"),
    "disk": ({"refuses": "MISCONF Errors writing to the AOF"}, "redis", "takes no writes (MISCONF", "disk"),
    "replica": ({"refuses": "READONLY You can't"}, "redis", "takes no writes (READONLY", "master"),
    "other refusal": ({"refuses": "NOREPLICAS Not enough"}, "redis", "takes no writes (NOREPLICAS", "replicas"),
    "no trainer": (
        {"status": "no trainer yet", "trainer": {"epoch": 0, "seen": None, "alive": False}, "policy": None},
        "no trainer",
        "no trainer has ever come",
        "millpond train",
    ),
    "trainer left": ({"trainer": {"seen": None, "alive": False}}, "trainer gone", "has left", "--resume"),
    "trainer silent": ({"trainer": GONE}, "trainer gone", "host pid 7 is silent for 50 s (last: training", "log"),
    "alarm": ({"alarms": 1, "alarm": "worker w1: KeyError"}, "alarm", "a fatal error waits", "inspect errors"),
    "paused": ({"paused": True}, "paused", "paused, and nothing is leased", "HDEL"),
    "evaluating": ({"held": True}, "evaluating", "an evaluation has the engines, and nothing is leased", ""),
    "no config": ({"caps": {"bound": None, "room": None, "in_flight": None}}, "no config", "`config`", "restart"),
    "no worker ever": ({"workers": [], "pushed": 0, "pushed_age": None}, "no workers", "has ever come", "generate"),
    "workers refuse": (
        {"workers": [], "pushed": 0, "failure": FAILURE},
        "no workers",
        "the last that ended said 8 s ago: UsageError: --rm-type is math here",
        "generate",
    ),
    "workers gone": ({"workers": []}, "no workers", "no generator is there", "generate"),
    "all silent": ({"workers": SILENT}, "workers silent", "all generators are silent, the last for 30 s", "logs"),
    "one silent": ({"workers": [WORKER, SILENT[0]]}, "some silent", "silent, soon declared dead: w1", ""),
    "engines away": ({"workers": workers(trouble="refused")}, "engines away", "no engine answers (refused)", "logs"),
    "engines start": (
        {"workers": workers(ready=False, busy_for=70)},
        "engines start",
        "not ready yet, for 70 s",
        "",
    ),
    "weights": (
        {"workers": workers(loading=6, busy_for=9.0)},
        "loading",
        "all generators load weights (version 6), for 9 s",
        "",
    ),
    "never fed": (
        {"queues": IDLE, "feeder": False, "prompts": {"fed": 0, "total": None}},
        "no prompts",
        "no prompt has ever been fed; no feeder is there",
        "millpond feed",
    ),
    "feeder gone": ({"queues": DRY, "feeder": False}, "no prompts", "no prompt waits; no feeder is there", "feed"),
    "feeder unknown": ({"queues": DRY, "feeder": None}, "no prompts", "is the feeder running?", "feed"),
    "to be fed again": (
        {"queues": {**DRY, "refeed": 3}, "feeder": False, "prompts": {"fed": 100}},
        "no prompts",
        "3 are to be fed again",
        "feed",
    ),
    "feeder slow": ({"queues": DRY}, "feeder slow", "no prompts wait; a feeder is connected", "log"),
    "data ended": ({"queues": IDLE, "prompts": {"fed": 100}}, "data ended", "the data has ended", ""),
    "trainer busy": ({"trainer": TRAINS}, "trainer busy", "busy training upon version 5, for 34 s", ""),
    "trainer starts": ({"trainer": {"doing": "starting", "doing_for": 4.0}}, "trainer busy", "busy starting", ""),
    "list full": ({"queues": FULL}, "list full", "the list is full (8 of 8 groups)", ""),
    "bytes full": (
        {"full": True, "queues": {"queued_bytes": 900}},
        "bytes full",
        "the list is full (900 B of 0.977 KB)",
        "",
    ),
    "no room": (
        {"caps": {"room": 0}, "queues": {"in_flight": 4, "queued": 2, "open": 12}},
        "no room",
        "4 groups in flight, 2 queued and 6 with the trainer, of 12",
        "",
    ),
    "in flight": ({"queues": {"in_flight": 8}}, "flight full", "as many groups are in flight as may be (8 of 8)", ""),
    "generating": ({}, "generating", "1 generators work on 4 groups, 50 tokens/s; the last group came 3 s ago", ""),
    "idle": ({"queues": {"in_flight": 0}}, "idle", "take no prompts, though some wait", "logs"),
}


@pytest.mark.parametrize("case", TABLE)
def test_each_cause_has_its_sentence_and_remedy(case: str) -> None:
    changes, name, what, do = TABLE[case]
    first = causes(view(**changes))[0]
    assert first.name == name
    assert what in first.what
    assert do in first.do
    assert bool(first.do) == bool(do)


def test_every_cause_is_in_the_table() -> None:
    source = Path(why.__file__).with_name("causes.py").read_text()
    known = set(re.findall(r'Cause\(\s*"([^"]+)"', source))
    assert known == {name for _, name, _, _ in TABLE.values()}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"trainer": GONE, "queues": FULL, "caps": {"room": 0}}, ["trainer gone", "list full", "no room"]),
        ({"trainer": TRAINS, "queues": FULL, "caps": {"room": 0}}, ["trainer busy", "list full", "no room"]),
        ({"refuses": "OOM x", "trainer": GONE, "alarms": 1}, ["redis", "trainer gone", "alarm"]),
        ({"workers": [], "queues": DRY, "feeder": False}, ["no workers", "no prompts"]),
        ({"workers": workers(loading=6), "trainer": TRAINS}, ["loading", "trainer busy"]),
        ({"paused": True, "workers": SILENT}, ["paused", "workers silent"]),
        ({"status": "failed", "workers": [], "trainer": GONE}, ["failed"]),
    ],
)
def test_what_brings_the_others_about_comes_first(changes: dict[str, Any], names: list[str]) -> None:
    found = [cause.name for cause in causes(view(**changes)) if cause.name != "generating"]
    assert found == names


def test_nothing_from_redis_is_obeyed_by_a_terminal_in_any_sentence() -> None:
    evil = "\x1b[2J\n"
    for changes in (
        {"status": "done", "why": evil},
        {"status": "failed", "why": evil},
        {"refuses": evil},
        {"trainer": {**GONE, "name": evil, "doing": evil}},
        {"trainer": {**TRAINS, "doing": evil}},
        {"alarms": 1, "alarm": evil},
        {"workers": [], "failure": Failure(evil, evil, 1.0)},
        {"workers": [WORKER, replace(SILENT[0], name=evil)]},
        {"workers": workers(trouble=evil)},
        {"workers": workers(loading=evil, busy_for=evil)},
        {"workers": workers(tokens_per_sec=evil)},
    ):
        assert all(str(cause).isprintable() for cause in causes(view(**changes)))


# -- the verdict of two looks


def moved(**changes: Any) -> Overview:
    return view(**{"pushed": 21, **changes})


@pytest.mark.parametrize(
    ("after", "stands", "name", "sentence"),
    [
        (moved(), False, "moves", "It does not stand still: the last group came 3 s ago, the last publication 12 s"),
        (moved(policy=None, policy_age=None), False, "moves", "no weights are published yet"),
        (moved(trainer=GONE), True, "trainer gone", "It moves, but not for long: no trainer is alive"),
        (view(trainer=GONE), True, "trainer gone", "It stands still: no trainer is alive"),
        (view(trainer=TRAINS), False, "trainer busy", "It waits: the trainer is busy"),
        (view(trainer={**TRAINS, "doing_for": 700.0}), True, "trainer busy", "It stands still: the trainer is busy"),
        (view(workers=workers(loading=6, busy_for=700)), True, "loading", "It stands still: all generators load"),
        (view(pushed_age=30.0), False, "generating", "It waits: 1 generators work"),
        (view(pushed_age=700.0), True, "generating", "It stands still: 1 generators work"),
        (view(queues=FULL), False, "list full", "It waits: the list is full"),
        (view(queues=FULL, policy_age=700.0), True, "list full", "It stands still: the list is full"),
        (moved(policy_age=700.0), True, "circles", "groups come and go, and no weights were published for 12 min"),
        (moved(policy_age=700.0, trainer=TRAINS), False, "moves", "It does not stand still"),
        (view(status="done", why="enough"), False, "done", "The run is done: enough."),
        (view(status="failed", why="boom"), True, "failed", "It stands still: the run has failed: boom."),
        (view(queues={"in_flight": 0}, workers=[WORKER], caps={"room": 0}), False, "no room", "It waits: no room"),
    ],
)
def test_two_looks_tell_what_moves_from_what_stands(after: Overview, stands: bool, name: str, sentence: str) -> None:
    verdict = judge(replace(after, pushed=20), after, False, 600.0)
    assert (verdict.stands, verdict.name) == (stands, name), verdict
    assert sentence in verdict.sentence


def test_prompts_that_only_go_to_and_fro_do_not_count_as_movement() -> None:
    again = {"dropped": {}, "dead": {}, "recycled": {"engine_down": 9}, "strikes": {}}
    after = view(queues={"fresh": 5, "in_flight": 8}, prompts={"reasons": again})
    assert judge(HEALTHY, after, False, 600.0).moved == []


def test_a_run_that_was_started_for_the_look_stands_still_unless_it_had_ended() -> None:
    assert judge(HEALTHY, HEALTHY, True, 600.0).name == "stopped"
    assert judge(HEALTHY, HEALTHY, True, 600.0).stands
    ended = view(status="draining", trainer={"alive": False, "seen": None})
    assert not judge(ended, ended, True, 600.0).stands


# -- runs brought to a stand by real parts


def asked(capsys: Capture, rig: Rig, *argv: str, code: int) -> tuple[str, str]:
    """What the command says, and the name of the root cause."""
    args = ["--redis-url", rig.url, "--run", rig.keys.run, "--apart", "0.01", *argv]
    capsys.readouterr()
    assert why.main(args) == code
    text = capsys.readouterr().out
    assert why.main([*args, "--json"]) == code
    return text, json.loads(capsys.readouterr().out)["cause"]


def test_a_run_that_was_only_fed_waits_for_a_trainer(real: Rig, capsys: Capture) -> None:
    feed(real, 3)
    text, cause = asked(capsys, real, code=1)
    assert cause == "no trainer"
    assert text.splitlines() == [
        "It stands still: no trainer has ever come. To do: start `millpond train`.",
        "- no generator has ever come: start `millpond generate`",
    ]


def test_a_run_without_a_feeder_says_so_and_one_with_a_feeder_does_not(real: Rig, capsys: Capture) -> None:
    trainer = real.trainer()
    real.worker()
    text, cause = asked(capsys, real, code=1)
    assert (cause, "no prompt has ever been fed; no feeder is there" in text) == ("no prompts", True)
    feeder = real.feeder()
    feeder.cursor()
    assert asked(capsys, real, code=0)[1] == "feeder slow"
    trainer.finish("done", "the data ended after 0 steps")
    assert asked(capsys, real, code=0)[0] == "The run is done: the data ended after 0 steps.\n"


def test_a_list_that_is_full_because_the_trainer_died_is_the_trainers_fault(real: Rig, capsys: Capture) -> None:
    trainer, worker = real.trainer(queue_capacity=2), real.worker()
    feed(real, 4)
    drain_of(trainer, 1)
    queue(real, worker, 1, 1)
    text, cause = asked(capsys, real, code=0)
    assert cause == "trainer busy"
    assert "- the list is full (2 of 2 groups): workers wait for the trainer\n" in text
    real.raw.hset(real.keys["state"], "trainer_seen", real.now() - 2 * LIMIT)
    text, cause = asked(capsys, real, code=1)
    assert cause == "trainer gone"
    assert text.startswith("It stands still: no trainer is alive: trainer is silent for 4")
    assert "the list is full" in text


def test_the_drain_says_when_it_waits_and_when_it_has_handed_over(real: Rig, capsys: Capture) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 4)
    queue(real, worker, 1)
    assert drain_of(trainer, 1).batch(Limit(1, (), 1)) is not None
    assert "the trainer is busy training upon version 1" in asked(capsys, real, code=0)[0]


def test_a_list_that_is_full_of_bytes_is_said_to_be(real: Rig, capsys: Capture) -> None:
    trainer, worker = real.trainer(queue_max_bytes=1), real.worker()
    feed(real, 4)
    trainer.renew(doing=WAITS)
    first, second = real.lease(worker, 2)
    push(real, worker, first, 1)
    assert real.do(worker.push(second, b"more")) == "full"
    text, cause = asked(capsys, real, code=0)
    assert (cause, "B of 1 B): workers wait for the trainer" in text) == ("bytes full", True)


def test_room_that_is_used_up_is_counted_by_where_it_went(real: Rig, capsys: Capture) -> None:
    trainer, worker = real.trainer(bound=4), real.worker()
    feed(real, 9)
    queue(real, worker, 1, 1)
    real.lease(worker, 9)
    trainer.take(1)
    trainer.renew(doing=WAITS)
    text, cause = asked(capsys, real, code=0)
    assert cause == "no room"
    assert "2 groups in flight, 1 queued and 1 with the trainer, of 4" in text


def test_silent_workers_and_those_that_left_are_told_apart(real: Rig, capsys: Capture) -> None:
    trainer, worker = real.trainer(), real.worker()
    trainer.renew(doing=WAITS)
    feed(real, 2)
    queue(real, worker, 1)
    real.silence("w1", 3 * LIMIT)
    text, cause = asked(capsys, real, code=1)
    assert (cause, "all generators are silent, the last for 6" in text) == ("workers silent", True)
    assert real.do(worker.leave())
    assert asked(capsys, real, code=1)[0].startswith("It stands still: no generator is there.")


def test_a_pause_an_alarm_and_a_failure_are_said(real: Rig, capsys: Capture) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 2)
    real.raw.hset(real.keys["state"], "paused", "1")
    assert asked(capsys, real, code=1)[1] == "paused"
    real.do(worker.fail("Traceback: here", "KeyError: 'label'"))
    text, cause = asked(capsys, real, code=1)
    assert cause == "alarm"
    assert "a fatal error waits for the trainer to read it (worker w1: KeyError: 'label')" in text
    trainer.finish("failed", "worker w1 failed")
    assert asked(capsys, real, code=1)[0].startswith("It stands still: the run has failed: worker w1 failed.")


def test_what_moves_between_two_looks_moves(real: Rig, capsys: Capture) -> None:
    trainer, worker = real.trainer(), real.worker()
    trainer.renew(doing=WAITS)
    feed(real, 9)

    before = why.look(trainer)
    queue(real, worker, 1)
    verdict = judge(before, why.look(trainer), False, 600.0)
    assert (verdict.name, verdict.moved) == ("moves", ["pushed"])
    assert "It does not stand still: the last group came" in verdict.sentence


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Rig]:
    """A run on a Redis of its own, to be spoilt."""
    with EmbeddedServer(tmp_path / "redis", "process") as server:
        rig = Rig(server.url)
        yield rig
        rig.raw.config_set("maxmemory", 0)
        rig.raw.config_set("save", "")
        rig.raw.replicaof("NO", "ONE")
        rig.close()


def test_a_redis_that_takes_no_writes_is_the_first_cause(own: Rig, capsys: Capture) -> None:
    own.trainer()
    feed(own, 3)
    own.raw.config_set("maxmemory", 1)
    text, cause = asked(capsys, own, code=1)
    assert (cause, "Redis takes no writes (" in text, "maxmemory" in text) == ("redis", True, True)
    own.raw.config_set("maxmemory", 0)
    own.raw.replicaof("localhost", "1")
    text, cause = asked(capsys, own, code=1)
    assert (cause, "replica" in text) == ("redis", True)


def test_a_redis_that_cannot_save_is_the_first_cause(own: Rig, capsys: Capture, tmp_path: Path) -> None:
    own.trainer()
    own.raw.config_set("save", "3600 1")
    (tmp_path / "redis" / "dump.rdb").mkdir()
    own.raw.bgsave()
    eventually(lambda: own.raw.info("persistence")["rdb_last_bgsave_status"] == "err", "a save that fails")
    text, cause = asked(capsys, own, code=1)
    assert (cause, "MISCONF" in text, "cannot write to its disk" in text) == ("redis", True, True)


def test_a_redis_that_is_away_is_a_sentence_too(tmp_path: Path, capsys: Capture) -> None:
    argv = ["--redis-url", f"unix://{tmp_path}/none", "--run", "x", "--redis-patience", "0.1"]
    assert why.main(argv) == 1
    assert capsys.readouterr().out.startswith("It stands still: Redis does not answer (")
    assert why.main([*argv, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["cause"] == "redis away"


def test_a_run_that_is_unknown_is_a_mistake(real: Rig) -> None:
    real.trainer()
    with pytest.raises(UsageError, match="there is no run nope"):
        why.main(["--redis-url", real.url, "--run", "nope"])


# -- what workers say of themselves


def test_workers_that_load_or_whose_engine_is_away_say_so(real: Rig, capsys: Capture) -> None:
    trainer = real.trainer()
    trainer.renew(doing=WAITS)
    feed(real, 2)
    engine = Hand()
    engine.gate.clear()

    async def load() -> None:
        async with at_work(real, engine) as generator:
            await until(lambda: engine.loads)
            assert "all generators load weights (version 1)" in asked(capsys, real, code=0)[0]
            engine.gate.set()
            await until(lambda: engine.prompts() == [0, 1])
            engine.fail(0, 0, EngineDown("connection refused"))
            await until(lambda: generator.worker.trouble)
            await generator.broker.heartbeat(generator.info(), 0)
            text, cause = asked(capsys, real, code=1)
            assert (cause, "no engine answers (connection refused)" in text) == ("engines away", True)
            engine.end(1)
            await until(lambda: not generator.worker.trouble)

    asyncio.run(load())


# -- a whole run


def local(stage: Stage, out: Path, *more: object) -> Started:
    data = prompts(stage.folder, 200)
    pace = ("--echo-latency", "0.01", "--queue-capacity", "4")
    return stage.millpond("run", "--out", out, *ECHO_RUN, "--prompt-data", data, "--num-epoch", "1", *pace, *more)


def verdict_of(stage: Stage, out: Path, code: int | None = None) -> dict[str, Any]:
    ended = stage.millpond("why", out, "--json", "--apart", "0.5")
    assert ended.wait() in ((0, 1) if code is None else (code,)), ended.said()
    return dict(json.loads(ended.said()))


def test_a_run_is_followed_from_its_first_step_to_its_stop(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        run = local(stage, out, "--echo-train-seconds", "0.3")
        eventually(lambda: (out / "metrics.jsonl").exists(), "a step")
        eventually(lambda: verdict_of(stage, out)["cause"] == "moves", "a run that moves")
        run.kill(signal.SIGINT)
        run.ends(130)
        assert verdict_of(stage, out, 0)["sentence"] == "The run was stopped in order: asked to stop."


@pytest.mark.slow
def test_a_trainer_that_is_held_is_the_cause_until_it_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Stage(tmp_path) as stage:
        run = local(stage, out, "--echo-train-seconds", "0.3")
        eventually(lambda: (out / "metrics.jsonl").exists(), "a step")
        trainer = run.children()["train"]
        os.kill(trainer, signal.SIGSTOP)
        found = eventually(lambda: (v := verdict_of(stage, out))["cause"] == "trainer gone" and v, "silence", 120)
        assert found["stands_still"]
        assert "list full" in [cause["name"] for cause in found["others"]]
        os.kill(trainer, signal.SIGCONT)
        eventually(lambda: verdict_of(stage, out)["cause"] == "moves", "a run that moves again")
