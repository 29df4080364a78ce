"""A prompt that kills its worker takes no other with it: what was there when workers died, again and again, goes on
with no second of its kind."""

from __future__ import annotations

import pytest
from rig import Rig, ids

from pipeline.leases import WorkerBroker
from pipeline.replies import Lease


def filled(run: Rig, worker: WorkerBroker, count: int) -> list[Lease]:
    """What a worker of such a size has after it has leased all that it gets."""
    held: list[Lease] = []
    while len(held) < count and (more := run.lease(worker, count - len(held), alone=any(x.alone for x in held))):
        held += more
    return held


def killed(run: Rig, name: str) -> None:
    run.silence(name)
    assert run.reap() == [name]


@pytest.mark.parametrize("limit", [2, 3, 5, 9])
def test_a_prompt_that_kills_its_worker_is_dead_at_the_bound_and_takes_no_other_with_it(run: Rig, limit: int) -> None:
    trainer = run.trainer(max_prompt_attempts=limit, bound=40, in_flight=40, queue_capacity=40)
    run.feeder(24)
    deaths = 0
    while run.standing().waiting:
        worker = run.worker(f"w{deaths}")
        held = filled(run, worker, 6)
        assert held
        assert sum(x.alone for x in held) <= 1
        if 3 in ids(held):
            killed(run, worker.worker)
            deaths += 1
        else:
            run.push(worker, held)
    assert deaths == limit
    assert run.ended("dead") == {3}
    assert run.counter("dead:worker_died") == 1
    assert sorted(p.id for p in run.take(trainer, 40)) == [i for i in range(24) if i != 3]


def test_what_goes_alone_does_so_until_it_is_made_and_holds_up_no_fresh_prompt(run: Rig) -> None:
    run.trainer(max_prompt_attempts=5)
    run.feeder(6)
    for name in ("w1", "w2"):
        assert ids(run.lease(run.worker(name), 2)) == [0, 1]
        killed(run, name)
    one, other = run.worker("w3"), run.worker("w4")
    (first,) = [x for x in run.lease(one, 4) if x.alone]
    assert run.lease(one, 4, alone=True)[0].stream == "fresh"
    assert [x.prompt.id for x in run.lease(other, 1)] == [1]
    run.do(one.hand_back([first], "shutdown"))
    (again,) = run.lease(one, 1)
    assert (again.prompt.id, again.alone) == (0, True)
    assert run.push(one, [again]) == ["pushed"]
