"""`millpond feed` and `millpond generate`: flags in, a running stage, an exit code out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from redis.exceptions import RedisError

from pipeline.agreed import Agreed
from pipeline.broker import Broker
from pipeline.code import digest
from pipeline.config import FeedConfig, GenerateConfig
from pipeline.connect import verify
from pipeline.errors import MillpondError, RedisDown, Starved, Stopped, UsageError
from pipeline.flags import parse
from pipeline.jobs import Jobs
from pipeline.join import Place, join
from pipeline.keys import Keys
from pipeline.leases import WorkerBroker, new_worker_id
from pipeline.log import setup
from pipeline.modes import CODE, check
from pipeline.options import flag
from pipeline.pulse import WorkerPulse
from pipeline.replies import Pulse
from producers import custom_generate, engines, feeder, filters, rewards, waves
from producers.engines.base import Engine
from producers.generator import Generator
from producers.group import Maker
from producers.rewards import by_worker
from producers.work import Worker

log = logging.getLogger(__name__)

PASSES = (Stopped, RedisDown, Starved, UsageError)
"What ends this worker and is no reason to end the run: others may go on, and a mistyped flag here is mended here."


def feed(argv: list[str]) -> int:
    """Keep a run's prompt stream fed from a file."""
    config = parse(FeedConfig, argv, os.environ, "millpond feed")
    check(config)
    found = join(config)
    setup("feeder", found.folder)
    broker = verified(found, "feeder", config.redis_patience)
    return feeder.main(config, broker, broker.stop)


def generate(argv: list[str]) -> int:
    """Lease prompts, sample, score, push; until told to stop or the run is over."""
    config = parse(GenerateConfig, argv, os.environ, "millpond generate")
    check(config)
    found = join(config)
    setup(f"generator-{os.getpid()}", found.folder)
    first = verified(found, "worker", config.redis_patience)
    first.close()
    code = asyncio.run(_generate(config, found, first.stop))
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        log.warning("a reward function is still running; it is not waited for")
        logging.shutdown()
        os._exit(code)
    return code


def verified(found: Place, name: str, patience: float) -> Broker:
    """A broker on a Redis that may be used, waited for until a signal says otherwise."""
    broker = Broker(found.url, Keys(found.run), name, patience)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: broker.stop.set())
    for warning in broker.patiently(lambda: verify(broker.client, found.url)):
        log.warning(warning)
    return broker


async def _generate(config: GenerateConfig, found: Place, asked: threading.Event) -> int:
    """`asked`: to stop, before there was anything here to tell."""
    worker = new_worker_id()
    broker = WorkerBroker(found.url, Keys(found.run), worker, config.redis_patience)
    _on_signals(broker.stop.set)
    if asked.is_set():
        broker.stop.set()
    try:
        while (rules := await _rules(broker, config)) is not None:
            async with (
                _scorer(config, rules, found) as scorer,
                _generator(broker, config, rules, found, scorer) as generator,
            ):
                _on_signals(generator.halt)
                if broker.stop.is_set():  # before the generator could be told
                    generator.halt()
                changed = await generator.run()
            if not changed:
                break
            log.warning("the trainer has other settings now: all is handed back, and begun anew with them")
    except UsageError as error:
        await broker.fail("", str(error), alarm=False)
        raise
    except PASSES:
        raise
    except Exception as error:
        what = str(error) if isinstance(error, MillpondError) else f"{type(error).__name__}: {error}"
        await broker.fail(traceback.format_exc(), what)
        raise
    finally:
        await broker.close()
    log.info("everything is handed back; worker %s leaves", worker)
    return 0


def _scorer(config: GenerateConfig, rules: Agreed, found: Place) -> AbstractAsyncContextManager[rewards.Scorer]:
    if rules.rm_place == "worker":
        return by_worker.opened(config, rules.group_rm, Jobs(found.url, Keys(found.run), "rewards"))
    return rewards.opened(config, rules.group_rm)


def _on_signals(act: Callable[[], None]) -> None:
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, act)


@contextlib.asynccontextmanager
async def _generator(
    broker: WorkerBroker, config: GenerateConfig, rules: Agreed, found: Place, scorer: rewards.Scorer
) -> AsyncIterator[Generator]:
    """A generator with its engine started, registered and giving signs of life."""
    path, own = config.dynamic_sampling_filter_path, config.custom_generate_function_path
    play = custom_generate.load(own) if own else custom_generate.ONCE
    engine, tokenizer = engines.build(config, rules.pause_generation_mode, rules.adapter_rank)
    maker = Maker(engine, tokenizer, scorer, rules, broker.worker, asyncio.Semaphore(engines.slots(config)), play)
    worker = Worker(broker, maker, filters.load(path) if path else None)
    generator = (waves.Waves if rules.deterministic_mode else Generator)(worker, engines.slots(config))
    loop = asyncio.get_running_loop()

    def hear(heard: Pulse | RedisError) -> None:
        if isinstance(heard, RedisError):
            loop.call_soon_threadsafe(generator.fail, heard)
        else:
            loop.call_soon_threadsafe(generator.hear, heard)

    def sign() -> tuple[dict[str, Any], int, float]:
        return generator.info(), generator.spare, generator.turned if generator.ready else time.monotonic()

    generator.ready = False
    await broker.register(generator.info())
    pulse = WorkerPulse(found.url, broker.keys, broker.worker, sign, hear)
    pulse.start()
    try:
        await _start(engine, generator, broker)
        if rules.deterministic_mode:
            await waves.check(engine, config, worker)
        log.info("worker %s works on run %s", broker.worker, found.run)
        yield generator
    finally:
        await asyncio.to_thread(pulse.stop)
        await engine.close()


async def _start(engine: Engine, generator: Generator, broker: WorkerBroker) -> None:
    """An engine may take minutes; who is told to stop meanwhile leaves at once."""
    starting = asyncio.ensure_future(engine.start())

    def stop() -> None:
        broker.stop.set()
        starting.cancel()

    _on_signals(stop)
    try:
        await starting
    except BaseException:
        await broker.leave()
        if broker.stop.is_set():
            raise Stopped("asked to stop while the engine was starting") from None
        raise
    _on_signals(broker.stop.set)
    generator.turned, generator.ready = time.monotonic(), True


async def _rules(broker: WorkerBroker, config: GenerateConfig) -> Agreed | None:
    """What the trainer has written for all workers; None when told to stop before there was anything."""
    began = time.monotonic()
    said = began - 28  # the first soon
    while not broker.stop.is_set():
        rules = await broker.agreed()
        if rules is not None:
            same_code(rules, config)
            return rules
        now = time.monotonic()
        if now - began > config.redis_patience:
            raise Starved(f"run {broker.keys.run} has had no trainer for {now - began:.0f} s; start `millpond train`")
        if now - said > 30:
            said = now
            log.warning("run %s has no trainer yet; waiting", broker.keys.run)
        await asyncio.sleep(0.2)
    return None


def same_code(rules: Agreed, config: GenerateConfig) -> None:
    """UsageError unless this worker has the functions, rewards and filters that the run was started with."""
    if "rm_place" in config.model_fields_set and config.rm_place != rules.rm_place:
        raise UsageError(
            f"--rm-place is {config.rm_place} here, and {rules.rm_place} with the run's trainer, which decides"
        )
    for name in CODE:
        mine = getattr(config, name)
        if (digest(mine) if mine else None) != rules.code.get(name):
            theirs = "has none" if name not in rules.code else "was started with another one"
            raise UsageError(
                f"{flag(name)} is {mine or 'not given'} here, and run's trainer {theirs}: all must agree, "
                "or groups would be made or scored in different ways"
            )
