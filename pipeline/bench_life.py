"""A prompt's whole life, over and over: what the broker's benchmark measures."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import defaultdict
from types import TracebackType
from typing import Any, Self

from pipeline.agreed import Agreed
from pipeline.broker import Broker
from pipeline.errors import MillpondError
from pipeline.fenced import TrainerBroker
from pipeline.keys import Keys
from pipeline.leases import WorkerBroker, new_worker_id
from pipeline.ledger import Ledger
from pipeline.types import Policy, Prompt

RECORD = json.dumps({"prompt": "What is 17 * 23? Think step by step.", "label": "391", "metadata": {}})
MANY = 1 << 20


class Life:
    """One run with a feeder, a worker and a trainer, all in this process; the groups are bytes without meaning."""

    def __init__(self, url: str, size: int, batch: int) -> None:
        """`size` is that of a group in bytes; `batch` prompts go round together."""
        self.batch = batch
        self.keys = Keys(uuid.uuid4().hex)
        self.message = bytes(size)
        self.queue: list[Prompt] = []
        "prompts of the groups in the list, oldest first: a message here does not say whose it is"
        self.phases: dict[str, list[float]] = defaultdict(list)
        "seconds by verb, of each round"
        self.runner = asyncio.Runner()
        self.feeder = Broker(url, self.keys, "feeder")
        self.trainer = TrainerBroker(url, self.keys)
        self.worker = WorkerBroker(url, self.keys, new_worker_id())

    def __enter__(self) -> Self:
        self.trainer.takeover("bench")
        self.trainer.configure(_rules().model_dump_json())
        self.trainer.restore(Ledger())
        self._publish([])
        self.trainer.renew(status="running")
        self.runner.run(self.worker.register({}))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.feeder.close()
        self.trainer.close()
        self.runner.run(self.worker.close())
        self.runner.close()

    def fill(self, depth: int) -> None:
        """`depth` finished groups wait in the list from now on."""
        while (left := depth - len(self.queue)) > 0:
            self._make(min(left, 256))

    def feed_ahead(self) -> None:
        """As many prompts as go together wait in the stream from now on, as behind a feeder."""
        self.feeder.feed(self.feeder.cursor(), [RECORD] * self.batch)

    def server_seconds(self) -> float:
        """Processor time the server has used."""
        used: Any = self.feeder.client.info("cpu")
        return float(used["used_cpu_user"] + used["used_cpu_sys"])

    def round(self) -> None:
        """`batch` prompts from feed to commit, in as many calls as the product makes."""
        self._make(self.batch)
        self._train(self.batch)

    def _make(self, count: int) -> None:
        begin = time.perf_counter()
        self.feeder.feed(self.feeder.cursor(), [RECORD] * count)
        self._lap("feed", begin)
        self.runner.run(self._generate(count))

    async def _generate(self, count: int) -> None:
        begin = time.perf_counter()
        leased = await self.worker.lease(count, 0)
        if leased.why == "reaped":  # on a slow machine: it gives no signs of life between rounds
            await self.worker.register({})
            leased = await self.worker.lease(count, 0)
        if len(leased.leases) < count:
            raise MillpondError(f"{len(leased.leases)} prompts leased of {count} ({leased.why})")
        begin = self._lap("lease", begin)
        for lease in leased.leases:
            await self.worker.push(lease, self.message)
        self._lap("push", begin)
        self.queue += [lease.prompt for lease in leased.leases]

    def _train(self, count: int) -> None:
        begin = time.perf_counter()
        taken = 0
        while taken < count:
            taken += len(self.trainer.take(count - taken)[0])
        prompts, self.queue = self.queue[:taken], self.queue[taken:]
        for prompt in prompts:
            self.trainer.hold(prompt)
        begin = self._lap("take", begin)
        self.trainer.check()
        begin = self._lap("check", begin)
        self._publish(prompts)
        begin = self._lap("publish", begin)
        self.trainer.commit(prompts)
        self._lap("commit", begin)

    def _publish(self, prompts: list[Prompt]) -> None:
        version = 1 + (self.trainer.latest.version if self.trainer.latest else 0)
        self.trainer.publish(Policy(version, f"weights/{version}", "hf", "", version, time.time()), prompts)

    def _lap(self, verb: str, begin: float) -> float:
        now = time.perf_counter()
        self.phases[verb].append(now - begin)
        return now


class Bare:
    """The same bytes through RPUSH and BLPOP, by the same clients: the worker's asynchronous, the trainer's not."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.key = f"millpond:{life.keys.run}:bench:bare"

    def round(self) -> None:
        self.life.runner.run(self._push())
        for _ in range(self.life.batch):
            self.life.trainer.client.blpop([self.key], timeout=1)

    async def _push(self) -> None:
        for _ in range(self.life.batch):
            await self.life.worker.client.rpush(self.key, self.life.message)


def _rules() -> Agreed:
    return Agreed(
        group_rm=False,
        code={},
        bound=MANY,
        in_flight=MANY,
        max_weight_staleness=None,
        queue_capacity=MANY,
        queue_max_bytes=1 << 40,
        max_group_bytes=1 << 30,
        rollout_submission_granularity="sample",
        pause_generation_mode="retract",
    )
