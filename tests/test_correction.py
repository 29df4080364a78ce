"""Importance weights, against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.correction import Rule, importance

ONES = torch.tensor([1, 1, 1])


def test_truncated_weights_are_cut_on_both_sides_and_carry_no_gradient() -> None:
    old = torch.tensor([3.0, 1.0, 0.1]).log().requires_grad_()
    weights, ratio = importance(old, torch.zeros(3), ONES, Rule("token", "truncate", 0.5, 2.0))
    assert weights.tolist() == pytest.approx([2.0, 1.0, 0.5])
    assert ratio.tolist() == pytest.approx([3.0, 1.0, 0.1])
    assert not weights.requires_grad


def test_masked_weights_are_the_ratio_or_nothing() -> None:
    old = torch.tensor([3.0, 1.5, 0.1]).log()
    weights, _ = importance(old, torch.zeros(3), ONES, Rule("token", "mask", 0.5, 2.0))
    assert weights.tolist() == pytest.approx([0.0, 1.5, 0.0])


@pytest.mark.parametrize(("level", "first"), [("sequence", 3.0), ("geometric", math.sqrt(3.0))])
def test_a_sequence_has_one_weight(level: str, first: float) -> None:
    old = torch.tensor([6.0, 0.5, 0.25]).log()
    weights, ratio = importance(old, torch.zeros(3), torch.tensor([2, 1]), Rule(level, "truncate", 0.0, 2.5))
    assert ratio.tolist() == pytest.approx([first, first, 0.25])
    assert weights.tolist() == pytest.approx([min(first, 2.5), min(first, 2.5), 0.25])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_ratio_that_would_overflow_stays_finite(level: str) -> None:
    _, ratio = importance(torch.zeros(2), torch.full((2,), -1000.0), torch.tensor([2]), Rule(level, "truncate", 0, 2))
    assert ratio.isfinite().all()
