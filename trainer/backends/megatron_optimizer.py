"""megatron-core's distributed optimizer: gradients and AdamW's state are spread over the replicas (ZeRO-1)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from pipeline.config import TrainConfig
from trainer.backends.megatron_model import PolicyModel
from trainer.backends.optimizer import rate

MOMENTS = ("exp_avg", "exp_avg_sq")
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}
"of what is saved: the same for any number of ranks"


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

    def sharded(self, model: dict[str, Any], loading: bool) -> Any:
        """What it has learned of the parameters, as dist_checkpointing takes it; `model` is the model's own."""
        return self._own.sharded_state_dict(model, is_loading=loading, metadata=SHARDING)["param_state"]

    @torch.no_grad()
    def restore(self, found: Any, updates: int) -> None:
        """What dist_checkpointing loaded for `sharded`. The settings stay those of this configuration.

        Megatron loads a count of steps by itself, but into one tensor that all parameters share, which each of them
        would then count up.
        """
        self.updates = updates
        for state in self._own.optimizer.state.values():
            state.pop("step", None)
        self._own.load_parameter_state_from_fully_reshardable(found)
        self._count()

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
