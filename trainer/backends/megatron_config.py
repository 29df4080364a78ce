"""What a Hugging Face configuration is to megatron-core, and which models are refused before they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from pipeline.errors import UsageError
from trainer.backends.megatron_mesh import Mesh
from trainer.backends.megatron_names import MORE

LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"What megatron-core's rotary scaling has built in, besides the factor."


def read(folder: Path | None, flag: str) -> Any:
    """The configuration in `folder`. UsageError where there is none, or one that Megatron's model would differ from."""
    from transformers import AutoConfig

    if folder is None or not (folder / "config.json").is_file():
        raise UsageError(f"{flag} {folder}: no folder with a Hugging Face model (it has no config.json)")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {folder}: {error}") from error
    if found := [*_misfits(config)]:
        raise UsageError(
            f"{flag} {folder}: --train-backend megatron trains Llama, Qwen2, Qwen2.5 and Qwen3 (dense), and this model "
            f"has {'; '.join(found)}. Use --train-backend torch"
        )
    return config


def refuse_sizes(config: Any, tensor: int, stages: int) -> None:
    """UsageError where a model cannot be cut so."""
    counts = {"KV heads": config.num_key_value_heads, "feed-forward channels": config.intermediate_size}
    for what, count in counts.items():
        if count % tensor:
            raise UsageError(f"--tensor-model-parallel-size {tensor}: the model's {count} {what} are no multiple of it")
    layers = config.num_hidden_layers
    if layers % stages:
        raise UsageError(f"--pipeline-model-parallel-size {stages}: the model's {layers} layers are no multiple of it")


def transformer(config: Any, mesh: Mesh, dtype: torch.dtype) -> TransformerConfig:
    """Without any fused kernel: what is left needs torch alone."""
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=config.model_type == "qwen3",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.stages,
        sequence_parallel=mesh.sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
        init_method=_left_alone,
        output_layer_init_method=_left_alone,
        calculate_per_token_loss=True,  # losses are weighted as parts of the whole minibatch's already
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # or variable lengths are refused, for dense models too
        batch_p2p_comm=mesh.device.type == "cuda",
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
    )


def rotary(config: Any) -> dict[str, Any]:
    """Arguments of GPTModel."""
    found = config.rope_parameters
    scaled = found["rope_type"] == "llama3"
    more = {"rope_scaling": True, "rope_scaling_factor": found["factor"]} if scaled else {}
    return {"position_embedding_type": "rope", "rotary_base": found["rope_theta"], **more}


def _left_alone(tensor: torch.Tensor) -> torch.Tensor:
    """A checkpoint fills it. Without any initialization Megatron does not note which parameters are parts."""
    return tensor


def _misfits(config: Any) -> Iterator[str]:
    if config.model_type not in MORE:
        yield f"model_type {config.model_type}"
        return
    if config.hidden_act != "silu":
        yield f"hidden_act {config.hidden_act}, not silu"
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            yield f"{name} true"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        yield "sliding-window attention"
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        yield f"rotary embeddings of type {kind}, not default or llama3"
    if kind == "llama3" and any(rope.get(name) != value for name, value in LLAMA3.items()):
        yield (
            "rotary embeddings of type llama3 with other constants than Llama 3's ("
            + ", ".join(f"{name} {rope.get(name)}" for name in LLAMA3)
            + ")"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "rotary embeddings over a part of each head"
