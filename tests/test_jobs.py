"""Jobs and who does them: a real worker on a real Redis, killed, hung, given what is not its to do."""

from __future__ import annotations

import base64
import pickle
import re
import signal
import subprocess
import sys
import threading
import uuid
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from processes import Stage, Started, alive, eventually, own_code
from rig import Rig, agreed
from rq import Callback, Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from pipeline import job_queues, join, purge
from pipeline.agreed import Agreed
from pipeline.broker import Broker
from pipeline.causes import causes
from pipeline.code import digest
from pipeline.config import GenerateConfig, RunConfig, WorkerConfig
from pipeline.errors import UsageError
from pipeline.evaluation import Terms
from pipeline.glance import look
from pipeline.jobs import EVAL, REWARD, Jobs, Outcome
from pipeline.keys import Keys
from pipeline.modes import check
from pipeline.outage import passing
from pipeline.plan import others_of
from pipeline.server import EmbeddedServer
from producers.hand import Hand
from producers.jobs import JOBS, Desk
from producers.member import LIMIT
from producers.worker import Crew

MINE = """
import os, time
from pathlib import Path

def score(x):
    word, _, rest = x.response.partition(" ")
    if word == "hang":  # until its file is there; and says where
        Path(rest + ".pid").write_text(str(os.getpid()))
        while not Path(rest).exists():
            time.sleep(0.02)
    if word == "die" and not (rest and Path(rest).exists()):
        Path(rest or "dead").touch()
        os.kill(os.getpid(), 11)
    if word == "raise":
        raise KeyError("a bug of mine")
    return os.getpid() if word == "pid" else len(x.response)
"""


@dataclass
class Place:
    """A run that has a config and jobs, and no trainer."""

    stage: Stage
    url: str
    run: str
    jobs: Jobs

    def put(self, response: str, timeout: float = 60.0) -> str:
        given = {"prompt": "p", "label": None, "metadata": {}, "status": "completed", "index": 0, "prompt_id": 1}
        return self.jobs.put(REWARD, uuid.uuid4().hex, {"inputs": [{**given, "response": response}]}, timeout, 600)

    def outcomes(self, *ids: str) -> list[Outcome]:
        found: dict[str, Outcome] = {}

        def all_ended() -> bool:
            found.update(self.jobs.ended([id for id in ids if id not in found], 0.2))
            return len(found) == len(ids)

        eventually(all_ended, f"the end of {len(ids)} jobs", 90)
        return [found[id] for id in ids]

    def file(self) -> Path:
        return self.stage.folder / uuid.uuid4().hex

    def worker(self, *more: object) -> Started:
        started = self.stage.millpond(
            "worker", "--run", self.run, "--redis-url", self.url, "--custom-rm-path", "mine.score", *more,
            **own_code(self.stage.folder, MINE),
        )  # fmt: skip
        eventually(lambda: self.workers() or started.process.poll() is not None, "a worker", 90)
        return started

    def workers(self) -> int:
        client = self.jobs.client
        names: Any = client.smembers(f"rq:workers:{self.jobs.keys.queue('rewards')}")
        return sum(bool(client.exists(name)) for name in names)


def place_on(url: str, folder: Path, **rules: Any) -> Place:
    run = f"r.{uuid.uuid4().hex}"
    jobs = Jobs(url, Keys(run), "test")
    config = agreed(rm_place="worker", code={"custom_rm_path": digest("mine.score")}, **rules)
    jobs.client.set(jobs.keys["config"], config.model_dump_json())
    return Place(Stage(folder), url, run, jobs)


@pytest.fixture(scope="module")
def place(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """With one worker for all tests that leave it alive."""
    made = place_on(redis_url, tmp_path_factory.mktemp("jobs"))
    with made.stage:
        made.worker("--rm-workers", 1)
        yield made
        made.jobs.close()


@pytest.fixture
def alone(redis_url: str, tmp_path: Path) -> Iterator[Place]:
    """Without a worker."""
    made = place_on(redis_url, tmp_path)
    with made.stage:
        yield made
        made.jobs.close()


def given(pid: float) -> list[str]:
    return Path(f"/proc/{int(pid)}/cmdline").read_text().split("\0")


# --- how jobs end


def test_a_job_is_done_in_a_process_that_was_not_forked_and_has_no_secret_in_its_words(place: Place) -> None:
    first, second = place.outcomes(place.put("pid"), place.put("pid"))
    assert first.value == second.value
    words = given(first.value[0])
    assert "producers.horse" in words
    password = place.url.split("@")[0].rpartition(":")[2]
    assert password
    assert password not in str(words)


def test_what_hangs_is_killed_and_what_raises_tells_why_and_the_next_is_done(place: Place) -> None:
    file = place.file()
    late, wrong, fine = place.outcomes(place.put(f"hang {file}", timeout=1), place.put("raise"), place.put("abc"))
    assert (late.state, late.why) == ("failed", "late: not done in 1 s")
    assert not alive(int(_pid(file) or 0))
    assert wrong.why.startswith("failed: KeyError: 'a bug of mine'\nTraceback")
    assert 'mine.py", line' in wrong.why
    assert fine == Outcome("done", [3.0])


def test_a_job_whose_process_is_killed_is_run_once_more_and_else_names_the_signal(place: Place) -> None:
    """BB-73, the child alone; BB-75: the failure names the signal."""
    once, always = place.outcomes(place.put(f"die {place.file()}"), place.put("die"))
    assert once.state == "done"
    assert always == Outcome("failed", why="died: its process got SIGSEGV")


def test_answers_that_hang_hold_up_none_but_themselves(place: Place) -> None:
    """Three of 40 hang until all others are scored, with one process for them all to begin with."""
    file = place.file()
    ids = {place.put(f"hang {file}" if n % 13 == 2 else "abc"): n % 13 == 2 for n in range(40)}
    assert {one.value[0] for one in place.outcomes(*(id for id, hangs in ids.items() if not hangs))} == {3.0}
    assert not place.jobs.ended([id for id, hangs in ids.items() if hangs])
    file.touch()
    assert all(one.state == "done" for one in place.outcomes(*ids))


@pytest.mark.slow
def test_ten_that_hang_among_200_hold_up_none_of_the_others(alone: Place) -> None:
    alone.worker("--rm-workers", 2)
    file = alone.file()
    ids = {alone.put(f"hang {file}" if n % 20 == 5 else "abc", timeout=600): n % 20 == 5 for n in range(200)}
    alone.outcomes(*(id for id, hangs in ids.items() if not hangs))
    assert not alone.jobs.ended([id for id, hangs in ids.items() if hangs])


def test_a_job_that_nobody_waits_for_any_more_is_stopped(place: Place) -> None:
    file = place.file()
    id = place.put(f"hang {file}", timeout=1000)
    pid = int(eventually(lambda: _pid(file), "a start"))
    place.jobs.forget([id])
    eventually(lambda: not alive(pid), "its end")
    assert place.outcomes(id)[0].state == "lost"


# --- what is no job of ours


def test_a_foreign_job_is_refused_and_reported_and_nothing_of_it_is_called(place: Place) -> None:
    file, client = place.file(), place.jobs.client
    where = {"connection": client, "name": place.jobs.keys.queue("rewards")}
    plain, pickled = Queue(**where, serializer=JSONSerializer), Queue(**where)
    called = Callback("os.mkdir")
    foreign = [
        plain.enqueue("os.mkdir", str(file)),
        plain.enqueue("os.mkdir", str(file), on_failure=called, on_success=called, on_stopped=called),
        pickled.enqueue("os.mkdir", str(file)),
        plain.enqueue_call(EVAL.function, kwargs={"version": 1}),
        plain.enqueue_call(REWARD.function, args=(str(file),)),
        plain.enqueue_call(REWARD.function, kwargs={"inputs": []}, timeout=-1),
    ]
    broken = plain.enqueue("os.mkdir", str(file))
    client.hset(broken.key, "status", "nonsense")
    outcomes = place.outcomes(*(job.id for job in foreign))
    assert [one.what for one in outcomes] == ["refused"] * 6
    assert "'os.mkdir' is no job of Millpond's" in outcomes[0].why
    assert place.outcomes(place.put("abc")) == [Outcome("done", [3.0])]
    errors: Any = client.xrange(place.jobs.keys["errors"])
    told = [entry[b"what"].decode() for _, entry in errors]
    assert sum("refused" in what for what in told) == 7
    assert any("cannot be read" in what for what in told)
    assert not file.exists()


def values(client: redis.Redis, key: bytes) -> list[bytes]:
    kind = client.type(key)
    read: dict[bytes, Any] = {
        b"hash": lambda: [x for pair in client.hgetall(key).items() for x in pair],  # type: ignore[union-attr]
        b"list": lambda: client.lrange(key, 0, -1),
        b"set": lambda: client.smembers(key),
        b"zset": lambda: client.zrange(key, 0, -1),
        b"string": lambda: [client.get(key)],
        b"stream": lambda: [x for _, e in client.xrange(key) for x in e.values()],  # type: ignore[union-attr]
    }
    return [value for value in read[kind]() if value is not None] if kind != b"none" else []  # type: ignore[index]


def unpacked(value: bytes) -> Iterator[bytes]:
    yield value
    for undo in (zlib.decompress, lambda v: base64.b64decode(v, validate=True)):
        try:
            inner = undo(value)
            yield from unpacked(inner) if inner else ()
        except (ValueError, zlib.error):
            continue


def test_nothing_in_rqs_keys_is_pickled(place: Place) -> None:
    """Of jobs that wait, are done, failed and ran into their time."""
    evaluation = place.jobs.put(EVAL, "20", {"version": 7, "names": ["é", None, 1.5]}, 1800)
    place.outcomes(place.put("abc"), place.put("raise"), place.put(f"hang {place.file()}", timeout=1))
    keys = job_queues.rq_keys(Broker(place.url, place.jobs.keys, "test"))
    found = [x for key in keys for value in values(place.jobs.client, key) for x in unpacked(value)]
    assert any(b"a bug of mine" in value for value in found)
    assert any(value == b"[3.0]" for value in found)
    assert any(b'"version": 7' in value for value in found)
    assert [value for value in found if value[:1] == b"\x80" and b"\x94" in value] == []
    assert any(value[:1] == b"\x80" and b"\x94" in value for value in unpacked(zlib.compress(pickle.dumps(("f",)))))
    place.jobs.forget([evaluation])


def test_rq_info_shows_queue_and_workers(place: Place) -> None:
    id = place.put("abc")
    place.outcomes(id)
    command = [sys.executable, "-m", "rq.cli", "info", "--url", place.url, place.jobs.keys.queue("rewards")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert re.search(rf"^millpond:{place.run}:rewards +\|", said, re.MULTILINE)
    assert re.search(
        rf"^millpond:{place.run}:\S+-rewards-0 \(.*\): (idle|busy) millpond:{place.run}:rewards", said, re.M
    )
    assert place.jobs.ended([id])[id] == Outcome("done", [3.0])


# --- who is killed, told to stop, or not let in


def test_the_job_of_a_worker_that_is_killed_is_done_by_another(alone: Place) -> None:
    """BB-73. That its time without a sign is over, 20 s, is written into Redis."""
    file, client = alone.file(), alone.jobs.client
    first = alone.worker("--rm-workers", 1)
    id = alone.put(f"hang {file}")
    pid = int(eventually(lambda: _pid(file), "a start"))
    first.kill(signal.SIGKILL)
    first.wait()
    eventually(lambda: not alive(pid), "the end of its process")
    file.touch()
    queue = alone.jobs.keys.queue("rewards")
    (execution,) = client.zrange(f"rq:wip:{queue}", 0, -1)  # type: ignore[misc]
    client.zadd(f"rq:wip:{queue}", {execution: 1.0})
    client.delete(*(key for key in client.scan_iter(f"rq:worker:millpond:{alone.run}:*")))
    second = alone.worker("--rm-workers", 1)
    assert alone.outcomes(id)[0].state == "done"
    second.kill(signal.SIGTERM)
    second.ends(0)
    assert alone.workers() == 0


def test_what_a_worker_took_and_never_began_is_anothers_after_the_heartbeats_limit(alone: Place) -> None:
    """Killed in between. Its time, 20 s, is written into Redis."""
    hand, id = hand_of(alone, WorkerConfig(custom_rm_path="mine.score")), alone.put("abc")
    client, queue = alone.jobs.client, f"rq:queue:{alone.jobs.keys.queue('rewards')}"
    assert client.lmove(queue, f"{queue}:intermediate", "RIGHT", "LEFT") == id.encode()

    def tidied() -> list[list[bytes]]:
        client.delete(f"rq:tidy:{hand.queue.name}")
        hand.tidy()
        return [client.lrange(name, 0, -1) for name in (queue, f"{queue}:intermediate")]  # type: ignore[misc]

    first = f"{queue}:intermediate:first_seen:{id}"
    assert tidied() == tidied() == [[], [id.encode()]]
    client.set(first, float(client.get(first) or 0) - LIMIT - 1)  # type: ignore[arg-type]
    assert tidied() == [[id.encode()], []]
    assert not client.exists(first)
    assert Job.fetch(id, connection=client, serializer=JSONSerializer).retries_left == REWARD.retries - 1
    hand.broker.close()


def test_a_worker_that_is_told_to_stop_ends_its_job_first(alone: Place) -> None:
    file = alone.file()
    worker = alone.worker("--rm-workers", 1)
    id = alone.put(f"hang {file}")
    eventually(file.with_suffix(".pid").exists, "a start")
    worker.kill(signal.SIGTERM)
    file.touch()
    worker.ends(0)
    assert alone.jobs.ended([id])[id].state == "done"


def hand_of(place: Place, config: WorkerConfig) -> Hand:
    """For a thread of the test's."""
    broker = Broker(place.url, place.jobs.keys, "job", patience=60)
    rules = Agreed.model_validate_json(place.jobs.client.get(place.jobs.keys["config"]))  # type: ignore[arg-type]
    desk = Desk(config, rules, place.run, place.url, None)
    return Hand(broker, REWARD, "w0", JOBS["reward"], desk)


@contextmanager
def working(hand: Hand) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=hand.run)
    thread.start()
    try:
        yield thread
    finally:
        hand.broker.stop.set()
        thread.join(60)
        hand.broker.close()
    assert not thread.is_alive()


def test_what_does_not_end_in_time_is_handed_back_and_loses_no_try(
    alone: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", own_code(alone.stage.folder, MINE)["PYTHONPATH"])
    torch.ones(8).sum()  # BB-75: what has computed here would be broken in a fork
    hand, file = hand_of(alone, WorkerConfig(custom_rm_path="mine.score")), alone.file()
    hand.grace = 0.1
    id = alone.put(f"hang {file}")
    with working(hand):
        pid = int(eventually(lambda: _pid(file), "a start"))
    assert not alive(pid)
    job = Job.fetch(id, connection=alone.jobs.client, serializer=JSONSerializer)
    assert (job.get_status(), job.retries_left) == ("queued", REWARD.retries)
    assert alone.jobs.client.lrange(f"rq:queue:{alone.jobs.keys.queue('rewards')}", 0, -1) == [id.encode()]
    assert not alone.jobs.client.zcard(f"rq:wip:{alone.jobs.keys.queue('rewards')}")


def _pid(file: Path) -> str:
    path = file.with_suffix(".pid")
    return path.read_text() if path.exists() else ""


def test_a_full_redis_keeps_a_worker_waiting_and_breaks_nobody(tmp_path: Path) -> None:
    """BB-64."""
    with EmbeddedServer(tmp_path / "redis", "process") as server:
        place = place_on(server.url, tmp_path)
        client = place.jobs.client
        client.config_set("maxmemory", 1)
        with working(hand_of(place, WorkerConfig(rm_type="length"))) as thread:
            id, why = place.jobs.offer(EVAL, "20", {"version": 1}, timeout=60)
            assert not id
            assert "maxmemory" in why
            with pytest.raises(redis.exceptions.RedisError) as error:
                place.put("abc")
            assert passing(error.value)
            assert thread.is_alive()
            client.config_set("maxmemory", 0)
            assert place.outcomes(place.put("abc")) == [Outcome("done", [3.0])]
        place.jobs.close()


def test_a_worker_with_another_reward_takes_no_jobs(alone: Place) -> None:
    id = alone.put("abc")
    args = ("worker", "--run", alone.run, "--redis-url", alone.url, "--rm-type", "length")
    assert "--custom-rm-path is not given here, and run's trainer was started with another" in alone.stage.millpond(
        *args
    ).ends(2)
    assert not alone.jobs.ended([id])


def test_a_worker_does_no_job_by_settings_that_the_trainer_has_changed(alone: Place) -> None:
    """A trainer that was stopped leaves its workers there; it may be resumed with other settings."""
    client, key = alone.jobs.client, alone.jobs.keys["config"]
    first = Agreed.model_validate_json(client.get(key))  # type: ignore[arg-type]
    client.set(key, first.model_copy(update={"rm_place": "generator", "digest": "a"}).model_dump_json())
    args = ("worker", "--run", alone.run, "--redis-url", alone.url, "--custom-rm-path", "mine.score")
    own = own_code(alone.stage.folder, MINE)
    assert "its generators" in alone.stage.millpond(*args, "--worker-jobs", "rewards", **own).ends(2)
    worker = alone.stage.millpond(*args, **own)
    eventually(lambda: alone.jobs.workers(EVAL), "a worker", 90)
    client.set(key, first.model_copy(update={"digest": "b"}).model_dump_json())
    assert alone.outcomes(alone.put("abc")) == [Outcome("done", [3.0])]
    eventually(lambda: alone.jobs.workers(EVAL), "a worker for evaluations", 90)
    other = Terms(sets=("a",), shared=False, code={})
    client.set(key, first.model_copy(update={"digest": "b", "evals": other}).model_dump_json())
    eventually(lambda: not alone.jobs.workers(EVAL) and alone.jobs.workers(REWARD), "evaluations left to others", 90)
    client.set(key, first.model_copy(update={"code": {"rm_type": "x"}, "digest": "c"}).model_dump_json())
    assert "--custom-rm-path is mine.score here, and run's trainer has none" in worker.ends(2)


def test_a_worker_for_evaluations_waits_for_no_answers_when_the_run_is_over(real: Rig) -> None:
    with closing(Jobs(real.url, real.keys, "test")) as jobs:
        jobs.put(REWARD, "left", {"inputs": []}, timeout=10)
    broker = Broker(real.url, real.keys, "jobs", 20)
    real.raw.hset(real.keys["state"], "status", "running")
    rules, config = agreed(rm_place="worker"), WorkerConfig(rm_type="length", worker_jobs="evals")
    crew = Crew(config, join.Place(real.url, real.keys.run, None), rules, broker)
    assert not crew._over()
    real.raw.hset(real.keys["state"], "status", "done")
    assert crew._over()
    broker.close()


# --- how long, and whose


def test_times_are_those_of_the_kind_and_not_rqs(alone: Place) -> None:
    """BB-76: RQ's own are 180 s for a job, 500 s for its result, a year for a failure."""
    job = Job.fetch(alone.put("abc", timeout=240), connection=alone.jobs.client, serializer=JSONSerializer)
    assert (job.timeout, job.result_ttl, job.failure_ttl) == (240, 3600, 3600)
    assert Job.fetch(alone.put("abc", timeout=2.5), job.connection, serializer=JSONSerializer).timeout == 3
    id = alone.jobs.put(EVAL, "20", {"version": 1}, timeout=7200)
    job = Job.fetch(id, connection=alone.jobs.client, serializer=JSONSerializer)
    assert (job.timeout, job.result_ttl, job.ttl, job.retries_left) == (7200, 7 * 86400, None, 2)
    assert alone.jobs.put(EVAL, "20", {"version": 2}, timeout=1) == id
    assert job.kwargs == {"version": 1}


def test_arguments_that_are_too_many_or_no_json_are_refused(alone: Place) -> None:
    with pytest.raises(UsageError, match="are allowed"):
        alone.put("x" * (8 << 20))
    with pytest.raises(TypeError, match="JSON"):
        alone.jobs.put(EVAL, "1", {"value": b"1"}, timeout=1)


def test_jobs_that_wait_for_nobody_are_shown_and_purged_with_their_run(real: Rig) -> None:
    real.trainer()
    jobs = Jobs(real.url, real.keys, "test")
    jobs.put(EVAL, "20", {"version": 1}, timeout=60)
    jobs.put(REWARD, "1", {"inputs": []}, timeout=60)
    broker = real.feeder()
    view = look(broker)
    assert [(q.name, q.waiting, q.running, q.workers) for q in view.jobs] == [("rewards", 1, 0, 0), ("evals", 1, 0, 0)]
    told = {cause.name: cause for cause in causes(view)}
    assert told["no worker for rewards"].kind == "fault"
    assert told["no worker for evals"].kind == "wait"
    assert "1 evals wait and no worker for them is there: start `millpond worker`" in str(told["no worker for evals"])
    assert len(job_queues.rq_keys(broker)) == 4
    purge._delete(broker)
    assert job_queues.rq_keys(broker) == set()
    queues: Any = real.raw.smembers("rq:queues")
    assert not [name for name in queues if real.keys.prefix.encode() in name]
    jobs.close()


def test_a_run_starts_a_worker_only_where_there_are_jobs_for_one() -> None:
    assert ("worker", "worker") not in others_of(RunConfig())
    assert ("worker", "worker") in others_of(RunConfig(rm_place="worker", rm_type="exact"))


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        (GenerateConfig(custom_rm_path="m.f", rm_timeout=5), "--rm-timeout does nothing here: --custom-rm-path takes"),
        (
            GenerateConfig(rm_type="exact", rm_spares=5),
            "--rm-spares does nothing here: it belongs to --rm-place",
        ),
        (WorkerConfig(custom_rm_path="m.f", rm_memory=5), "--rm-memory does nothing here"),
        (GenerateConfig(custom_rm_path="m.f", rm_timeout=5, rm_place="worker"), ""),
        (WorkerConfig(custom_rm_path="m.f", rm_timeout=5, rm_spares=0), ""),
    ],
)
def test_limits_of_a_reward_are_refused_where_nothing_keeps_them(config: GenerateConfig, wrong: str) -> None:
    if not wrong:
        assert check(config) == []
        return
    with pytest.raises(UsageError, match=wrong):
        check(config)
