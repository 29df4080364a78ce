"""A generator on SGLang servers beside the bare servers: the same requests, as many in flight, by turns.

Bare is an HTTP client that posts requests and reads answers. The generator leases prompts from a real Redis, checks and
scores what comes, and pushes groups.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from pipeline.agreed import Agreed
from pipeline.bench import BenchConfig
from pipeline.broker import Broker
from pipeline.codec import decode
from pipeline.errors import MillpondError, UsageError
from pipeline.fenced import TrainerBroker
from pipeline.keys import Keys
from pipeline.leases import WorkerBroker
from pipeline.ledger import Ledger
from pipeline.measure import Figure, ratio
from pipeline.server import EmbeddedServer
from pipeline.types import Policy
from producers.engines import sglang_wire as wire
from producers.engines.base import Request, Sampling
from producers.engines.bench_updates import of_updates
from producers.engines.sglang import SGLangEngine
from producers.engines.sglang_http import open_session
from producers.engines.sglang_pool import Servers
from producers.generator import Generator
from producers.group import Maker, seed_of
from producers.rewards import BuiltIn
from producers.tokens import HFTokenizer
from producers.work import Worker

SAMPLES = 8
"of a prompt"
TEXT = "1234567890"
"which any tokenizer knows"


def of_servers(config: BenchConfig) -> Iterator[Figure]:
    """The servers see the model's folder under the path that this process has for it."""
    if config.engine_url is None or config.hf_checkpoint is None:
        raise UsageError(
            "millpond bench sglang needs --engine-url and --hf-checkpoint: servers that run, and their model"
        )
    key = config.engine_api_key.get_secret_value() if config.engine_api_key else None
    servers = Servers(tuple(config.engine_url.split(",")), key=key, concurrency=config.server_concurrency)
    size = (8, 16, 1) if config.quick else (32, 64, 5)
    seconds, tokens = asyncio.run(_compare(config.hf_checkpoint, servers, size))
    rates = {side: [n / s for n, s in zip(tokens[side], seconds[side], strict=True)] for side in seconds}
    for side in rates:
        yield Figure(f"{side}_tokens", sorted(rates[side])[len(rates[side]) // 2], "tokens/s")
    yield Figure("millpond_over_bare", ratio(rates["millpond"], rates["bare"]), "x", at_least=0.9)
    yield from of_updates(config.hf_checkpoint, servers, *((16, 2) if config.quick else (64, 20)))


Rounds = dict[str, list[float]]


async def _compare(checkpoint: Path, servers: Servers, size: tuple[int, int, int]) -> tuple[Rounds, Rounds]:
    prompts, length, rounds = size
    seconds: Rounds = {"bare": [], "millpond": []}
    tokens: Rounds = {"bare": [], "millpond": []}
    with TemporaryDirectory() as folder, EmbeddedServer(Path(folder) / "redis", "process") as redis:
        rules = _rules(length, servers.concurrency)
        async with _Run(redis.url, checkpoint, servers, rules) as run:
            for turn in range(rounds + 1):
                for side in list(seconds)[:: 1 if turn % 2 else -1]:
                    begin = time.perf_counter()
                    await (run.generate(prompts) if side == "millpond" else run.post(prompts))
                    took = time.perf_counter() - begin
                    if turn:  # the first warms up
                        seconds[side].append(took)
                        tokens[side].append(run.counted(side, prompts))
    return seconds, tokens


class _Run:
    """Both sides, on the same servers."""

    def __init__(self, url: str, checkpoint: Path, servers: Servers, rules: Agreed) -> None:
        self.url, self.checkpoint, self.servers, self.rules = url, checkpoint, servers, rules
        self.keys = Keys("bench")
        self.tokenizer = HFTokenizer(checkpoint)
        self.made = self.posted = 0

    async def __aenter__(self) -> _Run:
        self.trainer = TrainerBroker(self.url, self.keys)
        self.trainer.takeover("bench", True)
        self.trainer.configure(self.rules.model_dump_json())
        self.trainer.restore(Ledger())
        self.trainer.publish(Policy(1, str(self.checkpoint.resolve()), "hf", "", 0, time.time()), [])
        self.trainer.renew(status="running")
        self.engine = SGLangEngine(self.checkpoint, self.servers, "retract", 600.0)
        await self.engine.start()
        self.broker = WorkerBroker(self.url, self.keys, "bench")
        slots = asyncio.Semaphore(self.servers.concurrency)
        maker = Maker(self.engine, self.tokenizer, BuiltIn("length"), self.rules, "bench", slots)
        self.generator = Generator(Worker(self.broker, maker, None), self.servers.concurrency)
        await self.broker.register(self.generator.info())
        self.session = open_session(self.servers.key)
        self.running = asyncio.create_task(self.generator.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.generator.halt()
        await self.running
        await self.session.close()
        await self.engine.close()
        await self.broker.close()
        self.trainer.close()

    async def generate(self, prompts: int) -> None:
        """From the feed to the last group in the list."""
        record = json.dumps({"prompt": TEXT, "label": None, "metadata": {}})
        with closing(Broker(self.url, self.keys, "bench")) as feeder:
            feeder.feed(feeder.cursor(), [record] * prompts)
        self.made += prompts
        while self.trainer.counters().get("pushed", 0) < self.made:
            if self.running.done():
                raise MillpondError(f"the generator ended: {self.running.exception()}")
            await asyncio.sleep(0.01)

    def counted(self, side: str, prompts: int) -> int:
        """Tokens of the last round."""
        if side == "bare":
            return self.posted
        groups: Any = self.trainer.client.lrange(self.keys["groups"], -prompts, -1)
        return sum(len(q.tokens) for m in groups for s in decode(m).samples for q in s.sequences)

    async def post(self, prompts: int) -> None:
        """As many requests, and as many in flight."""
        tokens = self.tokenizer.encode(TEXT, False, {})
        sampling = Sampling(self.rules.rollout_max_response_len, 1.0, self.tokenizer.stop_token_ids)
        gate = asyncio.Semaphore(self.servers.concurrency)
        urls = self.servers.urls

        async def one(n: int) -> int:
            request = Request(f"{n:032x}", np.asarray(tokens), sampling, seed_of(0, self.made, n))
            body = wire.generate(request, sampling.max_new_tokens, request.rid, 1)
            async with gate, self.session.post(f"{urls[n % len(urls)]}/generate", json=body) as reply:
                answer: Any = await reply.json()
                return len(answer["output_ids"])

        self.posted = sum(await asyncio.gather(*map(one, range(prompts * SAMPLES))))


def _rules(length: int, concurrency: int) -> Agreed:
    """No bound is ever met but that of what is in flight."""
    return Agreed(
        rollout_max_response_len=length,
        n_samples_per_prompt=SAMPLES,
        group_rm=False,
        code={},
        bound=1 << 20,
        in_flight=max(1, concurrency // SAMPLES),
        max_weight_staleness=None,
        queue_capacity=1 << 20,
        queue_max_bytes=1 << 40,
        max_group_bytes=1 << 30,
        rollout_submission_granularity="sample",
        pause_generation_mode="retract",
    )
