"""Trains any Hugging Face causal language model in one process, on a CPU or one GPU."""

from __future__ import annotations

import logging
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.config import TrainConfig
from pipeline.errors import MillpondError, UsageError, WeightsError
from pipeline.types import Group
from trainer import batch, losses
from trainer.advantages import Advantages
from trainer.backends.hf import CausalModel
from trainer.batch import Microbatch, Unit
from trainer.credit import Penalties
from trainer.objective import Objective, Told

log = logging.getLogger(__name__)

STATE = "trainer.pt"
PATIENCE = 3
"minibatches in a row that may fail to be finite; the last of them ends the run"


class TorchBackend:
    """See trainer.backends.base."""

    def __init__(self, config: TrainConfig, tis: bool) -> None:
        torch.set_num_threads(config.torch_threads)
        torch.manual_seed(config.seed)
        self._config = config
        self._objective = Objective(config, tis)
        self._device = _device(config.device)
        self._model = CausalModel(config.hf_checkpoint, self._device)
        self._reference = self._frozen() if self._objective.needs_reference else None
        self._optimizer = _adamw(self._model.module, config)
        self._updates = 0
        self._bad = 0

    def train(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """See Backend. Means are 0 where no minibatch counted; lr is the first minibatch's, grad_norm their mean."""
        config, lr, names = self._config, self._lr(), self._objective.figures
        found = batch.units(groups)
        penalties = self._penalties(found)
        credited = self._objective.credited(found, penalties)
        minis = batch.minibatches(credited, config.global_batch_size, (config.seed, step))
        packed = [self._packed(self._objective.weighted(mini)) for mini in minis]
        olds = [[self._told(self._model, m) if len(packed) > 1 else None for m in micros] for micros in packed]
        results = [self._minibatch(micros, old, step) for micros, old in zip(packed, olds, strict=True)]
        done = [(micros, *result) for micros, result in zip(packed, results, strict=True) if result is not None]
        tokens = max(1, sum(_count(micros) for micros, _, _ in done))
        sums = sum((total for _, total, _ in done), torch.zeros(len(names))).tolist()
        return {f"train/{name}": value / tokens for name, value in zip(names, sums, strict=True)} | {
            "train/grad_norm": sum(norm for _, _, norm in done) / max(1, len(done)),
            "train/lr": lr,
            "train/optimizer_steps": float(len(done)),
            "train/skipped": float(len(results) - len(done)),
            "train/masked_samples": float(sum(not unit.rows for unit in found)),
            **({"train/kl": float(np.concatenate([*penalties.values()]).mean()) / config.kl_coef} if penalties else {}),
        }

    def save_weights(self, folder: Path) -> None:
        self._model.save(folder)

    def save(self, folder: Path) -> None:
        """Model, optimizer and random state: tensors and numbers, no code."""
        cuda = torch.cuda.get_rng_state_all() if self._device.type == "cuda" else []
        state = {
            "model": self._model.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "updates": self._updates,
            "rng": [torch.get_rng_state(), *cuda],
        }
        torch.save(state, folder / STATE)

    def load(self, folder: Path) -> None:
        """The optimizer's settings stay those of this configuration."""
        path = folder / STATE
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        if not zipfile.is_zipfile(path):
            raise WeightsError(f"{path}: missing or damaged")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            self._model.module.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise WeightsError(f"{path}: not a training state of this model: {error}") from error
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(own)
        self._updates = int(state["updates"])
        cpu, *cuda = state["rng"]
        torch.set_rng_state(cpu)
        if self._device.type == "cuda":
            torch.cuda.set_rng_state_all(cuda[: torch.cuda.device_count()])

    def close(self) -> None:
        pass

    def _minibatch(self, micros: list[Microbatch], olds: list[Tensor | None], step: int) -> tuple[Tensor, float] | None:
        """One optimizer step. Returns sums of the figures and the gradient norm, None where they are not finite.

        With nothing to learn there is no backward pass: on gradients of 0 momentum and decay would move the weights.
        """
        count, learn = _count(micros), self._objective.learns(micros)
        if not learn:
            log.warning("step %d: no update: %s", step, "all advantages are 0" if count else "every token is masked")
        total = torch.zeros(len(self._objective.figures))
        with torch.set_grad_enabled(learn):
            for micro, old in zip(micros, olds, strict=True):
                figures = self._sums(micro, old, count)
                if learn:
                    (figures[0] / count).backward()  # type: ignore[no-untyped-call]
                total += figures.detach().cpu()
        limit = self._config.clip_grad
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.module.parameters(), limit)) if learn else 0.0
        finite = math.isfinite(norm) and bool(total.isfinite().all())
        if learn and finite:
            self._update()
        self._optimizer.zero_grad(set_to_none=True)
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

    def _packed(self, units: Sequence[Unit]) -> list[Microbatch]:
        return [m.to(self._device) for m in batch.microbatches(units, self._config.max_tokens_per_gpu)]

    def _penalties(self, units: Sequence[Unit]) -> Penalties | None:
        """What drift from the reference costs of the reward, by trained token."""
        if self._reference is None or self._config.kl_coef == 0:
            return None
        costs: dict[tuple[int, int, int], Advantages] = {}
        for micro in self._packed(units):
            own = self._config.use_rollout_logprobs
            before = micro.logprobs if own else self._told(self._model, micro)
            drift = (before - self._told(self._reference, micro)).double().cpu()
            parts = torch.split(drift * self._config.kl_coef, micro.lengths.tolist())
            costs |= {id: part.numpy() for id, part in zip(micro.ids, parts, strict=True)}
        return {u.id: np.concatenate([costs[*u.id, n] for n in range(len(u.rows))]) for u in units if u.rows}

    def _frozen(self) -> CausalModel:
        """The reference. UsageError where it is another kind of model."""
        model = CausalModel(self._config.ref_load or self._config.hf_checkpoint, self._device)
        model.module.requires_grad_(False)
        words = [m.module.get_output_embeddings().weight.shape[0] for m in (self._model, model)]
        if words[0] != words[1]:
            raise UsageError(f"--ref-load {self._config.ref_load}: {words[1]} tokens, --hf-checkpoint has {words[0]}")
        return model

    def _update(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr()
        self._optimizer.step()
        self._updates += 1
        self._bad = 0

    def _lr(self) -> float:
        """Of the next update."""
        warmup = self._config.lr_warmup_iters
        return self._config.lr * (min(1.0, (self._updates + 1) / warmup) if warmup else 1.0)

    def _complain(self, step: int, norm: float) -> None:
        self._bad += 1
        problem = f"step {step}: the loss or its gradient is not finite (gradient norm {norm})"
        if self._bad >= PATIENCE:
            raise MillpondError(f"{problem}, {self._bad} times in a row: lower --lr, or go back to an older checkpoint")
        log.warning("%s: minibatch skipped, weights unchanged", problem)


def _count(micros: Sequence[Microbatch]) -> int:
    return sum(len(m.targets) for m in micros)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: {error}") from error


def _adamw(module: Any, config: TrainConfig) -> torch.optim.AdamW:
    """No decay on biases and norms, as in Megatron and transformers."""
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in module.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
