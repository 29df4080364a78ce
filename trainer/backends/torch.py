"""Trains any Hugging Face causal language model, on CPUs or GPUs; over several ranks its weights are spread (FSDP2) or
whole on each (DDP)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import TrainConfig
from pipeline.errors import UsageError, WeightsError
from pipeline.rendezvous import Piece
from pipeline.types import HF, PEFT, Group
from trainer import batch, losses
from trainer.backends import lora, sharded, state
from trainer.backends.base import At
from trainer.backends.hf import CausalModel, Form
from trainer.backends.optimizer import Optimizer
from trainer.backends.steps import Judge, Steps
from trainer.batch import Microbatch, Unit
from trainer.objective import Objective
from trainer.ranks import Ranks


class TorchBackend:
    """See trainer.backends.base."""

    def __init__(self, config: TrainConfig, tis: bool, ranks: Ranks | None = None) -> None:
        torch.set_num_threads(config.torch_threads)
        torch.manual_seed(config.seed)
        self._ranks = ranks or Ranks()
        if config.deterministic_mode:
            _pin(self._ranks)
        objective = Objective(config, tis)
        self._device = device_of(config)
        self._form = form_of(config, self._ranks, self._device)
        self._model = CausalModel(config.hf_checkpoint, self._device, self._form)
        reference = self._compared(config) if objective.needs_reference else None
        self._optimizer = Optimizer(self._model.module, config)
        whole = Whole(config, self._model, reference, self._optimizer, self._ranks)
        self._steps = Steps(config, objective, whole, self._model.words)

    def train(self, groups: Sequence[Group], step: int, at: At | None = None) -> dict[str, float]:
        return self._steps.train(groups, step, at)

    def save_weights(self, folder: Path, form: str = HF) -> None:
        if form == PEFT:
            self._model.save_adapter(folder, self._ranks.lead)
        else:
            self._model.save(folder, self._ranks.lead)

    def outline(self) -> list[Piece]:
        return self._model.outline()

    def pieces(self) -> Iterator[Tensor]:
        return self._model.pieces(self._ranks.lead)

    def save(self, folder: Path) -> None:
        """Model, optimizer and random state: tensors and numbers, no code. All ranks take part, the lead writes."""
        facts = {"updates": self._optimizer.updates, "lora": _facts(self._form)}
        if self._form.adapters:
            if self._ranks.lead:
                (folder / "adapter").mkdir()
            self._model.save_adapter(folder / "adapter", self._ranks.lead)
        if self._ranks.lead:
            return state.write(folder, self._state(), facts)
        for _ in self._state():
            pass
        return None

    def load(self, folder: Path) -> None:
        """The optimizer's settings stay those of this configuration."""
        saved = self._restored(folder)
        self._optimizer.restore(saved)
        torch.set_rng_state(saved.tensor("rng", torch.get_rng_state()))

    def load_weights(self, folder: Path) -> None:
        if (folder / "state.json").is_file():
            self._restored(folder)
        elif self._form.adapters:
            raise UsageError(f"--load {folder}: adapters are trained on a model as it is; give it as --hf-checkpoint")
        else:
            self._model.take(folder)

    def _restored(self, folder: Path) -> state.Saved:
        saved = state.Saved(folder)
        if (before := saved.facts.get("lora")) != (now := _facts(self._form)):
            raise WeightsError(
                f"{folder}: trained with adapters {before}, and this run has {now}: give the same --lora-*"
            )
        for name, tensor in self._model.state():
            sharded.fill(tensor, saved.tensor(f"model.{name}", tensor))
        return saved

    def close(self) -> None:
        self._ranks.part()

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._model.state():
            yield f"model.{name}", sharded.whole(tensor)
        for name, tensor in self._optimizer.tensors():
            yield name, sharded.whole(tensor)
        yield "rng", torch.get_rng_state()

    def _compared(self, config: TrainConfig) -> CausalModel | Bare:
        """The reference. UsageError where it is another kind of model."""
        if self._form.adapters and config.ref_load is None:
            return Bare(self._model)
        flag = "--ref-load" if config.ref_load else "--hf-checkpoint"
        folder = config.ref_load or config.hf_checkpoint
        model = CausalModel(folder, self._device, replace(self._form, adapters=None), flag)
        model.module.requires_grad_(False)
        words = [m.module.get_output_embeddings().weight.shape[0] for m in (self._model, model)]
        if words[0] != words[1]:
            raise UsageError(f"--ref-load {config.ref_load}: {words[1]} tokens, --hf-checkpoint has {words[0]}")
        return model


@dataclass(frozen=True)
class Bare:
    """A model without its adapters."""

    model: CausalModel

    def logits(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See CausalModel."""
        with lora.without(self.model.module):
            return self.model.logits(input_ids, positions)


@dataclass(frozen=True)
class Whole:
    """See trainer.backends.steps.Model: a microbatch at a time, through a model that looks whole to each rank."""

    config: TrainConfig
    model: CausalModel
    reference: CausalModel | Bare | None
    optimizer: Optimizer
    ranks: Ranks

    @property
    def lr(self) -> float:
        return self.optimizer.lr

    def share(self, units: Sequence[Unit]) -> list[Microbatch]:
        found = batch.share(units, batch.passes(self.config), self.ranks.rank, self.ranks.world)
        return [micro.to(self.model.device) for micro in found]

    def total(self, tensor: Tensor) -> Tensor:
        return self.ranks.total(tensor)

    @torch.no_grad()
    def told(self, micros: Sequence[Microbatch], reference: bool = False) -> list[Tensor]:
        model = self.reference if reference and self.reference else self.model
        return [self._forward(model, micro)[0] for micro in micros]

    def run(self, micros: Sequence[Microbatch], judge: Judge, count: int, learn: bool) -> list[Tensor]:
        found = []
        with torch.set_grad_enabled(learn):
            for place, micro in enumerate(micros):
                figures = judge(place, *self._forward(self.model, micro))
                if learn:
                    (figures[0] / count).backward()  # type: ignore[no-untyped-call]
                found.append(figures.detach())
        if learn and self.ranks.world > 1 and not self.model.form.spread:
            sharded.add_up(self.model.module.parameters(), self.ranks)
        return found

    def clip(self) -> float:
        return self.optimizer.clip()

    def update(self) -> None:
        self.optimizer.update()

    def forget(self) -> None:
        self.optimizer.forget()

    def _forward(self, model: CausalModel | Bare, micro: Microbatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy at each trained token, [N], at the rollout's temperature."""
        logits, temperature = model.logits(micro.input_ids, micro.predictors), self.config.rollout_temperature
        if temperature != 1:  # a copy less where it is
            logits = logits.float() / temperature
        return losses.logprobs_and_entropy(logits, micro.targets, self.config.entropy_coef > 0)


def _facts(form: Form) -> dict[str, Any] | None:
    return asdict(form.adapters) if form.adapters else None


def form_of(config: TrainConfig, ranks: Ranks, device: torch.device) -> Form:
    spread = ranks.world > 1 and config.data_parallel_sharding_strategy != "no_shard"
    bf16 = device.type == "cuda" if config.bf16 is None else config.bf16
    return Form(spread, bf16, config.gradient_checkpointing, lora.adapters_of(config))


def _pin(ranks: Ranks) -> None:
    """Nothing is added up in an order that may be another one the next time; what knows no other way raises."""
    if ranks.world > 1:
        raise UsageError(f"--deterministic-mode with {ranks.world} ranks: their sums are not pinned; train with one")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA is first used
    torch.use_deterministic_algorithms(True)


def device_of(config: TrainConfig) -> torch.device:
    """UsageError where there is none of that name."""
    name = config.device
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {config.device}: {error}") from error
