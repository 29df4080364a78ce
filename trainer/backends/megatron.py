"""Trains Llama, Qwen2, Qwen2.5 and Qwen3 with megatron-core: tensor, pipeline and data parallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipeline.config import TrainConfig
from pipeline.errors import UsageError
from pipeline.rendezvous import Piece
from pipeline.types import HF, Group
from trainer.backends import megatron_config, megatron_state
from trainer.backends.base import At
from trainer.backends.megatron_mesh import Mesh
from trainer.backends.megatron_model import PolicyModel
from trainer.backends.megatron_optimizer import Optimizer
from trainer.backends.megatron_parts import Parts
from trainer.backends.megatron_shim import on
from trainer.backends.megatron_weights import Weights
from trainer.backends.steps import Steps
from trainer.objective import Objective


class MegatronBackend:
    """See trainer.backends.base. With bfloat16 weights (--bf16) the optimizer keeps float32 ones."""

    def __init__(self, config: TrainConfig, tis: bool, mesh: Mesh) -> None:
        torch.set_num_threads(config.torch_threads)
        torch.manual_seed(config.seed)
        self._mesh = mesh
        objective = Objective(config, tis)
        with on(mesh.device):
            self._model, self._weights = _loaded(config, config.hf_checkpoint, mesh)
            reference = self._frozen(config) if objective.needs_reference else None
            self._optimizer = Optimizer(self._model, config)
        parts = Parts(config, mesh, self._model, reference, self._optimizer)
        self._steps = Steps(config, objective, parts, self._model.words)

    def train(self, groups: Sequence[Group], step: int, at: At | None = None) -> dict[str, float]:
        with on(self._mesh.device):
            return self._steps.train(groups, step, at)

    def save_weights(self, folder: Path, form: str = HF) -> None:
        self._weights.save(self._model, folder)

    def outline(self) -> list[Piece]:
        return self._weights.outline

    def pieces(self) -> Iterator[Tensor]:
        return self._weights.pieces(self._model)

    def save(self, folder: Path) -> None:
        """Model and optimizer, each rank its part; nothing draws random numbers."""
        with on(self._mesh.device):
            megatron_state.save(folder, self._model, self._optimizer, self._mesh.ranks.lead)

    def load(self, folder: Path) -> None:
        """The optimizer's settings stay those of this configuration, and so do the sizes that the model is cut by."""
        with on(self._mesh.device):
            megatron_state.load(folder, self._model, self._optimizer)

    def load_weights(self, folder: Path) -> None:
        with on(self._mesh.device):
            if megatron_state.found_in(folder):
                megatron_state.load_model(folder, self._model)
            else:
                other = Weights(folder, megatron_config.read(folder, "--load"), self._mesh, "--load")
                if other.shape != self._weights.shape:
                    raise UsageError(f"--load {folder}: another make of model than --hf-checkpoint")
                other.fill(self._model)
            self._optimizer.begin_again()

    def close(self) -> None:
        self._mesh.close()

    def _frozen(self, config: TrainConfig) -> PolicyModel:
        """The reference. UsageError where it is another kind of model."""
        model, weights = _loaded(config, config.ref_load or config.hf_checkpoint, self._mesh)
        words = [w.shape.words for w in (self._weights, weights)]
        if words[0] != words[1]:
            raise UsageError(f"--ref-load {config.ref_load}: {words[1]} tokens, --hf-checkpoint has {words[0]}")
        model.requires_grad_(False)
        return model


def _loaded(config: TrainConfig, folder: Path | None, mesh: Mesh) -> tuple[PolicyModel, Weights]:
    flag = "--hf-checkpoint" if folder == config.hf_checkpoint else "--ref-load"
    found = megatron_config.read(folder, flag)
    megatron_config.refuse_sizes(found, mesh.tensor, mesh.stages)
    weights = Weights(Path(folder or ""), found, mesh, flag)
    bf16 = mesh.device.type == "cuda" if config.bf16 is None else config.bf16
    model = PolicyModel(found, mesh, torch.bfloat16 if bf16 else torch.float32)
    if config.gradient_checkpointing:
        model.recompute()
    weights.fill(model)
    return model, weights
