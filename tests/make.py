"""Real small things for the tests of drain, generator and trainer: groups to order, an engine held by hand, a crew."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rig import Rig

from consumers.drain import Drain, DrainRules, drain
from pipeline.agreed import Agreed
from pipeline.broker import Broker
from pipeline.codec import encode
from pipeline.config import FeedConfig, TrainConfig
from pipeline.errors import WeightsError
from pipeline.fenced import TrainerBroker
from pipeline.leases import WorkerBroker
from pipeline.modes import check, resolve_rollout
from pipeline.replies import Lease
from pipeline.types import ABORTED, COMPLETED, Group, Policy, Prompt, Sample, Sequence, Span
from producers import feeder
from producers.custom_generate import ONCE, Play
from producers.engines.base import Completion, Engine, Request
from producers.engines.echo import EchoEngine
from producers.filters import Filter
from producers.generator import Generator
from producers.group import Maker, seed_of
from producers.rewards import BuiltIn, Scorer
from producers.tokens import ByteTokenizer
from producers.work import Worker
from trainer import cli
from trainer.backends.echo import EchoBackend
from trainer.keeper import keeper_of
from trainer.loop import Loop
from trainer.report import Reporter
from trainer.start import begin

# -- prompts and groups


def record(id: int) -> str:
    """A prompt's record: the echo engine gets its text, `p` and the id, as tokens."""
    return json.dumps({"prompt": f"p{id}", "label": None, "metadata": {}})


def feed(rig: Rig, prompts: int, ends: bool = False) -> Broker:
    """So many more prompts; with `ends` they are the last."""
    feeder = rig.feeder()
    cursor = feeder.cursor()
    after = feeder.feed(cursor, [record(id) for id in range(cursor, cursor + prompts)])
    if ends:
        feeder.describe_data(after, after, "digest")
    return feeder


def sequence(*versions: int | None) -> Sequence:
    """A prompt of two tokens, then one token by each version."""
    tokens = np.arange(3, 3 + len(versions), dtype=np.int32)
    spans = tuple(Span(version, at, at + 1) for at, version in enumerate(versions))
    return Sequence(tokens[:2], tokens, np.full(len(tokens), -1, np.float32), np.ones(len(tokens), np.uint8), spans)


def group(prompt: Prompt, *versions: int | None, n: int = 2, status: str = COMPLETED) -> Group:
    """n samples of one sequence each; the first has tokens by all `versions`, the others by the last."""
    first = Sample(0, status, "answer", 1.0, (sequence(*versions),))
    others = (Sample(i, COMPLETED, "answer", 0.0, (sequence(versions[-1]),)) for i in range(1, n))
    return Group(prompt, (first, *others), "w1", 0.1)


def push(rig: Rig, worker: WorkerBroker, lease: Lease, *versions: int | None, **how: Any) -> bytes:
    message = encode(group(lease.prompt, *versions, **how))
    assert rig.do(worker.push(lease, message)) == "pushed"
    return message


def queue(rig: Rig, worker: WorkerBroker, *versions: int | None, **how: Any) -> list[Lease]:
    """One group in the list for each version, oldest token first."""
    leases = rig.lease(worker, len(versions))
    assert len(leases) == len(versions)
    for lease, version in zip(leases, versions, strict=True):
        push(rig, worker, lease, version, **how)
    return leases


ABORT: dict[str, Any] = {"status": ABORTED}


def drain_of(trainer: TrainerBroker, size: int = 2, **changes: Any) -> Drain:
    """Of groups of two samples; starves at once."""
    rules: dict[str, Any] = {"n_samples": 2, "handler": "retry", "starve_timeout": 0.01, "drop_last": False}
    return Drain(trainer, DrainRules(size=size, **{**rules, **changes}))


# -- an engine in the test's hand


class Hand(EchoEngine):
    """An echo engine whose answers of 4 tokens never end by themselves; a test ends them, by prompt and sample."""

    def __init__(self) -> None:
        super().__init__("1e9", 4)
        self.held: dict[tuple[int, int], str] = {}
        "(prompt, sample) -> rid of each request that runs"
        self.sent: list[tuple[int, int]] = []
        "all that ever came"
        self.gate = asyncio.Event()
        "while it is clear, loads wait"
        self.gate.set()
        self.loads: list[int] = []
        "versions of the loads that began"
        self.gone: set[int] = set()
        "versions whose folder has vanished"
        self.poke = asyncio.Event()
        "for a maker that belongs to no generator"

    async def generate(self, request: Request) -> Completion:
        prompt = int(bytes(request.tokens.tolist())[1:])
        key = prompt, next(i for i in range(64) if seed_of(42, prompt, i) == request.seed)
        self.held[key] = request.rid
        self.sent.append(key)
        try:
            return await super().generate(request)
        finally:
            del self.held[key]

    def prompts(self) -> list[int]:
        """With a request that runs."""
        return sorted({prompt for prompt, _ in self.held})

    def advance(self, prompt: int, share: float) -> None:
        """All that runs of the prompt has so much of its tokens."""
        for key, rid in self.held.items():
            if key[0] == prompt:
                self._flights[rid].ran = share * self._flights[rid].answer.seconds

    def end(self, prompt: int, *samples: int) -> None:
        """Of all samples, where none is named."""
        for key in [key for key in self.held if key[0] == prompt and (not samples or key[1] in samples)]:
            self._flights[self.held[key]].land(4, "stop")

    def fail(self, prompt: int, sample: int, error: BaseException) -> None:
        self._flights[self.held[prompt, sample]].future.set_exception(error)

    def cancel(self, prompt: int, sample: int) -> None:
        """A cancel from within the engine, as client libraries know them."""
        self._flights[self.held[prompt, sample]].future.cancel()

    async def load(self, policy: Policy) -> None:
        self.loads.append(policy.version)
        await self.gate.wait()
        if policy.version in self.gone:
            raise WeightsError(f"{policy.path} is gone")
        await super().load(policy)


# -- workers


def maker_of(
    engine: Engine,
    rules: Agreed,
    scorer: Scorer | None = None,
    slots: int = 64,
    worker: str = "w1",
    play: Play = ONCE,
) -> Maker:
    return Maker(engine, ByteTokenizer(), scorer or BuiltIn("length"), rules, worker, asyncio.Semaphore(slots), play)


@asynccontextmanager
async def hired(
    rig: Rig,
    engine: Engine,
    name: str = "w1",
    concurrency: int = 8,
    keep: Filter | None = None,
    scorer: Scorer | None = None,
    url: str = "",
    play: Play = ONCE,
    kind: type[Generator] = Generator,
) -> AsyncIterator[Generator]:
    """A generator that is registered and does not run yet; it waits for a trainer."""
    broker = WorkerBroker(url or rig.url, rig.keys, name, patience=20)
    await until(lambda: rig.raw.exists(rig.keys["config"]))
    rules = await broker.agreed()
    assert rules is not None
    maker = maker_of(engine, rules, scorer, concurrency, name, play)
    generator = kind(Worker(broker, maker, keep), concurrency)
    await engine.start()
    await broker.register(generator.info())
    try:
        yield generator
    finally:
        await engine.close()
        await broker.close()


@asynccontextmanager
async def at_work(rig: Rig, engine: Engine, **how: Any) -> AsyncIterator[Generator]:
    """A generator that runs; halted at the end, and whatever ended it is raised."""
    async with hired(rig, engine, **how) as generator:
        before = subscribers(rig)
        running = asyncio.create_task(generator.run())
        try:
            await until(lambda: running.done() or subscribers(rig) > before)
            yield generator
        finally:
            generator.halt()
            await asyncio.wait_for(running, 10)


def subscribers(rig: Rig) -> int:
    """Workers that hear what is announced."""
    return sum(rig.keys.run in client["name"] for client in rig.raw.client_list("pubsub"))


@contextmanager
def crew(rig: Rig, engine: Callable[[], Engine], **how: Any) -> Iterator[None]:
    """A generator in a thread of its own, for as long as the test's thread trains."""
    over = threading.Event()

    async def work() -> None:
        async with at_work(rig, engine(), **how):
            await asyncio.to_thread(over.wait)

    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(asyncio.run, work())
        try:
            yield
        finally:
            over.set()
            working.result()


async def until(condition: Callable[[], object]) -> None:
    """Returns when it holds; fails after 10 seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (a condition on anything)
            await asyncio.sleep(0.002)


async def calm(engine: Hand) -> None:
    """Until no request has come for a while."""
    sent = -1
    while sent != len(engine.sent):
        sent = len(engine.sent)
        await asyncio.sleep(0.08)


# -- trainers


def train_config(**fields: Any) -> TrainConfig:
    """Batches of 2 groups of 2 samples, one version of staleness, a checkpoint every 2 steps, no training."""
    values: dict[str, Any] = {
        "train_backend": "echo",
        "fully_async": True,
        "max_weight_staleness": 1,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "save_interval": 2,
        "num_rollout": 1000,
        "starve_timeout": 20.0,
    }
    return TrainConfig.model_validate({**values, **fields})


def loop_of(rig: Rig, folder: Path, backend: EchoBackend | None = None, **fields: Any) -> Loop:
    """A trainer that has begun, as `millpond train` makes it."""
    config = train_config(**fields)
    assert check(config) is not None
    broker = rig.new_trainer()
    backend = backend or EchoBackend(0.0)
    now = begin(config, broker, backend, folder)
    report = Reporter(folder / "metrics.jsonl", broker, now.step)
    selection = resolve_rollout(config)
    source = cli._drain(config, broker)
    last = None, cli._evaluations(config, broker, rig.url, report), keeper_of(config, folder, broker.epoch, now.step)
    return Loop(config, broker, backend, folder, drain, source, report, selection.max_staleness, now, *last)


def run(loop: Loop) -> Loop:
    """To its end, whatever that is."""
    try:
        loop.run()
    finally:
        loop.report.file.close()
    return loop


def train(rig: Rig, folder: Path, **fields: Any) -> Loop:
    return run(loop_of(rig, folder, **fields))


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def feeding(rig: Rig, folder: Path, rows: int, epochs: int | None = 1) -> Iterator[None]:
    """A feeder in a thread of its own: so many prompts, `epochs` times."""
    path = folder / f"{rows}.jsonl"
    path.write_text("".join(f'{{"input": "p{n}"}}\n' for n in range(rows)))
    config = FeedConfig.model_validate({"prompt_data": path, "num_epoch": epochs})
    broker = rig.feeder()
    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(feeder.main, config, broker, broker.stop)
        try:
            yield
        finally:
            broker.stop.set()
            working.result()
