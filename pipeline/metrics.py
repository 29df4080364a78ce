"""Metrics of a training step, and the file they go to.

Names are slime's and miles' where they have the thing: `rollout/*`, `rollout/fully_async/*`, `perf/*`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import IO, Any

from pipeline.types import TRUNCATED, Group, Sample

Values = dict[str, float]


class Metrics:
    """`metrics.jsonl`: a line a step, `{"step": 3, "time": unix seconds, name: number, ...}`; its owner's alone."""

    def __init__(self, path: Path, step: int = 0, aside: Path | None = None) -> None:
        """`step` is the first that will be written: lines of it and later ones belong to a branch that was given up at
        a resume and are cut, as is a line that a crash left half written. The file is made anew, as `aside` first: what
        another owner still writes goes to the old one."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = aside or path.with_name(path.name + ".new")
        self._file: IO[bytes] = os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
        self._file.writelines(_history(path, step))
        self._file.flush()
        aside.replace(path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """What is not finite becomes null: a step of NaNs is still a line, and JSON."""
        self.put(step, {name: _plain(value) for name, value in values.items()})

    def put(self, step: int, values: Mapping[str, Any]) -> None:
        """Anything that JSON has."""
        line = json.dumps({"step": step, "time": round(time.time(), 3), **values}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Records:
    """What a trainer writes down of its steps, in files of the run's folder."""

    def __init__(self, path: Path, step: int, aside: Path) -> None:
        """As Metrics; `aside` is a folder."""
        self.folder = path.parent
        names = (path.name, "evals.jsonl", "timeline.jsonl")
        self.steps, self.evals, self.timeline = (Metrics(path.with_name(n), step, aside / n) for n in names)

    def write(self, step: int, values: Mapping[str, float], workers: Mapping[str, Sequence[float]]) -> None:
        """`workers`: tokens a second and groups in flight by name, as they say themselves at the end of the step."""
        self.steps.write(step, values)
        self.timeline.put(step, {"workers": workers})

    def late(self, step: int, values: Mapping[str, float]) -> None:
        """What belongs to `step` and comes when others have passed, such as an evaluation."""
        self.evals.write(step, values)

    def close(self) -> None:
        for file in (self.steps, self.evals, self.timeline):
            file.close()


def _history(path: Path, step: int) -> list[bytes]:
    if not path.exists():
        return []
    with path.open("rb") as file:
        return [line for line in file if _step(line) < step]


def _step(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _plain(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(value)


def rollout(groups: Sequence[Group]) -> Values:
    """`rollout/*` of a batch of at least one group, as it was generated: before a sample filter takes samples out.

    Lengths are trained tokens over all sequences of a sample. `zero_std` counts the groups whose rewards are all equal,
    which teach nothing, by reward, and as a share of all groups.
    """
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    equal = Counter(reward for group in groups if (reward := _equal_reward(group)) is not None)
    return {
        **({"rollout/raw_reward": fmean(rewards)} if rewards else {}),
        "rollout/unscored": len(samples) - len(rewards),
        **statistics("rollout/response_len", [response_len(sample) for sample in samples]),
        "rollout/truncated_ratio": fmean(sample.status == TRUNCATED for sample in samples),
        "rollout/groups": len(groups),
        "rollout/zero_std/ratio": equal.total() / len(groups),
        **{f"rollout/zero_std/count_{reward}": count for reward, count in sorted(equal.items())},
    }


def response_len(sample: Sample) -> int:
    """Tokens of `sample` that the model sampled."""
    return sum(int(sequence.loss_mask.sum()) for sequence in sample.sequences)


def _equal_reward(group: Group) -> float | None:
    """The reward that all samples of the group have, to one digit; None where they differ or one has none."""
    rewards = {sample.reward for sample in group.samples}
    reward = rewards.pop() if len(rewards) == 1 else None
    return None if reward is None else round(float(reward), 1)


def statistics(name: str, values: Sequence[float]) -> Values:
    return {
        f"{name}/mean": fmean(values),
        f"{name}/min": min(values),
        f"{name}/max": max(values),
        f"{name}/median": median(values),
    }


def fully_async(queue_size: int, staleness: Mapping[str, float], filtered: Mapping[str, int]) -> Values:
    """`rollout/fully_async/*`: groups left in the list; avg_staleness and max_staleness, in publications, of those that
    were trained on; how many were not, by why (`aborted`, `stale`, ...)."""
    values = {
        "queue_size": queue_size,
        **{f"{why}_groups_filtered": count for why, count in {"aborted": 0, "stale": 0, **filtered}.items()},
        **staleness,
    }
    return {f"rollout/fully_async/{name}": value for name, value in values.items()}


_COUNTED = {
    "dropped:": "rollout/dynamic_filter/drop_",
    "recycled:": "rollout/recycled/",
    "dead:": "rollout/dead/",
}


def counted(before: Mapping[str, int], after: Mapping[str, int]) -> Values:
    """What the key `counters` counted during a step, by reason: dropped, sent round again, dead-lettered."""
    return {
        name + key.removeprefix(kind): after[key] - before.get(key, 0)
        for key in sorted(after)
        for kind, name in _COUNTED.items()
        if key.startswith(kind)
    }


def perf(groups: Sequence[Group], train: float, wait: float, step: float) -> Values:
    """`perf/*` in seconds: `step` is the whole step, `train` and `wait` (for groups) are within it.

    `rollout_time` is from lease to push of the batch's slowest group; `overlap` the share of it that the trainer did
    not wait for: 0 in lock-step, 1 when generation is hidden altogether. Tokens are response tokens of the batch.
    """
    generation = max(group.seconds for group in groups)
    tokens = sum(response_len(sample) for group in groups for sample in group.samples)
    return {
        "perf/rollout_time": generation,
        "perf/train_time": train,
        "perf/step_time": step,
        "perf/wait_time": wait,
        "perf/tokens_per_sec": tokens / step if step > 0 else 0.0,
        "perf/overlap": min(1.0, max(0.0, 1 - wait / generation)) if generation > 0 else 1.0,
    }
