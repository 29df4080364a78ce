"""The local engine side by side with transformers' `generate`: same model, same prompts, same numbers of tokens.

`generate` does what it must and no more: batches of equal size in the order of arrival, left padding, no end token, no
scores. The engine also gives log-probabilities and versions. Both compute with one thread; what counts is the process's
CPU time, so that a busy machine does not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from producers.engines.base import Request, Sampling

VOCABULARY, CONTEXT = 64, 512


def compare(rows: int = 32, uneven: bool = False, rounds: int = 9) -> dict[str, float]:
    """Tokens a CPU second of both and their ratio (medians of `rounds`, taking turns), `rows` in flight.

    Even: one batch, 64 tokens each. Uneven: four batches' worth, log-normal lengths around 24 of at most 256.
    """
    rng = np.random.default_rng(0)
    count = 4 * rows if uneven else rows
    prompt_sizes = rng.integers(4, 13, count) if uneven else np.full(count, 8)
    sizes = np.exp(rng.normal(np.log(24), 0.8, count)).clip(1, 256).astype(int) if uneven else np.full(count, 64)
    requests = [
        Request(f"{i:04d}", rng.integers(2, VOCABULARY, size).astype(np.int32), Sampling(int(n), 1.0, ()), i)
        for i, (size, n) in enumerate(zip(prompt_sizes, sizes, strict=True))
    ]
    with TemporaryDirectory() as folder:
        _make_model(Path(folder))
        local, generate = asyncio.run(_measure(Path(folder), requests, rows, rounds))
    tokens = int(sizes.sum())
    return {
        "rows": rows,
        "tokens": tokens,
        "local_tokens_per_s": tokens / median(local),
        "generate_tokens_per_s": tokens / median(generate),
        "ratio": median(theirs / ours for ours, theirs in zip(local, generate, strict=True)),
    }


async def _measure(
    folder: Path, requests: Sequence[Request], rows: int, rounds: int
) -> tuple[list[float], list[float]]:
    from transformers import AutoModelForCausalLM

    from producers.engines.local import LocalEngine

    engine = LocalEngine(folder, "cpu", rows, "retract", threads=1)
    await engine.start()
    net = AutoModelForCausalLM.from_pretrained(folder)
    local, generate = [], []
    try:
        for turn in range(rounds + 1):
            begin = time.process_time()
            await asyncio.gather(*map(engine.generate, requests))
            between = time.process_time()
            for at in range(0, len(requests), rows):
                await asyncio.to_thread(_generate, net, requests[at : at + rows])
            if turn:  # the first warms both up
                local.append(between - begin)
                generate.append(time.process_time() - between)
    finally:
        await engine.close()
    return local, generate


def _generate(net: Any, requests: Sequence[Request]) -> None:
    from transformers import BatchEncoding

    widest = max(len(request.tokens) for request in requests)
    pads = [widest - len(request.tokens) for request in requests]
    batch = BatchEncoding(
        {
            "input_ids": [[0] * pad + request.tokens.tolist() for pad, request in zip(pads, requests, strict=True)],
            "attention_mask": [[0] * pad + [1] * (widest - pad) for pad in pads],
        },
        tensor_type="pt",
    )
    longest = max(request.sampling.max_new_tokens for request in requests)
    net.generate(**batch, max_new_tokens=longest, do_sample=True, top_k=0, top_p=1.0, temperature=1.0)


def _make_model(folder: Path) -> None:
    """85 thousand parameters: the size of the model a first run trains."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
