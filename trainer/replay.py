"""`millpond replay ARCHIVE`: trains on what a run has archived (--archive), without Redis and without generators.

What the run was trained with goes before defaults, so that without flags the same figures come out, and a flag tries
another estimator, loss or correction on the same groups.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from pipeline import archive, metrics, torchrun
from pipeline.algorithms import Algorithm, Optimizing
from pipeline.archive import Record
from pipeline.config import Async, Rollout, TrainConfig
from pipeline.errors import RunExists, UsageError
from pipeline.fitting import Fitting
from pipeline.flags import dump, parse, parted
from pipeline.log import fields, setup
from pipeline.lora import Lora
from pipeline.modes import check, idle, resolve_rollout
from pipeline.options import flag
from pipeline.parallel import Parallel
from pipeline.plan import put_config
from pipeline.sections import Positive, PositiveFloat, option
from pipeline.types import Group
from trainer import backends, checkpoint
from trainer.backends.base import At, Backend
from trainer.workshop import made

log = logging.getLogger(__name__)


class ReplayConfig(Optimizing, Algorithm, Fitting, Lora, Parallel):
    """Trains on what a run has archived: millpond replay ARCHIVE. What is not given is as it was in that run."""

    out: Path | None = option(None, "a new folder for metrics, logs and the weights at the end")
    hf_checkpoint: Path | None = option(None, "model and tokenizer folder that the run began with")
    load: Path | None = option(
        None, "checkpoint of that run to begin after, where the archive does not begin at step 1"
    )
    num_rollout: Positive | None = option(None, "training steps after which it ends; --lr-decay-style counts on them")
    global_batch_size: Positive | None = option(None, "samples in an optimizer step (default: the whole batch)")
    train_backend: Literal["torch", "megatron", "echo"] = option("torch", "torch, megatron, or echo: trains nothing")
    seed: int = option(1234, "seed of the trainer", ge=0)
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    torch_threads: Positive = option(1, "threads torch computes with in one process")
    distributed_timeout_minutes: PositiveFloat = option(10.0, "under torchrun: minutes one exchange may take")
    deterministic_mode: bool = option(False, "the same figures to the digit, each time")


NOT_RECORDED = {"out", "load"}
KNOWN = tuple(name for name in ReplayConfig.model_fields if name not in NOT_RECORDED)
"Options that a replay has from the archive where they are not given."
SAMPLED = (*Rollout.model_fields, *Async.model_fields)
"Those that say how groups were made, which a replay cannot change."


@dataclass(frozen=True)
class Job:
    """What a command line asks for."""

    own: ReplayConfig
    config: TrainConfig
    "what the backends are built of"
    folder: Path
    steps: list[int]


def main(argv: list[str]) -> int:
    """Train on an archive."""
    job = asked(argv, os.environ)
    warnings, tis = check(job.config), resolve_rollout(job.config).tis
    if torchrun.rank() > 0:
        backends.follow(job.config, tis)
        return 0
    out = _out(job.own)
    with closing(backends.build(job.config, tis)) as backend:  # refused, the folder is empty and can be given again
        setup("replay", out)
        for warning in warnings:
            log.warning(warning)
        train(job, backend, out)
    return 0


def asked(argv: list[str], environ: Mapping[str, str]) -> Job:
    """UsageError where there is no such archive, or a step is missing."""
    flags, words = parted(ReplayConfig, argv)
    if not words and {"-h", "--help"} & {*flags}:
        parse(ReplayConfig, flags, environ, "millpond replay")
    folder = _folder(words)
    first, _ = archive.read(folder / archive.name_of(archive.steps(folder)[0]))
    recorded = {name: first.options[name] for name in KNOWN if name in first.options}
    own = parse(ReplayConfig, flags, environ, "millpond replay", recorded)
    other = first.options.get("load") if first.step == 1 else None
    if other and not own.load and "hf_checkpoint" not in own.model_fields_set:
        raise UsageError(
            f"{folder}: the run was begun with --load {other}: give its checkpoint of step 0 with --load "
            f"({folder.parent / 'checkpoints' / '00000000'}), or those weights as --hf-checkpoint"
        )
    begun = checkpoint.read(own.load).step if own.load else 0
    most = own.num_rollout if "num_rollout" in own.model_fields_set else None  # a resume may have had more
    return Job(own, _trained(own, first, folder), folder, _steps(folder, begun, most))


def train(job: Job, backend: Backend, out: Path) -> None:
    """All steps, and the weights at the end."""
    put_config(out, dump(job.own, idle(job.config)))
    if job.own.load:
        backend.load(job.own.load / "model")
    version = _replay(job, backend, out)
    for folder in (out / "weights", out / "weights" / ".new"):
        folder.mkdir(mode=0o700)
    with made(out / "weights" / ".new", out / "weights" / f"{version:08d}"):
        backend.save_weights(out / "weights" / ".new")
    log.info("done: steps %d to %d, weights in %s", job.steps[0], job.steps[-1], out / "weights" / f"{version:08d}")


def _folder(words: list[str]) -> Path:
    if len(words) != 1:
        raise UsageError("which archive? Give its one folder: millpond replay runs/NAME/archive --out ...")
    folder = Path(words[0])
    inner = folder / "archive"
    if not archive.steps(folder) and archive.steps(inner):
        return inner
    if not archive.steps(folder):
        what = "holds no step" if folder.is_dir() else "is no folder" if folder.exists() else "is not there"
        raise UsageError(f"{folder} {what}: an archive is made by millpond run or train with --archive")
    return folder


def _trained(own: ReplayConfig, first: Record, folder: Path) -> TrainConfig:
    """What the backends are built of."""
    known = {name: first.options[name] for name in SAMPLED if name in first.options}
    try:
        config = TrainConfig.model_validate({**known, **own.model_dump(exclude=NOT_RECORDED), "num_epoch": 1})
    except ValidationError as error:
        problem = error.errors()[0]
        where = folder / archive.name_of(first.step)
        raise UsageError(f"{where}: step {first.step}: {flag(str(problem['loc'][0]))}: {problem['msg']}") from None
    config.model_fields_set.intersection_update(own.model_fields_set)
    return config


def _steps(folder: Path, begun: int, most: int | None) -> list[int]:
    """Those to train on; UsageError where one is missing."""
    there = archive.steps(folder)
    last = min(there[-1], most) if most else there[-1]
    wanted = list(range(begun + 1, last + 1))
    if not wanted:
        raise UsageError(f"{folder} ends with step {there[-1]}: nothing is left after step {begun}")
    for step in wanted:
        if step not in set(there):
            help = f"; --load the checkpoint after {there[0] - 1} steps to begin there" if step < there[0] else ""
            raise UsageError(
                f"{folder / archive.name_of(step)}: step {step} is missing; there are {_runs(there)}{help}"
            )
    return wanted


def _runs(steps: list[int]) -> str:
    """`1 to 4, 6 to 9`."""
    starts = [step for step in steps if step - 1 not in set(steps)]
    ends = [step for step in steps if step + 1 not in set(steps)]
    return ", ".join(f"{a} to {b}" for a, b in zip(starts, ends, strict=True))


def _out(own: ReplayConfig) -> Path:
    if own.out is None:
        raise UsageError("where to? Give a new folder with --out")
    try:
        if own.out.exists() and any(own.out.iterdir()):
            raise RunExists(f"--out {own.out}: is there already; a replay makes a new folder")
        own.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {own.out}: {error.strerror}") from None
    return own.out


def _replay(job: Job, backend: Backend, out: Path) -> int:
    """The version of the weights at the end."""
    version = 0
    with closing(metrics.Metrics(out / "metrics.jsonl")) as file:
        for record, groups in _read(job):
            began = time.monotonic()
            figures = backend.train(groups, record.step - 1, At(record.version, record.lineage, record.exact))
            seconds = time.monotonic() - began
            rollout, perf = metrics.rollout(groups), metrics.perf(groups, seconds, 0.0, seconds)
            file.write(record.step, {**figures, **rollout, **record.figures, **perf})
            reward, loss = rollout.get("rollout/raw_reward", float("nan")), figures.get("train/loss", float("nan"))
            log.info("step %s", fields(step=record.step, reward=reward, loss=loss, train=seconds))
            version = int(record.figures.get("train/weight_version", record.version + 1))
    return version


def _read(job: Job) -> Iterator[tuple[Record, list[Group]]]:
    """The steps, each held against the model and the options that this replay has."""
    model = archive.shape_of(job.config.hf_checkpoint)
    before: dict[str, Any] = {}
    for step in job.steps:
        path = job.folder / archive.name_of(step)
        record, groups = archive.read(path)
        for problem in archive.misfits(path, record, groups, model):
            raise UsageError(problem)
        if record.options.get("rollout_temperature") != job.config.rollout_temperature:
            raise UsageError(f"{path}: step {step}: it was sampled at another temperature than the steps before it")
        now = {name: record.options.get(name) for name in KNOWN}
        if before and now != before:
            changed = ", ".join(f"{flag(n)} {before[n]} -> {now[n]}" for n in KNOWN if now[n] != before[n])
            log.warning("from step %d on the run was trained with %s; this replay keeps its own", step, changed)
        before = now
        yield record, groups
