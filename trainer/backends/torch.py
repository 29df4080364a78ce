"""Trains any Hugging Face causal language model in one process, on a CPU or one GPU."""

from __future__ import annotations

import logging
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import TrainConfig
from pipeline.errors import MillpondError, UsageError, WeightsError
from pipeline.types import Group
from trainer import batch, correction, losses
from trainer.advantages import ESTIMATORS
from trainer.backends.hf import CausalModel
from trainer.batch import Microbatch

log = logging.getLogger(__name__)

STATE = "trainer.pt"
PATIENCE = 3
"minibatches in a row that may fail to be finite; the last of them ends the run"
FIGURES = (
    "loss",
    "pg_loss",
    "entropy",
    "pg_clipfrac",
    "ppo_kl",
    "train_rollout_logprob_abs_diff",
    "tis",
    "tis_clipfrac",
)
"means over the trained tokens of a step, with slime's names; the last two only with TIS"


class TorchBackend:
    """See trainer.backends.base. `tis`: truncated importance weights, unless the old policy is the rollout's itself."""

    def __init__(self, config: TrainConfig, tis: bool) -> None:
        torch.set_num_threads(config.torch_threads)
        torch.manual_seed(config.seed)
        self._config = config
        self._figures = FIGURES if tis and not config.use_rollout_logprobs else FIGURES[:-2]
        estimate, std = ESTIMATORS[config.advantage_estimator], not config.disable_grpo_std_normalization
        self._advantages = lambda rewards: estimate(rewards, std)
        self._device = _device(config.device)
        self._model = CausalModel(config.hf_checkpoint, self._device)
        self._optimizer = _adamw(self._model.module, config)
        self._updates = 0
        self._bad = 0

    def train(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """See Backend. Means are 0 where no minibatch counted; lr is the first minibatch's, grad_norm their mean."""
        config, lr = self._config, self._lr()
        found = batch.units(groups, self._advantages)
        minis = batch.minibatches(found, config.global_batch_size, (config.seed, step))
        packed = [[m.to(self._device) for m in batch.microbatches(x, config.max_tokens_per_gpu)] for x in minis]
        olds = [[self._old(m, len(packed)) for m in micros] for micros in packed]
        results = [self._minibatch(micros, old, step) for micros, old in zip(packed, olds, strict=True)]
        done = [(micros, *result) for micros, result in zip(packed, results, strict=True) if result is not None]
        tokens = max(1, sum(_count(micros) for micros, _, _ in done))
        sums = sum((total for _, total, _ in done), torch.zeros(len(self._figures))).tolist()
        return {f"train/{name}": value / tokens for name, value in zip(self._figures, sums, strict=True)} | {
            "train/grad_norm": sum(norm for _, _, norm in done) / max(1, len(done)),
            "train/lr": lr,
            "train/optimizer_steps": float(len(done)),
            "train/skipped": float(len(results) - len(done)),
            "train/masked_samples": float(sum(not unit.rows for unit in found)),
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
        count = _count(micros)
        learn = count > 0 and (self._config.entropy_coef > 0 or any(bool(m.advantages.any()) for m in micros))
        if not learn:
            log.warning("step %d: no update: %s", step, "all advantages are 0" if count else "every token is masked")
        total = torch.zeros(len(self._figures))
        with torch.set_grad_enabled(learn):
            for micro, old in zip(micros, olds, strict=True):
                figures = self._sums(micro, old)
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

    def _sums(self, micro: Microbatch, old: Tensor | None) -> Tensor:
        """The figures summed over the tokens; the first is the loss and carries the gradient."""
        config = self._config
        logprobs, entropy = self._forward(micro)
        current = logprobs.detach()
        old = current if old is None else old
        high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
        loss, clipped = losses.clipped(logprobs, old, micro.advantages, config.eps_clip, high)
        off = []
        if "tis" in self._figures:
            weights, ratio = correction.truncated(old, micro.logprobs, config.tis_clip_low, config.tis_clip)
            loss = loss * weights
            off = [ratio, weights != ratio]
        drift = ((current if config.use_rollout_logprobs else old) - micro.logprobs).abs()
        whole = loss - config.entropy_coef * entropy
        return torch.stack([x.sum() for x in (whole, loss, entropy, clipped, old - current, drift, *off)])

    def _forward(self, micro: Microbatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy at each trained token, [N], at the rollout's temperature."""
        logits, temperature = self._model.logits(micro.input_ids, micro.predictors), self._config.rollout_temperature
        if temperature != 1:  # a copy less where it is
            logits = logits.float() / temperature
        return losses.logprobs_and_entropy(logits, micro.targets, self._config.entropy_coef > 0)

    def _old(self, micro: Microbatch, minibatches: int) -> Tensor | None:
        """The old policy's log-probabilities, [N]; None: those of the model at hand, which cost no extra pass."""
        if self._config.use_rollout_logprobs:
            return micro.logprobs
        if minibatches == 1:
            return None
        with torch.no_grad():
            return self._forward(micro)[0]

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
