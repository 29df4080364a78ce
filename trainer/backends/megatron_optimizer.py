"""megatron-core's distributed optimizer: gradients and AdamW's state are spread over the replicas (ZeRO-1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from pipeline.config import TrainConfig
from trainer.backends.megatron_model import PolicyModel
from trainer.backends.optimizer import rate

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("weight", *MOMENTS)
"what is held of each parameter; the weight in float32"


class Optimizer:
    """`updates`: steps taken. `net`: the model, with the buffers its gradients are added up in."""

    def __init__(self, model: PolicyModel, config: TrainConfig) -> None:
        """The model's weights are in place by now: with bfloat16 ones the float32 copies are made of them."""
        self._config = config
        self.updates = 0
        rules = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.net = DistributedDataParallel(model.config, rules, model)
        model.config.no_sync_func = self.net.no_sync
        model.config.finalize_model_grads_func = _finalize
        dtype = model.config.params_dtype
        settings = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=config.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        (self._own,) = get_megatron_optimizer(settings, [self.net]).chained_optimizers
        self._spans = {
            parameter: ranges["param"]
            for buffer in self._own.gbuf_ranges
            for buckets in buffer.values()
            for bucket in buckets
            for parameter, ranges in bucket["param_map"].items()
        }
        "of each parameter, flat, what this rank holds"
        self._begin()

    @property
    def lr(self) -> float:
        """Of the next update."""
        return rate(self._config, self.updates)

    def clip(self) -> float:
        """The gradient's norm, over all ranks, before it was cut to the limit."""
        self._own.prepare_grads()
        return float(self._own.clip_grad_norm(self._config.clip_grad))

    def begin_again(self) -> None:
        """From weights that were put into the model since."""
        self._own.reload_model_params()

    def update(self) -> None:
        """No decay on biases and norms."""
        for group in self._own.param_groups:
            group["lr"] = self.lr
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
        self._own.step_with_ready_grads()
        self.updates += 1

    def forget(self) -> None:
        """The gradients."""
        self.net.zero_grad_buffer()
        self._own.zero_grad()

    def sharded(self, tensors: dict[str, Any], loading: bool) -> dict[str, Any]:
        """What it has learned of the parameters, as dist_checkpointing takes it; `tensors` are the model's own.

        Each parameter's whole, whoever holds which slice of it; Megatron's own way to put them together (0.16) takes
        them from the wrong places where an embedding is the output head of another stage. Collective.
        """
        return {
            name: {kind: self._whole(parameter, kind, tensors[name], loading) for kind in KINDS}
            for name, parameter in self.net.module.named_parameters()
        }

    @torch.no_grad()
    def restore(self, found: dict[str, Any], updates: int) -> None:
        """What dist_checkpointing loaded for `sharded`. The settings stay those of this configuration."""
        self.updates = updates
        for name, parameter in self.net.module.named_parameters():
            for kind in KINDS:
                for own in self._slices(parameter, kind):
                    own.copy_(self._span(found[name][kind], parameter))
        self._count()

    def _whole(self, parameter: torch.nn.Parameter, kind: str, like: Any, loading: bool) -> Any:
        """As `like`, which is the parameter as dist_checkpointing takes it."""
        found = torch.zeros(parameter.shape, device="cpu" if loading else parameter.device)
        if not loading:
            for own in self._slices(parameter, kind):
                self._span(found, parameter).copy_(own.detach())
            dist.all_reduce(found, group=self._own.data_parallel_group)
        more = {"dtype": found.dtype} if hasattr(like, "dtype") else {}
        return replace(like, key=f"optimizer.{kind}.{like.key}", data=found.cpu(), **more)

    def _span(self, whole: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
        """This rank's slice of a tensor that is like the parameter, flat."""
        span = self._spans[parameter]
        return whole.flatten()[span.start : span.end]

    def _slices(self, parameter: torch.nn.Parameter, kind: str) -> list[torch.Tensor]:
        """What this rank holds of it, flat; nothing where that is another one's."""
        if parameter not in self._spans:
            return []
        group, place = self._own.model_param_group_index_map[parameter]
        own = self._own.optimizer.param_groups[group]["params"][place]
        return [own if kind == "weight" else self._own.optimizer.state[own][kind]]

    def _begin(self) -> None:
        """Nothing learned: with that in place it can be saved and restored before the first update."""
        for group in self._own.optimizer.param_groups:
            for parameter in group["params"]:
                zeros = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
                self._own.optimizer.state[parameter].update(zeros)
        self._count()

    def _count(self) -> None:
        """The steps taken, where the optimizer looks for them: torch's by parameter, others by group."""
        if isinstance(self._own.optimizer, torch.optim.AdamW):
            for state in self._own.optimizer.state.values():
                state["step"] = torch.tensor(float(self.updates))
        else:
            for group in self._own.optimizer.param_groups:
                group["step"] = self.updates


def _finalize(nets: list[Any], tokens: Any, **_: Any) -> None:
    """Gradients are sums already; they are divided by nothing more."""
    finalize_model_grads(nets, None)
