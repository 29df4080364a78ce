"""How often at least one of k answers is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb
from statistics import fmean


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that k out of n answers, `right` of which are right, hold a right one: 1 - C(n - right, k) / C(n, k).

    The unbiased estimate of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    ValueError unless 1 <= k <= n and 0 <= right <= n.
    """
    if not (1 <= k <= n and 0 <= right <= n):
        raise ValueError(f"pass@{k} of {right} right answers out of {n}")
    return 1 - comb(n - right, k) / comb(n, k)


def rates(counts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, float]]:
    """k = 1, 2, 4, ... with the mean of pass@k over prompts, each as (answers, right ones); of those that have k
    answers. None where there are no answers."""
    k = 1
    while able := [pass_at_k(n, right, k) for n, right in counts if n >= k]:
        yield k, fmean(able)
        k *= 2
