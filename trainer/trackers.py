"""The trackers of a trainer: each a process of its own, which reads what the trainer writes anyway.

Nothing in the step's path waits for one. One that ends before its time is told of once, and training goes on.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from pipeline import tracking
from pipeline.children import Child, end
from pipeline.config import Tracking
from pipeline.join import Place

log = logging.getLogger(__name__)

PATIENCE = 30.0
"Seconds that trackers have at the end to send the rest."


class Trackers:
    """None, until `start`; then one child each."""

    def __init__(self, config: Tracking, place: Place, folder: Path, patience: float = PATIENCE) -> None:
        self.patience = patience
        env = {name: value for name, value in os.environ.items() if not name.startswith("MILLPOND_")}
        env |= {"MILLPOND_REDIS_URL": place.url, "MILLPOND_SUPERVISED": "1"}
        if config.wandb_key:
            env["MILLPOND_WANDB_KEY"] = config.wandb_key.get_secret_value()
        words = ["track", str(folder.absolute()), "--run", place.run, "--follow", f"--since={time.time()}"]

        def child(kind: str) -> Child:
            command = [*words, *tracking.flags(config, kind)]
            return Child(f"track-{kind}", lambda _: command, folder / "logs", env)

        self.children = [child(kind) for kind in tracking.asked(config)]

    def start(self) -> None:
        for child in self.children:
            child.start()

    def look(self) -> None:
        """Tells of those that have ended, once."""
        for child in [child for child in self.children if child.process and child.poll() is not None]:
            self.children.remove(child)
            words = child.last_words().splitlines()
            log.error(
                "%s ended with exit code %s, which training does not need: %s (see %s; `millpond track` sends the run "
                "again)", child.name, child.poll(), words[-1] if words else "it said nothing", child.errors,
            )  # fmt: skip

    def close(self) -> None:
        """They send the rest, for a while. One that has just begun is told to end once it says that it is there."""
        self.children = [child for child in self.children if child.process]
        self.look()
        until = time.monotonic() + self.patience
        while any(not _there(child) for child in self.children) and time.monotonic() < until:
            time.sleep(0.05)
        end(self.children, lambda: self.patience)
        self.children = [child for child in self.children if child.poll()]
        self.look()


def _there(child: Child) -> bool:
    return child.poll() is not None or child.errors.stat().st_size > 0
