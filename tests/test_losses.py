"""The loss and its correction, against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.correction import truncated
from trainer.losses import clipped, logprobs_and_entropy


def test_the_clip_rules_only_where_it_makes_the_surrogate_worse() -> None:
    ratios = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    loss, ruled = clipped(ratios.log(), torch.zeros(5), advantages, 0.2, 0.28)
    assert loss.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8, -2.2])
    assert ruled.tolist() == [True, False, False, True, False]


def test_the_gradient_is_minus_ratio_times_advantage_or_nothing() -> None:
    logprobs = torch.tensor([1.5, 0.5, 1.5, 0.5]).log().requires_grad_()
    loss, _ = clipped(logprobs, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.2, 0.28)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("distance", [200.0, -200.0])
def test_a_ratio_that_would_overflow_gives_finite_numbers(advantage: float, distance: float) -> None:
    logprobs = torch.tensor([distance], requires_grad=True)
    loss, _ = clipped(logprobs, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert loss.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_logprobs_and_entropy_of_a_known_distribution() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]).log() + 7
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([0, 2]), True)
    assert logprobs.tolist() == pytest.approx([-math.log(2), -math.log(3)])
    assert entropy.tolist() == pytest.approx([1.5 * math.log(2), math.log(3)])


def test_the_gradient_through_the_logits_agrees_with_finite_differences() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, 2, 2])
    old = torch.tensor([-1.0, -2.5, -0.5, -3.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        logprobs, entropy = logprobs_and_entropy(x, targets, True)
        return (clipped(logprobs, old, advantages, 0.2, 0.28)[0] - 0.1 * entropy).sum()

    assert torch.autograd.gradcheck(loss, (logits,))


def test_entropy_that_is_only_a_figure_has_no_gradient() -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([0]), False)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_importance_weights_are_cut_on_both_sides_and_carry_no_gradient() -> None:
    old = torch.tensor([3.0, 1.0, 0.1]).log().requires_grad_()
    weights, ratio = truncated(old, torch.zeros(3), 0.5, 2.0)
    assert weights.tolist() == pytest.approx([2.0, 1.0, 0.5])
    assert ratio.tolist() == pytest.approx([3.0, 1.0, 0.1])
    assert not weights.requires_grad


def test_an_importance_ratio_that_would_overflow_stays_finite() -> None:
    _, ratio = truncated(torch.zeros(1), torch.full((1,), -1000.0), 0.0, 2.0)
    assert ratio.isfinite().all()


def test_entropy_as_a_figure_is_the_same_over_many_tokens() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(1300, 7), torch.zeros(1300, dtype=torch.int64)
    whole = logprobs_and_entropy(logits, targets, True)
    pieces = logprobs_and_entropy(logits, targets, False)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_bfloat16_logits_are_worked_on_in_float32() -> None:
    logits = torch.randn(3, 7, dtype=torch.bfloat16)
    logprobs, _ = logprobs_and_entropy(logits, torch.tensor([0, 1, 2]), True)
    assert torch.equal(logprobs, logprobs_and_entropy(logits.float(), torch.tensor([0, 1, 2]), True)[0])
