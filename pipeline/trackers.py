"""Where the lines of metrics.jsonl and evals.jsonl go besides: TensorBoard, Weights & Biases.

A tracker runs in a process of its own (`pipeline.track`), so nothing is caught here: one that raises ends its process,
one that hangs is ended there, and training goes on.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any, Protocol

from pipeline.config import Tracking
from pipeline.event_file import EventFile
from pipeline.find import settings

Line = dict[str, Any]
"`step`, `time` in unix seconds, and numbers by name; null where one was not finite"


class Tracker(Protocol):
    def write(self, line: Line) -> None:
        """A step, or what came late: it belongs to the step it names, whatever was written since."""
        ...

    def close(self) -> None: ...


class TensorBoard:
    """One event file a process."""

    def __init__(self, config: Tracking, folder: Path, seen: int | None) -> None:
        """`seen`: the last step that an earlier process has written; what it wrote of later ones is no longer shown."""
        names = [name for name in (config.tb_project_name, config.tb_experiment_name) if name]
        where = (config.tensorboard_dir or folder / "tensorboard").joinpath(*names)
        self.file = EventFile(where, 0 if seen is None else seen + 1)

    def write(self, line: Line) -> None:
        self.file.write(line["time"], int(line["step"]), numbers(line))

    def close(self) -> None:
        self.file.close()


class WeightsAndBiases:
    """One W&B run for one folder, over resumes too.

    `step` is an axis of our own: W&B's must grow, and an evaluation is of a step that has long passed.
    """

    def __init__(self, config: Tracking, folder: Path, run: str) -> None:
        import wandb

        host = {"base_url": config.wandb_host} if config.wandb_host else {}
        if config.wandb_key and config.wandb_mode == "online":
            wandb.login(key=config.wandb_key.get_secret_value(), host=config.wandb_host)
        self.run = wandb.init(
            project=config.wandb_project,
            entity=config.wandb_team,
            group=config.wandb_group,
            name=run,
            id=config.wandb_run_id or own_id(folder),
            resume="allow",
            mode=config.wandb_mode,
            dir=str(config.wandb_dir or folder),
            config=settings(folder),
            settings=wandb.Settings(silent=True, console="off", **host),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def write(self, line: Line) -> None:
        self.run.log({"step": line["step"], **numbers(line)})

    def close(self) -> None:
        self.run.finish()


def numbers(line: Line) -> dict[str, float]:
    return {n: v for n, v in line.items() if isinstance(v, int | float) and n not in ("step", "time")}


def own_id(folder: Path) -> str:
    """The same whenever this folder's run goes on."""
    path = folder / "wandb.json"
    if not path.exists():
        aside = path.with_suffix(".new")
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"id": secrets.token_hex(8)}, file)
        aside.replace(path)
    return str(json.loads(path.read_text())["id"])
