"""A backend over several ranks: rank 0 has each of them do what it does itself, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import msgpack
from torch import Tensor

from pipeline.codec import decode, encode
from pipeline.rendezvous import Piece
from pipeline.types import HF, Group
from trainer.backends.base import At, Backend
from trainer.ranks import Ranks


class Leader:
    """See trainer.backends.base: what rank 0's loop is given in place of its own backend."""

    def __init__(self, own: Backend, ranks: Ranks) -> None:
        self.own = own
        self.ranks = ranks

    def train(self, groups: Sequence[Group], step: int, at: At | None = None) -> dict[str, float]:
        told = {"do": "train", "step": step, "at": None if at is None else asdict(at)}
        self.ranks.tell(told, msgpack.packb([encode(group) for group in groups]))
        return self.own.train(groups, step, at)

    def save_weights(self, folder: Path, form: str = HF) -> None:
        self.ranks.tell({"do": "save_weights", "folder": str(folder.resolve()), "form": form})
        self.own.save_weights(folder, form)

    def outline(self) -> list[Piece]:
        return self.own.outline()

    def pieces(self) -> Iterator[Tensor]:
        self.ranks.tell({"do": "pieces"})
        return self.own.pieces()

    def save(self, folder: Path) -> None:
        self._all("save", folder, self.own.save)

    def load(self, folder: Path) -> None:
        self._all("load", folder, self.own.load)

    def load_weights(self, folder: Path) -> None:
        self._all("load_weights", folder, self.own.load_weights)

    def close(self) -> None:
        self.ranks.tell({"do": "close"})
        self.own.close()

    def _all(self, verb: str, folder: Path, own: Callable[[Path], None]) -> None:
        self.ranks.tell({"do": verb, "folder": str(folder.resolve())})
        own(folder)


def follow(backend: Backend, ranks: Ranks) -> None:
    """The life of another rank: to the end of rank 0's."""
    for command, payload in ranks.commands():
        verb = command["do"]
        if verb == "close":
            return backend.close()
        if verb == "pieces":
            for _ in backend.pieces():
                pass
        elif verb == "save_weights":
            backend.save_weights(Path(command["folder"]), command["form"])
        elif verb == "train":
            at = command["at"] and At(**command["at"])
            backend.train([decode(m) for m in msgpack.unpackb(payload)], command["step"], at)
        else:
            by_folder = {"load_weights": backend.load_weights, "save": backend.save, "load": backend.load}
            by_folder[verb](Path(command["folder"]))
    return None
