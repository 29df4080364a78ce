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
from pipeline.fitting import Fitting
from pipeline.types import ABORTED, Group, Logprobs, Sample, Tokens
from pipeline.types import Sequence as Trace

if TYPE_CHECKING:
    import torch

Positions = NDArray[np.int64]
Floats = NDArray[np.float32]
Age = Callable[[int | None], int | None]
"weight version -> publications since; None is unknown"


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
    ages: Positions
    "int64 [K]: publications since each was sampled; -1 is unknown"
    advantages: Floats
    "float32 [K]; 0 until trainer.credit gives them"
    weight: float = 0.0
    "of each token's loss in the minibatch's; 0 until `aggregated` gives it"


@dataclass(frozen=True)
class Unit:
    """What one sample gives to train on; no rows where it is removed, aborted, unscored or empty."""

    id: tuple[int, int]
    "prompt id, sample index"
    score: float | None
    "its reward; None where it is unscored or aborted"
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        """That are trained on."""
        return sum(len(row.targets) for row in self.rows)

    @property
    def cost(self) -> int:
        """Tokens that go through the model."""
        return sum(len(row.inputs) for row in self.rows)


@dataclass(frozen=True)
class Passes:
    """How forward passes are filled."""

    tokens: int
    "at most, with the padding"
    rows: int | None = None
    "so many, in place of `tokens`"
    balanced: bool = True
    "ranks get about as many tokens; or else about as many samples"


def passes(config: Fitting) -> Passes:
    rows = None if config.use_dynamic_batch_size else config.micro_batch_size
    return Passes(config.max_tokens_per_gpu, rows, config.balance_data)


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
    ages: torch.Tensor
    "int64 [N]; -1 is unknown"
    advantages: torch.Tensor
    "float32 [N]"
    weights: torch.Tensor
    "float32 [N]: of each token's loss in the minibatch's"
    lengths: torch.Tensor
    "int64 [B]: trained tokens of each row"
    ids: tuple[tuple[int, int, int], ...]
    "[B]: prompt id, sample index and sequence index of each row"

    def to(self, device: torch.device) -> Microbatch:
        names = ("input_ids", "predictors", "targets", "logprobs", "ages", "advantages", "weights", "lengths")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def units(groups: Sequence[Group], age: Age = lambda version: None) -> list[Unit]:
    """One unit a sample, in the order of prompt id and sample index, whatever the order of `groups`.

    An aborted sample counts as unscored. A removed one (metadata `remove_sample`) is not trained on, but its reward
    still counts among its siblings', as in slime.
    """
    found = []
    for group in groups:
        for sample in group.samples:
            score = None if sample.status == ABORTED else sample.reward
            keep = score is not None and not sample.metadata.get("remove_sample", False)
            found.append(Unit((group.prompt.id, sample.index), score, _rows(sample, age) if keep else ()))
    return sorted(found, key=lambda u: u.id)


def minibatches(found: Sequence[Unit], size: int | None, seed: tuple[int, int]) -> list[list[Unit]]:
    """`size` samples an optimizer step, in an order drawn from `seed`; the last may be smaller. None: all in one."""
    if size is None or size >= len(found):
        return [list(found)] if found else []
    order = np.random.default_rng(seed).permutation(len(found))
    return [[found[i] for i in order[start : start + size]] for start in range(0, len(found), size)]


def aggregated(minibatch: Sequence[Unit], kind: str, constant: float) -> list[Unit]:
    """The units with the weight of each token's loss in the minibatch's (--loss-aggregation).

    token: 1 / all tokens (DAPO, arXiv:2503.14476, eq. 8). sequence: 1 / (samples x the sample's tokens), as in GRPO.
    constant: 1 / (samples x `constant`) (Dr. GRPO, arXiv:2503.20783). A sample without a token counts as a sample.
    """
    total, samples = sum(unit.tokens for unit in minibatch), len(minibatch)

    def weight(unit: Unit) -> float:
        return 1 / {"token": total, "sequence": samples * unit.tokens, "constant": samples * constant}[kind]

    return [
        replace(unit, rows=tuple(replace(row, weight=weight(unit)) for row in unit.rows)) if unit.rows else unit
        for unit in minibatch
    ]


def shares(minibatch: Sequence[Unit], ranks: int, balanced: bool = True) -> list[list[Unit]]:
    """The units of each rank, of about as many tokens: the longest first, each to the rank that has least. Not
    `balanced`: in turn."""
    if not balanced:
        return [list(minibatch[rank::ranks]) for rank in range(ranks)]
    found: list[list[Unit]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for unit in sorted(minibatch, key=lambda unit: -unit.cost):
        rank = loads.index(min(loads))
        found[rank].append(unit)
        loads[rank] += unit.cost
    return found


def microbatches(minibatch: Sequence[Unit], how: Passes) -> list[Microbatch]:
    """Rows of like length together. A row of more than `how.tokens` cannot be cut: it gets one of its own."""
    return [_stack(rows) for rows in _packed(minibatch, how)]


def share(minibatch: Sequence[Unit], how: Passes, rank: int, ranks: int) -> list[Microbatch]:
    """The microbatches of one rank; all ranks have as many, as each forward pass may be a collective: what lacks is
    made up by some without a token to train on."""
    packed = [_packed(units, how) for units in shares(minibatch, ranks, how.balanced)]
    most = max(map(len, packed))
    return [_stack(rows) for rows in packed[rank]] + [_stack([]) for _ in range(most - len(packed[rank]))]


Placed = tuple[tuple[int, int, int], Row]


def _packed(minibatch: Sequence[Unit], how: Passes) -> list[list[Placed]]:
    rows = [((*unit.id, n), row) for unit in minibatch for n, row in enumerate(unit.rows)]
    rows.sort(key=lambda pair: -len(pair[1].inputs))
    found = []
    start = 0
    while start < len(rows):
        fits = how.rows or max(1, how.tokens // len(rows[start][1].inputs))
        found.append(rows[start : start + fits])
        start += fits
    return found


def _rows(sample: Sample, age: Age) -> tuple[Row, ...]:
    return tuple(_row(q, age) for q in sample.sequences if q.loss_mask.any())


def _row(trace: Trace, age: Age) -> Row:
    if len(trace.prompt_tokens) == 0:
        raise GroupError("a sequence without a prompt: nothing predicts its first token")
    trained = np.flatnonzero(trace.loss_mask)
    predictors = trained + (len(trace.prompt_tokens) - 1)
    inputs = np.concatenate((trace.prompt_tokens, trace.tokens))[: predictors[-1] + 1]
    ages = np.full(len(trace.tokens), -1, dtype=np.int64)
    for span in trace.versions:
        found = age(span.version)
        ages[span.start : span.end] = -1 if found is None else found
    nothing = np.zeros(len(trained), dtype=np.float32)
    return Row(inputs, predictors, trace.tokens[trained], trace.logprobs[trained], ages[trained], nothing)


def _stack(rows: Sequence[Placed]) -> Microbatch:
    """Without rows: one of a single token that is not trained on."""
    import torch

    width = max((len(row.inputs) for _, row in rows), default=1)
    inputs = np.zeros((max(1, len(rows)), width), dtype=np.int64)
    for line, (_, row) in zip(inputs, rows, strict=False):
        line[: len(row.inputs)] = row.inputs
    counts = [len(row.targets) for _, row in rows]
    offsets = np.repeat(np.arange(len(rows)) * width, counts)

    def flat(name: str, kind: type) -> torch.Tensor:
        parts = [getattr(row, name) for _, row in rows]
        return torch.from_numpy(np.concatenate([np.zeros(0, kind), *parts]).astype(kind))

    return Microbatch(
        input_ids=torch.from_numpy(inputs),
        predictors=flat("predictors", np.int64) + torch.from_numpy(offsets),
        targets=flat("targets", np.int64),
        logprobs=flat("logprobs", np.float32),
        ages=flat("ages", np.int64),
        advantages=flat("advantages", np.float32),
        weights=torch.from_numpy(np.repeat([row.weight for _, row in rows], counts).astype(np.float32)),
        lengths=torch.tensor(counts, dtype=torch.int64),
        ids=tuple(id for id, _ in rows),
    )
