"""Whatever somebody puts into Redis costs a bounded amount of memory, is told of once, and stops nobody."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make import at_work, drain_of, feed, group, push, record, until
from rig import Rig, agreed, ids, policy

from consumers.drain import raise_alarm
from consumers.staleness import Limit
from pipeline import status, why
from pipeline.audit import audit
from pipeline.codec import decode, encode
from pipeline.errors import GroupError, MessageError, WorkerFailed
from pipeline.plain import MAX_TOTAL
from pipeline.types import Prompt
from producers.engines.echo import EchoEngine

ROOT = Path(__file__).parents[1]
AT_1 = Limit(1, (), 1)
GOOD = encode(group(Prompt(0, 1, 0, record(0)), 1))


# -- memory


def many(item: bytes, count: int) -> bytes:
    """A list of lists, full of `item`."""
    rows = count // 65535 + 1
    return b"\xdd" + struct.pack(">I", rows) + (b"\xdc\xff\xff" + item * 65535) * rows


SIZE = 1 << 22
LARGE: dict[str, bytes] = {
    "lists that announce more than there is": b"\xdc\xff\xff" * 1000 + b"\xc0" * SIZE,
    "maps that announce more than there is": b"\xde\xff\xff\xa1a" * 1000 + b"\xc0" * SIZE,
    "a list of 4 billion": b"\xdd\xff\xff\xff\xff" + b"\xc0" * SIZE,
    "a map of 4 billion": b"\xdf\xff\xff\xff\xff" + b"\xc0" * SIZE,
    "bytes of 4 GB": b"\xc6\xff\xff\xff\xff" + b"x" * SIZE,
    "empty maps": many(b"\x80", SIZE),
    "empty lists": many(b"\x90", SIZE),
    "short texts": many(b"\xa2ab", SIZE // 3),
    "integers": many(b"\xcd\xff\xff", SIZE // 3),
    "one within the other": b"\x91" * SIZE,
    "maps within maps": b"\x81\xa1a" * (SIZE // 3),
}
MEASURE = """
import resource, sys
from pipeline.codec import decode
from pipeline.errors import MessageError
data = sys.stdin.buffer.read()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
try:
    decode(data)
except MessageError:
    print(1024 * (peak() - before))
"""


@pytest.mark.parametrize("what", LARGE)
def test_reading_a_hostile_message_takes_twice_its_size_and_160_mb_at_most(what: str) -> None:
    message = LARGE[what]
    done = subprocess.run([sys.executable, "-c", MEASURE], input=message, capture_output=True, cwd=ROOT, check=True)
    assert int(done.stdout) < 2 * len(message) + (160 << 20)


def test_what_would_not_be_read_for_its_many_entries_is_not_sent() -> None:
    rows = [[0] * 60000] * (MAX_TOTAL // 60000 + 1)
    made = group(Prompt(0, 1, 0, record(0)), 1)
    sample = made.samples[0]
    few, much = ({"metadata": {"rows": rows[:count]}} for count in (2, len(rows)))
    assert len(decode(encode(replaced(made, sample, few))).samples[0].metadata["rows"]) == 2
    with pytest.raises(MessageError, match=f"more than {MAX_TOTAL} entries"):
        encode(replaced(made, sample, much))


def replaced(made: Any, sample: Any, changes: dict[str, Any]) -> Any:
    return replace(made, samples=(replace(sample, **changes), *made.samples[1:]))


# -- the drain


def mutated(seed: int) -> bytes:
    """A good message, spoilt."""
    chance = random.Random(seed)
    data = bytearray(GOOD)
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                del data[at : at + chance.randint(1, 40)]
            case 2:
                data[at:at] = chance.randbytes(chance.randint(1, 40))
            case _:
                data[at:at] = data[at : at + 40]
        data = data or bytearray(b"\xc0")
    return bytes(data)


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=9) | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda some: (
        st.lists(some, max_size=4) | st.dictionaries(st.text(max_size=9) | st.integers(0, 9), some, max_size=4)
    ),
    max_leaves=12,
)
KEYS = sorted(msgpack.unpackb(GOOD))


def swapped(key: str, value: Any) -> bytes:
    """A good message with another value under one key."""
    made: bytes = msgpack.packb({**msgpack.unpackb(GOOD), key: value}, use_bin_type=True)
    return made


BLOBS = (
    st.integers(0, 2**32).map(mutated)
    | st.builds(swapped, st.sampled_from(KEYS), VALUES)
    | VALUES.map(msgpack.packb)
    | st.binary(max_size=64)
    | st.just(GOOD[: len(GOOD) // 2])
    | st.just(GOOD + GOOD)
)


def decodes(blob: bytes) -> bool:
    try:
        decode(blob)
    except MessageError:
        return False
    return True


@given(st.lists(BLOBS, min_size=1, max_size=12), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_no_message_stops_the_drain(redis_url: str, blobs: list[bytes], seed: int) -> None:
    """The good groups between them are trained on; what would not decode lies in quarantine."""
    chance = random.Random(seed)
    with closing(Rig(redis_url)) as rig:
        trainer, worker = rig.trainer(), rig.worker()
        feed(rig, 9)
        leases = rig.lease(worker, 5)[1:]  # prompt 0, which the blobs speak of, stays in flight
        for lease in leases:
            push(rig, worker, lease, 1)
        rig.raw.lset(rig.keys["groups"], 0, b"\xc1")  # prompt 1
        for blob in blobs:
            (rig.raw.lpush if chance.random() < 0.8 else rig.raw.rpush)(rig.keys["groups"], blob)
        batch = drain_of(trainer, 3, starve_timeout=20).batch(AT_1)
        assert ids_of(batch) == [2, 3, 4]
        trainer.publish(policy(2), list(trainer.ledger.taken.values()))
        while trainer.client.llen(trainer.keys["groups"]):
            drain_of(trainer, 3)._take(100)
        trainer.check("quarantined", "strike")
        assert rig.raw.xlen(rig.keys["quarantine"]) == 1 + sum(not decodes(blob) for blob in blobs)
        assert [e["id"] for e in rig.entries()] == ["1"]
        assert rig.conserved()


def ids_of(batch: Any) -> list[int]:
    return [group.prompt.id for group in batch.groups]


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_a_group_that_nobody_leased_is_let_go_whatever_its_size(real: Rig, samples: int) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 3)
    (lease,) = real.lease(worker, 1)
    push(real, worker, lease, 1)
    for id, attempt in ((2, 1), (0, 7), (2**62, 1)):
        real.raw.lpush(real.keys["groups"], encode(group(Prompt(id, attempt, 0, record(id)), 1, n=samples)))
    batch = drain_of(trainer, 1, starve_timeout=20).batch(AT_1)
    assert ids_of(batch) == [0]
    assert real.conserved()


def test_a_group_of_the_wrong_size_that_a_worker_pushed_is_still_an_error(real: Rig) -> None:
    trainer, worker = real.trainer(), real.worker()
    feed(real, 1)
    (lease,) = real.lease(worker, 1)
    push(real, worker, lease, 1, n=3)
    with pytest.raises(GroupError, match="prompt 0: worker w1 pushed 3 samples"):
        drain_of(trainer, 1).batch(AT_1)


@pytest.mark.parametrize(
    "alarm",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        b"[]",
        b"null",
        b'{"kind": []}',
        b'{"kind": "failed"}',
        b'{"kind": 1, "what": {"a": [1]}, "trace": null}',
        b"9" * 5000,
        b"x" * (1 << 22),
    ],
    ids=lambda alarm: repr(alarm[:20]),
)
def test_any_alarm_is_one_error(alarm: bytes) -> None:
    with pytest.raises(WorkerFailed) as caught:
        raise_alarm(alarm)
    assert len(str(caught.value)) < 5000


# -- prompts


ENTRIES: dict[str, dict[str, Any]] = {
    "no fields of ours": {"hello": "world"},
    "no attempt": {"id": 0, "strikes": 0, "prompt": record(0)},
    "an id that is none": {"id": "x", "attempt": 1, "strikes": 0, "prompt": record(0)},
    "an id beyond all bitmaps": {"id": 2**62, "attempt": 1, "strikes": 0, "prompt": record(0)},
    "a negative id": {"id": -1, "attempt": 1, "strikes": 0, "prompt": record(0)},
    "an id written in another way": {"id": "00", "attempt": 1, "strikes": 0, "prompt": record(0)},
    "an attempt written in another way": {"id": 0, "attempt": "1_0", "strikes": 0, "prompt": record(0)},
    "an attempt that is none": {"id": 0, "attempt": "two", "strikes": 0, "prompt": record(0)},
    "no Unicode": {"id": 0, "attempt": 1, "strikes": 0, "prompt": b"\xff\xfe"},
}
RECORDS = ["", "no JSON", "[]", "7", "[" * 100_000, '{"prompt": 5}', '{"prompt": "x", "metadata": []}', "{}"]


def test_entries_that_are_no_prompts_are_taken_out_and_told_of(real: Rig, caplog: pytest.LogCaptureFixture) -> None:
    real.trainer()
    for fields in ENTRIES.values():
        real.raw.xadd(real.keys["prompts"], fields)
        real.raw.xadd(real.keys["prompts:retry"], fields)
    feed(real, 4)
    asyncio.run(work_until(real, lambda: real.raw.llen(real.keys["groups"]) == 4))
    told = [r.message for r in caplog.records if r.levelno == logging.ERROR and "is no prompt" in r.message]
    assert len(told) == 2 * len(ENTRIES) == len(real.entries("quarantine"))
    assert real.raw.xlen(real.keys["prompts"]) == real.raw.xlen(real.keys["prompts:retry"]) == 0
    assert real.conserved()


@pytest.mark.parametrize("id", [10, 1_000_000, 2**32 - 1])
def test_what_was_never_fed_is_not_pushed_and_moves_no_cursor_and_no_bitmap(real: Rig, id: int) -> None:
    trainer = real.trainer()
    feed(real, 4)
    for stream in ("prompts", "prompts:retry"):
        real.raw.xadd(real.keys[stream], {"id": id, "attempt": 1, "strikes": 2, "prompt": record(0)})
    trainer = real.trainer()
    assert real.standing().feed == 4
    worker = real.worker()
    leases = real.lease(worker, 8)
    assert sorted(ids(leases)) == [0, 1, 2, 3, id, id]
    good, bad = ([x for x in leases if (x.prompt.id < 4) is ours] for ours in (True, False))
    assert real.push(worker, bad[:1]) == ["lost"]
    assert real.do(worker.hand_back(bad[1:], "bad_sample", "strike")) == 1
    assert real.counter("refused:alien") == 2
    assert real.push(worker, good) == ["pushed"] * 4
    assert len(real.take(trainer, 8)) == 4
    real.trainer()
    assert real.standing().feed == 4
    assert not real.standing().refeed
    assert all(real.raw.strlen(real.keys[f"done:{name}"]) <= 1 for name in ("committed", "dropped", "dead"))


async def work_until(rig: Rig, done: Callable[[], object]) -> None:
    async with at_work(rig, EchoEngine("0.001", 4)):
        await until(done)


def test_records_that_cannot_be_right_are_dead_lettered_with_a_reason(real: Rig) -> None:
    real.trainer(max_group_bytes=1 << 24, queue_max_bytes=1 << 24)
    feeder = real.feeder()
    feeder.feed(0, [*RECORDS, record(8), json.dumps({"prompt": "y" * (1 << 18)})])
    asyncio.run(work_until(real, lambda: real.raw.llen(real.keys["groups"]) == 2))
    assert real.ended("dead") == set(range(len(RECORDS)))
    assert {e["reason"] for e in real.entries("dead")} == {"bad_record"}
    assert real.conserved()


def test_a_resume_a_reap_and_an_audit_pass_over_what_is_no_prompt(real: Rig) -> None:
    trainer = real.trainer()
    real.worker()
    aliens = [fields for what, fields in ENTRIES.items() if what != "no Unicode"]  # which Redis does not see
    for fields in aliens:
        real.raw.xadd(real.keys["prompts"], fields)
    feed(real, 2)
    leased: Any = real.raw.xreadgroup("generators", "w1", {real.keys["prompts"]: ">"}, count=len(aliens) + 1)
    assert len(leased[0][1]) == len(aliens) + 1
    trainer.restore(trainer.ledger)
    audit(trainer)
    real.silence("w1")
    assert real.reap() == ["w1"]
    assert real.counter("refused:alien") == len(aliens)
    assert real.conserved()


# -- other keys


@pytest.mark.parametrize("info", [b"", b"no JSON", b"\xff", b"[]", b'{"version": "x", "loading": []}', b"[" * 100_000])
def test_what_workers_say_of_themselves_is_passed_over_where_it_is_odd(
    real: Rig, info: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = real.trainer()
    real.worker()
    real.raw.hset(real.keys["workers:info"], "w1", info)
    assert trainer.worker_versions() == set()
    place = ["--redis-url", real.url, "--run", real.keys.run]
    assert status.main(place) == 0
    assert why.main([*place, "--apart", "0.01"]) == 1
    assert "no prompt has ever been fed" in capsys.readouterr().out


@pytest.mark.parametrize("fields", [{"version": "x"}, {"path": "/5"}, {"version": b"\xff"}])
def test_weights_that_are_no_publication_are_one_clear_error(real: Rig, fields: dict[str, Any]) -> None:
    trainer, worker = real.trainer(), real.worker()
    real.raw.delete(real.keys["weights"])
    real.raw.hset(real.keys["weights"], mapping=fields)
    for look in (trainer.policy, lambda: real.do(worker.policy()), lambda: status.look(trainer)):
        with pytest.raises(MessageError, match="weights: the key holds no publication"):
            look()


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", agreed().model_dump_json()[:-9]])
def test_settings_that_are_none_are_one_clear_error(real: Rig, text: str) -> None:
    worker = real.new_worker("w1")
    real.raw.set(real.keys["config"], text)
    with pytest.raises(MessageError, match="config: the key holds no settings of a run"):
        real.do(worker.agreed())


@pytest.mark.parametrize("key", ["workers", "state", "counters", "groups", "alarm", "unsettled", "prompts", "config"])
def test_a_key_of_another_kind_is_named(real: Rig, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    real.trainer()
    real.raw.delete(real.keys[key])
    real.raw.sadd(real.keys[key], "odd")
    with pytest.raises(MessageError, match="WRONGTYPE"):
        status.main(["--redis-url", real.url, "--run", real.keys.run])


# -- code


FORBIDDEN = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "yaml"}
PRODUCT = sorted(p for d in ("pipeline", "producers", "consumers", "trainer") for p in (ROOT / d).rglob("*.py"))
RUNS_CODE = {"producers/rewards/programs.py", "producers/rewards/jail.py"}
"What grades programs runs them, in a process of its own that can do nothing else."


@pytest.mark.parametrize("path", PRODUCT, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_unpickles_or_evaluates(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not {alias.name.partition(".")[0] for alias in node.names} & FORBIDDEN
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in FORBIDDEN
        elif isinstance(node, ast.Call):
            assert_harmless(node, path)


def assert_harmless(call: ast.Call, path: Path) -> None:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    assert name not in ("eval", "exec", "compile") or str(path.relative_to(ROOT)) in RUNS_CODE, call.lineno
    given = {word.arg: word.value for word in call.keywords}
    if isinstance(call.func, ast.Attribute) and ast.unparse(call.func) in ("torch.load", "np.load", "numpy.load"):
        word = "weights_only" if "torch" in ast.unparse(call.func) else "allow_pickle"
        told = given.get(word)
        safe = isinstance(told, ast.Constant) and told.value is (word == "weights_only")
        assert safe or (word == "allow_pickle" and told is None), call.lineno
