"""`millpond train`: flags in, a trained model out."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial

from consumers import filters
from consumers.drain import Drain, DrainRules
from pipeline import code, torchrun
from pipeline.config import TrainConfig
from pipeline.connect import verify
from pipeline.errors import Fenced, RedisDown, Starved, Stopped, WorkerFailed
from pipeline.fenced import TrainerBroker
from pipeline.flags import parse
from pipeline.jobs import Jobs
from pipeline.join import RUNS, join
from pipeline.keys import Keys
from pipeline.log import setup
from pipeline.modes import check, resolve_rollout
from pipeline.origin import weights_in
from pipeline.pulse import TrainerPulse
from pipeline.types import Policy, Prompt
from trainer import backends
from trainer.backends.base import Backend
from trainer.evaluate import Evaluations
from trainer.keeper import keeper_of
from trainer.loop import Loop
from trainer.report import Reporter
from trainer.start import begin
from trainer.trackers import Trackers

log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Train on finished groups and publish the weights."""
    config = parse(TrainConfig, argv, os.environ, "millpond train")
    warnings = check(config)
    selection = resolve_rollout(config)
    if torchrun.rank() > 0:
        return _follow(config, selection.tis)
    if config.load and not config.resume:
        weights_in(config.load, config.train_backend)  # a mistake is told before anything is spent
    place = join(config)
    folder = place.folder or RUNS / place.run
    setup("trainer", folder)
    broker = TrainerBroker(place.url, Keys(place.run), config.redis_patience)
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: broker.stop.set())
    for warning in [*warnings, *broker.patiently(lambda: verify(broker.client, place.url))]:
        log.warning(warning)
    rollout = code.load(selection.rollout, "--rollout-function-path")
    with ExitStack() as after:  # other ranks hear first that it is over
        trackers = Trackers(config, place, folder)
        after.callback(trackers.close)
        after.callback(broker.close)
        pulse = TrainerPulse(place.url, broker)
        pulse.start()
        after.callback(pulse.stop)
        backend = after.enter_context(closing(backends.build(config, selection.tis)))
        try:
            now = begin(config, broker, backend, folder)
            report = Reporter(folder / "metrics.jsonl", broker, now.step, trackers)
            trackers.start()
            drain = _drain(config, broker)
            announce = _announce(config, broker, backend)
            evals = _evaluations(config, broker, place.url, report)
            last = announce, evals, keeper_of(config, folder, broker.epoch, now.step)
            Loop(config, broker, backend, folder, rollout, drain, report, selection.max_staleness, now, *last).run()
        except (Fenced, RedisDown, Stopped, WorkerFailed, Starved):
            raise  # the run knows, or cannot be told
        except Exception as error:
            if broker.epoch:
                broker.finish("failed", f"the trainer failed: {type(error).__name__}: {error}"[:500])
            raise
    return 0


def _follow(config: TrainConfig, tis: bool) -> int:
    """Another rank than 0: once they have met it ends when rank 0 says so, not when torchrun tells all its processes
    to. Before that at once: rank 0 may have failed, and a wait for it in torch hears no handler of Python's."""
    _heed(signal.SIG_DFL)
    setup(f"trainer-{torchrun.rank()}", None)
    backends.follow(config, tis, lambda: _heed(signal.SIG_IGN))
    return 0


def _heed(how: signal.Handlers) -> None:
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, how)


def _announce(
    config: TrainConfig, broker: TrainerBroker, backend: Backend
) -> Callable[[Policy, list[Prompt]], None] | None:
    """How weights are published, unless by the broker alone."""
    if config.update_weight_transport == "disk":
        return None
    from trainer.backends.torch import device_of
    from trainer.push import Push

    return Push(config, broker, backend, device_of(config).type)


def _evaluations(config: TrainConfig, broker: TrainerBroker, url: str, report: Reporter) -> Evaluations | None:
    if config.eval_interval is None:
        return None
    return Evaluations(config, broker, Jobs(url, broker.keys, "trainer-jobs"), report.file)


def _drain(config: TrainConfig, broker: TrainerBroker) -> Drain:
    rules = DrainRules(
        size=config.rollout_batch_size,
        n_samples=config.n_samples_per_prompt,
        handler=config.async_unused_samples_handler,
        starve_timeout=config.starve_timeout,
        drop_last=config.drop_last,
    )
    path = config.rollout_sample_filter_path
    if path is None:
        return Drain(broker, rules)
    function = code.load(path, "--rollout-sample-filter-path")
    return Drain(broker, rules, partial(filters.rollout_sample_filter, function))
