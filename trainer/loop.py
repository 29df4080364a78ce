"""The training loop: drain, train, publish, save, commit.

Consumes batches; waits in the drain; is unblocked by groups; produces weight versions, checkpoints and a line of
metrics a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from consumers.drain import Batch, Drain
from consumers.staleness import Limit
from pipeline.config import TrainConfig
from pipeline.errors import GroupError, MillpondError, Starved, Stopped, WorkerFailed
from pipeline.fenced import TrainerBroker
from pipeline.types import HF, PEFT, Policy, Prompt
from trainer import checkpoint, weights
from trainer.backends.base import At, Backend
from trainer.evaluate import Evaluations
from trainer.keeper import Keeper
from trainer.report import Reporter
from trainer.start import Beginning
from trainer.workshop import Workshop

log = logging.getLogger(__name__)

MERGED = "merged-"
"What the name of a folder begins with that holds the model at a step, in a run that published adapters alone."


@dataclass
class Loop:
    """One trainer's life after it began."""

    config: TrainConfig
    broker: TrainerBroker
    backend: Backend
    folder: Path
    rollout: Callable[[Drain, Limit], Batch | None]
    drain: Drain
    report: Reporter
    max_staleness: int | None
    now: Beginning
    "steps done, and the version that was published last or is to be published first"
    announce: Callable[[Policy, list[Prompt]], None] | None = None
    "what publishes in the broker's place"
    evals: Evaluations | None = None
    keeper: Keeper | None = None
    "where steps are archived"
    untold: tuple[Batch, dict[str, float], float, At] | None = None
    "a step that has no line yet: batch, figures, seconds, where the policy stood"

    def __post_init__(self) -> None:
        self.began = self.now.step
        self.saved = -1 if self.now.fresh else self.now.step
        model = self.config.hf_checkpoint if self.config.debug_rollout_only else None
        self.unchanged = (model, weights.digest(model)) if model else None
        "weights that no step changes, which are published as they are; and their digest"
        self.form = PEFT if self.config.lora_publish == "adapter" else HF
        self.written: dict[tuple[int, int], tuple[Path, str]] = {}
        "(version, step) -> folder and digest, of the last publication"

    def run(self) -> None:
        """To the end of steps or data, whichever comes first; what was trained is in a checkpoint at any end but a
        crash."""
        if self.evals:
            self.evals.begin(self.now.step)
            self._mark_best()
        policy = self.publish(self.now.version)
        if self.now.fresh:  # whatever comes, it goes on from these weights
            self.save()
        self.broker.renew(status="running", why="")
        try:
            self._evaluate(policy)
            why = self._steps()
            self.drain.release()
            self.save()
            self._export()
            self._evaluate_last()
        except (Stopped, WorkerFailed, Starved, GroupError) as error:
            self.drain.release()
            self.save()
            self.broker.finish("draining" if isinstance(error, Stopped) else "failed", str(error)[:500])
            raise
        self.broker.finish("done", why)
        log.info("done: %s", why)

    def _steps(self) -> str:
        """Why it ended."""
        while self.config.num_rollout is None or self.now.step < self.config.num_rollout:
            batch = self.rollout(self.drain, Limit(self.now.version, self.now.lineage, self.max_staleness))
            if batch is not None:
                self.step(batch)
            if batch is None or batch.last:
                return f"the data ended after {self.now.step} steps"
        return f"all {self.now.step} steps are done"

    def step(self, batch: Batch) -> None:
        """One batch into the weights, and the weights out to everyone."""
        began = time.monotonic()
        exact = self.config.update_weights_interval == 1
        at = At(self.now.version, self.now.lineage, exact)
        try:
            figures = self.backend.train(batch.groups, self.now.step, at)
        except GroupError as error:  # half a step is in no checkpoint, nor are its groups
            raise MillpondError(f"step {self.now.step + 1}: {error}") from error
        trained = time.monotonic() - began
        self.broker.ledger.trained.update(self.drain.handed())
        self.now = replace(self.now, step=self.now.step + 1)
        self.untold = batch, figures, trained, at
        self.report.count()
        policy = None
        if self.now.step % self.config.update_weights_interval == 0:
            policy = self.publish(self.now.version + 1)
        self._tell()
        last = batch.last or self.now.step == self.config.num_rollout
        self._evaluate(None if last else policy)
        if self._save_is_due() and not self.broker.ledger.trained:
            self.save()

    def _tell(self) -> None:
        """The line and the archive of the last step, once: at the latest before a checkpoint contains it, where a stop
        came between the step and its publication."""
        if self.untold:
            batch, figures, trained, at = self.untold
            own = self.report.step(self.now, batch, figures, trained)
            if self.keeper:
                self.keeper.keep(self.now.step, batch.groups, at, own)
            self.untold = None

    def _save_is_due(self) -> bool:
        """A step at which to save came since the last; between two publications it waits, or versions would come faster
        than room reckons with, and groups grow stale."""
        interval = self.config.save_interval
        return interval > 0 and self.now.step // interval > self.saved // interval

    def _evaluate(self, policy: Policy | None) -> None:
        """Takes in what has been evaluated, and asks for more; the last weights' turn comes when all is saved."""
        if self.evals:
            self.evals.look()
            self._mark_best()
            if policy:
                self.evals.ask(policy)

    def _evaluate_last(self) -> None:
        if self.evals:
            self.evals.finish(self.policy)
            self._mark_best()
            self._clean()

    def _mark_best(self) -> None:
        if self.evals and self.config.save_best:
            shop = Workshop(self.folder / "checkpoints", self.broker.epoch)
            checkpoint.point(shop, self.evals.best(set(weights.versions(shop.root))))

    def _export(self) -> None:
        """Where adapters alone were published, a whole model for who takes it away, in place of an earlier step's."""
        shop, name = Workshop(self.folder, self.broker.epoch), f"{MERGED}{self.now.step:08d}"
        if self.form == HF or ((shop.root / name).exists() and self.now.step == self.began):
            return
        shop.take_away(shop.root / name)  # of a branch that was given up
        with shop.making(name) as folder:
            self.backend.save_weights(folder)
        for path in shop.root.glob(f"{MERGED}*"):
            if path.name != name:
                shop.take_away(path)
        log.info("the model with its adapters merged is in %s", shop.root / name)

    def publish(self, version: int) -> Policy:
        """Write aside, rename, then announce. Room opens for what these weights were trained on."""
        shop = Workshop(self.folder / "weights", self.broker.epoch)
        now = version, self.now.step
        if now not in self.written:  # else a stop cut off its announcement
            self.written = {now: self.unchanged or weights.save(self.backend, shop, version, self.form)}
        path, digest = self.written[now]
        where = str(path.resolve()) if digest else ""
        policy = Policy(version, where, self.form, digest, self.now.step, time.time(), self.now.lineage)
        self.policy = policy
        if self.evals:
            self.evals.hold(policy)
        book = self.broker.ledger
        trained = [book.taken[id] for id in sorted(book.trained)]
        (self.announce or self.broker.publish)(policy, trained)
        self.now = replace(self.now, version=version)
        if self.config.save_interval == 0:
            self.broker.commit(trained)
        self._clean()
        return policy

    def _clean(self) -> None:
        """Deletes weights that nobody uses."""
        version, asked = self.now.version, self.evals.versions if self.evals else set()
        used = {version, version - 1} | self.broker.worker_versions() | asked
        weights.clean(Workshop(self.folder / "weights", self.broker.epoch), used)

    def save(self) -> None:
        """A checkpoint if there is anything new, then the commit of what it contains. What was trained is published
        first: a commit must not open room that a publication has not."""
        book = self.broker.ledger
        if book.trained:
            self.publish(self.now.version + 1)
        self._tell()
        if self.config.save_interval == 0 or self.saved == self.now.step:
            return
        book.data = self.broker.state().get("data", book.data)
        ledger = checkpoint.ledger_of(self.broker.standing(), book)
        shop = Workshop(self.folder / "checkpoints", self.broker.epoch)
        now = self.now
        checkpoint.save(
            checkpoint.Checkpoint(
                shop.root / f"{now.step:08d}", now.step, now.version, now.lineage, shop.epoch, ledger
            ),
            self.backend,
            shop,
        )
        refused = self.broker.commit(list(book.published.values()))
        if refused:
            log.error("trained here, but not ours to commit in Redis: prompts %s", refused)
        book.dropped, book.dead, book.cursor = ledger.dropped, ledger.dead, ledger.cursor
        self.saved = now.step
        self._mark_best()
        checkpoint.prune(shop, self.config.save_keep, self.evals.steps if self.evals else set())
