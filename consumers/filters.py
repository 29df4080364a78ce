"""Sample filters: run last, on the assembled batch; they mark samples that are not trained on, and do nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pipeline.errors import GroupError
from pipeline.types import Group, Sample

MARK = "remove_sample"
"Key in a sample's metadata; True sets its loss mask to zero."


def remove(sample: Sample) -> Sample:
    """The sample with the mark."""
    return replace(sample, metadata={**sample.metadata, MARK: True})


def removed(sample: Sample) -> bool:
    return sample.metadata.get(MARK) is True


def rollout_sample_filter(function: Callable[[list[Group]], Any], groups: list[Group]) -> list[Group]:
    """What `function(groups)` gives: the same groups in the same order, some of their samples marked.

    GroupError where groups or samples are fewer, more, in another order, or changed in anything but metadata.
    """
    name = f"sample filter {getattr(function, '__qualname__', function)}"
    result = function(list(groups))
    if not isinstance(result, list | tuple) or not all(isinstance(group, Group) for group in result):
        raise GroupError(f"{name}: must give the list of groups back, with samples marked by consumers.filters.remove")
    if len(result) != len(groups):
        raise GroupError(f"{name}: gave {len(result)} groups for {len(groups)}; mark samples, do not leave them out")
    for before, after in zip(groups, result, strict=True):
        for problem in _differences(before, after):
            raise GroupError(f"{name}: prompt {before.prompt.id}: {problem}")
    return list(result)


def _differences(before: Group, after: Group) -> Iterator[str]:
    if after.prompt != before.prompt:
        yield f"prompt {after.prompt.id} stands in its place"
    if len(after.samples) != len(before.samples):
        yield f"{len(after.samples)} samples for {len(before.samples)}; mark samples, do not leave them out"
    for old, new in zip(before.samples, after.samples, strict=False):
        if replace(new, metadata=old.metadata, sequences=()) != replace(old, sequences=()):
            yield f"sample {old.index} is changed in more than its metadata"
        if new.sequences is not old.sequences:
            yield f"sample {old.index} has other sequences"
