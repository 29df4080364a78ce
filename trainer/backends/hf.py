"""A Hugging Face causal language model for training: loaded in float32, asked for few logits, saved as it came."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pipeline.errors import UsageError
from pipeline.rendezvous import Piece
from trainer import outline
from trainer.backends import lora
from trainer.backends.sharded import fill, layers, named, shard

EMPTY = torch.empty(0)

COPIED = ("tokenizer*", "vocab*", "merges.txt", "*_tokens*.json", "chat_template*", "*.model", "generation_config.json")


@dataclass(frozen=True)
class Form:
    """How a model lies in memory and runs."""

    spread: bool = False
    "over all ranks of the process group"
    bf16: bool = False
    "passes in bfloat16, over float32 weights"
    recompute: bool = False
    "layers are worked out again in the backward pass"
    adapters: lora.Adapters | None = None
    "what alone is trained"


class CausalModel:
    """It stays in eval mode: dropout would make its probabilities other ones than the sampler's."""

    def __init__(
        self, folder: Path | None, device: torch.device, form: Form = Form(), flag: str = "--hf-checkpoint"
    ) -> None:
        """`flag` named the folder. Errors: UsageError."""
        self._folder, self.module, self._dtype = _load(folder, flag)
        self.form = form
        if form.adapters:
            lora.adapt(self.module, form.adapters)
            if form.bf16:
                lora.slim(self.module, self._dtype)
        if form.recompute:  # by hand, as transformers does it in train mode only
            for layer in layers(self.module):
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        if form.spread:
            shard(self.module, form.bf16)
        self.module.to(device)
        self.device = device
        self._positions = torch.empty(0, dtype=torch.int64)
        head = self.module.get_output_embeddings()
        if head is None:
            raise UsageError(f"{flag} {folder}: {type(self.module).__name__} has no output head to train")
        head.register_forward_pre_hook(self._keep)
        self.words: int = self.module.get_input_embeddings().weight.shape[0]

    def logits(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """int64 [B, T] padded on the right, int64 [N] into the flattened [B * T] -> [N, V], in the dtype of passes.

        Only the N positions reach the output head: with a large vocabulary the logits of all would not fit. What a
        model does to its logits after the head (scaling, capping) stays in place.
        """
        self._positions = positions
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.form.bf16):
            logits: Tensor = self.module(input_ids=input_ids, use_cache=False).logits[0]
        return logits

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """What training changes, by name."""
        return lora.own(self.module) if self.form.adapters else named(self.module)

    def take(self, folder: Path) -> None:
        """The weights of another model of the same make. Errors: UsageError."""
        _, other, _ = _load(folder, "--load")
        found = dict(named(other))
        for name, tensor in named(self.module):
            if name not in found or found[name].shape != tensor.shape:
                shape = list(found[name].shape) if name in found else "missing"
                raise UsageError(
                    f"--load {folder}: another make of model than --hf-checkpoint {self._folder}: {name} is {shape}, "
                    f"and must be {list(tensor.shape)}"
                )
            fill(tensor, found[name])

    def save(self, folder: Path, lead: bool = True) -> None:
        """In the checkpoint's own dtype, adapters merged, a file at a time; tokenizer files go along. Where the model
        is spread all ranks take part, and the lead writes."""
        if not lead:
            for _ in self.pieces(lead):
                pass
            return
        outline.write(folder, self.outline(), self.pieces())
        self.module.config.dtype = self._dtype
        self.module.config.architectures = [type(self.module).__name__.removeprefix("FSDP")]
        self.module.config.save_pretrained(folder)
        for path in (p for pattern in COPIED for p in self._folder.glob(pattern) if p.is_file()):
            shutil.copyfile(path, folder / path.name)

    def save_adapter(self, folder: Path, lead: bool) -> None:
        """The adapters alone, in peft's layout. Where the model is spread all ranks take part, and the lead writes."""
        lora.export(self.module, folder, lead, self._folder)

    def outline(self) -> list[Piece]:
        """What `save` writes."""
        found = ((n, torch.empty(t.shape, dtype=t.dtype, device="meta")) for n, t, _ in lora.published(self.module))
        return [_piece(name, tensor, self._saved_as(tensor)) for name, tensor in _as_saved(self.module, found)]

    def pieces(self, lead: bool = True) -> Iterator[Tensor]:
        """The tensors of `outline`, whole, on this device; empty ones for all but the lead. Where the model is spread
        all ranks take part."""
        found = ((name, lora.merged(tensor, layer)) for name, tensor, layer in lora.published(self.module))
        if not lead:
            yield from (EMPTY for _ in found)
            return
        for _, tensor in _as_saved(self.module, found):
            yield tensor.to(self.device, self._saved_as(tensor)).contiguous()

    def _saved_as(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    def _keep(self, _: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """[B, T, H] -> [1, N, H]."""
        return (inputs[0].flatten(0, 1).index_select(0, self._positions).unsqueeze(0),)


def _load(folder: Path | None, flag: str) -> tuple[Path, Any, torch.dtype]:
    """Folder, model in float32, and the dtype its checkpoint has."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging as chatter

    if folder is None or not (folder / "config.json").is_file():
        raise UsageError(f"{flag} {folder}: no folder with a Hugging Face model (it has no config.json)")
    chatter.disable_progress_bar()
    try:
        dtype = AutoConfig.from_pretrained(folder, local_files_only=True).dtype
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {folder}: {error}") from error
    # Saving refuses generation configs that loading took, so the checkpoint's own file is copied instead.
    model.generation_config = GenerationConfig()
    return folder, model.eval(), dtype or torch.float32


def _piece(name: str, tensor: Tensor, dtype: torch.dtype) -> Piece:
    return Piece(name, str(dtype).removeprefix("torch."), tuple(tensor.shape), tensor.numel() * dtype.itemsize)


def _as_saved(module: Any, found: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Under the names and in the shapes of the checkpoint: transformers keeps some tensors together that lie apart in
    files, such as those of experts."""
    from transformers.core_model_loading import WeightConverter, revert_weight_conversion

    changes = getattr(module, "_weight_conversions", None) or []
    joined = [c for c in changes if isinstance(c, WeightConverter) and len(c.target_patterns) > 1]
    if joined:  # several tensors at hand make one of a file
        return iter(revert_weight_conversion(module, dict(found)).items())
    if not changes:
        return found
    return (pair for name, tensor in found for pair in revert_weight_conversion(module, {name: tensor}).items())
