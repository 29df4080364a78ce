"""Who is who where a model is cut by tensors and by layers: rank 0 is the first part of the first layers.

World = tensor x pipeline x data. Ranks that differ in the tensor place alone are neighbours (they talk most).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch import Tensor

from pipeline.config import TrainConfig
from trainer.ranks import Ranks


@dataclass(frozen=True)
class Mesh:
    """This process's place."""

    ranks: Ranks
    device: torch.device
    tensor: int
    "ranks that share each tensor"
    part: int
    "this one among them"
    stages: int
    "ranks that share the layers"
    stage: int
    "this one among them"
    sequence: bool
    "between tensors, ranks that share them share positions"
    replicas: int
    "of the whole model, each with a share of the samples"
    replica: int
    "this one among them"

    @property
    def last(self) -> bool:
        """Whether logits are here."""
        return self.stage == self.stages - 1

    @property
    def tensor_group(self) -> Any:
        return state.get_tensor_model_parallel_group()

    @property
    def pipeline_group(self) -> Any:
        return state.get_pipeline_model_parallel_group()

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over replicas of what their last stages have, on every rank; collective."""
        return self.ranks.total(tensor if self.last and self.part == 0 else torch.zeros_like(tensor))

    def dissolve(self) -> None:
        """The ranks stay together, in no order."""
        state.destroy_model_parallel()

    def close(self) -> None:
        """For good."""
        self.dissolve()
        dist.destroy_process_group()


def mesh(config: TrainConfig, ranks: Ranks, device: torch.device) -> Mesh:
    """The ranks in order; of one, a group as well. At most one order at a time."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        way = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(way, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    state.initialize_model_parallel(
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        distributed_timeout_minutes=config.distributed_timeout_minutes,
    )
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # nothing draws random numbers
    return Mesh(
        ranks,
        device,
        state.get_tensor_model_parallel_world_size(),
        state.get_tensor_model_parallel_rank(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_pipeline_model_parallel_rank(),
        config.sequence_parallel,
        state.get_data_parallel_world_size(),
        state.get_data_parallel_rank(),
    )
