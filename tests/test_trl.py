"""The same tokens, rewards and log-probabilities give the loss and the gradient that TRL's GRPO gives, to 1e-5."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_groups import random_groups

from pipeline.config import TrainConfig
from trainer.batch import Passes, microbatches, units
from trainer.objective import Objective, Told

LIMIT = 7.0
"tokens an answer may have"


class Case:
    """Sixteen answers of one to five tokens, as both sides want them; [B, T] padded with what must not count."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.objective = Objective(config(fields), tis=bool(fields.get("use_tis")))
        credited = self.objective.credited(units(random_groups(4, 4)), None)
        (self.micro,) = microbatches(self.objective.weighted(credited), Passes(1 << 20))
        lengths = self.micro.lengths
        self.mask = (torch.arange(int(lengths.max())) < lengths[:, None]).double()
        torch.manual_seed(5)
        self.logprobs, self.old, self.reference, self.entropy = (torch.rand(self.mask.shape).double() for _ in range(4))
        self.logprobs, self.old, self.reference = (-0.7 * x for x in (self.logprobs, self.old, self.reference))
        self.sampler = self.old + 0.8 * (torch.rand(self.mask.shape).double() - 0.5)

    def flat(self, table: Tensor) -> Tensor:
        return table[self.mask.bool()]

    def table(self, flat: Tensor) -> Tensor:
        found = torch.zeros_like(self.mask)
        found[self.mask.bool()] = flat.double()
        return found

    def ours(self) -> tuple[float, Tensor]:
        logprobs = self.logprobs.clone().requires_grad_()
        told = Told(*(self.flat(x) for x in (logprobs, self.entropy, self.old, self.reference)))
        micro = self.micro.__class__(**{**vars(self.micro), "logprobs": self.flat(self.sampler)})
        count = len(micro.targets)
        loss = self.objective.sums(micro, told, count)[0] / count
        loss.backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        return float(loss.detach()), logprobs.grad

    def theirs(self, **settings: Any) -> tuple[float, Tensor]:
        from trl import GRPOTrainer

        logprobs = self.logprobs.clone().requires_grad_()
        empty = torch.zeros(len(self.mask), 0, dtype=torch.int64)
        given = {
            "prompt_ids": empty,
            "prompt_mask": empty,
            "completion_ids": torch.zeros(self.mask.shape, dtype=torch.int64),
            "completion_mask": self.mask,
            "advantages": self.table(self.micro.advantages),
            "old_per_token_logps": self.old,
            "ref_per_token_logps": self.reference,
            "importance_sampling_ratio": settings.pop("ratio", None),
            "num_items_in_batch": self.mask.sum(),
        }
        trainer = SimpleNamespace(**{**TRL, **settings})
        trainer._metrics = {"train": defaultdict(list)}
        trainer.args = SimpleNamespace(delta=trainer.delta, use_bias_correction_kl=False, steps_per_generation=1)
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, self.entropy, None)
        loss = GRPOTrainer._compute_loss(trainer, SimpleNamespace(training=True), given)
        loss.backward()
        assert logprobs.grad is not None
        return float(loss.detach()), logprobs.grad


TRL: dict[str, Any] = {
    "loss_type": "bnpo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "delta": None,
    "beta": 0.0,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "max_completion_length": LIMIT,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "aux_loss_enabled": False,
    "current_gradient_accumulation_steps": 1,
    "entropy_coef": 0.0,
    "_entropy_bonus_enabled": False,
    "use_adaptive_entropy": False,
    "model": SimpleNamespace(training=True),
    "accelerator": SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    ),
}


def config(fields: dict[str, Any]) -> TrainConfig:
    base = {"eps_clip": 0.2, "eps_clip_high": 0.28, "rollout_max_response_len": int(LIMIT)}
    return TrainConfig.model_validate({**base, **fields})


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DAPO": ({}, {}),
    "GRPO": ({"loss_aggregation": "sequence"}, {"loss_type": "grpo"}),
    "Dr. GRPO": ({"advantage_estimator": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "GSPO": ({"advantage_estimator": "gspo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "CISPO": (
        {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.2},
        {"loss_type": "cispo", "epsilon_high": 1.2},
    ),
    "two-sided": ({"eps_clip_c": 1.4}, {"delta": 1.4}),
    "KL": ({"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"}, {"beta": 0.3}),
    "KL, by sample": (
        {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "loss_aggregation": "sequence"},
        {"beta": 0.3, "loss_type": "grpo"},
    ),
    "entropy": ({"entropy_coef": 0.01}, {"entropy_coef": 0.01, "_entropy_bonus_enabled": True}),
}


@pytest.mark.parametrize("name", SAME)
def test_a_loss_and_its_gradient_are_those_of_trl(name: str) -> None:
    fields, settings = SAME[name]
    case = Case(fields)
    (ours, gradient), (theirs, expected) = case.ours(), case.theirs(**settings)
    assert ours == pytest.approx(theirs, abs=1e-6, rel=1e-5)
    assert torch.allclose(gradient, expected, atol=1e-6, rtol=1e-5)
    assert float(gradient.abs().sum()) > 0.01


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_act_as_those_of_trl(level: str, mode: str) -> None:
    """TRL works them out where it samples, as here: the ratio, cut or left out above the bound."""
    case = Case({"use_tis": True, "tis_level": level, "tis_mode": mode, "tis_clip": 1.1})
    log = (case.old - case.sampler) * case.mask
    ratio = (log if level == "token" else log.sum(1, keepdim=True)).exp()
    ratio = ratio.clamp(max=1.1) if mode == "truncate" else ratio.masked_fill(ratio > 1.1, 0.0)
    (ours, gradient), (theirs, expected) = case.ours(), case.theirs(use_vllm=True, ratio=ratio)
    assert ours == pytest.approx(theirs, abs=1e-6, rel=1e-5)
    assert torch.allclose(gradient, expected, atol=1e-6, rtol=1e-5)
