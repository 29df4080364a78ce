"""status, inspect, audit and purge, on a real server and the real broker: a run that holds something in every place."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from pipeline import audit, inspect, purge, show, status
from pipeline.agreed import Agreed
from pipeline.broker import Broker
from pipeline.codec import encode
from pipeline.errors import RedisDown, UsageError
from pipeline.fenced import TrainerBroker
from pipeline.keys import NAMES, Keys
from pipeline.leases import WorkerBroker
from pipeline.replies import Lease
from pipeline.server import EmbeddedServer, locate
from pipeline.types import Group, Policy, Prompt, Sample, Sequence, Span

ROOT = Path(__file__).parents[1]
Capture = pytest.CaptureFixture[str]
T = TypeVar("T")

AGREED = Agreed(
    rollout_batch_size=2,
    n_samples_per_prompt=2,
    group_rm=False,
    code={},
    bound=12,
    in_flight=12,
    max_weight_staleness=1,
    queue_capacity=8,
    queue_max_bytes=1 << 20,
    max_group_bytes=1 << 20,
    rollout_submission_granularity="sample",
    pause_generation_mode="retract",
)
PLACES = {
    "waiting": 28,
    "in flight": 4,
    "queued": 1,
    "taken": 2,
    "trained": 1,
    "committed": 1,
    "dropped": 1,
    "dead": 1,
    "to be fed again": 1,
}
"What `filled` puts where; 40 prompts in all."


def group_of(prompt: Prompt, worker: str = "w1") -> Group:
    def sample(i: int) -> Sample:
        tokens = np.arange(3 + i, dtype=np.int32)
        zeros = np.zeros(len(tokens), dtype=np.float32)
        ones = np.ones(len(tokens), dtype=np.uint8)
        sequence = Sequence(np.array([7], dtype=np.int32), tokens, zeros, ones, (Span(1, 0, len(tokens)),))
        return Sample(i, "completed", f"answer {i} \x1b[31m", float(i), (sequence,), {"odd": float("nan")})

    return Group(prompt, (sample(0), sample(1)), worker, 0.5)


def record(i: int) -> str:
    return json.dumps({"prompt": f"What is {i}?", "label": str(i)})


def new_trainer(url: str, run: str) -> TrainerBroker:
    trainer = TrainerBroker(url, Keys(run), patience=5)
    trainer.takeover("host-1")
    trainer.configure(AGREED.model_dump_json())
    trainer.publish(Policy(1, "/weights/1", "hf", "d", 0, 1.0), [])
    trainer.renew(status="running", save_interval="20")
    return trainer


def as_worker(url: str, run: str, name: str, work: Callable[[WorkerBroker], Any]) -> Any:
    async def go() -> Any:
        worker = WorkerBroker(url, Keys(run), name, patience=5)
        try:
            return await work(worker)
        finally:
            await worker.close()

    return asyncio.run(go())


async def generate(worker: WorkerBroker) -> None:
    """0 to 4 are pushed, 5 dropped, 6 dead, 7 goes round again, 8 to 11 stay in flight."""
    info = {
        "host": "node-a",
        "pid": 11,
        "engine": "Echo",
        "version": 1,
        "loading": 2,
        "samples": 8,
        "tokens_per_sec": 99.5,
    }
    await worker.register(info)
    leases = (await worker.lease(12, 0)).leases
    for lease in leases[:5]:
        assert await worker.push(lease, encode(group_of(lease.prompt))) == "pushed"
    await worker.drop(leases[5], "zero_std")
    await worker.hand_back([leases[6]], "too_large", "bury")
    await worker.hand_back([leases[7]], "stale", "strike")
    await worker.heartbeat(info, 3)


def filled(url: str, run: str) -> TrainerBroker:
    """A run with prompts in every place, see PLACES."""
    trainer = new_trainer(url, run)
    trainer.describe_data(40, 80, "abc")
    trainer.feed(0, [record(i) for i in range(40)])
    as_worker(url, run, "w1", generate)
    prompts = [Prompt(i, 1, 0, record(i)) for i in range(4)]
    messages, _ = trainer.take(4)
    assert len(messages) == 4
    assert all(trainer.hold(prompt) for prompt in prompts)
    trainer.publish(Policy(3, "/weights/3", "hf", "e", 1, 2.0, ((2, 1),)), prompts[:2])
    assert trainer.commit(prompts[:1]) == []
    delete_entry(trainer, 39)
    trainer.fenced("missing", 39)
    trainer.quarantine(b"\xff\x00broken", "schema: unknown")
    as_worker(url, run, "w1", lambda worker: worker.fail("Traceback:\n  boom \x1b[2J", "ZeroDivisionError"))
    return trainer


def delete_entry(broker: Broker, id: int) -> None:
    stream = broker.keys["prompts"]
    for entry, fields in broker.client.xrange(stream):
        if int(fields[b"id"]) == id:
            broker.client.xdel(stream, entry)


@dataclass(frozen=True)
class Place:
    """A server in a run's folder, and the run `demo` in it."""

    folder: Path
    url: str


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("here") / "runs" / "demo"
    with EmbeddedServer(folder / "redis") as server:
        filled(server.url, "demo").close()
        yield Place(folder, server.url)


@pytest.fixture
def fresh(demo: Place) -> Iterator[TrainerBroker]:
    """Another such run in the same server, to be spoilt."""
    trainer = filled(demo.url, f"test-{uuid.uuid4().hex}")
    yield trainer
    trainer.close()


def remote(demo: Place, broker: Broker) -> list[str]:
    return ["--redis-url", demo.url, "--run", broker.keys.run]


def told(capsys: Capture, main: Callable[[list[str]], int], *argv: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(list(argv)) == code
    return capsys.readouterr().out


def as_json(capsys: Capture, main: Callable[[list[str]], int], *argv: str, code: int = 0) -> Any:
    return json.loads(told(capsys, main, *argv, "--json", code=code), parse_constant=pytest.fail)


# -- audit


def test_each_prompt_of_a_live_run_is_found_in_its_one_place(demo: Place, capsys: Capture) -> None:
    found = as_json(capsys, audit.main, str(demo.folder), "--run", "demo")
    assert found["places"] == PLACES
    assert found["feed"] == sum(PLACES.values()) == 40
    assert found["holds"]
    assert found["hints"] == []
    assert "each of 40 prompts stands in exactly one place" in told(capsys, audit.main, *flags(demo))


def flags(demo: Place) -> list[str]:
    return ["--out", str(demo.folder), "--run", "demo"]


def spoil_missing(t: TrainerBroker) -> None:
    delete_entry(t, 20)


def spoil_in_two_places(t: TrainerBroker) -> None:
    t.client.setbit(t.keys["done:dropped"], 20, 1)


def spoil_twice_in_one_place(t: TrainerBroker) -> None:
    t.client.xadd(t.keys["prompts:retry"], {"id": 20, "attempt": 1, "strikes": 0, "prompt": "{}"})


def spoil_never_fed(t: TrainerBroker) -> None:
    t.client.xadd(t.keys["prompts"], {"id": 1000, "attempt": 1, "strikes": 0, "prompt": "{}"})


def spoil_unsettled_not_open(t: TrainerBroker) -> None:
    t.client.hdel(t.keys["open"], "4")


def spoil_queued_twice(t: TrainerBroker) -> None:
    t.client.zadd(t.keys["unsettled"], {"3": 5})


def spoil_push_number(t: TrainerBroker) -> None:
    t.client.zadd(t.keys["unsettled"], {"4": 77})


def spoil_leased_entry(t: TrainerBroker) -> None:
    delete_entry(t, 8)


@pytest.mark.parametrize(
    ("spoil", "field", "expected"),
    [
        (spoil_missing, "missing", [20]),
        (spoil_in_two_places, "doubled", {"20": ["waiting", "dropped"]}),
        (spoil_twice_in_one_place, "doubled", {"20": ["waiting", "waiting"]}),
        (spoil_never_fed, "beyond", {"1000": ["waiting"]}),
        (spoil_unsettled_not_open, "other", ["unsettled and not open: 4"]),
        (spoil_queued_twice, "other", ["2 ids count as queued, and the list is 1 groups long"]),
        (spoil_push_number, "other", ["unsettled under push numbers above 5, the newest: 4"]),
        (spoil_leased_entry, "other", ["leases of entries that no longer exist, which take up room: 1"]),
    ],
)
def test_a_violation_is_found_and_listed_by_id(
    demo: Place,
    fresh: TrainerBroker,
    capsys: Capture,
    spoil: Callable[[TrainerBroker], None],
    field: str,
    expected: Any,
) -> None:
    spoil(fresh)
    assert as_json(capsys, audit.main, *remote(demo, fresh), code=1)[field] == expected
    text = told(capsys, audit.main, *remote(demo, fresh), code=1)
    assert "exactly one place" not in text
    assert str(next(iter(expected))) in text


def test_counters_that_differ_are_a_hint_and_no_violation(demo: Place, fresh: TrainerBroker, capsys: Capture) -> None:
    fresh.client.hincrby(fresh.keys["counters"], "committed", 5)
    assert "hint: committed: 1, and the counter says 6" in told(capsys, audit.main, *remote(demo, fresh))


def test_what_a_restore_is_about_to_name_is_not_called_missing(demo: Place, fresh: TrainerBroker) -> None:
    class DuringRestore(Broker):
        looks = 0

        def patiently(self, verb: Callable[[], T]) -> T:
            answer = super().patiently(verb)
            self.looks += 1
            self.client.sadd(self.keys["refeed"], 20)
            return answer

    delete_entry(fresh, 20)
    broker = DuringRestore(demo.url, fresh.keys, "look")
    assert audit.audit(broker).holds
    assert broker.looks == 2
    broker.close()


def test_the_audit_holds_at_every_instant_of_a_busy_run(demo: Place) -> None:
    run = f"test-{uuid.uuid4().hex}"
    trainer, over = new_trainer(demo.url, run), threading.Event()
    trainer.feed(0, [record(i) for i in range(2000)])

    async def work(worker: WorkerBroker) -> None:
        await worker.register({})
        while not over.is_set():
            for i, lease in enumerate((await worker.lease(4, 0)).leases):
                await one_fate(worker, lease, i)
            await asyncio.sleep(0)

    async def one_fate(worker: WorkerBroker, lease: Lease, i: int) -> None:
        if i == 1:
            await worker.drop(lease, "zero_std")
        elif i == 2:
            await worker.hand_back([lease], "aborted")
        else:
            await worker.push(lease, encode(group_of(lease.prompt)))

    def train() -> None:
        version = 1
        while not over.is_set():
            trainer.take(2, block=False)
            version += 1
            trainer.publish(Policy(version, f"/{version}", "hf", "", 0, 0.0), [])
            trainer.check()

    threads = [threading.Thread(target=as_worker, args=(demo.url, run, "w", work)), threading.Thread(target=train)]
    for thread in threads:
        thread.start()
    broker = Broker(demo.url, Keys(run), "look")
    found = [audit.audit(broker) for _ in range(50)]
    over.set()
    for thread in threads:
        thread.join()
    broker.close()
    trainer.close()
    assert all(result.holds for result in found), [result for result in found if not result.holds]
    assert len({str(result.places) for result in found}) > 1


# -- status


def test_status_says_what_waits_where(demo: Place, capsys: Capture) -> None:
    view = as_json(capsys, status.main, *flags(demo))
    size = len(encode(group_of(Prompt(4, 1, 0, record(4)))))
    assert view["queues"] == {
        "fresh": 27, "retry": 1, "in_flight": 4, "refeed": 1,
        "queued": 1, "queued_bytes": size, "taken": 2, "trained": 1, "open": 4,
    }  # fmt: skip
    assert view["caps"] == {
        "queue": 8, "queue_bytes": 1 << 20, "in_flight": 13, "bound": 12, "room": 5, "open": 52, "max_staleness": 1,
    }  # fmt: skip
    assert view["prompts"] == {
        "fed": 40, "total": 80, "committed": 1, "dropped": 1, "dead": 1,
        "reasons": {
            "dropped": {"zero_std": 1}, "dead": {"too_large": 1}, "recycled": {"stale": 1},
            "strikes": {"stale": 1, "too_large": 1},
        },
    }  # fmt: skip
    assert (view["policy"]["version"], view["policy"]["step"], view["policy"]["lineage"]) == (3, 1, [[2, 1]])
    assert (view["trainer"]["name"], view["trainer"]["epoch"]) == ("host-1", 1)
    assert [(w["name"], w["leased"], w["info"]["host"]) for w in view["workers"]] == [("w1", 4, "node-a")]
    assert view["oldest_queued_lag"] == 1


def test_status_fits_80_columns_and_names_all_of_it(demo: Place, capsys: Capture) -> None:
    text = told(capsys, status.main, *flags(demo))
    assert max(len(line) for line in text.splitlines()[1:]) <= 80
    for words in (
        "version      3, step 1", "lineage: 2 restored 1", "host-1, epoch 1, seen", "40 fed of 80; 27 fresh",
        "1 retried wait, 1 to be fed again", "4 of 13 groups; workers: 1, 99.5 tokens/s", "1 of 8 groups",
        "the oldest lags by 1",
        "2 taken, 1 trained", "5 of 12 groups may be leased (max staleness 1)", "4 of 52 groups pushed",
        "1: zero_std 1", "1: too_large 1", "stale 1, too_large 1", "node-a", "1>2", "99.5", "a fatal error waits",
    ):  # fmt: skip
        assert words in text, words


def test_status_of_a_run_that_nobody_has_trained_yet(demo: Place, capsys: Capture) -> None:
    broker = Broker(demo.url, Keys(f"test-{uuid.uuid4().hex}"), "feeder")
    broker.feed(0, [record(0)])
    text = told(capsys, status.main, *remote(demo, broker))
    broker.close()
    for words in (
        "no trainer yet",
        "none published yet",
        "no trainer has ever come: start `millpond train`",
        "no generator has ever come",
        "1 fed; 1 fresh",
    ):
        assert words in text, words


def test_status_says_why_a_run_stands_still(demo: Place, fresh: TrainerBroker, capsys: Capture) -> None:
    fresh.configure(replace_in_config(bound=7))
    assert "no room: workers wait for the next version" in told(capsys, status.main, *remote(demo, fresh))
    fresh.configure(replace_in_config(queue_capacity=1))
    fresh.renew(paused="1", trainer_seen="1000")
    fresh.client.zadd(fresh.keys["workers"], {"w1": 1000})
    text = told(capsys, status.main, *remote(demo, fresh))
    assert max(len(line) for line in text.splitlines()[1:]) <= 80
    for words in ("the list is full (1 of 1", "is paused", "no trainer is alive: host-1", "all generators are silent"):
        assert words in text, words


def replace_in_config(**values: int) -> str:
    return AGREED.model_copy(update=values).model_dump_json()


def test_status_shows_the_last_whole_step_of_a_local_run(demo: Place, capsys: Capture) -> None:
    lines = [{"step": i, "rollout/raw_reward": 0.25 * i, "rollout/fully_async/avg_staleness": 0.5} for i in (2, 3)]
    metrics = demo.folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "rollo')
    text = told(capsys, status.main, *flags(demo))
    metrics.unlink()
    assert "3: reward 0.75, staleness 0.5" in text


def test_watching_ends_with_the_run(tmp_path: Path, capsys: Capture) -> None:
    codes: list[int] = []
    with EmbeddedServer(tmp_path / "redis") as server:
        filled(server.url, "demo").close()
        argv = [str(tmp_path), "--watch", "0.01", "--json", "--redis-patience", "0.1"]
        watcher = threading.Thread(target=lambda: codes.append(status.main(argv)))
        watcher.start()
        lines = ""
        while lines.count("\n") < 3 and watcher.is_alive():
            lines += capsys.readouterr().out
    watcher.join()
    assert codes == [0]
    assert [json.loads(line)["run"] for line in lines.splitlines()[:3]] == ["demo"] * 3


def test_on_a_terminal_there_are_rich_tables(demo: Place) -> None:
    text = on_terminal("status", *flags(demo))
    assert "──" in text
    assert "node-a" in text


def on_terminal(*argv: str, typed: bytes = b"") -> str:
    """What `millpond ...` writes to a terminal of 100 columns, on which `typed` is typed."""
    ours, theirs = pty.openpty()
    os.write(ours, typed)
    env = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    command = [sys.executable, "-m", "pipeline.cli", *argv]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # Linux: the other end is closed
            break
        if not part:
            break
        output += part
    os.close(ours)
    assert process.wait() == 0, output
    return output.decode()


# -- inspect


def test_groups_are_decoded_without_being_consumed(demo: Place, fresh: TrainerBroker, capsys: Capture) -> None:
    for _ in range(2):
        text = told(capsys, inspect.main, "groups", *remote(demo, fresh))
    assert "1 of 1 groups" in text
    row = text.splitlines()[-1].split()
    assert row[:7] == ["4", "1", "1", "1", "0", "1", "3-4"]
    assert row[-1] == "w1"
    (entry,) = as_json(capsys, inspect.main, "groups", *remote(demo, fresh))["entries"]
    assert (entry["id"], entry["attempt"], entry["versions"], entry["lag"]) == (4, 1, [1], 1)
    assert entry["prompt"] == {"prompt": "What is 4?", "label": "4"}
    assert [s["text"] for s in entry["samples"]] == ["answer 0 \x1b[31m", "answer 1 \x1b[31m"]
    sequence = entry["samples"][1]["sequences"][0]
    assert (sequence["tokens"], sequence["loss_mask"], sequence["versions"]) == ([0, 1, 2, 3], [1] * 4, [[1, 0, 4]])


def test_what_does_not_decode_is_shown_as_such(demo: Place, fresh: TrainerBroker, capsys: Capture) -> None:
    fresh.client.rpush(fresh.keys["groups"], b"\x1b]0;owned\xff", encode(group_of(Prompt(5, 1, 0, record(5)))))
    text = told(capsys, inspect.main, "groups", *remote(demo, fresh))
    assert "undecodable: " in text
    assert "3 of 3 groups" in text
    entries = as_json(capsys, inspect.main, "groups", *remote(demo, fresh))["entries"]
    assert [("undecodable" in e, e.get("id")) for e in entries] == [(False, 4), (True, None), (False, 5)]
    assert entries[1]["bytes"] == 10
    fresh.client.delete(fresh.keys["groups"])
    fresh.client.rpush(fresh.keys["groups"], b"\x00")
    assert "1 of 8 groups" in told(capsys, status.main, *remote(demo, fresh))


def test_prompts_are_listed_as_they_will_be_leased(demo: Place, capsys: Capture) -> None:
    found = as_json(capsys, inspect.main, "prompts", *flags(demo), "--limit", "6")
    assert found["total"] == 32
    assert [(e["id"], e["stream"], e["worker"]) for e in found["entries"]] == [
        (7, "retry", None), (8, "fresh", "w1"), (9, "fresh", "w1"), (10, "fresh", "w1"), (11, "fresh", "w1"),
        (12, "fresh", None),
    ]  # fmt: skip
    assert found["entries"][0]["strikes"] == 1
    assert found["entries"][0]["prompt"]["prompt"] == "What is 7?"
    text = told(capsys, inspect.main, "prompts", str(demo.folder), "--run", "demo", "--limit", "2")
    assert "2 of 32 prompts" in text
    assert "What is 8?" in text
    assert "What is 9?" not in text


def test_dead_letters_quarantine_and_errors_are_shown(demo: Place, capsys: Capture) -> None:
    assert "too_large" in told(capsys, inspect.main, "dead", *flags(demo))
    (dead,) = as_json(capsys, inspect.main, "dead", *flags(demo))["entries"]
    assert (dead["id"], dead["reason"], dead["prompt"]["label"]) == (6, "too_large", "6")
    assert "schema: unknown" in told(capsys, inspect.main, "quarantine", *flags(demo))
    (spoilt,) = as_json(capsys, inspect.main, "quarantine", *flags(demo))["entries"]
    assert (spoilt["length"], spoilt["head"]) == (8, "\\xff\x00broken")
    text = told(capsys, inspect.main, "errors", *flags(demo))
    assert "ZeroDivisionError" in text
    assert "    Traceback:" in text


def test_nothing_from_redis_is_obeyed_by_a_terminal(demo: Place, capsys: Capture) -> None:
    for kind in inspect.KINDS:
        text = told(capsys, inspect.main, kind, *flags(demo))
        assert [c for c in text if not c.isprintable() and c != "\n"] == [], kind


def test_inspect_asks_for_a_kind(demo: Place) -> None:
    with pytest.raises(UsageError, match="groups, prompts, dead, quarantine, errors, archive, not 'group'"):
        inspect.main(["group", *flags(demo)])


# -- purge


def test_a_living_run_is_not_purged(demo: Place, fresh: TrainerBroker) -> None:
    with pytest.raises(UsageError, match=r"is alive: trainer host-1, worker w1"):
        purge.main([*remote(demo, fresh), "--yes"])
    fresh.finish("done", "")
    with pytest.raises(UsageError, match=r"is alive: worker w1;"):
        purge.main([*remote(demo, fresh), "--yes"])
    fresh.client.zadd(fresh.keys["workers"], {"w1": 1000})
    feeder = Broker(demo.url, fresh.keys, "feeder")
    feeder.cursor()
    with pytest.raises(UsageError, match=r"is alive: feeder"):
        purge.main([*remote(demo, fresh), "--yes"])
    feeder.close()
    assert fresh.exists()


def end(trainer: TrainerBroker) -> None:
    trainer.finish("done", "")
    trainer.client.delete(trainer.keys["workers"])


def test_purge_takes_the_keys_of_its_run_and_no_others(demo: Place, fresh: TrainerBroker, capsys: Capture) -> None:
    longer = Keys(f"{fresh.keys.run}2")
    fresh.client.set(longer["feed"], 1)
    fresh.client.set(f"{fresh.keys.prefix}not-known", 1)
    end(fresh)
    text = told(capsys, purge.main, *remote(demo, fresh), "--yes")
    assert "keys deleted" in text
    assert ":***@" in text
    assert fresh.client.keys(f"{fresh.keys.prefix}*") == []
    assert fresh.client.delete(longer["feed"]) == 1
    with pytest.raises(UsageError, match="there is no run"):
        purge.main([*remote(demo, fresh), "--yes"])


def test_purge_of_a_local_run_says_that_the_folder_stays(demo: Place, fresh: TrainerBroker, capsys: Capture) -> None:
    end(fresh)
    text = told(capsys, purge.main, str(demo.folder), "--run", fresh.keys.run, "--yes")
    assert f"the folder {demo.folder} stays" in text


def test_purge_asks_first_and_needs_a_terminal_for_it(demo: Place, fresh: TrainerBroker) -> None:
    end(fresh)
    command = [sys.executable, "-m", "pipeline.cli", "purge", *remote(demo, fresh)]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, "give --yes" in done.stderr) == (2, True)
    assert "nothing was deleted" in on_terminal("purge", *remote(demo, fresh), typed=b"n\n")
    assert fresh.exists()
    assert "keys deleted" in on_terminal("purge", *remote(demo, fresh), typed=b"y\n")
    assert not fresh.exists()


# -- finding a run


def test_a_stopped_run_is_looked_at_and_stopped_again(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "old"
    with EmbeddedServer(folder / "redis") as server:
        trainer = filled(server.url, "named-otherwise")
        trainer.close()
    text = told(capsys, status.main, str(folder), "--watch", "60")
    assert f"run named-otherwise in {folder}: running; stopped (go on: millpond run --resume --out {folder})" in text
    assert locate(folder / "redis") is None
    assert as_json(capsys, audit.main, "--out", str(folder))["places"] == PLACES
    assert "1 of 1 groups" in told(capsys, inspect.main, "groups", str(folder))
    with pytest.raises(UsageError, match=rf"is stopped.*millpond run --resume --out {folder}.*delete the folder"):
        purge.main([str(folder), "--yes"])
    assert locate(folder / "redis") is None


def test_runs_are_found_below_the_current_folder(
    demo: Place, fresh: TrainerBroker, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(demo.folder.parents[1])
    newer = demo.folder.parent / "remote"
    newer.mkdir()
    (newer / "config.toml").write_text(f'run = "{fresh.keys.run}"\nredis_url = "{demo.url}"\n')
    os.utime(demo.folder, (1e9, 1e9))
    for argv, run in (
        ([], fresh.keys.run),
        (["remote"], fresh.keys.run),
        (["--run", "demo"], "demo"),
        (["demo"], "demo"),
        (["runs/demo"], "demo"),
        (["--out", "runs/demo", "--run", fresh.keys.run], fresh.keys.run),
        (["demo", "--redis-url", demo.url], "demo"),
        (["runs/remote", "--redis-url", demo.url], fresh.keys.run),
    ):
        assert as_json(capsys, status.main, *argv)["run"] == run, argv
    os.utime(newer, (1e8, 1e8))
    assert as_json(capsys, status.main)["run"] == "demo"
    for argv in (["other"], ["--run", "other"], ["--out", "runs/other"]):
        with pytest.raises(UsageError, match=r"no run in runs/other; in runs/ there are: demo, remote$"):
            status.main(argv)
    (newer / "config.toml").write_text("")
    with pytest.raises(UsageError, match=r"runs/remote has no Redis of its own .*give --redis-url and --run"):
        status.main(["remote"])
    (newer / "config.toml").unlink()
    newer.rmdir()


def test_an_unknown_run_is_answered_with_those_there_are(demo: Place, fresh: TrainerBroker) -> None:
    for argv in (["nope", "--redis-url", demo.url], ["--run", "nope", "--out", str(demo.folder)]):
        with pytest.raises(UsageError, match=rf"there is no run nope in .*; there are: demo, .*{fresh.keys.run}"):
            status.main(argv)
    with pytest.raises(UsageError, match=r"which run in .*\*\*\*.*Give --run; there are: demo, ") as caught:
        status.main(["--redis-url", demo.url])
    assert caught.value.exit_code == 2


def test_where_nothing_is_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no run in runs/ here"):
        status.main([])
    with pytest.raises(UsageError, match="no run in runs/x; there is none in runs/"):
        audit.main(["x"])
    with pytest.raises(UsageError, match="unexpected argument 'b'"):
        status.main(["a", "b"])
    with pytest.raises(RedisDown):
        status.main(["x", "--redis-url", f"unix://{tmp_path}/none", "--redis-patience", "0.1"])


# -- what is shown, and how


@pytest.mark.parametrize(
    ("form", "value", "expected"),
    [
        (show.size, 999, "999 B"),
        (show.size, 225_000, "220 KB"),
        (show.size, 1 << 30, "1 GB"),
        (show.ago, -3, "0 s"),
        (show.ago, 99, "99 s"),
        (show.ago, 600, "10 min"),
        (show.ago, 86400 * 7, "7 d"),
        (show.clean, "a\x1b[2J\u202e\udc80ü\n", "a\\x1b[2J\\u202e\\udc80ü\\n"),
        (show.text, b"\xff", "\\xff"),
    ],
)
def test_values_are_written_for_people(form: Callable[[Any], str], value: Any, expected: str) -> None:
    assert form(value) == expected


def test_the_guide_to_redis_cli_shows_every_key() -> None:
    guide = (ROOT / "docs" / "redis-cli.md").read_text()
    assert sorted(re.findall(r"^### `(.+)`$", guide, re.MULTILINE)) == sorted(NAMES)
