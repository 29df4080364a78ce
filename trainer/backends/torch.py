"""Trains any Hugging Face causal language model, on CPUs or GPUs; over several ranks its weights are spread (FSDP2).

All ranks are given the same groups and work out the same split; each runs its share of the samples. Whatever decides
(figures, norms, whether there is an update) is the same number on all.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.config import TrainConfig
from pipeline.errors import MillpondError, UsageError
from pipeline.rendezvous import Piece
from pipeline.types import Group
from trainer import batch, losses
from trainer.backends import sharded, state
from trainer.backends.base import At
from trainer.backends.hf import CausalModel
from trainer.backends.optimizer import Optimizer
from trainer.batch import Microbatch, Unit
from trainer.credit import Penalties
from trainer.mismatch import Mismatch
from trainer.objective import Objective, Told
from trainer.ranks import Ranks

log = logging.getLogger(__name__)

PATIENCE = 3
"minibatches in a row that may fail to be finite; the last of them ends the run"


class TorchBackend:
    """See trainer.backends.base."""

    def __init__(self, config: TrainConfig, tis: bool, ranks: Ranks | None = None) -> None:
        torch.set_num_threads(config.torch_threads)
        torch.manual_seed(config.seed)
        self._config = config
        self._ranks = ranks or Ranks()
        self._objective = Objective(config, tis)
        self._device = device_of(config)
        self._model = CausalModel(config.hf_checkpoint, self._device, self._ranks.world > 1)
        self._reference = self._frozen() if self._objective.needs_reference else None
        self._optimizer = Optimizer(self._model.module, config)
        self._bad = 0
        self._mismatch = Mismatch()

    def train(self, groups: Sequence[Group], step: int, at: At | None = None) -> dict[str, float]:
        """See Backend. Means are 0 where no minibatch counted; lr is the first minibatch's, grad_norm their mean."""
        config, lr, names = self._config, self._optimizer.lr, self._objective.figures
        found = batch.units(groups, at.age if at else lambda version: None)
        penalties = self._penalties(found)
        minis = [
            self._objective.weighted(mini)
            for mini in batch.minibatches(
                self._objective.credited(found, penalties), config.global_batch_size, (config.seed, step)
            )
        ]
        shares = [self._share(mini) for mini in minis]
        olds = [[self._told(self._model, m) if len(minis) > 1 else None for m in micros] for micros in shares]
        results = [self._minibatch(*parts, step) for parts in zip(minis, shares, olds, strict=True)]
        done = [(_count(mini), *result) for mini, result in zip(minis, results, strict=True) if result is not None]
        tokens = max(1, sum(count for count, _, _ in done))
        sums = sum((total for _, total, _ in done), torch.zeros(self._objective.size))
        by_age = self._objective.by_age(sums)
        self._mismatch.look(by_age, at)
        means = zip(names, sums.tolist(), strict=False)
        return {f"train/{name}": value / tokens for name, value in means} | {
            **by_age,
            "train/grad_norm": sum(norm for _, _, norm in done) / max(1, len(done)),
            "train/lr": lr,
            "train/optimizer_steps": float(len(done)),
            "train/skipped": float(len(results) - len(done)),
            "train/masked_samples": float(sum(not unit.rows for unit in found)),
            **({"train/kl": float(np.concatenate([*penalties.values()]).mean()) / config.kl_coef} if penalties else {}),
        }

    def save_weights(self, folder: Path) -> None:
        self._model.save(folder, self._ranks.lead)

    def outline(self) -> list[Piece]:
        return self._model.outline()

    def pieces(self) -> Iterator[Tensor]:
        return self._model.pieces(self._ranks.lead)

    def save(self, folder: Path) -> None:
        """Model, optimizer and random state: tensors and numbers, no code. All ranks take part, the lead writes."""
        facts = {"updates": self._optimizer.updates}
        if self._ranks.lead:
            return state.write(folder, self._state(), facts)
        for _ in self._state():
            pass
        return None

    def load(self, folder: Path) -> None:
        """The optimizer's settings stay those of this configuration."""
        saved = state.Saved(folder)
        for name, tensor in sharded.named(self._model.module):
            sharded.fill(tensor, saved.tensor(f"model.{name}", tensor))
        self._optimizer.restore(saved)
        torch.set_rng_state(saved.tensor("rng", torch.get_rng_state()))

    def close(self) -> None:
        self._ranks.part()

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in sharded.named(self._model.module):
            yield f"model.{name}", sharded.whole(tensor)
        for name, tensor in self._optimizer.tensors():
            yield name, sharded.whole(tensor)
        yield "rng", torch.get_rng_state()

    def _share(self, minibatch: Sequence[Unit]) -> list[Microbatch]:
        """What this rank runs of it."""
        found = batch.share(minibatch, self._config.max_tokens_per_gpu, self._ranks.rank, self._ranks.world)
        return [micro.to(self._device) for micro in found]

    def _minibatch(
        self, mini: Sequence[Unit], micros: list[Microbatch], olds: list[Tensor | None], step: int
    ) -> tuple[Tensor, float] | None:
        """One optimizer step. Returns sums of the figures and the gradient norm, None where they are not finite.

        With nothing to learn there is no backward pass: on gradients of 0 momentum and decay would move the weights.
        """
        count, learn = _count(mini), self._objective.learns(mini)
        if not learn:
            log.warning("step %d: no update: %s", step, "all advantages are 0" if count else "every token is masked")
        total = torch.zeros(self._objective.size)
        with torch.set_grad_enabled(learn):
            for micro, old in zip(micros, olds, strict=True):
                figures = self._sums(micro, old, count)
                if learn:
                    (figures[0] / count).backward()  # type: ignore[no-untyped-call]
                total += figures.detach().cpu()
        total = self._ranks.total(total)
        norm = self._optimizer.clip() if learn else 0.0
        finite = math.isfinite(norm) and bool(total.isfinite().all())
        if learn and finite:
            self._optimizer.update()
            self._bad = 0
        self._optimizer.forget()
        if finite:
            return total, norm
        self._complain(step, norm)
        return None

    def _sums(self, micro: Microbatch, old: Tensor | None, count: int) -> Tensor:
        reference = self._told(self._reference, micro) if self._reference and self._config.use_kl_loss else None
        logprobs, entropy = self._forward(self._model, micro)
        return self._objective.sums(micro, Told(logprobs, entropy, old, reference), count)

    def _forward(self, model: CausalModel, micro: Microbatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy at each trained token, [N], at the rollout's temperature."""
        logits, temperature = model.logits(micro.input_ids, micro.predictors), self._config.rollout_temperature
        if temperature != 1:  # a copy less where it is
            logits = logits.float() / temperature
        return losses.logprobs_and_entropy(logits, micro.targets, self._config.entropy_coef > 0)

    def _told(self, model: CausalModel, micro: Microbatch) -> Tensor:
        """A model's log-probabilities, [N], without gradient."""
        with torch.no_grad():
            return self._forward(model, micro)[0]

    def _penalties(self, units: Sequence[Unit]) -> Penalties | None:
        """What drift from the reference costs of the reward, by trained token, of all ranks' shares."""
        if self._reference is None or self._config.kl_coef == 0:
            return None
        places = {(*u.id, n): row for u in units for n, row in enumerate(u.rows)}
        ends = dict(zip(places, np.cumsum([len(row.targets) for row in places.values()]).tolist(), strict=True))
        costs = torch.zeros(max(ends.values(), default=0), dtype=torch.float64)
        for micro in self._share(units):
            own = self._config.use_rollout_logprobs
            before = micro.logprobs if own else self._told(self._model, micro)
            drift = (before - self._told(self._reference, micro)).double().cpu() * self._config.kl_coef
            for id, part in zip(micro.ids, torch.split(drift, micro.lengths.tolist()), strict=True):
                costs[ends[id] - len(part) : ends[id]] = part
        flat = np.split(self._ranks.total(costs).numpy(), np.cumsum([u.tokens for u in units])[:-1])
        return {unit.id: part for unit, part in zip(units, flat, strict=True) if unit.rows}

    def _frozen(self) -> CausalModel:
        """The reference. UsageError where it is another kind of model."""
        folder = self._config.ref_load or self._config.hf_checkpoint
        model = CausalModel(folder, self._device, self._ranks.world > 1)
        model.module.requires_grad_(False)
        words = [m.module.get_output_embeddings().weight.shape[0] for m in (self._model, model)]
        if words[0] != words[1]:
            raise UsageError(f"--ref-load {self._config.ref_load}: {words[1]} tokens, --hf-checkpoint has {words[0]}")
        return model

    def _complain(self, step: int, norm: float) -> None:
        self._bad += 1
        problem = f"step {step}: the loss or its gradient is not finite (gradient norm {norm})"
        if self._bad >= PATIENCE:
            raise MillpondError(f"{problem}, {self._bad} times in a row: lower --lr, or go back to an older checkpoint")
        log.warning("%s: minibatch skipped, weights unchanged", problem)


def _count(minibatch: Sequence[Unit]) -> int:
    return sum(unit.tokens for unit in minibatch)


def device_of(config: TrainConfig) -> torch.device:
    """UsageError where there is none of that name."""
    name = config.device
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {config.device}: {error}") from error
