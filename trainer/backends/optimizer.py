"""AdamW over a model's parameters, whole or spread over ranks: learning rate, norm limit, state."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pipeline.algorithms import optimizer_steps
from pipeline.config import TrainConfig
from trainer.backends.sharded import fill, whole
from trainer.backends.state import Saved

MOMENTS = ("exp_avg", "exp_avg_sq")


def rate(config: TrainConfig, updates: int) -> float:
    """The learning rate of the update after so many."""
    warmup = config.lr_warmup_iters
    if updates < warmup:
        return config.lr * (updates + 1) / warmup
    last = config.lr_decay_iters or optimizer_steps(config)
    if config.lr_decay_style == "constant" or last <= warmup:
        return config.lr
    done = min(1.0, (updates - warmup) / (last - warmup))
    left = 1 - done if config.lr_decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left


class Optimizer:
    """`updates`: steps taken."""

    def __init__(self, module: nn.Module, config: TrainConfig) -> None:
        """No decay on biases and norms, as in Megatron and transformers."""
        self._config = config
        self._named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        decayed = {True: config.weight_decay, False: 0.0}
        groups = [
            {"params": [p for p in self._named.values() if (p.dim() > 1) is wide], "weight_decay": decay}
            for wide, decay in decayed.items()
        ]
        betas = (config.adam_beta1, config.adam_beta2)
        self._adamw = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
        self.updates = 0

    @property
    def lr(self) -> float:
        """Of the next update."""
        return rate(self._config, self.updates)

    def clip(self) -> float:
        """The gradient's norm before it was cut to the limit."""
        norm = torch.nn.utils.clip_grad_norm_(self._named.values(), self._config.clip_grad)
        return float(whole(norm))

    def update(self) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._adamw.step()
        self.updates += 1

    def forget(self) -> None:
        """The gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What it has learned of the parameters, by name; nothing before the first update."""
        for name, parameter in self._named.items():
            for moment in MOMENTS:
                if parameter in self._adamw.state:
                    yield f"{moment}.{name}", self._adamw.state[parameter][moment]

    def restore(self, saved: Saved) -> None:
        """The settings stay those of this configuration."""
        self.updates = int(saved.facts["updates"])
        self._adamw.state.clear()
        for name, parameter in self._named.items():
            if not saved.has(f"{MOMENTS[0]}.{name}"):
                continue
            state = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
            for moment, target in state.items():
                fill(target, saved.tensor(f"{moment}.{name}", target))
            state["step"] = torch.tensor(float(self.updates), device=parameter.device)
            self._adamw.state[parameter] = state
