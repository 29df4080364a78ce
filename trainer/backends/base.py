"""What every training backend offers the loop: groups in, metrics out, weights and state to and from folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pipeline.types import Group


class Backend(Protocol):
    def train(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """One batch, one optimizer step a minibatch. Returns finite `train/*` figures.

        A minibatch from which nothing can be learned changes no weight, not by a bit. One whose loss or gradient is not
        finite is skipped and counted (`train/skipped`); three in a row: MillpondError.
        """
        ...

    def save_weights(self, folder: Path) -> None:
        """The weights into an existing folder, in the Hugging Face layout; nothing where a backend has none."""
        ...

    def save(self, folder: Path) -> None:
        """All that the next step depends on, into an existing folder."""
        ...

    def load(self, folder: Path) -> None:
        """What `save` wrote; the next step is then the one that would have followed. Errors: WeightsError."""
        ...

    def close(self) -> None: ...
