"""Options of slime, miles and Megatron that are none here, and what to do instead: the nearest name would mislead."""

from __future__ import annotations

DROPOUT = "the sampler has no dropout, and with it the trainer's probabilities would be other ones; leave it out"
EXPERTS = "--train-backend megatron cuts dense models by tensors and by layers, and nothing else"
GPUS = "each process is started where it is to run: trainers by torchrun --nproc-per-node N, engines at --engine-url"
RECOMPUTED = "--gradient-checkpointing works every layer out again"
SHAPE = "a model's shape is read from --hf-checkpoint; leave it out"
TURNS = "trainer and engines never take turns on the same GPUs; leave it out"
VALUES = "no estimator here has a critic; see --advantage-estimator"

INSTEAD = {
    "num_steps_per_rollout": "give --global-batch-size: --rollout-batch-size x --n-samples-per-prompt / that number",
    "use_dynamic_global_batch_size": "a step's samples are trained on, whatever their number; leave it out",
    "over_sampling_batch_size": "generation never ends with a batch; --async-max-concurrent-samples bounds it",
    "save": "--out is the run's folder, with its checkpoints",
    "save_hf": "all weights are published in the Hugging Face layout, in weights/ of the run's folder",
    **dict.fromkeys(("no_load_optim", "no_load_rng", "finetune"), "--load of a new run takes weights alone"),
    "no_save_optim": "a checkpoint is what a resume goes on from; weights alone are in weights/ of the run's folder",
    "ckpt_step": "--load names a checkpoint's folder",
    "ref_ckpt_step": "--ref-load names a model's folder",
    "ref_update_interval": "the reference stays what it is; start again with another --ref-load",
    "optimizer": "there is AdamW alone; leave it out",
    "lr_warmup_fraction": "give --lr-warmup-iters, in optimizer steps",
    "lr_warmup_samples": "give --lr-warmup-iters, in optimizer steps",
    "lr_decay_samples": "give --lr-decay-iters, in optimizer steps",
    "use_distributed_optimizer": "--train-backend megatron always has it; leave it out",
    "accumulate_allreduce_grads_in_fp32": "it is always so; leave it out",
    "attention_softmax_in_fp32": "attention is torch's own; leave it out",
    "attention_backend": "attention is torch's own; leave it out",
    "attn_implementation": "attention is torch's own; leave it out",
    "fp16": "passes are in bfloat16 or float32: --bf16, --no-bf16",
    "log_probs_chunk_size": "logits are worked out where a token is trained alone; --max-tokens-per-gpu bounds them",
    "log_probs_max_tokens_per_gpu": "--max-tokens-per-gpu bounds every pass",
    "balance_by_flops": "--balance-data gives ranks about as many tokens",
    "calculate_per_token_loss": "give --loss-aggregation token",
    "disable_rewards_normalization": "what is taken off a reward follows from --advantage-estimator",
    "custom_reward_post_process_path": "what is made of rewards follows from --advantage-estimator; --custom-rm-path "
    "with --group-rm scores whole groups",
    "custom_advantage_function_path": "advantages are one of --advantage-estimator",
    "loss_type": "the loss follows from --advantage-estimator",
    "custom_loss_function_path": "the loss follows from --advantage-estimator",
    "use_opsm": "--use-rs leaves out sequences that are too far from their sampler",
    **dict.fromkeys(("use_opd", "opd_type", "opd_kl_coef"), "there is no distillation"),
    "get_mismatch_metrics": "the figures are always there: train/train_rollout_logprob_abs_diff",
    "use_unbiased_kl": "--kl-loss-type names the estimate",
    "custom_config_path": "--config names a file of options",
    "dump_details": "--archive keeps what each step trains on",
    "save_debug_train_data": "--archive keeps what each step trains on",
    "target_modules": "give --lora-target-modules",
    "exclude_modules": "--lora-target-modules names the layers that have an adapter",
    "use_fault_tolerance": "any process may die at any time; leave it out",
    "megatron_to_hf_mode": "weights leave in the Hugging Face layout always; leave it out",
    "transformer_impl": "Transformer Engine is not used; leave it out",
    **dict.fromkeys(("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"), EXPERTS),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), DROPOUT),
    **dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers"), RECOMPUTED),
    **dict.fromkeys(("critic_load", "critic_lr", "critic_lr_warmup_iters", "critic_save", "critic_num_nodes"), VALUES),
    **dict.fromkeys(("num_critic_only_steps", "value_clip", "gamma", "lambd"), VALUES),
    **dict.fromkeys(("actor_num_nodes", "actor_num_gpus_per_node", "num_gpus_per_node", "rollout_num_gpus"), GPUS),
    "rollout_num_gpus_per_engine": GPUS,
    **dict.fromkeys(("offload", "offload_train", "offload_rollout", "no_offload_train", "no_offload_rollout"), TURNS),
    **dict.fromkeys(("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"), SHAPE),
    **dict.fromkeys(("group_query_attention", "num_query_groups", "vocab_size", "padded_vocab_size"), SHAPE),
    **dict.fromkeys(("max_position_embeddings", "position_embedding_type", "rotary_base", "rotary_percent"), SHAPE),
    **dict.fromkeys(("use_rotary_position_embeddings", "normalization", "norm_epsilon", "swiglu"), SHAPE),
    **dict.fromkeys(("disable_bias_linear", "add_qkv_bias", "qk_layernorm", "num_experts"), SHAPE),
    **dict.fromkeys(("untie_embeddings_and_output_weights", "make_vocab_size_divisible_by"), SHAPE),
}
"By the field's name it would have."


def instead(name: str) -> str:
    """What to say of an option that is none here; nothing of one that nobody knows. As a flag or as a field."""
    field = name.removeprefix("--").replace("-", "_")
    if field.startswith("sglang_"):
        return ": engines are servers of their own, started with SGLang's options (docs/sglang.md)"
    return f": {INSTEAD[field]}" if field in INSTEAD else ""
