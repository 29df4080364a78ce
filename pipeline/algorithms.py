"""What the trainer learns by: the options, under slime's names, and which of them go together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pipeline.sections import Fraction, Positive, PositiveFloat, Section, option

WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"Estimators that are nothing without the batch's mean and deviation."

Rule = tuple[bool, str, tuple[str, ...]]
"where it holds, why, and the options that do nothing there"


class Optimizing(Section):
    """Optimizer"""

    lr: PositiveFloat = option(1e-6, "learning rate")
    lr_warmup_iters: int = option(0, "optimizer steps of linear warm-up", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = option("constant", "how it falls after the warm-up")
    lr_decay_iters: Positive | None = option(None, "optimizer steps until it has fallen (default: all of the run)")
    min_lr: float = option(0.0, "what it falls to", ge=0)
    weight_decay: float = option(0.0, "AdamW weight decay", ge=0)
    adam_beta1: Fraction = option(0.9, "AdamW beta 1")
    adam_beta2: Fraction = option(0.95, "AdamW beta 2")
    adam_eps: PositiveFloat = option(1e-8, "AdamW epsilon")
    clip_grad: PositiveFloat = option(1.0, "gradient norm limit")


class Algorithm(Section):
    """Algorithm"""

    advantage_estimator: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gspo", "cispo"
    ] = option("grpo", "how rewards become advantages, and the loss that belongs to it")
    disable_grpo_std_normalization: bool = option(False, "do not divide advantages by the group's deviation")
    normalize_advantages: bool | None = option(
        None, "whiten advantages over the tokens of a step (default: on for reinforce_plus_plus and its baseline)"
    )
    loss_aggregation: Literal["token", "sequence", "constant"] | None = option(
        None, "mean over tokens, over samples, or over samples x --rollout-max-response-len (default: the estimator's)"
    )
    eps_clip: PositiveFloat = option(0.2, "lower clip range of the ratio")
    eps_clip_high: PositiveFloat | None = option(None, "upper clip range (default: --eps-clip)")
    eps_clip_c: float | None = option(None, "dual clip: bound of the loss at a negative advantage, above 1", gt=1)
    entropy_coef: float = option(0.0, "entropy bonus", ge=0)
    kl_coef: float = option(0.0, "what a nat of drift from the reference costs of the reward", ge=0)
    use_kl_loss: bool = option(False, "add a KL term to the loss")
    kl_loss_coef: float = option(0.0, "weight of the KL term; 0: it is only a figure", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = option("low_var_kl", "estimate of the KL term")
    ref_load: Path | None = option(None, "the reference's folder, for KL (default: --hf-checkpoint)")
    use_rollout_logprobs: bool = option(False, "take the rollout's log-probabilities as the old policy's")
    use_tis: bool | None = option(None, "importance weights (default: on when staleness can exceed 0)")
    tis_level: Literal["token", "sequence", "geometric"] = option(
        "token", "a ratio of a token, or of a sequence as the product or the geometric mean of its tokens'"
    )
    tis_mode: Literal["truncate", "mask"] = option("truncate", "outside the bounds: cut to them, or 0 (IcePop)")
    tis_clip: PositiveFloat = option(2.0, "upper bound of the importance weight")
    tis_clip_low: float = option(0.0, "lower bound of the importance weight", ge=0)
    custom_tis_function_path: str | None = option(None, "own importance weights, module.function")
    use_rs: bool = option(False, "leave out sequences whose ratio is outside the bounds below")
    rs_level: Literal["sequence", "geometric"] = option("geometric", "that ratio: product, or geometric mean")
    rs_upper_bound: PositiveFloat = option(1.01, "upper bound of that ratio")
    rs_lower_bound: float = option(0.99, "lower bound of that ratio", ge=0)


def idle(config: Algorithm, tis: bool) -> list[Rule]:
    """Options that do nothing in the mode of `config`; `tis`: importance weights are on."""
    no_kl = not config.use_kl_loss and config.kl_coef == 0
    own = config.custom_tis_function_path is not None
    return [
        (not tis, "importance weights are off (--use-tis)", ("tis_clip", "tis_clip_low", "tis_level", "tis_mode")),
        (not tis, "importance weights are off (--use-tis)", ("custom_tis_function_path",)),
        (own, "--custom-tis-function-path takes its place", ("tis_clip", "tis_clip_low", "tis_level", "tis_mode")),
        (not config.use_rs, "--use-rs is off", ("rs_level", "rs_upper_bound", "rs_lower_bound")),
        (not config.use_kl_loss, "--use-kl-loss is off", ("kl_loss_coef", "kl_loss_type")),
        (no_kl, "neither --use-kl-loss nor --kl-coef asks for a reference", ("ref_load",)),
        (
            config.advantage_estimator not in ("grpo", "gspo", "cispo"),
            f"--advantage-estimator {config.advantage_estimator} divides by no deviation of a group",
            ("disable_grpo_std_normalization",),
        ),
        (config.advantage_estimator == "cispo", "CISPO's loss has no second clip", ("eps_clip_c",)),
    ]


def idle_decay(config: Optimizing) -> Rule:
    return config.lr_decay_style == "constant", "the learning rate is constant", ("lr_decay_iters", "min_lr")


def optimizer_steps(config: Any) -> int:
    """Of a trainer's whole run, a minibatch each; 0 where --num-rollout does not end it."""
    samples = config.rollout_batch_size * config.n_samples_per_prompt
    found: int = (config.num_rollout or 0) * -(-samples // (config.global_batch_size or samples))
    return found


def refused_decay(config: Any) -> Iterator[str]:
    """`config` is a trainer's."""
    end = config.lr_decay_iters or optimizer_steps(config)
    if config.lr_decay_style != "constant" and not end:
        yield f"--lr-decay-style {config.lr_decay_style} needs an end: give --lr-decay-iters, or --num-rollout"
    elif config.lr_decay_style != "constant" and end <= config.lr_warmup_iters:
        yield (
            f"--lr-decay-style {config.lr_decay_style} ends after {end} optimizer steps, within the "
            f"--lr-warmup-iters {config.lr_warmup_iters}: the learning rate would never fall"
        )
    if config.min_lr > config.lr:
        yield f"--min-lr {config.min_lr} is above --lr {config.lr}"


def refused(config: Algorithm) -> Iterator[str]:
    """A sentence for each thing that cannot work."""
    if config.use_rollout_logprobs and (config.use_tis or config.use_rs):
        other = "--use-tis" if config.use_tis else "--use-rs"
        yield f"{other} and --use-rollout-logprobs both correct for the same difference; use one"
    for low, high in (("tis_clip_low", "tis_clip"), ("rs_lower_bound", "rs_upper_bound")):
        if getattr(config, low) > getattr(config, high):
            names = [f"--{name.replace('_', '-')} {getattr(config, name)}" for name in (low, high)]
            yield f"{names[0]} is above {names[1]}"
    if config.advantage_estimator in WHITENED and config.normalize_advantages is False:
        yield (
            f"--advantage-estimator {config.advantage_estimator} takes its baseline from the whole batch: "
            "leave --no-normalize-advantages out, or use rloo"
        )


def warnings(config: Algorithm) -> Iterator[str]:
    if config.advantage_estimator == "gspo" and "eps_clip" not in config.model_fields_set:
        yield (
            f"GSPO's ratio is a mean over a sequence and hardly ever leaves --eps-clip {config.eps_clip}; the paper "
            "has --eps-clip 3e-4 --eps-clip-high 4e-4"
        )
    if config.use_kl_loss and config.kl_loss_type == "k1" and config.kl_loss_coef > 0:
        yield "the gradient of --kl-loss-type k1 is 0 on average: k2 and low_var_kl pull towards the reference"
