"""Admission: how far generation may run ahead of training, and how old a version is.

`bound` is AReaL's staleness rule ((S + 1) batches not yet trained on) counted in groups; the lease script subtracts
what is leased or unsettled from it. At that bound a group is due in the very last step that it may be trained in; so
while the trainer has all that it needs, `slack` less may be ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.errors import UsageError


def bound(max_staleness: int | None, batch: int, interval: int, queue_capacity: int) -> int:
    """Groups that may be leased or unsettled at once; `max_staleness` None is unbounded: the queue's cap rules."""
    need = batch * interval
    if max_staleness is not None:
        return (max_staleness + 1) * need
    if queue_capacity < need:
        raise UsageError(
            f"a queue of {queue_capacity} groups can never fill --rollout-batch-size {batch} x "
            f"--update-weights-interval {interval} = {need}: raise --queue-capacity or "
            "--async-data-buffer-capacity-factor, or set --max-weight-staleness"
        )
    return queue_capacity


def slack(max_staleness: int | None, batch: int, interval: int) -> int:
    """Groups by which the bound is lower while twice as many are unsettled: those of a publication are trained on, and
    those of the next are complete. Up to a staleness of 2 there would be nothing left to be in flight."""
    return batch * interval if max_staleness is not None and max_staleness > 2 else 0


def ahead(bound: int, slack: int, unsettled: int) -> int:
    """Groups that may be leased or unsettled at once, as things stand."""
    return bound - slack if unsettled >= 2 * slack else bound


def lag(version: int | None, current: int, lineage: Sequence[tuple[int, int]] = ()) -> int | None:
    """Publications between weights `version` and weights `current`; None where the version is unknown.

    `lineage` holds (N, r) for each resume: publication N carries the weights of version r. A version between r and N
    belongs to a branch that was discarded: it is w - r updates away from where the present branch left. Negative when
    `version` is newer than `current`: an error of the run's history, which the caller counts.
    """
    if version is None:
        return None
    for published, restored in reversed(lineage):
        if published > current:
            continue
        if version >= published:
            break
        since = current - published
        if version > restored:
            return since + (version - restored)
        return since + (lag(version, restored, [x for x in lineage if x[0] < published]) or 0)
    return current - version


def given_up(version: int | None, current: int, lineage: Sequence[tuple[int, int]]) -> bool:
    """Whether `version` is of a branch that was discarded at a resume: that its groups are old is not their fault."""
    return version is not None and any(r < version < published <= current for published, r in lineage)
