"""What grows with nothing: streams, pending entries, memory; and what never stops the steps."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from make import crew, drain_of, feed, feeding, loop_of, queue, run
from processes import Parts, Started, contiguous, prompts, steps
from rig import Rig, policy

from consumers.staleness import Limit
from pipeline.server import EmbeddedServer
from producers.engines.base import Completion, Request
from producers.engines.echo import EchoEngine
from trainer.backends.echo import EchoBackend

BATCH, STALENESS, SAVE = 32, 2, 5
ROOM = (STALENESS + 1) * BATCH
LOW_WATER = 256
AT_ONCE = ("--rollout-batch-size", BATCH, "--n-samples-per-prompt", "2", "--save-interval", SAVE)
RULES = (*AT_ONCE, "--fully-async", "--max-weight-staleness", STALENESS, "--echo-train-seconds", "0")


def rss(pid: int) -> int:
    """MiB of a process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) // 1024 if found else 0


@dataclass(frozen=True)
class Look:
    """A run at one instant."""

    committed: int
    streams: int
    "entries in both"
    open: int
    redis: int
    "MiB"
    processes: tuple[int, ...]
    "MiB of each"


def look(parts: Parts, processes: list[Started]) -> Look:
    keys, pipe = parts.broker.keys, parts.broker.client.pipeline()
    pipe.bitcount(keys["done:committed"])
    pipe.xlen(keys["prompts"])
    pipe.xlen(keys["prompts:retry"])
    pipe.hlen(keys["open"])
    pipe.info("memory")
    committed, fresh, again, open, memory = pipe.execute()
    sizes = tuple(rss(p.process.pid) for p in processes if p.process.poll() is None)
    return Look(committed, fresh + again, open, memory["used_memory"] >> 20, sizes)


def bounded(folder: Path, rows: int) -> list[Look]:
    """What was seen of a run over so many prompts, as separate processes; every bound held all the time."""
    seen: list[Look] = []
    with EmbeddedServer(folder / "redis") as server, Parts(folder, server.url, prompts(folder, rows)) as parts:
        trainer, feeder = (
            parts.trainer(*RULES, "--num-epoch", "1"),
            parts.feeder("--num-epoch", "1", "--feed-low-water", LOW_WATER),
        )
        processes = [trainer, feeder, *(parts.generator() for _ in range(2))]
        while trainer.process.poll() is None:
            seen.append(look(parts, processes))
            time.sleep(0.5)
        for process in processes:
            process.ends(0)
        found = parts.audit()
        assert found.places["committed"] + found.places["dead"] == found.feed == rows
        contiguous(steps(parts.out))
        assert max(x.open for x in seen) <= SAVE * BATCH + ROOM
        assert max(x.streams for x in seen) <= 2 * LOW_WATER + ROOM
        ended = look(parts, processes)
        assert (ended.streams, ended.open) == (0, 0)
    return seen


def test_a_run_keeps_to_its_bounds_at_every_moment(tmp_path: Path) -> None:
    seen = bounded(tmp_path, 3000)
    assert len({x.committed for x in seen}) > 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_prompts_leave_nothing_behind(tmp_path: Path) -> None:
    """Memory in the last third is what it was in the second, but for one bit a prompt and the slack of allocators."""
    seen = bounded(tmp_path, 100_000)
    second, third = ([x for x in seen if n / 3 <= x.committed / 100_000 < (n + 1) / 3] for n in (1, 2))
    print(*seen[:: len(seen) // 20], sep="\n")
    assert max(x.redis for x in third) <= max(x.redis for x in second) + 8
    for n in range(4):
        before, after = (max(x.processes[n] for x in part if len(x.processes) == 4) for part in (second, third))
        assert after <= before + 16


# -- what never stops the steps


def test_a_full_list_of_stale_groups_does_not_stop_the_only_consumer(real: Rig) -> None:
    """Each is four publications old, and there is neither room nor a place in the list until the drain makes it."""
    trainer = real.trainer(bound=6, in_flight=6, queue_capacity=6)
    feed(real, 6)
    queue(real, real.worker("old"), *[1] * 6)
    for version in range(2, 6):
        trainer.publish(policy(version), [])
    assert real.lease(real.worker("new"), 1) == []
    drain = drain_of(trainer, 4, starve_timeout=20.0)
    with crew(real, lambda: EchoEngine("0", 4)):
        batch = drain.batch(Limit(5, (), 1))
    assert batch is not None
    assert batch.counts["stale"] == 6
    assert {span.version for g in batch.groups for s in g.samples for q in s.sequences for span in q.versions} == {5}


class Stuck(EchoEngine):
    """Never answers for prompt 5."""

    async def generate(self, request: Request) -> Completion:
        if bytes(request.tokens.tolist()) == b"p5":
            await asyncio.Event().wait()
        return await super().generate(request)


def test_a_straggler_that_never_finishes_does_not_stop_the_steps(real: Rig, tmp_path: Path) -> None:
    backend = EchoBackend(0.0)
    with feeding(real, tmp_path, 40), crew(real, lambda: Stuck("0.002", 4)):
        run(loop_of(real, tmp_path, backend, num_epoch=1))
    assert backend.steps == 20
    assert real.conserved()
    assert (real.ended("committed"), real.ended("dead")) == (set(range(40)) - {5}, {5})
    assert real.counter("dead:stale") == 1
