"""megatron-core's GPTModel with the shape of a Hugging Face model, asked for few log-probabilities."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region as gathered
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region as summed
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainer import losses
from trainer.backends import megatron_config
from trainer.backends.megatron_mesh import Mesh
from trainer.batch import Microbatch


class Attention(MegatronModule):  # type: ignore[misc]
    """torch's own causal attention, in the place of one that builds its masks on a GPU."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **more: Any) -> None:
        super().__init__(config=config)
        self._scale = more.get("softmax_scale")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[T, B, heads, width] and twice [T, B, groups, width] -> [T, B, heads * width]."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        shared = k.shape[1] != q.shape[1]
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=shared)
        return found.permute(2, 0, 1, 3).flatten(2)


class Norm(torch.nn.RMSNorm):
    """torch's own, known to Megatron as one that sees a share of the positions where they are shared."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PolicyModel(GPTModel):  # type: ignore[misc]
    """This rank's part of it. Where logits are, only those of trained positions are worked out."""

    def __init__(self, config: Any, mesh: Mesh, dtype: torch.dtype) -> None:
        """With whatever memory held for weights. `config`: Hugging Face's."""
        super().__init__(
            megatron_config.transformer(config, mesh, dtype),
            _blocks(config, mesh),
            vocab_size=config.vocab_size + -config.vocab_size % mesh.tensor,
            max_sequence_length=config.max_position_embeddings,
            pre_process=mesh.stage == 0,
            post_process=mesh.last,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            **megatron_config.rotary(config),
        )
        self.words: int = config.vocab_size
        self.to(mesh.device, dtype)
        self._mesh = mesh
        self._positions, self._length = torch.empty(0, dtype=torch.int64), 0
        self._padding: int | None = config.pad_token_id
        if mesh.stage == 0 and self._padding is not None:
            self.embedding.word_embeddings.register_forward_hook(self._still)
        if mesh.last:
            self.output_layer.sequence_parallel = False  # positions are whole again by then
            self.output_layer.register_forward_pre_hook(self._keep)

    def run(self, micro: Microbatch) -> Tensor:
        """Logits of the trained positions, [1, N, V / tensor]; before the last stage hidden states, [T, B, H]."""
        ids, self._positions, self._length = micro.input_ids, micro.predictors, micro.input_ids.shape[1]
        if self._mesh.sequence:
            ids = functional.pad(ids, (0, -ids.shape[1] % self._mesh.tensor))
        found: Tensor = self(ids, None, None)
        return found

    def recompute(self) -> None:
        """Layers are worked out again in the backward pass; Megatron's own way is bound to a GPU's random state."""
        for layer in self.decoder.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    def _still(self, _: Any, inputs: tuple[Tensor], found: Tensor) -> Tensor:
        """The padding token's embedding is not trained, as in transformers. [B, T] and [B, T, H] -> [B, T, H]; where
        positions are shared, the rest is [T / tensor, B, H]."""
        padding = inputs[0].eq(self._padding or 0)
        if self._mesh.sequence:
            padding = padding.T.chunk(self._mesh.tensor)[self._mesh.part]
        return torch.where(padding.unsqueeze(-1), found.detach(), found)

    def _keep(self, _: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """[T, B, H] -> [N, 1, H]; where positions are shared, of [T / tensor, B, H]."""
        found = inputs[0]
        if self._mesh.sequence:
            found = gathered(found, tensor_parallel_output_grad=False)[: self._length]
        return (found.transpose(0, 1).flatten(0, 1).index_select(0, self._positions).unsqueeze(1),)


def _blocks(config: Any, mesh: Mesh) -> TransformerBlockSubmodules:
    """What this stage's layers are made of; `config`: Hugging Face's."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = Attention
    if config.model_type == "qwen3":
        attention.q_layernorm = attention.k_layernorm = Norm
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    return TransformerBlockSubmodules([spec] * (config.num_hidden_layers // mesh.stages), Norm)


def logprobs_and_entropy(
    logits: Tensor, targets: Tensor, words: int, mesh: Mesh, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """See trainer.losses: the same of logits that are shared, [N, V / tensor], `words` of them real ones."""
    if mesh.tensor == 1:
        return losses.logprobs_and_entropy(logits, targets, entropy_gradient)
    logits = logits.float()
    width = logits.shape[1]
    first = mesh.part * width
    if first + width > words:
        logits = logits.masked_fill(torch.arange(first, first + width, device=logits.device) >= words, -1e30)
    highest = logits.detach().amax(1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, mesh.tensor_group)
    logits = logits - highest[:, None]
    shares = logits.exp()
    own = targets - first
    found = logits.gather(1, own.clamp(0, width - 1)[:, None])[:, 0]
    picked = found * ((own >= 0) & (own < width))
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        pieces = zip(torch.split(shares, losses.PIECE), torch.split(logits, losses.PIECE), strict=True)
        mean = torch.cat([(share * logit).sum(1) for share, logit in pieces])
    picked, total, mean = summed(torch.stack([picked, shares.sum(1), mean]))
    entropy = total.log() - mean / total
    return picked - total.log(), entropy if entropy_gradient else entropy.detach()
