"""Where a trainer makes what it puts in place, so that one that was replaced can put nothing in place any more.

ROOT/.trainer-3/    of the trainer of epoch 3; ROOT is the run's folder, its weights/ and its checkpoints/

All that a trainer puts under ROOT comes by one rename out of its workshop, and all that it takes away goes by one
rename into it. So what stands under ROOT is complete, and a trainer without a workshop can change nothing there.

A stopped trainer may wake up just before such a rename, after another has taken its run over; no check in Redis can
come late enough. Therefore whoever takes over opens workshops of its own, confirms its fence, and then, before it looks
at what stands under ROOT, moves those of lower epochs away. A rename of its predecessor was done before that and is
seen, or fails. Nor can the predecessor open a workshop afterwards and use it: it opens one once, before it confirms.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import WeightsError
from pipeline.fenced import TrainerBroker

_NAME = re.compile(r"\.trainer-(\d+)")


@dataclass(frozen=True)
class Workshop:
    root: Path
    epoch: int

    @property
    def folder(self) -> Path:
        return self.root / f".trainer-{self.epoch}"

    @contextmanager
    def making(self, name: str) -> Iterator[Path]:
        """A private folder to fill, which becomes ROOT/NAME in one step when the block ends, durable and complete, and
        vanishes if it raises. What stands there already is never replaced: WeightsError."""
        folder = self.folder / name
        folder.mkdir(mode=0o700)
        with made(folder, self.root / name):
            yield folder

    def take_away(self, path: Path) -> None:
        """Deletes a folder under ROOT; nobody sees it half deleted."""
        gone = self.folder / path.name
        with suppress(FileNotFoundError):  # somebody else deleted it
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)  # what a reader still has open goes with the workshop

    def set_aside(self, path: Path, name: str) -> None:
        """Renames a folder under ROOT to ROOT/NAME, whatever was there before."""
        self.take_away(self.root / name)
        path.rename(self.folder / path.name)
        (self.folder / path.name).rename(self.root / name)


@contextmanager
def made(folder: Path, final: Path) -> Iterator[None]:
    """While the block lasts, the new `folder` is filled; then it becomes `final`, or vanishes if the block raises."""
    try:
        yield
        _settle(folder)
        if final.exists():  # an empty folder would be replaced
            raise WeightsError(f"{final}: is there already")
        folder.rename(final)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    fsync(final.parent)


def claim(folder: Path, broker: TrainerBroker, *more: Path) -> None:
    """Opens the workshops of a trainer that has just taken the run over, and closes those of all before it; `more`:
    folders of its own elsewhere."""
    shops = [Workshop(root, broker.epoch) for root in dict.fromkeys((*_roots(folder), *more))]
    for shop in shops:
        shop.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        shop.folder.mkdir(mode=0o700)
        (shop.folder / "run").touch(mode=0o600)
        (shop.folder / "run").write_text(broker.keys.run)
    broker.renew()  # from here on, whoever takes over finds these
    for shop in shops:
        for epoch, path in _open(shop.root).items():
            if epoch < shop.epoch:
                shop.take_away(path)


def owner(folder: Path) -> str | None:
    """The run whose trainer opened a workshop there last; None where there was none."""
    newest = max(_open(folder).items(), default=None)
    try:
        return (newest[1] / "run").read_text() or None if newest else None
    except FileNotFoundError:
        return None


def last_epoch(folder: Path) -> int:
    """The highest that has a workshop. Redis may have forgotten it; the next must be above it."""
    return max((epoch for root in _roots(folder) for epoch in _open(root)), default=0)


def _roots(folder: Path) -> tuple[Path, Path, Path]:
    return folder, folder / "weights", folder / "checkpoints"


def _open(root: Path) -> dict[int, Path]:
    return {int(found[1]): path for path in root.glob(".trainer-*") if (found := _NAME.fullmatch(path.name))}


def _settle(folder: Path) -> None:
    """Private and on the disk, every file before its folder."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.chmod(0o700 if path.is_dir() else 0o600)
        fsync(path)
    fsync(folder)


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
