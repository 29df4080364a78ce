"""What every training backend offers the loop: groups in, metrics out, weights and state to and from folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pipeline.rendezvous import Piece
from pipeline.room import lag
from pipeline.types import HF, Group

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class At:
    """The weights that a step begins with, among those that were published."""

    version: int
    lineage: tuple[tuple[int, int], ...] = ()
    exact: bool = True
    "what was published last is what a step begins with"

    def age(self, version: int | None) -> int | None:
        """Publications since `version`; None is unknown."""
        return lag(version, self.version, self.lineage)


class Backend(Protocol):
    def train(self, groups: Sequence[Group], step: int, at: At | None = None) -> dict[str, float]:
        """One batch, one optimizer step a minibatch. Returns finite `train/*` figures; `at` gives tokens an age.

        A minibatch from which nothing can be learned changes no weight, not by a bit. One whose loss or gradient is not
        finite is skipped and counted (`train/skipped`); three in a row: MillpondError.
        """
        ...

    def save_weights(self, folder: Path, form: str = HF) -> None:
        """The weights into an existing folder, as a whole model or, where only adapters are trained, as these alone
        (`pipeline.types.PEFT`); nothing where a backend has none."""
        ...

    def outline(self) -> list[Piece]:
        """The tensors of a whole model, as `save_weights` writes it."""
        ...

    def pieces(self) -> Iterator[Tensor]:
        """They, in that order, where a process group can send them from; to be taken to the last one."""
        ...

    def save(self, folder: Path) -> None:
        """All that the next step depends on, into an existing folder."""
        ...

    def load(self, folder: Path) -> None:
        """What `save` wrote; the next step is then the one that would have followed. Errors: WeightsError."""
        ...

    def load_weights(self, folder: Path) -> None:
        """Weights alone, for a new run: of what `save` wrote, or in the Hugging Face layout. Errors: UsageError and
        WeightsError."""
        ...

    def close(self) -> None: ...
