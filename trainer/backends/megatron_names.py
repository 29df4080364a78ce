"""The names and layouts of a Llama, Qwen2 or Qwen3 checkpoint, and megatron-core's for the same tensors.

Megatron has q, k and v in one tensor, and gate and up in another; of each tensor a rank of the tensor-parallel group
holds a part. Pure: tensors in, tensors out; what holds for weights holds for gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Of a model, as far as layouts depend on it."""

    layers: int
    heads: int
    groups: int
    "KV heads; each with heads / groups query heads"
    width: int
    "of a head"
    words: int
    "in the vocabulary"
    tied: bool
    "embedding and output head are one"


@dataclass(frozen=True)
class Entry:
    own: str
    "Megatron's name"
    theirs: tuple[str, ...]
    "the checkpoint's"
    layout: str
    "whole: each rank has all; words, rows, columns: a part of them; heads: whole KV groups; gated: of gate and of up"
    layer: int | None = None


EMBEDDING = Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "words")
NORM = Entry("decoder.final_layernorm.weight", ("model.norm.weight",), "whole")
HEAD = Entry("output_layer.weight", ("lm_head.weight",), "words")
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
LAYER = (
    Entry("input_layernorm.weight", ("input_layernorm.weight",), "whole"),
    Entry("self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in QKV), "heads"),
    Entry("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "columns"),
    Entry("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "whole"),
    Entry("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gated"),
    Entry("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "columns"),
)
MORE = {
    "llama": (),
    "qwen2": (Entry("self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in QKV), "heads"),),
    "qwen3": (
        Entry("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "whole"),
        Entry("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "whole"),
    ),
}
"By the checkpoint's model_type: what a layer has besides. These are the types that are supported."


def shape(config: Any) -> Shape:
    """Of a Hugging Face configuration."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    words, tied = config.vocab_size, bool(config.tie_word_embeddings)
    return Shape(config.num_hidden_layers, heads, config.num_key_value_heads, width, words, tied)


def entries(kind: str, of: Shape) -> Iterator[Entry]:
    """Every tensor of a whole model of that model_type, from the first layer to the last."""
    yield EMBEDDING
    for layer in range(of.layers):
        for entry in (*LAYER, *MORE[kind]):
            theirs = tuple(f"model.layers.{layer}.{name}" for name in entry.theirs)
            yield replace(entry, own=f"decoder.layers.{layer}.{entry.own}", theirs=theirs, layer=layer)
    yield NORM
    if not of.tied:
        yield HEAD


def part(entry: Entry, tensors: Sequence[Tensor], of: Shape, rank: int, ranks: int) -> Tensor:
    """What a rank holds of the checkpoint's tensors."""

    def own(tensor: Tensor, dim: int = 0) -> Tensor:
        return tensor.chunk(ranks, dim)[rank]

    first = tensors[0]
    if entry.layout == "whole":
        return first
    if entry.layout == "words":
        return own(torch.cat([first, first.new_zeros(-len(first) % ranks, *first.shape[1:])]))
    if entry.layout == "columns":
        return own(first, 1)
    if entry.layout == "gated":
        return torch.cat([own(tensor) for tensor in tensors])
    grouped = [tensor.reshape(of.groups, -1, *tensor.shape[1:]) for tensor in tensors]
    return own(torch.cat(grouped, 1).flatten(0, 1))


def joined(entry: Entry, parts: Sequence[Tensor], of: Shape) -> list[Tensor]:
    """The checkpoint's tensors, of the parts of all ranks."""
    if entry.layout == "whole":
        return [parts[0]]
    if entry.layout == "words":
        return [torch.cat([*parts])[: of.words].clone()]
    if entry.layout == "columns":
        return [torch.cat([*parts], 1)]
    if entry.layout == "gated":
        halves = zip(*(tensor.chunk(2) for tensor in parts), strict=True)
        return [torch.cat(half) for half in halves]
    whole = torch.cat([*parts])
    heads = [of.heads // of.groups * of.width, of.width, of.width]
    grouped = torch.split(whole.reshape(of.groups, sum(heads), *whole.shape[1:]), heads, 1)
    return [tensor.flatten(0, 1) for tensor in grouped]
