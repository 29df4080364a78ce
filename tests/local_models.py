"""Tiny models for the local engine's tests, and what plain forward passes say about a completion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.types import Policy
from producers.engines.base import Completion, Request, Sampling
from producers.engines.local import LocalEngine
from producers.engines.local_sampling import draws, pick
from trainer import demo_model

torch.set_num_threads(1)
VOCABULARY, CONTEXT = 48, 256


def config(kind: str) -> Any:
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    sliding = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    recurrent = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2}
    recurrent |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    positions = {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    make = {
        "qwen3": lambda: transformers.Qwen3Config(head_dim=8, **common),
        "endless": lambda: transformers.LlamaConfig(**{**common, "max_position_embeddings": 1_000_000}),
        "llama": lambda: transformers.LlamaConfig(**common),
        "tied": lambda: transformers.LlamaConfig(tie_word_embeddings=True, **common),
        "mistral": lambda: transformers.MistralConfig(sliding_window=6, **common),
        "gemma3": lambda: transformers.Gemma3TextConfig(head_dim=8, **sliding, **common),
        "gemma2": lambda: transformers.Gemma2Config(head_dim=8, final_logit_softcapping=2.0, **sliding, **common),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, eos_token_id=1, **positions),
        "moe": lambda: transformers.Qwen3MoeConfig(head_dim=8, **experts, **common),
        "recurrent": lambda: transformers.Qwen3NextConfig(head_dim=8, **recurrent, **experts, **common),
    }
    return make[kind]()


def save(kind: str, folder: Path, seed: int = 0) -> Path:
    """A model with random weights, large enough to have opinions; made once a folder."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not folder.exists():
        logging.disable_progress_bar()
        torch.manual_seed(seed)
        net = AutoModelForCausalLM.from_config(config(kind)).float()
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(5)
        net.save_pretrained(folder)
    return folder


def save_all(kinds: Iterable[str], folder: Path) -> Path:
    """One of each, by name, and the project's own small model as `demo`."""
    for kind in kinds:
        save(kind, folder / kind)
    demo_model.make(folder / "demo", 0)
    return folder


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@asynccontextmanager
async def running(folder: Path, max_batch: int = 4, mode: Any = "retract") -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(folder, "cpu", max_batch, mode, threads=1)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def policy(version: int, folder: Path) -> Policy:
    return Policy(version, str(folder), "hf", "", 0, 0.0)


def request(seed: int, size: int, limit: int, temperature: float = 1.0, stops: tuple[int, ...] = ()) -> Request:
    """A prompt of `size` tokens that follow from the seed."""
    tokens = np.random.default_rng(seed).integers(2, VOCABULARY, size).astype(np.int32)
    return Request(f"{seed:08d}", tokens, Sampling(limit, temperature, stops), seed)


async def first_token(engine: LocalEngine) -> None:
    """Returns when a row that came before has sampled a token or more."""
    await engine.generate(Request("first-tk", np.array([5], np.int32), Sampling(1, 1.0, ()), 0))


def sequence(request: Request, done: Completion) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([request.tokens, done.tokens])).long()[None]


@torch.no_grad()
def plain_logits(net: Any, request: Request, done: Completion) -> torch.Tensor:
    """[R, vocab] before each response token: one forward pass, no cache, no padding, no batch."""
    logits: torch.Tensor = net(input_ids=sequence(request, done), use_cache=False).logits[0]
    return logits[len(request.tokens) - 1 : -1]


def check(logits: torch.Tensor, request: Request, done: Completion) -> None:
    """Each token is the one the request's draws pick out of `logits`, and its log-probability agrees to 1e-5."""
    size = len(done.tokens)
    uniforms = torch.from_numpy(draws(request.seed, size))[:, None]
    tokens, _ = pick(logits, torch.tensor([[request.sampling.temperature]]), uniforms)
    assert done.tokens.tolist() == tokens.view(-1).tolist()
    assert np.abs(done.logprobs - expected_logprobs(logits, request, done)).max() < 1e-5


def expected_logprobs(logits: torch.Tensor, request: Request, done: Completion) -> NDArray[np.float32]:
    """By the textbook: log_softmax(logits / T) at the sampled tokens."""
    scaled = torch.log_softmax(logits / request.sampling.temperature, -1)
    values: NDArray[np.float32] = scaled[range(len(done.tokens)), done.tokens.tolist()].numpy()
    return values


async def generate_all(engine: LocalEngine, requests: list[Request]) -> list[Completion]:
    return await asyncio.gather(*map(engine.generate, requests))
