"""A Hugging Face causal LM: loaded, tried out, and run over a window of cached columns."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging as hf_logging

from pipeline.errors import UsageError
from producers.engines.local_cache import Slots, Window


def pick_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name != "cpu" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: torch {torch.__version__} sees no GPU; use cpu or auto")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name}: expected auto, cpu, cuda or cuda:N") from error


def read_config(checkpoint: Path) -> Any:
    """The text part of a checkpoint's configuration."""
    if not (checkpoint / "config.json").is_file():
        raise UsageError(f"--hf-checkpoint {checkpoint}: no config.json there; expected a Hugging Face model folder")
    try:
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=True).get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"--hf-checkpoint {checkpoint}: {error}") from error
    if getattr(config, "max_position_embeddings", None) is None:
        raise UsageError(f"--hf-checkpoint {checkpoint}: a {config.model_type} model names no context length")
    return config


def open_net(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model in `folder` in its own dtype, on the CPU, and transformers' report of keys that did not fit.

    Raises OSError and ValueError.
    """
    hf_logging.disable_progress_bar()
    net, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, output_loading_info=True
    )
    return net, report


def load_net(checkpoint: Path, device: torch.device) -> Any:
    """The model for inference. UsageError where weights are missing or no such model exists."""
    try:
        net, report = open_net(checkpoint)
    except (OSError, ValueError) as error:
        raise UsageError(f"--hf-checkpoint {checkpoint}: {error}") from error
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            raise UsageError(
                f"--hf-checkpoint {checkpoint}: {problem.replace('_', ' ')}: {sorted(report[problem])[:3]}"
            )
    return net.requires_grad_(False).eval().to(device)


class Model:
    """Runs a model over a `Window` of `Slots`. UsageError where rows cannot share its kind of cache."""

    def __init__(self, net: Any, device: torch.device) -> None:
        self.net, self.device = net, device
        kinds = _layer_kinds(net)
        self.layers = len(kinds)
        self.vocab_size: int = net.config.get_text_config(decoder=True).vocab_size
        accepted = inspect.signature(net.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._takes_positions = "position_ids" in accepted
        self._extra: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        sdpa = net._supports_attention_backend and net.config._attn_implementation == "sdpa"
        own_mask = sdpa and kinds == [DynamicLayer] * len(kinds)
        self._direct = _direct(net, device)
        for self._own_mask in (own_mask, False):
            if probe(self, (7, 3)) and probe(self, (5, 5)):
                return
        raise UsageError(
            f"--hf-checkpoint: {type(net).__name__} answers differently with a cache and padding than without, "
            "so the local engine cannot sample from it"
        )

    def forward(self, ids: Tensor, first: Tensor, slots: Slots, window: Window) -> Tensor:
        """Logits [rows, vocab] after the last of `ids` int64 [rows, columns], which stand from column `window.high` on.

        `first` int64 [rows] is the column each row begins in. Keys and values are written to `slots`.
        """
        slots.window = window
        end = window.high + ids.shape[1]
        inputs: dict[str, Any] = {self._cache_name: slots.cache, "attention_mask": self._mask(first, window, end)}
        if self._takes_positions:
            columns = torch.arange(window.high, end, device=ids.device)
            inputs["position_ids"] = (columns - (first[:1, None] if window.even else first[:, None])).clamp_(min=0)
        if self._direct:
            body, head = self._direct
            logits: Tensor = head(body(input_ids=ids, use_cache=True, **inputs).last_hidden_state[:, -1])
            return logits
        logits = self.net(input_ids=ids, use_cache=True, **inputs, **self._extra).logits
        return logits[:, -1]

    def _mask(self, first: Tensor, window: Window, end: int) -> Tensor | None:
        """None, bool [rows, 1, queries, keys] of our own, or int64 [rows, keys] for transformers to make masks from.

        In our own mask padding attends to itself: a softmax over nothing would be NaN and spread through the values.
        """
        if window.even and self._own_mask:
            return None
        keys = torch.arange(window.low, end, device=first.device)
        seen = keys >= first[:, None]
        if not self._own_mask:
            return seen.long()
        queries = keys[window.high - window.low :, None]
        if len(queries) == 1:
            return seen[:, None, None]
        return (seen[:, None, None] & (keys <= queries)) | (keys == queries)


def _layer_kinds(net: Any) -> list[type]:
    """The kind of cache each layer has; refused are recurrent states, shared layers and other special ones."""
    kinds = [type(layer) for layer in DynamicCache(config=net.config).layers]
    known = {DynamicLayer, DynamicSlidingWindowLayer}
    if not kinds or getattr(net, "_is_stateful", False) or not known.issuperset(kinds):
        names = sorted({kind.__name__ for kind in kinds} - {kind.__name__ for kind in known})
        raise UsageError(
            f"--hf-checkpoint: {type(net).__name__} keeps a state that the local engine cannot move between rows"
            f" ({', '.join(names) or 'no cache'}); it samples from models with plain or sliding-window attention"
        )
    return kinds


@torch.inference_mode()
def _direct(net: Any, device: torch.device) -> tuple[Any, Any] | None:
    """Decoder and head, where they alone give the model's very logits: its own `forward` costs 4 % of a small step.

    None where it does more than call the two (soft caps, scaling), or wants other arguments.
    """
    body, head = net.get_decoder(), net.get_output_embeddings()
    wanted = set(inspect.signature(net.forward).parameters) & {"cache", "past_key_values", "position_ids"}
    if head is None or body is net or not wanted <= set(inspect.signature(body.forward).parameters):
        return None
    ids = torch.arange(8, device=device)[None] * 7 % net.config.get_text_config(decoder=True).vocab_size
    logits = net(input_ids=ids, use_cache=False).logits
    alone = head(body(input_ids=ids, use_cache=False).last_hidden_state)
    return (body, head) if logits.any() and torch.equal(alone, logits) else None


@torch.inference_mode()
def probe(model: Model, sizes: tuple[int, int]) -> bool:
    """Whether prompts of these lengths and three tokens more give the logits of plain forward passes."""
    slots, width, even = Slots(model.layers, model.device), max(sizes), sizes[0] == sizes[1]
    slots.grow(2, width + 3)
    ids = (torch.arange(2 * (width + 3), device=model.device) * 7 % model.vocab_size).view(2, -1)
    first = torch.tensor([width - size for size in sizes], device=model.device)
    logits = model.forward(ids[:, :width], first, slots, Window((0, 2), 0, 0, even))
    for end in range(width, width + 4):
        plain = [model.net(input_ids=ids[i : i + 1, first[i] : end], use_cache=False).logits[0, -1] for i in (0, 1)]
        if not _close(logits, torch.stack(plain)):
            return False
        if end < width + 3:
            logits = model.forward(ids[:, end : end + 1], first, slots, Window((0, 2), 0, end, even))
    return True


def _close(a: Tensor, b: Tensor) -> bool:
    """Within rounding of the dtype, measured on the logits' deviations from their mean."""
    tolerance = 1e-3 if a.dtype == torch.float32 else 0.1
    a, b = (x.float() - x.float().mean(-1, keepdim=True) for x in (a, b))
    return bool((a - b).norm() <= tolerance * b.norm())
