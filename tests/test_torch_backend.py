"""The torch backend on the project's own small model."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainer_groups import group, random_groups, sample, sequence

from pipeline.config import TrainConfig
from pipeline.errors import GroupError, MillpondError, UsageError, WeightsError
from pipeline.types import Group, Span
from trainer import demo_model
from trainer.advantages import ESTIMATORS, grpo
from trainer.backends import build, state
from trainer.backends.base import At
from trainer.backends.torch import TorchBackend
from trainer.batch import Passes, share, units
from trainer.objective import Objective, Told


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "demo"
    demo_model.make(folder, 0)
    return folder


def backend(checkpoint: Path, tis: bool = True, **changes: Any) -> TorchBackend:
    settings = {"lr": 1e-3, "device": "cpu", "entropy_coef": 0.02} | changes
    found = build(TrainConfig(hf_checkpoint=checkpoint, **settings), tis)
    assert isinstance(found, TorchBackend)
    return found


def weights(trained: TorchBackend, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    trained.save(folder)
    state = load_file(folder / "state-00001.safetensors")
    return {name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.")}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize(("token", "where"), [(-1, "prompt"), (22, "prompt"), (10**6, "answer")])
def test_a_token_that_the_model_does_not_have_is_told_with_its_prompt(checkpoint: Path, token: int, where: str) -> None:
    trained = backend(checkpoint)
    assert trained._model.words == 22
    mine = ([3, token], [5]) if where == "prompt" else ([3], [5, token])
    groups = [*random_groups(2, 2), group(7, sample(0, 1.0, sequence([3], [21])), sample(1, 0.0, sequence(*mine)))]
    said = rf"prompt 7 has token {token}, and --hf-checkpoint \S+ has 22: worker \S+ samples with another model"
    with pytest.raises(GroupError, match=said):
        trained.train(groups, 0)


def plain_logprobs(model: Any, q: Any, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [R] of one sequence's answer and entropy [R], by a whole forward pass without any padding."""
    ids = torch.from_numpy(np.concatenate((q.prompt_tokens, q.tokens))).long()
    logs = (model(input_ids=ids[None]).logits[0].float() / temperature).log_softmax(-1)
    start = len(q.prompt_tokens)
    logs = logs[start - 1 : -1]
    return logs.gather(1, ids[start:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def by_hand(checkpoint: Path, groups: list[Group]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and weights after one on-policy step with TIS, row by row."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    total, count = torch.zeros(()), 0
    for g in groups:
        for one, advantage in zip(g.samples, grpo([s.reward for s in g.samples]), strict=True):
            (q,) = one.sequences
            logprobs, entropy = plain_logprobs(model, q)
            weight = (logprobs.detach() - torch.from_numpy(q.logprobs)).exp().clamp(0, 2)
            ratio = (logprobs - logprobs.detach()).exp()
            total = total + (-ratio * float(advantage) * weight - 0.02 * entropy).sum()
            count += len(q.tokens)
    loss = total / count
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach()), {name: p.detach() for name, p in model.state_dict().items()}


def test_a_step_is_the_one_worked_out_row_by_row(checkpoint: Path, tmp_path: Path) -> None:
    groups = random_groups(4, 4)
    loss, expected = by_hand(checkpoint, groups)
    trained = backend(checkpoint)
    metrics = trained.train(groups, 0)
    assert metrics["train/loss"] == pytest.approx(loss, abs=1e-6)
    # Adam's first step is lr * sign(gradient): where a gradient is nothing but rounding its sign may differ
    moved = weights(trained, tmp_path / "w")
    far = sum(int(((moved[name] - expected[name]).abs() > 1e-5).sum()) for name in moved)
    assert far < 1e-3 * sum(t.numel() for t in moved.values())


ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: {"advantage_estimator": name} for name in ESTIMATORS},
    "by sequence": {"loss_aggregation": "sequence"},
    "by a constant": {"loss_aggregation": "constant", "rollout_max_response_len": 6},
    "KL in the loss": {"use_kl_loss": True, "kl_loss_coef": 0.1},
    "KL in the reward": {"kl_coef": 0.1},
    "KL in the reward, by token": {"kl_coef": 0.1, "advantage_estimator": "reinforce_plus_plus"},
    "masks": {"tis_mode": "mask", "tis_clip_low": 0.5, "use_rs": True, "rs_lower_bound": 0.8, "rs_upper_bound": 1.2},
    "by sequences": {"tis_level": "sequence"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_does_not_depend_on_the_split_into_microbatches(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    groups = random_groups(6, 4)
    other = tmp_path / "reference"
    demo_model.make(other, 1)
    refers = {"ref_load": other} if "KL" in name else {}
    # A large epsilon makes Adam's first step proportional to the gradient
    rules = ALGORITHMS[name] | refers | {"adam_eps": 1.0, "lr": 1.0}
    whole, split = (backend(checkpoint, **rules, max_tokens_per_gpu=n) for n in (16384, 20))
    one, again = whole.train(groups, 0), split.train(groups, 0)
    assert again == pytest.approx(one, abs=1e-6)
    assert one["train/grad_norm"] > 1e-3
    assert distance(weights(whole, tmp_path / "a"), weights(split, tmp_path / "b")) < 1e-6


def test_the_divergence_from_a_reference_is_worked_out_with_its_own_weights(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    groups = random_groups(3, 4)
    demo_model.make(tmp_path / "other", 1)
    folders = (checkpoint, tmp_path / "other")
    models = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in folders]
    with torch.no_grad():
        told = [[plain_logprobs(m, q)[0] for m in models] for g in groups for s in g.samples for q in s.sequences]
    drift = torch.cat([policy - reference for policy, reference in told])
    found = backend(checkpoint, use_kl_loss=True, kl_loss_type="k1", kl_coef=0.2, ref_load=tmp_path / "other")
    metrics = found.train(groups, 0)
    found_drift = pytest.approx(float(drift.mean()), abs=1e-5)
    assert (metrics["train/kl_loss"], metrics["train/kl"]) == (found_drift, found_drift)
    at_home = backend(checkpoint, use_kl_loss=True, kl_loss_coef=0.5).train(groups, 0)
    assert at_home["train/kl_loss"] == pytest.approx(0, abs=1e-9)


def test_a_reference_is_never_trained(checkpoint: Path) -> None:
    found = backend(checkpoint, use_kl_loss=True, kl_loss_coef=0.5, lr=1e-2)
    groups = random_groups(3, 4)
    drifts = [found.train(groups, step)["train/kl_loss"] for step in range(4)]
    assert drifts[0] == pytest.approx(0, abs=1e-9)
    assert drifts[1] > 1e-4


def test_a_reference_with_another_vocabulary_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.resize_token_embeddings(64)
    model.save_pretrained(tmp_path / "wide")
    with pytest.raises(UsageError, match=r"--ref-load .*wide: 64 tokens"):
        backend(checkpoint, use_kl_loss=True, ref_load=tmp_path / "wide")


def halves(old: torch.Tensor, rollout: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    assert int(lengths.sum()) == len(old) == len(rollout)
    return torch.full_like(old, 0.5)


def scalar(old: torch.Tensor, rollout: torch.Tensor, lengths: torch.Tensor) -> float:
    return 0.5


def test_importance_weights_may_be_the_users_own(checkpoint: Path) -> None:
    groups, rules = random_groups(3, 4), {"entropy_coef": 0.0}
    half = backend(checkpoint, custom_tis_function_path=f"{__name__}.halves", **rules).train(groups, 0)
    whole = backend(checkpoint, tis=False, **rules).train(groups, 0)
    assert half["train/pg_loss"] == pytest.approx(whole["train/pg_loss"] / 2, abs=1e-7)
    assert half["train/tis_clipfrac"] == 1
    with pytest.raises(GroupError, match=r"scalar: it must give a tensor of .* gave float"):
        backend(checkpoint, custom_tis_function_path=f"{__name__}.scalar").train(groups, 0)


def highest(old: torch.Tensor, rollout: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(old) / (old - rollout).exp().max()


def test_own_importance_weights_are_not_asked_for_where_a_rank_has_no_token(checkpoint: Path) -> None:
    (micro,) = share(units(random_groups(1, 1)), Passes(40), 1, 2)
    config = TrainConfig(custom_tis_function_path=f"{__name__}.highest")
    nothing = torch.zeros(0)
    assert not Objective(config, True).sums(micro, Told(nothing, nothing, None, None), 1).any()


def test_sequences_too_far_from_their_sampler_are_left_out(checkpoint: Path) -> None:
    rules = {"use_rs": True, "rs_lower_bound": 1e-9, "entropy_coef": 0.0}
    none = backend(checkpoint, **rules, rs_upper_bound=1e-8).train(random_groups(3, 4), 0)
    assert (none["train/rs_maskfrac"], none["train/pg_loss"], none["train/grad_norm"]) == (1, 0, 0)
    most = backend(checkpoint, **rules, rs_upper_bound=1e9).train(random_groups(3, 4), 0)
    assert most["train/rs_maskfrac"] == 0
    assert most["train/grad_norm"] > 0


def test_a_batch_that_is_rejected_as_a_whole_moves_no_weight_by_a_bit(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = {"use_rs": True, "rs_lower_bound": 0.0, "rs_upper_bound": 1e6, "entropy_coef": 0.0, "weight_decay": 0.1}
    trained = backend(checkpoint, **rules)
    assert trained.train(random_groups(2, 4), 0)["train/optimizer_steps"] == 1  # from here on Adam has momentum
    before = weights(trained, tmp_path / "before")
    far = sequence([3, 4], [5, 6], logprob=-50.0)
    figures = trained.train([group(0, *(sample(i, float(i), far) for i in range(2)))], 1)
    assert figures["train/rs_maskfrac"] == 1
    assert figures["train/optimizer_steps"] == figures["train/skipped"] == 0
    assert "no update: the gradient is 0" in caplog.text
    assert same(before, weights(trained, tmp_path / "after"))


def test_shuffled_groups_change_nothing(checkpoint: Path, tmp_path: Path) -> None:
    groups = random_groups(6, 4)
    one, other = (backend(checkpoint, global_batch_size=10) for _ in range(2))
    assert one.train(groups, 0) == other.train([groups[i] for i in (3, 0, 5, 1, 4, 2)], 0)
    assert same(weights(one, tmp_path / "a"), weights(other, tmp_path / "b"))


def test_the_figures_say_how_far_the_sampler_is_away(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    bare = random_groups(3, 4)
    with torch.no_grad():
        members = [
            [
                sample(s.index, s.reward, q.__class__(q.prompt_tokens, q.tokens, lp.numpy() - shift, q.loss_mask, ()))
                for s in g.samples
                for q in s.sequences
                for lp in [plain_logprobs(model, q, 0.7)[0]]
            ]
            for g in bare
            for shift in [np.float32(0.0 if g.prompt.id else math.log(3.0))]
        ]
    exact = [group(i, *m) for i, m in enumerate(members) if i]
    metrics = backend(checkpoint, rollout_temperature=0.7).train(exact, 0)
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert metrics["train/tis"] == pytest.approx(1, abs=1e-5)
    assert metrics["train/tis_clipfrac"] == 0
    metrics = backend(checkpoint, rollout_temperature=0.7).train([group(0, *members[0])], 0)
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(math.log(3.0), abs=1e-5)
    assert metrics["train/tis"] == pytest.approx(3.0, abs=1e-4)
    assert metrics["train/tis_clipfrac"] == 1


def sampled(checkpoint: Path, *versions: int, shift: float = 0.0) -> list[Group]:
    """Groups with the model's own log-probabilities, `shift` off; the sequence of sample n is of version n."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def told(q: Any, version: int) -> Any:
        with torch.no_grad():
            logprobs = plain_logprobs(model, q)[0].numpy() - np.float32(shift * (1 + version))
        return replace(q, logprobs=logprobs, versions=(Span(version, 0, len(q.tokens)),))

    return [
        replace(g, samples=tuple(replace(s, sequences=(told(s.sequences[0], versions[s.index]),)) for s in g.samples))
        for g in random_groups(3, len(versions))
    ]


def test_the_distance_from_the_sampler_is_told_by_the_tokens_age(checkpoint: Path) -> None:
    groups = sampled(checkpoint, 7, 5, 5, 0, shift=0.01)
    metrics = backend(checkpoint).train(groups, 0, At(7))
    name = "train/train_rollout_logprob_abs_diff"
    assert {k: v for k, v in metrics.items() if k.startswith(f"{name}/")} == {
        f"{name}/staleness_0": pytest.approx(0.08, abs=1e-5),
        f"{name}/staleness_2": pytest.approx(0.06, abs=1e-5),
        f"{name}/staleness_7": pytest.approx(0.01, abs=1e-5),
    }
    assert not [k for k in backend(checkpoint).train(groups, 0) if k.startswith(f"{name}/")]
    resumed = backend(checkpoint).train(groups, 0, At(9, ((9, 5),)))
    assert f"{name}/staleness_2" in resumed  # version 7 of a branch that left from 5


@pytest.mark.parametrize(
    ("shift", "at", "warned"),
    [(0.0, At(1), 0), (0.2, At(1), 1), (0.2, At(4), 0), (0.2, At(1, (), False), 0)],
    ids=["the same", "another", "stale", "weights have moved since"],
)
def test_a_distance_that_is_no_staleness_is_warned_of_once(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, shift: float, at: At, warned: int
) -> None:
    trained = backend(checkpoint, lr=1e-9)
    groups = sampled(checkpoint, 1, 1, 1, 1, shift=shift)
    for step in range(3):
        trained.train(groups, step, at)
    assert caplog.text.count("which is no staleness") == warned


def test_with_rollout_logprobs_as_the_old_policy_the_clip_acts_and_tis_does_not(checkpoint: Path) -> None:
    metrics = backend(checkpoint, use_rollout_logprobs=True).train(random_groups(6, 4), 0)
    assert metrics["train/pg_clipfrac"] > 0.1
    assert metrics["train/train_rollout_logprob_abs_diff"] > 0.1
    assert "train/tis" not in metrics


def test_later_minibatches_are_measured_against_the_weights_before_the_step(checkpoint: Path) -> None:
    groups = random_groups(6, 4)
    assert backend(checkpoint, lr=1e-2).train(groups, 0)["train/ppo_kl"] == 0
    several = backend(checkpoint, lr=1e-2, global_batch_size=6).train(groups, 0)
    assert several["train/optimizer_steps"] == 4
    assert abs(several["train/ppo_kl"]) > 1e-4
    assert several["train/pg_clipfrac"] > 0


def test_the_learning_rate_warms_up_by_optimizer_steps(checkpoint: Path) -> None:
    trained = backend(checkpoint, lr_warmup_iters=4, global_batch_size=8)
    rates = [trained.train(random_groups(4, 4), step)["train/lr"] for step in range(3)]
    assert rates == pytest.approx([0.25e-3, 0.75e-3, 1e-3])


@pytest.mark.parametrize(
    ("style", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1, 1, 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 0.55, 0.1 + 0.9 * (1 - 0.5**0.5) / 2, 0.1]),
    ],
)
def test_the_learning_rate_falls_after_the_warm_up(checkpoint: Path, style: str, rates: list[float]) -> None:
    rules = {"lr_decay_style": style, "lr_warmup_iters": 2, "lr_decay_iters": 6, "min_lr": 1e-4}
    trained = backend(checkpoint, **rules)
    found = [trained.train(random_groups(2, 2), step)["train/lr"] for step in range(7)]
    assert found == pytest.approx([1e-3 * rate for rate in rates])


def test_the_learning_rate_falls_over_all_minibatches_of_the_run(checkpoint: Path) -> None:
    sizes = {"num_rollout": 3, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "global_batch_size": 7}
    trained = backend(checkpoint, lr_decay_style="linear", **sizes)  # 3 optimizer steps each, the last of 2 samples
    found = [trained.train(random_groups(4, 4), step)["train/lr"] for step in range(3)]
    assert found == pytest.approx([1e-3, 1e-3 * 6 / 9, 1e-3 * 3 / 9])


def masked(reason: str) -> list[Group]:
    q, empty = sequence([3, 4], [5, 6]), sequence([3, 4], [])
    members = {
        "empty": [sample(0, 1.0, empty), sample(1, 0.0, empty)],
        "removed": [sample(i, float(i), q, metadata={"remove_sample": True}) for i in range(2)],
        "unscored": [sample(i, None, q) for i in range(2)],
        "loss mask": [sample(i, float(i), sequence([3, 4], [5, 6], mask=[0, 0])) for i in range(2)],
    }
    return [group(0, *members[reason])]


@pytest.mark.parametrize("reason", ["empty", "removed", "unscored", "loss mask"])
def test_a_masked_batch_moves_no_weight_by_a_bit(
    checkpoint: Path, tmp_path: Path, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained = backend(checkpoint, weight_decay=0.1, lr_warmup_iters=10)
    trained.train(random_groups(2, 4), 0)  # from here on Adam has momentum
    before = weights(trained, tmp_path / "before")
    with caplog.at_level(logging.WARNING):
        metrics = trained.train(masked(reason), 1)
    assert same(before, weights(trained, tmp_path / "after"))
    assert metrics["train/loss"] == metrics["train/grad_norm"] == metrics["train/skipped"] == 0
    assert metrics["train/optimizer_steps"] == 0
    assert metrics["train/masked_samples"] == 2
    assert "masked" in caplog.text
    assert trained.train(random_groups(2, 4), 2)["train/lr"] == pytest.approx(2e-4)


def test_equal_rewards_move_no_weight_unless_entropy_is_asked_for(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    q = sequence([3, 4], [5, 6])
    equal = [group(i, *(sample(j, 0.25 * i, q) for j in range(3))) for i in range(2)]
    for coefficient, stays in ((0.0, True), (0.02, False)):
        trained = backend(checkpoint, weight_decay=0.1, entropy_coef=coefficient)
        trained.train(random_groups(2, 4), 0)
        before = weights(trained, tmp_path / f"before {stays}")
        metrics = trained.train(equal, 1)
        assert same(before, weights(trained, tmp_path / f"after {stays}")) == stays
        assert metrics["train/entropy"] > 1
    assert caplog.text.count("all advantages are 0") == 1


def test_an_empty_batch_changes_nothing(checkpoint: Path) -> None:
    metrics = backend(checkpoint).train([], 0)
    assert all(math.isfinite(value) for value in metrics.values())


def broken(id: int = 0) -> Group:
    """The codec lets no such log-probabilities in; here they stand for any overflow."""
    return group(id, *(sample(i, float(i), sequence([3, 4], [5, 6], logprob=math.nan)) for i in range(2)))


def test_a_loss_that_is_not_finite_is_skipped_and_counted(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = backend(checkpoint)
    trained.train(random_groups(2, 4), 0)
    before = weights(trained, tmp_path / "before")
    metrics = trained.train([broken()], 1)
    assert same(before, weights(trained, tmp_path / "after"))
    assert metrics["train/skipped"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    assert "not finite" in caplog.text


def test_a_skipped_minibatch_leaves_the_others_figures_alone(checkpoint: Path) -> None:
    good = random_groups(1, 4)
    metrics = backend(checkpoint, global_batch_size=1).train([*good, broken(1)], 0)
    alone = backend(checkpoint, global_batch_size=1).train(good, 0)
    assert metrics["train/skipped"] == 2
    for name in ("train/train_rollout_logprob_abs_diff", "train/tis"):
        assert metrics[name] == pytest.approx(alone[name], abs=1e-6)


def test_the_third_loss_in_a_row_that_is_not_finite_ends_the_run(checkpoint: Path) -> None:
    trained = backend(checkpoint)
    for step in range(2):
        trained.train([broken()], step)
    trained.train(random_groups(2, 4), 2)
    for step in range(2):
        trained.train([broken()], step)
    with pytest.raises(MillpondError, match="3 times in a row"):
        trained.train([broken()], 5)


def test_a_restored_trainer_makes_the_same_next_step(checkpoint: Path, tmp_path: Path) -> None:
    first = backend(checkpoint, global_batch_size=6, lr_warmup_iters=10)
    for step in range(2):
        first.train(random_groups(4, 4, seed=step), step)
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved")
    second = backend(checkpoint, global_batch_size=6, lr_warmup_iters=10, seed=1234)
    second.load(tmp_path / "saved")
    groups = random_groups(4, 4, seed=9)
    assert first.train(groups, 2) == second.train(groups, 2)
    assert same(weights(first, tmp_path / "a"), weights(second, tmp_path / "b"))


def test_a_restored_trainer_keeps_to_its_own_settings(checkpoint: Path, tmp_path: Path) -> None:
    first = backend(checkpoint)
    first.train(random_groups(2, 4), 0)
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved")
    results = []
    for decay in (0.0, 0.5):
        second = backend(checkpoint, weight_decay=decay)
        second.load(tmp_path / "saved")
        second.train(random_groups(2, 4), 1)
        results.append(weights(second, tmp_path / f"decay {decay}"))
    assert not same(*results)


def test_a_state_that_is_missing_or_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    trained = backend(checkpoint)
    with pytest.raises(WeightsError, match="no training state"):
        trained.load(tmp_path)
    state.write(tmp_path, [("model.other", torch.zeros(1))], {"updates": 0})
    with pytest.raises(WeightsError, match=r"not a training state of this model: it has no model\.model\.embed"):
        trained.load(tmp_path)
    state.write(tmp_path, [(f"model.{name}", torch.zeros(3)) for name in weights(trained, tmp_path / "w")], {})
    with pytest.raises(WeightsError, match=r"embed_tokens\.weight is \(3,\)"):
        trained.load(tmp_path)
    (tmp_path / "state-00001.safetensors").write_bytes(b"junk")
    with pytest.raises(WeightsError, match="missing or damaged"):
        trained.load(tmp_path)
    (tmp_path / "state.json").write_text('{"megatron": "0.16", "updates": 2}')
    with pytest.raises(WeightsError, match="of --train-backend megatron"):
        trained.load(tmp_path)


def test_a_large_state_is_written_in_files_of_bounded_size(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.full((n,), float(n)) for n in (3, 30, 8, 8 + 8, 1)}
    state.write(tmp_path, tensors.items(), {"updates": 7}, largest=100)
    assert len([*tmp_path.glob("state-*.safetensors")]) == 3
    saved = state.Saved(tmp_path)
    assert saved.facts["updates"] == 7
    assert all(torch.equal(saved.tensor(name, t), t) for name, t in tensors.items())


def test_saved_weights_load_with_transformers_and_give_the_same_logits(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = backend(checkpoint)
    trained.train(random_groups(2, 4), 0)
    trained.save_weights(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.float32
    assert same(loaded.state_dict(), weights(trained, tmp_path / "w"))
    assert (
        AutoTokenizer.from_pretrained(tmp_path)("A:1=").input_ids
        == AutoTokenizer.from_pretrained(checkpoint)("A:1=").input_ids
    )
    assert loaded.generation_config.eos_token_id == 1


@pytest.mark.parametrize("present", [True, False])
def test_a_folder_without_a_model_is_refused_with_the_flag(tmp_path: Path, present: bool) -> None:
    if present:
        (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    with pytest.raises(UsageError, match="--hf-checkpoint"):
        backend(tmp_path)


def test_a_reference_that_is_no_model_is_refused_with_its_own_flag(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^--ref-load {tmp_path}: no folder with a Hugging Face model"):
        backend(checkpoint, use_kl_loss=True, ref_load=tmp_path)


def test_a_device_that_is_not_there_is_refused_with_the_flag(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="--device"):
        backend(checkpoint, device="nonsense")
