"""A model whose tensors and layers are on several ranks, in the hands of trainer.backends.steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from pipeline.config import TrainConfig
from trainer import batch
from trainer.backends.megatron_mesh import Mesh
from trainer.backends.megatron_model import PolicyModel, logprobs_and_entropy
from trainer.backends.megatron_optimizer import Optimizer
from trainer.backends.steps import Judge
from trainer.batch import Microbatch, Unit

Found = tuple[Tensor, Tensor]
"What a microbatch is to learn by, and what is to be kept of it."


@dataclass(frozen=True)
class Parts:
    """See trainer.backends.steps.Model. Microbatches go through the stages one behind the other (1F1B)."""

    config: TrainConfig
    mesh: Mesh
    model: PolicyModel
    reference: PolicyModel | None
    optimizer: Optimizer

    @property
    def lr(self) -> float:
        return self.optimizer.lr

    def share(self, units: Sequence[Unit]) -> list[Microbatch]:
        found = batch.share(units, batch.passes(self.config), self.mesh.replica, self.mesh.replicas)
        return [micro.to(self.mesh.device) for micro in found]

    def total(self, tensor: Tensor) -> Tensor:
        return self.mesh.total(tensor)

    @torch.no_grad()
    def told(self, micros: Sequence[Microbatch], reference: bool = False) -> list[Tensor]:
        """Zeros before the last stage, where nobody asks for them."""
        model = self.reference if reference and self.reference else self.model

        def keep(place: int, logits: Tensor) -> Found:
            logprobs = self._forward(logits, micros[place])[0]
            return logprobs.sum(), logprobs

        found = self._sweep(model, model, micros, keep)
        return found or [torch.zeros_like(micro.logprobs) for micro in micros]

    def run(self, micros: Sequence[Microbatch], judge: Judge, count: int, learn: bool) -> list[Tensor]:
        def learned(place: int, logits: Tensor) -> Found:
            figures = judge(place, *self._forward(logits, micros[place]))
            return figures[0] / count, figures.detach()

        with torch.set_grad_enabled(learn):
            return self._sweep(self.model, self.optimizer.net if learn else self.model, micros, learned)

    def clip(self) -> float:
        return self.optimizer.clip()

    def update(self) -> None:
        self.optimizer.update()

    def forget(self) -> None:
        self.optimizer.forget()

    def _sweep(
        self, model: PolicyModel, net: Any, micros: Sequence[Microbatch], last: Callable[[int, Tensor], Found]
    ) -> list[Tensor]:
        """All microbatches through `model`, and back where gradients are on; what `last` keeps, on the last stage."""
        if not micros:
            return []
        tokens = torch.zeros((), dtype=torch.int32, device=self.mesh.device)

        def step(places: Iterator[int], _: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
            place = next(places)
            return model.run(micros[place]), partial(end, place)

        def end(place: int, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            loss, kept = last(place, logits[0])
            return loss, tokens, kept

        found: list[Tensor] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(range(len(micros))),
            model=[net],
            num_microbatches=len(micros),
            seq_length=1,  # shapes are told along
            micro_batch_size=1,
            forward_only=not torch.is_grad_enabled(),
        )
        return found

    def _forward(self, logits: Tensor, micro: Microbatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy at each trained token, [N], at the rollout's temperature."""
        if self.config.rollout_temperature != 1:
            logits = logits.float() / self.config.rollout_temperature
        return logprobs_and_entropy(logits, micro.targets, self.model.words, self.mesh, self.config.entropy_coef > 0)
