"""The loss and its correction, against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trainer.losses import LOSSES, Clip, Scored, by_sequence, cispo, clipped, gspo, kl, logprobs_and_entropy

DAPO = Clip(0.2, 0.28)


def scored(logprobs: Tensor, advantages: list[float], lengths: list[int] | None = None) -> Scored:
    """Against an old policy of log-probability 0; sequences of one token where nothing is said."""
    counts = [1] * len(advantages) if lengths is None else lengths
    return Scored(logprobs, torch.zeros_like(logprobs), torch.tensor(advantages).to(logprobs), torch.tensor(counts))


def test_the_clip_rules_only_where_it_makes_the_surrogate_worse() -> None:
    ratios = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1])
    loss, ruled = clipped(scored(ratios.log(), [1.0, 1.0, -1.0, -1.0, 2.0]), DAPO)
    assert loss.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8, -2.2])
    assert ruled.tolist() == [True, False, False, True, False]


def test_the_gradient_is_minus_ratio_times_advantage_or_nothing() -> None:
    logprobs = torch.tensor([1.5, 0.5, 1.5, 0.5]).log().requires_grad_()
    loss, _ = clipped(scored(logprobs, [1.0, 1.0, -1.0, -1.0]), DAPO)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("distance", [200.0, -200.0])
def test_a_ratio_that_would_overflow_gives_finite_numbers(name: str, advantage: float, distance: float) -> None:
    logprobs = torch.tensor([distance], requires_grad=True)
    loss, _ = LOSSES[name](scored(logprobs, [advantage]), DAPO)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert loss.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_logprobs_and_entropy_of_a_known_distribution() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]).log() + 7
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([0, 2]), True)
    assert logprobs.tolist() == pytest.approx([-math.log(2), -math.log(3)])
    assert entropy.tolist() == pytest.approx([1.5 * math.log(2), math.log(3)])


@pytest.mark.parametrize("kind", [None, "k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("name", ["clip", "gspo"])
def test_the_gradient_through_the_logits_agrees_with_finite_differences(name: str, kind: str | None) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, 2, 2])
    old = torch.tensor([-1.0, -2.5, -0.5, -3.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        logprobs, entropy = logprobs_and_entropy(x, targets, True)
        found = LOSSES[name](Scored(logprobs, old, advantages, torch.tensor([3, 1])), DAPO)[0]
        return (found - 0.1 * entropy + (0 if kind is None else kl(logprobs, old, kind))).sum()

    assert torch.autograd.gradcheck(loss, (logits,))


def test_the_second_clip_bounds_the_loss_at_a_negative_advantage_only() -> None:
    ratios = torch.tensor([5.0, 5.0, 1.1, 0.1]).log().requires_grad_()
    loss, ruled = clipped(scored(ratios, [-2.0, 2.0, -2.0, -2.0]), Clip(0.2, 0.28, 3.0))
    assert loss.tolist() == pytest.approx([6.0, -2.56, 2.2, 1.6])
    assert ruled.tolist() == [True, True, False, True]
    loss.sum().backward()
    assert ratios.grad is not None
    assert ratios.grad.tolist() == pytest.approx([0, 0, 2.2, 0])


def test_gspo_has_one_ratio_a_sequence_and_its_length_does_not_count() -> None:
    # mean log ratios: (0.3 - 0.1) / 2 = 0.1, and -0.3
    logs = torch.tensor([0.3, -0.1, -0.3]).requires_grad_()
    loss, ruled = gspo(scored(logs, [1.0, 1.0, -1.0], [2, 1]), DAPO)
    assert loss.tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.1), 0.8])
    assert ruled.tolist() == [False, False, True]
    (loss * torch.tensor([0.5, 0.5, 1.0])).sum().backward()  # as aggregated by sequence
    assert logs.grad is not None
    assert logs.grad.tolist() == pytest.approx([-math.exp(0.1) / 2, -math.exp(0.1) / 2, 0.0])


def test_cispo_clips_the_weight_and_drops_no_gradient() -> None:
    logs = torch.tensor([5.0, 0.5, 0.5]).log().requires_grad_()
    loss, ruled = cispo(scored(logs, [1.0, 1.0, -2.0]), Clip(1.0, 1.0))
    assert loss.tolist() == pytest.approx([-2 * math.log(5), 0.5 * math.log(2), -math.log(2)])
    assert ruled.tolist() == [True, False, False]
    loss.sum().backward()
    assert logs.grad is not None
    assert logs.grad.tolist() == pytest.approx([-2.0, -0.5, 1.0])


def test_the_estimates_of_the_divergence_are_schulmans() -> None:
    d = torch.tensor([0.5, -0.5, 30.0, -30.0])
    assert kl(d, torch.zeros(4), "k1").tolist() == [0.5, -0.5, 30, -30]
    assert kl(d, torch.zeros(4), "k2").tolist() == [0.125, 0.125, 450, 450]
    assert kl(d, torch.zeros(4), "k3")[:2].tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5])
    assert kl(d, torch.zeros(4), "k3").isfinite().all()
    assert kl(d, torch.zeros(4), "low_var_kl").tolist() == pytest.approx(
        [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, 10, 10]
    )


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_on_average_over_the_policys_own_tokens_the_estimate_is_the_divergence(kind: str) -> None:
    logits = torch.tensor([[1.0, 0.2, -0.5], [0.1, 0.4, 0.3]], dtype=torch.float64)
    p, q = torch.log_softmax(logits, dim=1)
    assert float((p.exp() * kl(p, q, kind)).sum()) == pytest.approx(float((p.exp() * (p - q)).sum()))


def test_figures_of_a_sequence_go_to_each_of_its_tokens() -> None:
    values, lengths = torch.tensor([1.0, 2.0, 4.0, 6.0]), torch.tensor([1, 2, 1])
    assert by_sequence(values, lengths, mean=False).tolist() == [1, 6, 6, 6]
    assert by_sequence(values, lengths, mean=True).tolist() == [1, 3, 3, 6]


def test_entropy_that_is_only_a_figure_has_no_gradient() -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([0]), False)
    assert logprobs.requires_grad
    assert not entropy.requires_grad
