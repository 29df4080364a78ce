"""Groups -> tensors: what is trained on, in minibatches (an optimizer step each) of microbatches (a forward pass each).

Only tokens that are trained on are kept as targets, so there is no loss mask further on: a prompt, a tool's answer, an
aborted, removed or unscored sample is not masked out of the loss but absent from it. Rows are padded on the right: with
causal attention no token sees the padding, so the model needs neither an attention mask nor position ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import GroupError
from pipeline.types import ABORTED, Group, Logprobs, Sample, Tokens
from pipeline.types import Sequence as Trace

if TYPE_CHECKING:
    import torch

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """One sequence with K >= 1 tokens to train on."""

    inputs: Tokens
    "int32 [T]: the model's input, up to the token before the last one trained on"
    predictors: Positions
    "int64 [K], 0 <= p < T: the output at p predicts the token at p + 1"
    targets: Tokens
    "int32 [K]: the tokens trained on"
    logprobs: Logprobs
    "float32 [K]: what the sampler gave them"
    advantage: float
    "the sample's"


@dataclass(frozen=True)
class Unit:
    """What one sample gives to train on; no rows where it is removed, aborted, unscored or empty."""

    id: tuple[int, int]
    "prompt id, sample index"
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Microbatch:
    """B rows in one padded tensor; their N trained tokens flat, row after row."""

    input_ids: torch.Tensor
    "int64 [B, T], padded on the right with 0"
    predictors: torch.Tensor
    "int64 [N]: positions in the flattened [B * T] output"
    targets: torch.Tensor
    "int64 [N]"
    logprobs: torch.Tensor
    "float32 [N]: the rollout's"
    advantages: torch.Tensor
    "float32 [N]: each token has its sample's"
    ids: tuple[tuple[int, int], ...]
    "[B]: prompt id and sample index of each row"

    def to(self, device: torch.device) -> Microbatch:
        names = ("input_ids", "predictors", "targets", "logprobs", "advantages")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def units(groups: Sequence[Group], advantages: Callable[[Sequence[float | None]], NDArray[np.float64]]) -> list[Unit]:
    """One unit a sample, in the order of prompt id and sample index, whatever the order of `groups`.

    An aborted sample counts as unscored. A removed one (metadata `remove_sample`) is not trained on, but its reward
    still counts among its siblings', as in slime.
    """
    found = []
    for group in groups:
        scores = [None if s.status == ABORTED else s.reward for s in group.samples]
        for sample, score, advantage in zip(group.samples, scores, advantages(scores), strict=True):
            keep = score is not None and not sample.metadata.get("remove_sample", False)
            found.append(Unit((group.prompt.id, sample.index), _rows(sample, float(advantage)) if keep else ()))
    return sorted(found, key=lambda u: u.id)


def minibatches(found: Sequence[Unit], size: int | None, seed: tuple[int, int]) -> list[list[Unit]]:
    """`size` samples an optimizer step, in an order drawn from `seed`; the last may be smaller. None: all in one."""
    if size is None or size >= len(found):
        return [list(found)] if found else []
    order = np.random.default_rng(seed).permutation(len(found))
    return [[found[i] for i in order[start : start + size]] for start in range(0, len(found), size)]


def microbatches(minibatch: Sequence[Unit], budget: int) -> list[Microbatch]:
    """Rows of like length together, each microbatch at most `budget` tokens with its padding.

    A row longer than the budget cannot be cut: it gets a microbatch of its own.
    """
    rows = [(unit.id, row) for unit in minibatch for row in unit.rows]
    rows.sort(key=lambda pair: -len(pair[1].inputs))
    batches = []
    start = 0
    while start < len(rows):
        fits = max(1, budget // len(rows[start][1].inputs))
        batches.append(_stack(rows[start : start + fits]))
        start += fits
    return batches


def _rows(sample: Sample, advantage: float) -> tuple[Row, ...]:
    return tuple(_row(q, advantage) for q in sample.sequences if q.loss_mask.any())


def _row(trace: Trace, advantage: float) -> Row:
    if len(trace.prompt_tokens) == 0:
        raise GroupError("a sequence without a prompt: nothing predicts its first token")
    trained = np.flatnonzero(trace.loss_mask)
    predictors = trained + (len(trace.prompt_tokens) - 1)
    inputs = np.concatenate((trace.prompt_tokens, trace.tokens))[: predictors[-1] + 1]
    return Row(inputs, predictors, trace.tokens[trained], trace.logprobs[trained], advantage)


def _stack(rows: Sequence[tuple[tuple[int, int], Row]]) -> Microbatch:
    import torch

    width = max(len(row.inputs) for _, row in rows)
    inputs = np.zeros((len(rows), width), dtype=np.int64)
    for line, (_, row) in zip(inputs, rows, strict=True):
        line[: len(row.inputs)] = row.inputs
    counts = [len(row.targets) for _, row in rows]
    offsets = np.repeat(np.arange(len(rows)) * width, counts)
    return Microbatch(
        input_ids=torch.from_numpy(inputs),
        predictors=torch.from_numpy(np.concatenate([row.predictors for _, row in rows]) + offsets),
        targets=torch.from_numpy(np.concatenate([row.targets for _, row in rows]).astype(np.int64)),
        logprobs=torch.from_numpy(np.concatenate([row.logprobs for _, row in rows])),
        advantages=torch.from_numpy(np.repeat([row.advantage for _, row in rows], counts).astype(np.float32)),
        ids=tuple(id for id, _ in rows),
    )
