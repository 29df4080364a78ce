"""The configured loss with its corrections and figures, over any model's log-probabilities: what all backends share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline import code
from pipeline.config import TrainConfig
from pipeline.errors import GroupError
from trainer import correction, losses
from trainer.advantages import ESTIMATORS, Estimator, centred
from trainer.batch import Microbatch, Unit, aggregated
from trainer.correction import Rule
from trainer.credit import Penalties, credit
from trainer.losses import Clip, Scored

FIGURES = ("loss", "pg_loss", "entropy", "pg_clipfrac", "ppo_kl", "train_rollout_logprob_abs_diff")
OLDEST = 15
"the age that all older tokens count under"
BY_AGE = "train/train_rollout_logprob_abs_diff/staleness_"
WEIGHTED = ("loss", "pg_loss", "kl_loss")
"figures that are means as the loss is one (--loss-aggregation); the others are means over tokens"


@dataclass(frozen=True)
class Told:
    """What models say of a microbatch's trained tokens, [N] each."""

    logprobs: Tensor
    "by the model that is trained; carries the gradient"
    entropy: Tensor
    old: Tensor | None
    "by the policy before the step; None: the same as `logprobs`"
    reference: Tensor | None


class Objective:
    """`figures`: their names, which are slime's. `tis`: config.use_tis decided."""

    def __init__(self, config: TrainConfig, tis: bool) -> None:
        """Errors: UsageError for a function that cannot be loaded."""
        self.config = config
        self.tis = tis and not config.use_rollout_logprobs
        self.estimator = _estimator(config)
        high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
        self.clip = Clip(config.eps_clip, high, config.eps_clip_c)
        self._rule = Rule(config.tis_level, config.tis_mode, config.tis_clip_low, config.tis_clip)
        self._reject = Rule(config.rs_level, "mask", config.rs_lower_bound, config.rs_upper_bound)
        path = config.custom_tis_function_path
        self._custom = code.load(path, "--custom-tis-function-path") if path and self.tis else None
        self.figures = (
            *FIGURES,
            *(("kl_loss",) if config.use_kl_loss else ()),
            *(("tis", "tis_clipfrac") if self.tis else ()),
            *(("rs_maskfrac",) if config.use_rs else ()),
        )

    @property
    def size(self) -> int:
        """Numbers that `sums` gives."""
        return len(self.figures) + 2 * (OLDEST + 1)

    @property
    def needs_reference(self) -> bool:
        return self.config.use_kl_loss or self.config.kl_coef > 0

    def credited(self, units: Sequence[Unit], penalties: Penalties | None) -> list[Unit]:
        """With each token's advantage."""
        asked = self.config.normalize_advantages
        return credit(units, self.estimator, self.estimator.whitened if asked is None else asked, penalties)

    def weighted(self, minibatch: Sequence[Unit]) -> list[Unit]:
        """With each token's weight in the minibatch's loss."""
        kind = self.config.loss_aggregation or self.estimator.aggregation
        return aggregated(minibatch, kind, self.config.rollout_max_response_len)

    def learns(self, minibatch: Sequence[Unit]) -> bool:
        """Whether there is anything but gradients of 0."""
        pulled = self.config.entropy_coef > 0 or (self.config.use_kl_loss and self.config.kl_loss_coef > 0)
        rows = [row for unit in minibatch for row in unit.rows]
        return bool(rows) and (pulled or any(bool(row.advantages.any()) for row in rows))

    def sums(self, micro: Microbatch, told: Told, count: int) -> Tensor:
        """The figures times the tokens they are means over, [F]; the first is the loss and carries the gradient. Then,
        for each age from 0 to OLDEST, the sampler's distance summed over its tokens, and how many there are. `count`:
        trained tokens of the minibatch, of which this is a part."""
        config, current = self.config, told.logprobs.detach()
        before = current if told.old is None else told.old
        old = micro.logprobs if config.use_rollout_logprobs else before
        scored = Scored(told.logprobs, old, micro.advantages, micro.lengths)
        loss, ruled = losses.LOSSES[self.estimator.loss](scored, self.clip)
        found = {
            "entropy": told.entropy,
            "pg_clipfrac": ruled,
            "ppo_kl": old - current,
            "train_rollout_logprob_abs_diff": (before - micro.logprobs).abs(),
        }
        if self.tis:
            weights, found["tis"] = self._importance(old, micro)
            loss = loss * weights
            found["tis_clipfrac"] = weights != found["tis"]
        if config.use_rs:
            kept, _ = correction.importance(old, micro.logprobs, micro.lengths, self._reject)
            loss = loss * (kept > 0)
            found["rs_maskfrac"] = kept == 0
        found["pg_loss"] = loss
        found["loss"] = loss - config.entropy_coef * told.entropy
        if told.reference is not None and config.use_kl_loss:
            found["kl_loss"] = losses.kl(told.logprobs, told.reference, config.kl_loss_type)
            found["loss"] = found["loss"] + config.kl_loss_coef * found["kl_loss"]
        figures = torch.stack(
            [(found[x] * micro.weights).sum() * count if x in WEIGHTED else found[x].sum() for x in self.figures]
        )
        of_age = torch.nn.functional.one_hot(micro.ages.clamp(-1, OLDEST) + 1, OLDEST + 2)[:, 1:].to(figures.dtype)
        return torch.cat([figures, found["train_rollout_logprob_abs_diff"] @ of_age, of_age.sum(0)])

    def by_age(self, sums: Tensor) -> dict[str, float]:
        """The sampler's distance by the tokens' age, of what `sums` has after the figures."""
        distances, counts = sums[len(self.figures) :].reshape(2, -1).tolist()
        pairs = enumerate(zip(distances, counts, strict=True))
        return {f"{BY_AGE}{age}": distance / n for age, (distance, n) in pairs if n}

    def _importance(self, old: Tensor, micro: Microbatch) -> tuple[Tensor, Tensor]:
        weights, ratio = correction.importance(old, micro.logprobs, micro.lengths, self._rule)
        if self._custom is None or not len(old):  # a pass that only keeps other ranks company has no token
            return weights, ratio
        own = self._custom(old.detach(), micro.logprobs, micro.lengths)
        if not isinstance(own, Tensor) or own.shape != old.shape:
            raise GroupError(
                f"--custom-tis-function-path {self.config.custom_tis_function_path}: it must give a tensor of "
                f"{len(old)} weights, one a token, and gave {type(own).__name__} {list(getattr(own, 'shape', []))}"
            )
        return own.detach(), ratio


def _estimator(config: TrainConfig) -> Estimator:
    found = ESTIMATORS[config.advantage_estimator]
    if not config.disable_grpo_std_normalization:
        return found
    return Estimator(centred, found.loss, found.aggregation, found.whitened, found.by_token)
