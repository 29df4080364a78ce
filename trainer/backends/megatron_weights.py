"""A Hugging Face folder into a model that several ranks hold, and out of it again, a tensor at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.errors import UsageError
from pipeline.rendezvous import Piece
from trainer.backends.hf import COPIED, EMPTY
from trainer.backends.megatron_mesh import Mesh
from trainer.backends.megatron_model import PolicyModel
from trainer.backends.megatron_names import EMBEDDING, HEAD, Entry, entries, joined, part, shape
from trainer.outline import saved, write


class Weights:
    """The tensors of a folder, and which rank has which of them."""

    def __init__(self, folder: Path, config: Any, mesh: Mesh, flag: str) -> None:
        """UsageError where the folder holds other tensors than the name map has."""
        self.folder, self.mesh, self.shape = folder, mesh, shape(config)
        self._entries = [*entries(config.model_type, self.shape)]
        pieces = {piece.name: piece for piece in saved(folder)}
        names = [name for entry in self._entries for name in entry.theirs]
        if lacking := [name for name in names if name not in pieces]:
            raise UsageError(f"{flag} {folder}: no *.safetensors there has {lacking[0]} ({len(lacking)} are missing)")
        known = {*names, *HEAD.theirs}  # a tied head may be there as well
        if more := sorted(name for name in pieces if name not in known and not name.endswith(".inv_freq")):
            raise UsageError(
                f"{flag} {folder}: Megatron's layers have no place for {more[0]} ({len(more)} are too many)"
            )
        self.outline: list[Piece] = [pieces[name] for name in names]

    def fill(self, model: PolicyModel) -> None:
        """The model's parameters."""
        own = dict(model.named_parameters())
        with Reader(self.folder) as read, torch.no_grad():
            for entry in self._here():
                target = own.pop(self._local(entry))
                tensors = [read(name) for name in entry.theirs]
                value = part(entry, tensors, self.shape, self.mesh.part, self.mesh.tensor)
                if value.shape != target.shape:
                    raise UsageError(f"{self.folder}: {entry.theirs[0]} has another shape than config.json says")
                target.copy_(value)
        if own:
            raise ValueError(f"the name map has nothing for {', '.join(own)}")

    def pieces(self, model: PolicyModel) -> Iterator[Tensor]:
        """The tensors of `outline`, whole and on this device; empty ones for all but the lead. Collective."""
        own = dict(model.named_parameters())
        outline = iter(self.outline)
        for entry in self._entries:
            lacking: list[Tensor | None] = [None] * len(entry.theirs)
            for tensor in self._gathered(own, entry) or lacking:
                yield self._sent(next(outline), tensor, self._stage(entry))

    def save(self, model: PolicyModel, folder: Path) -> None:
        """In the checkpoint's own dtypes, a file at a time; its other files go along. Collective."""
        if not self.mesh.ranks.lead:
            for _ in self.pieces(model):
                pass
            return
        write(folder, self.outline, self.pieces(model))
        for path in (p for pattern in ("config.json", *COPIED) for p in self.folder.glob(pattern) if p.is_file()):
            shutil.copyfile(path, folder / path.name)

    def _stage(self, entry: Entry) -> int:
        """Which has it; of an embedding that is the output head as well, the first has the one that counts."""
        if entry.layer is None:
            return 0 if entry is EMBEDDING else self.mesh.stages - 1
        return entry.layer * self.mesh.stages // self.shape.layers

    def _here(self) -> Iterator[Entry]:
        """What this stage holds."""
        yield from (entry for entry in self._entries if self._stage(entry) == self.mesh.stage)
        if self.shape.tied and self.mesh.last and self.mesh.stages > 1:
            yield Entry(HEAD.own, EMBEDDING.theirs, EMBEDDING.layout)

    def _local(self, entry: Entry) -> str:
        """Each stage counts its layers from 0."""
        if entry.layer is None:
            return entry.own
        first = self.mesh.stage * self.shape.layers // self.mesh.stages
        return entry.own.replace(f".{entry.layer}.", f".{entry.layer - first}.", 1)

    def _gathered(self, own: dict[str, Tensor], entry: Entry) -> list[Tensor]:
        """The checkpoint's tensors of it, on its stage of the first replica; elsewhere nothing."""
        if self._stage(entry) != self.mesh.stage or self.mesh.replica:
            return []
        mine = own[self._local(entry)].detach()
        parts = [torch.empty_like(mine) for _ in range(self.mesh.tensor)]
        dist.all_gather(parts, mine.contiguous(), self.mesh.tensor_group)
        return joined(entry, parts, self.shape)

    def _sent(self, piece: Piece, tensor: Tensor | None, stage: int) -> Tensor:
        """From its stage to the first, where the lead is."""
        mesh, dtype = self.mesh, getattr(torch, piece.dtype)
        if mesh.replica or mesh.part:
            return EMPTY
        if tensor is None:
            tensor = torch.empty(piece.shape, dtype=dtype, device=mesh.device)
        tensor = tensor.to(dtype).contiguous()
        if stage != 0:
            dist.broadcast(tensor, dist.get_global_rank(mesh.pipeline_group, stage), mesh.pipeline_group)
        return tensor if mesh.ranks.lead else EMPTY


class Reader:
    """The tensors of a folder's safetensors files, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[Any] = []
        self._places: dict[str, Any] = {}

    def __enter__(self) -> Reader:
        for path in self._folder.glob("*.safetensors"):
            file = safe_open(path, "pt")
            names: list[str] = file.keys()  # type: ignore[no-untyped-call]
            self._places.update(dict.fromkeys(names, file))
        return self

    def __call__(self, name: str) -> Tensor:
        try:
            found: Tensor = self._places[name].get_tensor(name)
        except SafetensorError as error:
            raise UsageError(f"{self._folder}: damaged: {error}") from error
        return found

    def __exit__(self, *_: object) -> None:
        self._places.clear()
