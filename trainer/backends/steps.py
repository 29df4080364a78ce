"""A training step, whoever holds the model: minibatches, the old policy, the objective, and whether there is an update.

All ranks are given the same groups and work out the same split; each runs its share of the samples. Whatever decides
(figures, norms, whether there is an update) is the same number on all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.config import TrainConfig
from pipeline.errors import GroupError, MillpondError
from pipeline.types import Group
from trainer import batch
from trainer.backends.base import At
from trainer.batch import Microbatch, Unit
from trainer.credit import Penalties
from trainer.mismatch import Mismatch
from trainer.objective import Objective, Told

log = logging.getLogger(__name__)

PATIENCE = 3
"minibatches in a row that may fail to be finite; the last of them ends the run"

Judge = Callable[[int, Tensor, Tensor], Tensor]
"Place among the microbatches, log-probabilities [N], entropy [N] -> figures [F]; the first is what to learn by."


class Model(Protocol):
    """The model that is trained, its reference and its optimizer, spread over ranks in the backend's own way."""

    @property
    def lr(self) -> float:
        """Of the next update."""
        ...

    def share(self, units: Sequence[Unit]) -> list[Microbatch]:
        """What this rank runs of them."""
        ...

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all shares, on each rank; collective."""
        ...

    def told(self, micros: Sequence[Microbatch], reference: bool = False) -> list[Tensor]:
        """Log-probabilities of the trained tokens, [N] each, without gradient; of the frozen reference if asked for.
        Collective."""
        ...

    def run(self, micros: Sequence[Microbatch], judge: Judge, count: int, learn: bool) -> list[Tensor]:
        """All microbatches forward, and backward if `learn`: gradients of the first figure / `count` are added up.
        Returns the figures of each; where they are not worked out, none. Collective."""
        ...

    def clip(self) -> float:
        """Cuts the gradient to the limit; its norm before, over all ranks. Collective."""
        ...

    def update(self) -> None: ...

    def forget(self) -> None:
        """The gradients."""
        ...


class Steps:
    """Trains `model` by the configured objective."""

    def __init__(self, config: TrainConfig, objective: Objective, model: Model, words: int) -> None:
        """`words`: token ids that the model knows."""
        self._config = config
        self._objective = objective
        self._model = model
        self._words = words
        self._bad = 0
        self._mismatch = Mismatch()

    def train(self, groups: Sequence[Group], step: int, at: At | None = None) -> dict[str, float]:
        """See Backend. Means are 0 where no minibatch counted; lr is the first minibatch's, grad_norm their mean."""
        self._known(groups)
        config, lr, names = self._config, self._model.lr, self._objective.figures
        found = batch.units(groups, at.age if at else lambda version: None)
        penalties = self._penalties(found)
        minis = [
            self._objective.weighted(mini)
            for mini in batch.minibatches(
                self._objective.credited(found, penalties), config.global_batch_size, (config.seed, step)
            )
        ]
        shares = [self._model.share(mini) for mini in minis]
        olds = [self._model.told(micros) if len(minis) > 1 else [None] * len(micros) for micros in shares]
        results = [self._minibatch(*parts, step) for parts in zip(minis, shares, olds, strict=True)]
        done = [(_count(mini), *result) for mini, result in zip(minis, results, strict=True) if result is not None]
        tokens = max(1, sum(count for count, _, _ in done))
        norms = [norm for _, _, norm in done if norm > 0]
        sums = sum((total for _, total, _ in done), torch.zeros(self._objective.size))
        by_age = self._objective.by_age(sums)
        self._mismatch.look(by_age, at)
        means = zip(names, sums.tolist(), strict=False)
        return {f"train/{name}": value / tokens for name, value in means} | {
            **by_age,
            "train/grad_norm": sum(norms) / max(1, len(norms)),
            "train/lr": lr,
            "train/optimizer_steps": float(len(norms)),
            "train/skipped": float(len(results) - len(done)),
            "train/masked_samples": float(sum(not unit.rows for unit in found)),
            **({"train/kl": float(np.concatenate([*penalties.values()]).mean()) / config.kl_coef} if penalties else {}),
        }

    def _known(self, groups: Sequence[Group]) -> None:
        """GroupError where a token is none of the model's."""
        for group in groups:
            for tokens in (t for s in group.samples for q in s.sequences for t in (q.prompt_tokens, q.tokens)):
                if (strange := tokens[(tokens < 0) | (tokens >= self._words)]).size:
                    raise GroupError(
                        f"prompt {group.prompt.id} has token {strange[0]}, and --hf-checkpoint "
                        f"{self._config.hf_checkpoint} has {self._words}: worker {group.worker} samples with another "
                        "model or tokenizer"
                    )

    def _minibatch(
        self, mini: Sequence[Unit], micros: list[Microbatch], olds: Sequence[Tensor | None], step: int
    ) -> tuple[Tensor, float] | None:
        """One optimizer step. Returns sums of the figures and the gradient norm, None where they are not finite.

        With nothing to learn there is no backward pass, and on a gradient of 0 no update: momentum and decay would
        move the weights.
        """
        count, learn = _count(mini), self._objective.learns(mini)
        if not learn:
            log.warning("step %d: no update: %s", step, "all advantages are 0" if count else "every token is masked")
        found = self._model.run(micros, self._judge(micros, olds, count), count, learn)
        total = self._model.total(sum((f.detach().cpu() for f in found), torch.zeros(self._objective.size)))
        norm = self._model.clip() if learn else 0.0
        finite = math.isfinite(norm) and bool(total.isfinite().all())
        if learn and norm == 0:
            log.warning("step %d: no update: the gradient is 0, as where all tokens are clipped or rejected", step)
        if finite and norm > 0:
            self._model.update()
            self._bad = 0
        self._model.forget()
        if finite:
            return total, norm
        self._complain(step, norm)
        return None

    def _judge(self, micros: Sequence[Microbatch], olds: Sequence[Tensor | None], count: int) -> Judge:
        references: Sequence[Tensor | None] = [None] * len(micros)
        if self._config.use_kl_loss:
            references = self._model.told(micros, reference=True)

        def judge(place: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
            told = Told(logprobs, entropy, olds[place], references[place])
            return self._objective.sums(micros[place], told, count)

        return judge

    def _penalties(self, units: Sequence[Unit]) -> Penalties | None:
        """What drift from the reference costs of the reward, by trained token, of all ranks' shares."""
        if self._config.kl_coef == 0 or not units:
            return None
        places = {(*u.id, n): row for u in units for n, row in enumerate(u.rows)}
        ends = dict(zip(places, np.cumsum([len(row.targets) for row in places.values()]).tolist(), strict=True))
        costs = torch.zeros(max(ends.values(), default=0), dtype=torch.float64)
        micros = self._model.share(units)
        own = self._config.use_rollout_logprobs
        befores = [micro.logprobs for micro in micros] if own else self._model.told(micros)
        for micro, before, reference in zip(micros, befores, self._model.told(micros, reference=True), strict=True):
            drift = (before - reference).double().cpu() * self._config.kl_coef
            for id, part in zip(micro.ids, torch.split(drift, micro.lengths.tolist()), strict=True):
                costs[ends[id] - len(part) : ends[id]] = part
        flat = np.split(self._model.total(costs).numpy(), np.cumsum([u.tokens for u in units])[:-1])
        return {unit.id: part for unit, part in zip(units, flat, strict=True) if unit.rows}

    def _complain(self, step: int, norm: float) -> None:
        self._bad += 1
        problem = f"step {step}: the loss or its gradient is not finite (gradient norm {norm})"
        if self._bad >= PATIENCE:
            raise MillpondError(f"{problem}, {self._bad} times in a row: lower --lr, or go back to an older checkpoint")
        log.warning("%s: minibatch skipped, weights unchanged", problem)


def _count(minibatch: Sequence[Unit]) -> int:
    return sum(unit.tokens for unit in minibatch)
