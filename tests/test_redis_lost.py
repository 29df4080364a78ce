"""Redis loses keys while a run lives: by DEL, FLUSHALL, XGROUP DESTROY, XTRIM or eviction. Nobody restarted it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rig import Rig, policy

from pipeline.keys import GROUP, NAMES


class Busy:
    """0 committed, 1-2 published, 3-4 taken, 5 popped for nobody, 6-8 queued, 9-10 leased, 11 round again, 12 dropped,
    13 dead, 14 to be fed again, 15-19 fresh."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.trainer: Any = rig.trainer(bound=99, in_flight=99, queue_capacity=99)
        self.feeder, self.worker = rig.feeder(20), rig.worker()
        rig.queued(self.worker, 9)
        published = rig.take(self.trainer, 3)
        self.trainer.publish(policy(2), published)
        assert self.trainer.commit(published[:1]) == []
        rig.take(self.trainer, 2)
        rig.raw.lpop(rig.keys["groups"])
        self.leases = rig.lease(self.worker, 2)
        again, dropped, dead, gone = rig.lease(self.worker, 4)
        rig.do(self.worker.hand_back([again], "aborted", "strike"))
        rig.do(self.worker.drop(dropped, "zero_std"))
        rig.do(self.worker.hand_back([dead], "too_large", "bury"))
        rig.do(self.worker.hand_back([gone], "shutdown"))
        entry = next(e for e, f in self.entries("prompts:retry") if f[b"id"] == b"14")
        rig.raw.xdel(rig.keys["prompts:retry"], entry)
        rig.raw.sadd(rig.keys["refeed"], 14)

    def entries(self, stream: str) -> Any:
        return self.rig.raw.xrange(self.rig.keys[stream])


def delete(name: str) -> Callable[[Busy], Any]:
    return lambda busy: busy.rig.raw.delete(busy.rig.keys[name])


def destroy(name: str) -> Callable[[Busy], Any]:
    return lambda busy: busy.rig.raw.xgroup_destroy(busy.rig.keys[name], GROUP)


def all_keys(busy: Busy) -> None:
    busy.rig.raw.delete(*busy.rig.keys.all())


VANISHES: dict[str, Callable[[Busy], Any]] = {
    "everything": all_keys,
    **{name: delete(name) for name in NAMES if name not in ("groups:fenced", "wake")},
    "the group of prompts": destroy("prompts"),
    "the group of prompts:retry": destroy("prompts:retry"),
    "leased and waiting entries": lambda b: b.rig.raw.xtrim(b.rig.keys["prompts"], maxlen=2, approximate=False),
    "a waiting entry": lambda b: b.rig.raw.xdel(b.rig.keys["prompts"], b.entries("prompts")[-1][0]),
    "an open entry": lambda b: b.rig.raw.hdel(b.rig.keys["open"], "3"),
    "an unsettled id": lambda b: b.rig.raw.zrem(b.rig.keys["unsettled"], "7"),
    "cursor and what is committed": lambda b: b.rig.raw.delete(*(b.rig.keys[n] for n in ("feed", "done:committed"))),
}
HARMLESS = [
    "groups",
    "groups:sizes",
    "workers",
    "workers:info",
    "workers:spare",
    "alarm",
    "errors",
    "dead",
    "quarantine",
    "counters",
]
"Keys whose loss loses no prompt, or no more than a trainer's check finds without asking why."


@pytest.mark.parametrize("what", VANISHES)
def test_what_vanishes_is_told_again_and_every_prompt_is_trained_once(
    run: Rig, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    busy = Busy(run)
    assert run.conserved()
    VANISHES[what](busy)
    busy.trainer.check()
    assert run.conserved()
    assert run.ended() == {0}
    assert sorted(busy.trainer.ledger.taken) == [3, 4]
    assert run.standing().unsettled.keys() >= {3, 4}
    assert (busy.trainer.version(), busy.trainer.policy(), busy.trainer.state()["epoch"]) == (2, policy(2), "1")
    lost = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Redis has lost")]
    assert len(lost) == (0 if what in HARMLESS else 1)
    caplog.clear()
    busy.trainer.check()
    assert not caplog.records
    run.do(busy.worker.register({}))
    run.finish(busy.trainer, busy.worker, 24)
    assert run.ended() | run.ended("dropped") | run.ended("dead") == set(range(24))
    assert run.ended("dropped") | run.ended("dead") <= {12, 13}
