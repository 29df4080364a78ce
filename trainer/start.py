"""How a trainer begins: fresh, or from a checkpoint; either way with a new, higher version and a Redis that agrees."""

from __future__ import annotations

import json
import logging
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.archive import steps
from pipeline.broker import SAME_DATA
from pipeline.config import TrainConfig
from pipeline.errors import RunExists, Stopped, UsageError
from pipeline.fenced import TrainerBroker
from pipeline.flags import digest
from pipeline.ledger import Ledger
from pipeline.modes import agreed
from pipeline.origin import weights_in
from trainer import checkpoint, settings
from trainer.backends.base import Backend
from trainer.keeper import archive_of
from trainer.weights import newest_version
from trainer.workshop import Workshop, claim, last_epoch, owner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beginning:
    """Where the loop starts."""

    step: int
    "steps done"
    version: int
    "to publish the first weights under"
    lineage: tuple[tuple[int, int], ...]
    fresh: bool = False
    "its weights came by --load, and no checkpoint has them yet"


def begin(config: TrainConfig, broker: TrainerBroker, backend: Backend, folder: Path) -> Beginning:
    """Takes the run over, loads what there is to load, and sends round again what was taken and not committed."""
    state = broker.state()
    known = "epoch" in state
    _refuse(config, broker, folder, state)
    found = _load(config, folder)
    changed = settings.changed(config, folder) if config.goes_on else []
    settings.refuse(changed, found is not None, config.lora_rank > 0)
    if found is None and broker.committed():
        raise UsageError(
            f"--resume: {broker.committed()} prompts of run {broker.keys.run} are committed, and {folder} has no "
            "checkpoint: is that the run's folder (--out)? If it is, the run was trained without checkpoints "
            "(--save-interval 0), or they were deleted, and it cannot go on; start another from its last weights, with "
            "--hf-checkpoint and a folder under weights/"
        )
    if found:
        _same_data(broker, found)
    _take_over(config, broker, max(found.epoch if found else 0, last_epoch(folder)))
    kept = archive_of(config, folder)
    claim(folder, broker, *([kept] if kept else []))
    found = _load(config, folder)  # again: another trainer that was waited for may have saved
    if found:
        backend.load(found.folder / "model")
        later = checkpoint.give_up(Workshop(folder / "checkpoints", broker.epoch), found.step)
        if later:
            log.warning("checkpoints after step %d are given up, and renamed: %s", found.step, ", ".join(later))
    elif config.load:
        backend.load_weights(weights_in(config.load, config.train_backend))
    settings.tell(changed)
    settings.keep(config, Workshop(folder, broker.epoch))
    broker.configure(agreed(config).model_dump_json())
    broker.renew(settings=digest(config))
    missing = broker.restore(found.ledger if found else Ledger())
    heard = broker.worker_versions() | {broker.version(), newest_version(folder / "weights")}
    version = 1 + max(*heard, found.version if found else 0)
    fresh = config.load is not None and not found
    if not (found or known):
        return Beginning(0, version, (), fresh)
    step, restored = (found.step, found.version) if found else (0, 1)
    log.info("resumed at step %d; %d prompts are fed again; weights get version %d", step, missing, version)
    return Beginning(step, version, (*_lineage(broker, found), (version, restored)), fresh)


def _refuse(config: TrainConfig, broker: TrainerBroker, folder: Path, state: dict[str, str]) -> None:
    run, known = broker.keys.run, "epoch" in state
    if (other := owner(folder)) not in (None, run):
        raise UsageError(
            f"{folder} is the folder of run {other}: give run {run} another --out, or go on with --run {other}"
        )
    if config.resume and config.load and (other := owner(config.load.resolve().parents[1])) not in (None, run):
        raise UsageError(
            f"--resume with --load {config.load}: that checkpoint is run {other}'s, and so are the prompts it has "
            "trained on; give one of this run, or start a new run from its weights (without --resume)"
        )
    kept = archive_of(config, folder)
    if kept and ((other := owner(kept)) not in (None, run) or (steps(kept) and not config.goes_on)):
        raise RunExists(
            f"{kept} is the archive of {f'run {other}' if other else 'another run'}: --archive-folder names another"
        )
    if known and not config.goes_on:
        raise RunExists(
            f"run {run} is in this Redis already, trained by {state.get('trainer')}: --resume goes on with it, "
            f"another --run starts a new one, `millpond purge --run {run}` deletes it"
        )
    if not config.goes_on and checkpoint.newest(folder / "checkpoints"):
        raise RunExists(
            f"{folder} has checkpoints of an earlier run: --resume goes on from them, another --out starts a new run"
        )
    if config.resume and not known and not any(path.name != "logs" for path in folder.glob("*")):  # begun just now
        raise UsageError(f"--resume: there is no run {run}, neither in this Redis nor in {folder}")
    text: Any = broker.patiently(lambda: broker.client.get(broker.keys["config"]))
    before = json.loads(text)["n_samples_per_prompt"] if text else config.n_samples_per_prompt
    if before != config.n_samples_per_prompt:
        raise UsageError(
            f"--resume with --n-samples-per-prompt {config.n_samples_per_prompt}: the groups that run {run} has "
            f"waiting and in the making have {before} samples; give the same, or another --run"
        )


def _same_data(broker: TrainerBroker, found: checkpoint.Checkpoint) -> None:
    """Before a feeder may feed, which it may once there is a trainer: also a Redis that knows nothing is told."""
    data = found.ledger.data
    if data and (now := broker.claim_data(data)) != data:
        broker.disclaim_data()
        raise UsageError(
            f"--resume: {found.folder} was trained on other data ({data}) than run {broker.keys.run} is fed from now "
            f"({now}): {SAME_DATA}, or another --run and --out"
        )


def _load(config: TrainConfig, folder: Path) -> checkpoint.Checkpoint | None:
    """None: the run begins, with the weights of --load if that is given."""
    back = config.load if config.resume else None
    path = back or (checkpoint.newest(folder / "checkpoints") if config.goes_on else None)
    return checkpoint.read(path) if path else None


def _take_over(config: TrainConfig, broker: TrainerBroker, above: int) -> None:
    name = f"{socket.gethostname()} pid {os.getpid()}"
    while True:
        try:
            return broker.takeover(name, config.take_over, above)
        except UsageError as error:
            if not config.wait:
                raise
            log.warning("%s; waiting", error)
            if broker.stop.wait(2):
                raise Stopped("asked to stop while another trainer held the run") from None


def _lineage(broker: TrainerBroker, found: checkpoint.Checkpoint | None) -> tuple[tuple[int, int], ...]:
    """Of the branch that is gone on with. A publication after the checkpoint belongs to the discarded branch."""
    if found:
        return found.lineage
    policy = broker.policy()
    return policy.lineage if policy else ()
