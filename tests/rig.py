"""What the broker's tests stand on: one run on one Redis, the processes that take part in it, and time made to pass."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import redis

from pipeline.agreed import Agreed
from pipeline.broker import Broker
from pipeline.fenced import TrainerBroker
from pipeline.keys import GROUP, Keys
from pipeline.leases import WorkerBroker
from pipeline.ledger import Ledger, get_bit, set_bit
from pipeline.replies import Lease, Standing
from pipeline.scripts import load
from pipeline.types import Policy, Prompt

T = TypeVar("T")
B = TypeVar("B", bound=Broker)

LIMIT = 20_000
"heartbeat limit in ms"


def agreed(**changes: Any) -> Agreed:
    """Small bounds: 8 groups leased or unsettled, 8 leased, 8 in the list, 10 kB in the list, 2 samples a group."""
    values: dict[str, Any] = {
        "group_rm": False,
        "code": {},
        "bound": 8,
        "in_flight": 8,
        "max_weight_staleness": 1,
        "queue_capacity": 8,
        "queue_max_bytes": 10_000,
        "max_group_bytes": 20_000,
        "rollout_submission_granularity": "sample",
        "pause_generation_mode": "retract",
        "n_samples_per_prompt": 2,
        "max_prompt_attempts": 3,
        "heartbeat_limit_ms": LIMIT,
    }
    return Agreed(**{**values, **changes})


def records(first: int, count: int) -> list[str]:
    return [json.dumps({"i": i}) for i in range(first, first + count)]


def policy(version: int, path: str = "") -> Policy:
    return Policy(version, path or f"weights/{version}", "hf", "digest", version, 0.0)


def message(prompt: Prompt, size: int = 0) -> bytes:
    """A finished group, as far as the broker cares: who it is of, padded to `size` bytes."""
    return json.dumps([prompt.id, prompt.attempt, prompt.strikes, prompt.record]).encode().ljust(size)


def prompt_of(group: bytes) -> Prompt:
    return Prompt(*json.loads(group))


def ids(of: Sequence[Lease | Prompt]) -> list[int]:
    return [x.prompt.id if isinstance(x, Lease) else x.id for x in of]


def ones(bits: bytes | bytearray) -> set[int]:
    return {n for n in range(8 * len(bits)) if get_bit(bits, n)}


def bits(*ids: int) -> bytearray:
    made = bytearray()
    for id in ids:
        set_bit(made, id)
    return made


class Rig:
    """One run. `trainer`, `feeder` and `worker` make processes that take part; `close` ends them."""

    def __init__(self, url: str, run: str = "") -> None:
        self.url = url
        self.keys = Keys(run or uuid.uuid4().hex)
        self.runner = asyncio.Runner()
        self.raw = self.connect()
        self._sync: list[Broker] = []
        self._async: list[WorkerBroker] = []

    def connect(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    # -- who takes part

    def new_trainer(self) -> TrainerBroker:
        return self._kept(TrainerBroker(self.url, self.keys, patience=20))

    def trainer(self, ledger: Ledger | None = None, force: bool = True, **config: Any) -> TrainerBroker:
        """One that has taken the run over, restored `ledger` and published; the run goes on."""
        trainer = self.new_trainer()
        trainer.takeover("trainer", force)
        trainer.configure(agreed(**config).model_dump_json())
        trainer.restore(ledger or Ledger())
        last = trainer.policy()
        trainer.publish(policy(1 + last.version if last else 1), [])
        trainer.renew(status="running")
        return trainer

    def feeder(self, prompts: int = 0) -> Broker:
        """One that has fed so many prompts."""
        feeder = self._kept(Broker(self.url, self.keys, "feeder", patience=20))
        if prompts:
            feeder.feed(feeder.cursor(), records(feeder.cursor(), prompts))
        return feeder

    def worker(self, name: str = "w1") -> WorkerBroker:
        worker = self.new_worker(name)
        self.do(worker.register({"name": name}))
        return worker

    def new_worker(self, name: str) -> WorkerBroker:
        worker = WorkerBroker(self.url, self.keys, name, patience=20)
        self._async.append(worker)
        return worker

    def _kept(self, broker: B) -> B:
        self._sync.append(broker)
        return broker

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def close(self) -> None:
        for broker in self._sync:
            broker.close()
        for worker in self._async:
            self.do(worker.close())
        self.runner.close()
        self.raw.close()

    # -- what they do most

    def lease(self, worker: WorkerBroker, want: int, spare: int = 0, alone: bool = False) -> list[Lease]:
        return self.do(worker.lease(want, spare, alone)).leases

    def push(self, worker: WorkerBroker, leases: Sequence[Lease], size: int = 0) -> list[str]:
        return [self.do(worker.push(lease, message(lease.prompt, size))) for lease in leases]

    def take(self, trainer: TrainerBroker, count: int) -> list[Prompt]:
        """Taken without waiting, and held."""
        found = [prompt_of(m) for m in trainer.take(count, block=False)[0]]
        return [p for p in found if trainer.hold(p)]

    def queued(self, worker: WorkerBroker, count: int) -> list[Prompt]:
        """So many groups made and in the list."""
        leases = self.lease(worker, count)
        assert self.push(worker, leases) == ["pushed"] * count
        return [lease.prompt for lease in leases]

    def finish(self, trainer: TrainerBroker, worker: WorkerBroker, prompts: int) -> None:
        """Feeds up to `prompts` and trains on all; each ends committed, dropped or dead."""
        feeder = self.feeder()
        for _ in range(10 * prompts):
            feeder.refeed({id: records(id, 1)[0] for id in feeder.refeed_ids(1000)})
            if (at := feeder.cursor()) < prompts:
                feeder.feed(at, records(at, prompts - at))
            self.push(worker, self.do(worker.mine()))
            self.push(worker, self.lease(worker, 8))
            self.take(trainer, 8)
            trainer.check()
            held = [*trainer.ledger.taken.values(), *trainer.ledger.published.values()]
            trainer.publish(policy(1 + trainer.version()), held)
            refused = trainer.commit(held)
            assert refused == []
            stand = self.standing()
            if stand.feed == prompts and not (stand.waiting or stand.open or stand.refeed or stand.queued):
                return
        raise AssertionError(f"this never ends: {self.standing()}")

    # -- looking behind the brokers' backs

    def standing(self) -> Standing:
        """Where every prompt is; each must be in exactly one place."""
        script = load("snapshot")
        return Standing.of(self.raw.execute_command("EVAL", script.text, *script.call(self.keys)))

    def conserved(self) -> bool:
        return bool((self.standing().places() == 1).all())

    def ended(self, name: str = "committed") -> set[int]:
        """Ids with a bit in done:`name`."""
        return ones(getattr(self.standing(), name))

    def groups(self) -> list[bytes]:
        found: Any = self.raw.lrange(self.keys["groups"], 0, -1)
        return list(found)

    def sizes(self) -> list[int]:
        found: Any = self.raw.lrange(self.keys["groups:sizes"], 0, -1)
        return [int(x.split()[0]) for x in found]

    def counter(self, name: str) -> int:
        found: Any = self.raw.hget(self.keys["counters"], name)
        return int(found or 0)

    def entries(self, stream: str = "prompts:retry") -> list[dict[str, str]]:
        found: Any = self.raw.xrange(self.keys[stream])
        return [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in found]

    def consumers(self, stream: str = "prompts") -> set[str]:
        found: Any = self.raw.xinfo_consumers(self.keys[stream], GROUP)
        return {c["name"].decode() for c in found}

    def dump(self) -> dict[str, Any]:
        """Every key of the run with its value, but for signs of life: equal dumps, nothing happened."""
        script: Any = self.raw.eval(DUMP, 0, self.keys.prefix)
        return {k.decode(): v for k, v in zip(script[::2], script[1::2], strict=True)}

    # -- time

    def now(self) -> int:
        seconds, micros = self.raw.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def silence(self, worker: str, ms: int = 2 * LIMIT) -> None:
        """The last heartbeat of `worker` was so long ago."""
        self.raw.zadd(self.keys["workers"], {worker: self.now() - ms})

    def ticked(self, ms: int = 1000) -> None:
        """The last reap was so long ago, and no grace is left."""
        self.raw.hset(self.keys["state"], mapping={"tick": self.now() - ms, "grace": 0})

    def reap(self) -> list[str]:
        """By somebody who reaps every second."""
        self.ticked()
        return self.feeder().reap()


DUMP = """
local out = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do
  local kind = redis.call('TYPE', key).ok
  local value
  if kind == 'string' then value = redis.call('GET', key)
  elseif kind == 'list' then value = redis.call('LRANGE', key, 0, -1)
  elseif kind == 'hash' then
    value = {}
    local all = redis.call('HGETALL', key)
    for i = 1, #all, 2 do
      if all[i] ~= 'trainer_seen' then value[#value + 1] = all[i] .. '=' .. all[i + 1] end
    end
    table.sort(value)
  elseif kind == 'set' then value = redis.call('SMEMBERS', key); table.sort(value)
  elseif kind == 'zset' then value = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'stream' then value = {redis.call('XRANGE', key, '-', '+'), redis.call('XPENDING', key, 'generators')}
  end
  if string.sub(key, -8) ~= ':workers' then out[#out + 1] = key; out[#out + 1] = value end
end
return out
"""
