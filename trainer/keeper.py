"""Keeps what each step trains on (--archive): the files of pipeline.archive, of this history and no other.

They come out of the trainer's workshop like all that it puts in place (trainer.workshop).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline import archive
from pipeline.archive import Record
from pipeline.codec import encode
from pipeline.config import TrainConfig
from pipeline.errors import MillpondError
from pipeline.flags import plain
from pipeline.types import Group
from trainer.backends.base import At
from trainer.workshop import Workshop, fsync


def archive_of(config: TrainConfig, folder: Path) -> Path | None:
    """Its folder; None where nothing is kept."""
    if not (config.archive or config.debug_rollout_only):
        return None
    return config.archive_folder or folder / "archive"


def keeper_of(config: TrainConfig, folder: Path, epoch: int, step: int) -> Keeper | None:
    root = archive_of(config, folder)
    return Keeper(config, Workshop(root, epoch), step) if root else None


class Keeper:
    """Of one trainer, which has claimed the folder."""

    def __init__(self, config: TrainConfig, shop: Workshop, step: int) -> None:
        """`step` are done: files of later ones belong to a branch that was given up at a resume, and go."""
        self.shop = shop
        self.options = plain(config)
        if config.load and not config.resume:
            self.options["load"] = str(config.load)  # what a replay of step 1 must begin with, too
        self.model = archive.shape_of(config.hf_checkpoint)
        for later in archive.steps(shop.root):
            if later > step:
                (shop.root / archive.name_of(later)).rename(shop.folder / "gone")
                (shop.folder / "gone").unlink()

    def keep(self, step: int, groups: Sequence[Group], at: At, figures: dict[str, Any]) -> None:
        """The file of a step; durable and complete when this returns."""
        record = Record(step, at.version, at.lineage, at.exact, figures, self.options, self.model)
        name = archive.name_of(step)
        try:
            archive.write(self.shop.folder / name, record, [encode(group) for group in groups])
            (self.shop.folder / name).replace(self.shop.root / name)
            fsync(self.shop.root)
        except OSError as error:
            raise MillpondError(f"--archive: {self.shop.root / name}: {error.strerror}") from error
