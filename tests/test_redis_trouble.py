"""Redis is there and is in trouble: full, without a disk, a replica, loading, paused, out of reach, evicting."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from lossy import Lossy
from make import at_work, crew, drain_of, feed, feeding, group, loop_of, queue
from make import run as run_loop
from processes import Parts, eventually, holds, prompts
from redis.exceptions import ResponseError
from rig import Rig, ids, message, policy, records

from consumers.staleness import Limit
from pipeline.audit import audit
from pipeline.codec import encode
from pipeline.connect import connect
from pipeline.errors import Starved, Stopped
from pipeline.leases import WorkerBroker
from pipeline.pulse import TrainerPulse, WorkerPulse
from pipeline.redis_folder import read
from pipeline.server import EmbeddedServer
from pipeline.types import Group
from producers.engines.echo import EchoEngine
from trainer.backends.base import At
from trainer.backends.echo import EchoBackend

AT_1 = Limit(1, (), 1)
IMPATIENT = "?socket_timeout=2"
"A connection that gives up after 2 seconds instead of 10."


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "redis", "process") as running:
        yield running


@pytest.fixture
def own(server: EmbeddedServer) -> Iterator[Rig]:
    with closed(Rig(server.url)) as rig:
        yield rig


@contextmanager
def closed(rig: Rig) -> Iterator[Rig]:
    yield rig
    rig.raw = rig.connect()
    rig.close()


@contextmanager
def stopped(server: EmbeddedServer, seconds: float) -> Iterator[None]:
    """Nothing is answered for so long, whatever is sent meanwhile; the block runs in that time."""
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    thaw = threading.Timer(seconds, os.kill, (pid, signal.SIGCONT))
    thaw.start()
    try:
        yield
    finally:
        thaw.join()


class Remembers(EchoBackend):
    """What it trained on."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(seconds)
        self.trained: list[int] = []

    def train(self, groups: Sequence[Group], step: int, at: At | None = None) -> dict[str, float]:
        self.trained += [g.prompt.id for g in groups]
        return super().train(groups, step, at)


def whole(
    rig: Rig, folder: Path, rows: int, happens: Callable[[], None], tokens: int = 4, pace: float = 0.02, **config: Any
) -> Remembers:
    """A run of so many prompts, with signs of life, in which something happens; each is trained once, without a strike
    for death."""
    backend = Remembers(pace)
    how = {"max_prompt_attempts": 999, **config}

    def engine() -> EchoEngine:
        return EchoEngine("lognormal:0.01:1", tokens)

    with ExitStack() as stack:
        stack.enter_context(feeding(rig, folder, rows))
        for name in ("w1", "w2"):
            stack.enter_context(crew(rig, engine, name=name))
        loop = loop_of(rig, folder, backend, **how)
        pulse = TrainerPulse(rig.url, loop.broker)
        pulse.start()
        stack.callback(pulse.stop)
        troubled = stack.enter_context(ThreadPoolExecutor(1)).submit(happens)
        run_loop(loop)
        troubled.result()
    assert sorted(backend.trained) == list(range(rows))
    assert rig.ended() == set(range(rows))
    assert rig.counter("strikes:worker_died") == 0
    holds(audit(rig.feeder()))
    return backend


def told(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    """Lines of the log that tell of trouble with Redis."""
    return [m for r in caplog.records if all(word in (m := r.getMessage()) for word in ("Redis is", *words))]


# -- it refuses writes, and says why


def no_disk(server: EmbeddedServer, raw: redis.Redis) -> Callable[[], object]:
    """Its last save failed: a folder stands where its file is to be."""
    hurdle = server.data / "dump.rdb"
    (hurdle / "x").mkdir(parents=True)
    raw.config_set("save", "3600 1")
    raw.config_set("stop-writes-on-bgsave-error", "yes")
    save(raw, "err")

    def heal() -> None:
        (hurdle / "x").rmdir()
        hurdle.rmdir()
        save(raw, "ok")

    return heal


def save(raw: redis.Redis, outcome: str) -> None:
    def ended() -> bool:
        info: Any = raw.info("persistence")
        return not info["rdb_bgsave_in_progress"] and info["rdb_last_bgsave_status"] == outcome

    raw.execute_command("BGSAVE")
    eventually(ended, f"a save that is {outcome}")


def replica(server: EmbeddedServer, raw: redis.Redis) -> Callable[[], object]:
    raw.replicaof("127.0.0.1", "1")  # type: ignore[no-untyped-call]
    return lambda: raw.replicaof("NO", "ONE")  # type: ignore[no-untyped-call]


def memory(server: EmbeddedServer, raw: redis.Redis) -> Callable[[], object]:
    raw.config_set("maxmemory", 1)
    return lambda: raw.config_set("maxmemory", 0)


REFUSALS: dict[str, tuple[Callable[[EmbeddedServer, redis.Redis], Callable[[], object]], str]] = {
    "no disk": (no_disk, "it cannot write to its disk"),
    "replica": (replica, "it is a replica now: point --redis-url at its master"),
    "memory": (memory, "its maxmemory is reached"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_redis_that_refuses_writes_is_told_of_once_with_what_helps_and_waited_for(
    server: EmbeddedServer, own: Rig, refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    harm, help = REFUSALS[refusal]
    trainer, feeder, worker = own.trainer(), own.feeder(4), own.worker()
    leases = own.lease(worker, 3)
    heal = harm(server, own.raw)
    caplog.clear()

    async def work() -> list[str]:
        pushes = [asyncio.create_task(worker.push(lease, message(lease.prompt))) for lease in leases]
        assert (await worker.lease(1, 0)).why == "outage"
        return await asyncio.gather(*pushes)

    with ThreadPoolExecutor(3) as threads:
        verbs: list[Any] = [threads.submit(own.do, work()), threads.submit(feeder.feed, 4, records(4, 1))]
        verbs += [threads.submit(trainer.renew, why="x")] if refusal != "memory" else []
        eventually(lambda: len(told(caplog, "away", help)) == len(verbs), "all are told")
        time.sleep(1)
        assert [verb.exception() for verb in verbs if verb.done()] == []
        heal()
        assert [verb.result() for verb in verbs[:2]] == [["pushed"] * 3, 5]
    assert len(told(caplog, "away")) == len(told(caplog, "back")) == len(verbs)
    assert own.conserved()


def test_a_pop_that_waits_when_its_server_becomes_a_replica_is_an_outage(server: EmbeddedServer, own: Rig) -> None:
    trainer = own.trainer()

    def waits() -> bool:
        found: Any = own.raw.info("clients")
        return bool(found["blocked_clients"])

    with ThreadPoolExecutor(1) as threads:
        for _ in range(3):
            popping = threads.submit(trainer.take, 1)
            eventually(lambda popping=popping: waits() or popping.done(), "it waits")  # type: ignore[misc]
            heal = replica(server, own.raw)
            heal()
            assert popping.result() == ([], None)


def test_trouble_that_comes_and_goes_is_told_of_once(own: Rig, caplog: pytest.LogCaptureFixture) -> None:
    own.trainer()
    worker = own.worker()
    for _ in range(3):
        own.raw.config_set("maxmemory", 1)
        assert own.do(worker.lease(1, 0)).why == "outage"
        own.raw.config_set("maxmemory", 0)
        assert own.do(worker.lease(1, 0)).why == ""
    assert (len(told(caplog, "away")), len(told(caplog, "back"))) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_run_outlives_a_redis_that_refuses_writes(
    server: EmbeddedServer, own: Rig, tmp_path: Path, refusal: str
) -> None:
    def happens() -> None:
        time.sleep(0.3)
        heal = REFUSALS[refusal][0](server, own.raw)
        time.sleep(0.5)
        heal()

    whole(own, tmp_path, 60, happens)


def test_a_full_redis_is_drained_and_generators_keep_what_they_made(
    own: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Groups of 700 KB under a list's cap that memory does not hold."""
    used: Any = own.raw.info("memory")
    own.raw.config_set("maxmemory", used["used_memory"] + (3 << 20))
    how = {"max_weight_staleness": None, "queue_capacity": 50, "rollout_max_response_len": 40_000}
    whole(own, tmp_path, 12, lambda: None, 40_000, 0.1, **how)
    assert told(caplog, "away", "its maxmemory is reached")
    assert len(told(caplog)) < 12
    assert own.counter("pushed") == 12
    assert not [name for name in own.feeder().counters() if name.startswith("recycled:")]


# -- a failover: the name leads to another server, the old one lives on as a replica


def test_connections_leave_a_master_that_became_a_replica(tmp_path: Path) -> None:
    with ExitStack() as stack:
        old, new = (stack.enter_context(EmbeddedServer(tmp_path / name, "process")) for name in ("old", "new"))
        access = read(old.data)
        assert access is not None
        name = tmp_path / "name"
        name.symlink_to(old.socket)
        rig = stack.enter_context(closed(Rig(f"unix://:{access.password}@{name}")))
        direct = stack.enter_context(connect(new.url, "test"))
        direct.config_set("requirepass", access.password)
        trainer, feeder, worker = rig.trainer(), rig.feeder(4), rig.worker()
        held = [lease.prompt for lease in rig.lease(worker, 2)]
        for prompt in held:
            assert trainer.hold(prompt)
        rig.raw.replicaof("127.0.0.1", "1")  # type: ignore[no-untyped-call]
        name.unlink()
        name.symlink_to(new.socket)
        trainer.renew(why="after the failover")
        assert feeder.feed(4, records(4, 1)) == feeder.feed(2, records(2, 2)) - 2 == 2
        rig.do(worker.register({}))
        rig.raw = rig.connect()
        assert sorted(rig.standing().open) == ids(held)
        rig.finish(trainer, worker, 4)
        assert rig.ended() == set(range(4))


# -- it loads


class Slow(EmbeddedServer):
    """Takes its time to read its log."""

    def _config(self) -> str:
        return super()._config() + "key-load-delay 300\n"


def test_loading_is_waited_for_and_a_start_ends_with_the_end_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Slow(tmp_path / "redis", "process") as server, closed(Rig(server.url)) as rig:
        trainer, feeder, worker = rig.trainer(), rig.feeder(2), rig.worker()
        (lease,) = rig.lease(worker, 1)
        filler = rig.raw.pipeline(transaction=False)
        for n in range(6000):
            filler.set(f"filler:{n}", n)
        filler.execute()
        server.kill()
        caplog.clear()
        with ThreadPoolExecutor(4) as threads:
            started = threads.submit(server.start)
            access = eventually(lambda: read(server.data), "the socket is known")
            eventually(lambda: access.ask().startswith("-LOADING"), "it loads")
            assert not started.done()
            verbs = [
                threads.submit(trainer.renew, why="x"),
                threads.submit(feeder.feed, 2, records(2, 1)),
                threads.submit(lambda: rig.push(worker, [lease])),
            ]
            assert [verb.result() for verb in verbs] == [None, 3, ["pushed"]]
            started.result()
        assert access.ask() == "+PONG"
        assert len(told(caplog, "away")) == len(told(caplog, "back")) == 3
        assert rig.conserved()


# -- it is paused, or out of reach


def test_verbs_that_meet_a_pause_are_done_once(server: EmbeddedServer) -> None:
    """Sent, timed out, sent again, and the first one executed after all."""
    with ExitStack() as stack:
        rigs = [stack.enter_context(closed(Rig(server.url + IMPATIENT))) for _ in range(3)]
        scenes = [(rig, *of_everything(rig)) for rig in rigs]
        verbs = [
            lambda rig, trainer, worker: rig.push(worker, rig.do(worker.mine())),
            lambda rig, trainer, worker: trainer.recycle(list(trainer.ledger.taken.values()), "stale"),
            lambda rig, trainer, worker: trainer.publish(policy(2), list(trainer.ledger.taken.values())),
        ]
        with ThreadPoolExecutor(3) as threads, stopped(server, 3):
            done = [threads.submit(verb, *scene) for verb, scene in zip(verbs, scenes, strict=True)]
            for verb in done:
                verb.result()
        assert [trainer.version() for _, trainer, _ in scenes] == [1, 1, 2]
        assert [rig.counter("pushed") for rig in rigs] == [4, 2, 2]
        assert [len(rig.groups()) for rig in rigs] == [2, 0, 0]
        assert [[e["attempt"] for e in rig.entries()] for rig in rigs] == [[], ["2", "2"], []]
        for rig, trainer, worker in scenes:
            assert rig.conserved()
            rig.finish(trainer, worker, 6)
            assert rig.ended() == set(range(6))


def of_everything(rig: Rig) -> tuple[Any, WorkerBroker]:
    """Two groups taken, two prompts leased, two that wait."""
    trainer, worker = rig.trainer(), rig.worker()
    rig.feeder(6)
    rig.queued(worker, 2)
    assert len(rig.take(trainer, 2)) == len(rig.lease(worker, 2)) == 2
    return trainer, worker


def test_a_pause_beyond_the_heartbeat_limit_kills_nobody(server: EmbeddedServer) -> None:
    with closed(Rig(server.url + IMPATIENT)) as rig:
        trainer = rig.trainer(heartbeat_limit_ms=1000)
        rig.feeder(4)
        workers = [rig.worker(f"w{n}") for n in range(3)]
        held = [rig.lease(worker, 1) for worker in workers]
        assert trainer.reap() == []
        with stopped(server, 2.5):
            assert trainer.reap() == []
        for worker, leases in zip(workers[:2], held[:2], strict=True):
            assert rig.do(worker.heartbeat({}, 0)).known
            assert rig.push(worker, leases) == ["pushed"]

        def dead() -> list[str]:
            for worker in workers[:2]:
                assert rig.do(worker.heartbeat({}, 0)).known
            return trainer.reap()

        assert eventually(dead, "the one that stays silent is found") == ["w2"]
        assert rig.conserved()


def test_a_run_outlives_a_redis_that_is_silent(
    server: EmbeddedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def happens() -> None:
        time.sleep(0.5)
        with stopped(server, 3):
            pass

    with closed(Rig(server.url + IMPATIENT)) as rig:
        whole(rig, tmp_path, 40, happens, starve_timeout=3.0)
    assert 0 < len(told(caplog)) <= 8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_outlive_five_minutes_of_silence(server: EmbeddedServer, tmp_path: Path) -> None:
    """With the timeouts and limits of real life."""
    with Parts(tmp_path, server.url, prompts(tmp_path, 2000)) as parts:
        trainer = parts.trainer("--num-epoch", 1, "--fully-async", "--max-weight-staleness", 1, "--starve-timeout", 60)
        everyone = [trainer, parts.feeder("--num-epoch", 1), parts.generator(), parts.generator()]
        eventually(lambda: parts.broker.version() > 20, "it trains")
        with stopped(server, 300):
            pass
        for one in everyone:
            said = one.ends(0, 200)
            assert said.count("Redis is away") == said.count("Redis is back") <= 1
        places = parts.audit().places
        assert places["committed"] + places["dead"] == 2000
        assert "strikes:worker_died" not in parts.broker.counters()


def test_a_drain_does_not_starve_of_an_outage(server: EmbeddedServer, own: Rig) -> None:
    trainer, worker = own.trainer(), own.worker()
    feed(own, 4)
    queue(own, worker, 1)
    leases = own.lease(worker, 1)
    drain = drain_of(trainer, 2, starve_timeout=1.5)
    with ThreadPoolExecutor(1) as threads:
        batch = threads.submit(drain.batch, AT_1)
        eventually(lambda: len(drain.hand) == 1, "the first is in hand")
        server.kill()
        time.sleep(2)
        server.start()
        assert own.do(worker.push(leases[0], encode(group(leases[0].prompt, 1)))) == "pushed"
        assert ids([g.prompt for g in batch.result().groups]) == [0, 1]
    with pytest.raises(Starved):
        drain.batch(AT_1)


@pytest.mark.parametrize("cuts", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_pops_whose_replies_are_cut_off_lose_nothing(real: Rig, tmp_path: Path, cuts: int) -> None:
    """The network is cut during pops, those that wait and those that do not; the data may end before the last cut."""
    with Lossy(real.url) as lossy, closed(Rig(lossy.url, real.keys.run)) as rig:
        over = threading.Event()

        def happens() -> None:
            for n in range(cuts):
                lossy.lose((b"LPOP", b"BLPOP")[n % 2])
                eventually(lambda n=n: lossy.lost > n or over.is_set(), "cut")  # type: ignore[misc]

        backend = Remembers()
        engine = EchoEngine("lognormal:0.003:1", 4)
        with feeding(real, tmp_path, 10 * cuts), crew(real, lambda: engine), ThreadPoolExecutor(1) as threads:
            loop = loop_of(rig, tmp_path, backend, max_prompt_attempts=999, rollout_batch_size=4)
            cutting = threads.submit(happens)
            run_loop(loop)
            over.set()
            cutting.result()
    assert lossy.lost >= cuts // 2
    assert sorted(backend.trained) == list(range(10 * cuts))
    holds(audit(real.feeder()))


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_drain_that_is_stopped_again_and_again_under_load_loses_nothing(
    real: Rig, tmp_path: Path, times: int
) -> None:
    trainer = real.trainer(max_prompt_attempts=999, max_weight_staleness=None)
    drain, draw, trained = drain_of(trainer, 4, starve_timeout=30), random.Random(11), 0
    with feeding(real, tmp_path, 8 * times), crew(real, lambda: EchoEngine("lognormal:0.005:1", 4)):
        for _ in range(times):
            stop = threading.Timer(draw.uniform(0, 0.05), trainer.stop.set)
            stop.start()
            with suppress(Stopped):
                while (batch := drain.batch(Limit(trainer.version(), (), 999))) is not None:
                    trained += len(batch.groups)
                    trainer.publish(policy(trainer.version() + 1), [g.prompt for g in batch.groups])
                    assert trainer.commit([g.prompt for g in batch.groups]) == []
            stop.join()
            trainer.stop.clear()
            if draw.random() < 0.5:
                drain.release()
    found = holds(audit(real.feeder()))
    assert 0 < trained == found.places["committed"] <= found.feed
    assert found.places["committed"] + found.places["queued"] + found.places["taken"] <= real.counter("pushed")


# -- connections


def total(raw: redis.Redis) -> int:
    """Connections that the server has ever been asked for."""
    found: Any = raw.info("stats")
    assert found["rejected_connections"] == 0
    return int(found["total_connections_received"])


def connected(raw: redis.Redis) -> int:
    found: Any = raw.info("clients")
    return int(found["connected_clients"])


@pytest.mark.parametrize("seconds", [2, pytest.param(180, marks=pytest.mark.slow)])
def test_a_run_with_nothing_to_do_is_quiet_and_awake(
    server: EmbeddedServer, own: Rig, tmp_path: Path, seconds: int, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Any] = []

    def idle() -> None:
        eventually(lambda: own.raw.hget(own.keys["state"], "status") == b"running", "it runs")
        pulse = WorkerPulse(own.url, own.keys, "w1", lambda: ({}, 0, time.monotonic()), heard.append)
        pulse.beat()
        pulse.start()
        before = total(own.raw)
        time.sleep(seconds)
        try:
            assert total(own.raw) == before
            assert told(caplog) == []
        finally:
            feed(own, 4, ends=True)
            pulse.stop()

    with crew(own, lambda: EchoEngine("0.001", 4)), ThreadPoolExecutor(1) as threads:
        loop = loop_of(own, tmp_path, starve_timeout=600.0)
        pulse = TrainerPulse(own.url, loop.broker)
        pulse.beat()
        pulse.start()
        idling = threads.submit(idle)
        run_loop(loop)
        idling.result()
        pulse.stop()
    assert own.ended() == set(range(4))


def test_connections_are_few_under_load_and_in_an_outage(server: EmbeddedServer, own: Rig) -> None:
    """16 workers with 24 calls at once each: at most 8 connections a worker, and no storm when Redis comes back."""
    own.trainer(bound=999, in_flight=999, queue_capacity=999, queue_max_bytes=1 << 30)
    own.feeder(16 * 24)
    workers = [own.worker(f"w{n}") for n in range(16)]
    others = connected(own.raw)
    leases = [own.lease(worker, 24) for worker in workers]

    async def push(worker: WorkerBroker, mine: Sequence[Any]) -> list[str]:
        return await asyncio.gather(*(worker.push(lease, message(lease.prompt, 50_000)) for lease in mine))

    async def all_push(part: slice) -> int:
        answers = await asyncio.gather(*(push(w, mine[part]) for w, mine in zip(workers, leases, strict=True)))
        return sum(a == "pushed" for answer in answers for a in answer)

    assert own.do(all_push(slice(12))) == 16 * 12
    assert connected(own.raw) <= others + 16 * 8
    server.kill()

    async def through_an_outage() -> int:
        pushing = asyncio.create_task(all_push(slice(12, 24)))
        await asyncio.sleep(0.7)
        await asyncio.to_thread(server.start)
        return await pushing

    assert own.do(through_an_outage()) == 16 * 12
    own.raw = own.connect()
    assert connected(own.raw) <= others + 16 * 8
    assert total(own.raw) <= 16 * 8 * 2


# -- it was made to evict


def test_an_eviction_policy_that_is_changed_is_told_of_with_the_command_that_helps(
    own: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    pulse = TrainerPulse(own.url, own.trainer())
    said = []
    for evicts in ("noeviction", "allkeys-lru", "allkeys-lru", "volatile-lru", "noeviction", "noeviction"):
        own.raw.config_set("maxmemory-policy", evicts)
        caplog.clear()
        pulse.look()
        said.append([r.getMessage() for r in caplog.records])
    assert [len(lines) for lines in said] == [0, 1, 0, 1, 1, 0]
    assert "allkeys-lru" in said[1][0]
    assert "CONFIG SET maxmemory-policy noeviction" in said[1][0]
    pulse.broker.close()


def test_a_run_outlives_eviction(own: Rig, tmp_path: Path) -> None:
    """allkeys-random at the limit: keys vanish until memory is given back."""

    def happens() -> None:
        time.sleep(0.3)
        own.raw.config_set("maxmemory-policy", "allkeys-random")
        own.raw.config_set("maxmemory", 1)
        time.sleep(0.3)
        own.raw.config_set("maxmemory", 0)

    whole(own, tmp_path, 60, happens)


# -- a sign of life that meets what is no outage


def test_a_pulse_that_meets_an_error_that_will_not_pass_ends_its_owner(real: Rig) -> None:
    trainer = real.trainer()
    heard: list[Any] = []
    worker = WorkerPulse(real.url, real.keys, "w1", lambda: ({}, 0, time.monotonic()), heard.append)
    pulses = (TrainerPulse(real.url, trainer), worker)
    for name in ("state", "workers"):
        real.raw.set(real.keys[name], "not what it was")
    for pulse in pulses:
        pulse.start()
    eventually(lambda: trainer.trouble and heard, "both have failed")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        trainer.patiently(lambda: None)
    assert isinstance(heard[0], ResponseError)
    for pulse in pulses:
        pulse.stop()


def test_what_a_workers_pulse_met_ends_the_generator(real: Rig) -> None:
    real.trainer()

    async def scene() -> None:
        async with at_work(real, EchoEngine("0.001", 4)) as generator:
            generator.fail(ResponseError("WRONGTYPE"))

    with pytest.raises(ResponseError, match="WRONGTYPE"):
        real.do(scene())
