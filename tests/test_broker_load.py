"""The broker under many processes at once, and what a prompt's life costs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from rig import Rig, message, policy

from pipeline.leases import WorkerBroker


def workers(real: Rig, count: int) -> list[WorkerBroker]:
    made = [real.new_worker(f"w{n}") for n in range(count)]
    real.do(all_of(worker.register({}) for worker in made))
    return made


async def all_of(coroutines: Any) -> list[Any]:
    return await asyncio.gather(*coroutines)


async def watched(work: Coroutine[Any, Any, Any], look: Callable[[], Awaitable[int]]) -> int:
    """The most that `look` saw while the work was done."""
    task, most = asyncio.create_task(work), 0
    while not task.done():
        most = max(most, await look())
    await task
    return most


def test_64_concurrent_leasers_never_exceed_room(real: Rig) -> None:
    real.trainer(bound=10, in_flight=99)
    real.feeder(200)
    crowd = workers(real, 64)
    answers = real.do(all_of(w.lease(3, 0) for w in crowd for _ in range(3)))
    assert sum(len(a.leases) for a in answers) == 10
    assert real.standing().pending == 10
    assert min(a.room for a in answers) == 0


def test_64_concurrent_leasers_never_exceed_the_concurrency_of_the_run(real: Rig) -> None:
    """Each has one finished sample of an unfinished group, so 32 groups of two more may run."""
    real.trainer(bound=999, in_flight=10)
    real.feeder(200)
    crowd = workers(real, 64)
    real.do(all_of(w.heartbeat({}, 1) for w in crowd))
    answers = real.do(all_of(w.lease(3, 1) for w in crowd for _ in range(3)))
    assert sum(len(a.leases) for a in answers) == 10 + 32


def test_leased_and_unsettled_groups_stay_in_bounds_while_64_workers_come_and_go(real: Rig) -> None:
    trainer = real.trainer(bound=10, in_flight=8, queue_capacity=99)
    real.feeder(400)
    crowd = workers(real, 64)

    async def busy(n: int, worker: WorkerBroker) -> None:
        for turn in range(4):
            for lease in (await worker.lease(2, 0)).leases:
                if (n + turn) % 3 == 0:
                    await worker.push(lease, message(lease.prompt))
                elif (n + turn) % 3 == 1:
                    await worker.hand_back([lease], "shutdown")
                else:
                    await worker.drop(lease, "zero_std")

    async def look() -> int:
        stand = await asyncio.to_thread(real.standing)
        assert stand.pending <= 8
        assert (stand.places() == 1).all()
        return stand.pending + len(stand.unsettled)

    assert 1 < real.do(watched(all_of(busy(n, w) for n, w in enumerate(crowd)), look)) <= 10
    real.take(trainer, 99)
    assert trainer.check().lost == []


def test_64_concurrent_pushers_never_exceed_a_cap_of_8(real: Rig) -> None:
    trainer = real.trainer(bound=99, in_flight=99, queue_capacity=8)
    real.feeder(64)
    crowd = workers(real, 64)
    leases = [real.lease(worker, 1)[0] for worker in crowd]
    pushes = list(zip(crowd, leases, strict=True))
    answers = real.do(all_of(w.push(lease, message(lease.prompt)) for w, lease in pushes))
    assert sorted(answers) == ["full"] * 56 + ["pushed"] * 8
    assert len(real.groups()) == 8

    async def until_pushed(worker: WorkerBroker, lease: Any) -> None:
        while True:
            if await worker.push(lease, message(lease.prompt)) == "pushed":
                return
            await asyncio.sleep(0.01)

    async def look() -> int:
        length = await asyncio.to_thread(lambda: len(real.groups()))
        await asyncio.to_thread(real.take, trainer, 3)
        return length

    assert real.do(watched(all_of(until_pushed(w, lease) for w, lease in pushes), look)) <= 8
    while real.take(trainer, 9):
        pass
    assert sorted(trainer.ledger.taken) == list(range(64))
    assert real.sizes()[-len(real.groups()) or 99 :] == []


def test_64_concurrent_pushers_never_exceed_the_byte_cap(real: Rig) -> None:
    real.trainer(bound=99, in_flight=99, queue_capacity=99, queue_max_bytes=1000)
    real.feeder(64)
    crowd = workers(real, 64)
    leases = [real.lease(worker, 1)[0] for worker in crowd]
    answers = real.do(all_of(w.push(lease, message(lease.prompt, 130)) for w, lease in zip(crowd, leases, strict=True)))
    assert answers.count("pushed") == 1000 // 130
    assert sum(map(len, real.groups())) == 130 * (1000 // 130)


# -- what it costs


def calls(real: Rig) -> dict[str, int]:
    """How often each command has run on the server so far, inside scripts too."""
    stats: Any = real.raw.info("commandstats")
    return {name: stat["calls"] for name, stat in stats.items() if name != "cmdstat_info"}


def life(real: Rig, trainer: Any, worker: WorkerBroker) -> dict[str, int]:
    """The commands that one prompt's life takes, from feed to commit."""
    before = calls(real)
    real.feeder(1)
    leases = real.lease(worker, 1)
    assert real.push(worker, leases) == ["pushed"]
    held = real.take(trainer, 1)
    assert trainer.check().lost == []
    trainer.publish(policy(trainer.version() + 1), held)
    assert trainer.commit(held) == []
    after = calls(real)
    return {name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)}


def deep(real: Rig, trainer: Any, worker: WorkerBroker, depth: int) -> None:
    real.feeder(depth)
    real.queued(worker, depth)


def crowded(real: Rig, trainer: Any, worker: WorkerBroker, count: int) -> None:
    workers(real, count)


def aged(real: Rig, trainer: Any, worker: WorkerBroker, prompts: int) -> None:
    for _ in range(prompts // 50):
        real.feeder(50)
        real.queued(worker, 50)
        held = real.take(trainer, 50)
        trainer.publish(policy(trainer.version() + 1), held)
        trainer.commit(held)


@pytest.mark.parametrize(("grow", "less", "more"), [(deep, 10, 1000), (crowded, 1, 100), (aged, 50, 1000)])
def test_a_life_costs_the_same_at_any_depth_with_any_crowd_at_any_age(
    redis_url: str, grow: Callable[..., None], less: int, more: int
) -> None:
    costs = []
    for much in (less, more):
        real = Rig(redis_url)
        trainer = real.trainer(bound=9999, in_flight=9999, queue_capacity=9999, queue_max_bytes=1 << 30)
        worker = real.worker("me")
        grow(real, trainer, worker, much)
        life(real, trainer, worker)
        costs.append(life(real, trainer, worker))
        real.close()
    assert costs[0] == costs[1]
    sent = sum(costs[0].get(f"cmdstat_{name}", 0) for name in ("evalsha", "eval", "multi"))
    assert sent <= 12
