"""The main curves of a run as one PNG, by matplotlib."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pipeline.errors import UsageError

if TYPE_CHECKING:
    from pipeline.report import Told

CURVES = {
    "reward": ("rollout/raw_reward",),
    "staleness, versions": ("rollout/fully_async/avg_staleness", "rollout/fully_async/max_staleness"),
    "groups in the queue": ("rollout/fully_async/queue_size",),
    "response length, tokens": ("rollout/response_len/mean", "rollout/response_len/max"),
    "time, s": ("perf/step_time", "perf/train_time", "perf/wait_time"),
    "tokens a second": ("perf/tokens_per_sec",),
}


def draw(told: Told) -> bytes:
    if find_spec("matplotlib") is None:
        raise UsageError("--png needs the package matplotlib: pip install 'millpond[png]'")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    figure.suptitle(told.name, parse_math=False)
    for axes, (title, keys) in zip(figure.subplots(3, 2).flat, CURVES.items(), strict=True):
        for key in keys:
            points = told.points(key)
            axes.plot([x for x, _ in points], [y for _, y in points], label=key.rpartition("/")[2])
        if title == "reward":
            for name, points in told.scores().items():
                axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name.replace("$", r"\$"))
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.legend(loc="best", fontsize="small")
        axes.grid(alpha=0.3)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=90)
    return out.getvalue()
