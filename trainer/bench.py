"""A training step of each backend beside a bare loop that does as much: same model, same rows, same passes.

The bare loop is a Hugging Face model, a policy-gradient loss on the answers' log-probabilities, a backward pass, the
norm limit and AdamW, on tensors that are made beforehand: what any trainer does at least. The backends are given groups
as a run has them, and do all of a step. All compute with one thread; what counts is the process's CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from pipeline.config import TrainConfig
from pipeline.measure import turns
from pipeline.types import COMPLETED, Group, Prompt, Sample, Sequence, Span
from trainer import backends

VOCABULARY, GROUPS, SAMPLES, PROMPT, ANSWER = 512, 8, 4, 32, 96
PASS = 16
"rows in a forward pass"


def compare(groups: int = GROUPS, rounds: int = 9) -> dict[str, float]:
    """Tokens a CPU second of `bare`, `torch` and, where it is installed, `megatron`; with `_ratio`, over those of bare
    (medians of `rounds`, taking turns)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        folder = Path(name)
        _make_model(folder)
        batch = _groups(groups)
        sides = {"bare": _bare(folder, batch)}
        opened = []
        for kind in ("torch", *(("megatron",) if find_spec("megatron") else ())):
            backend = backends.build(_config(folder, kind), tis=False)
            opened.append(backend)
            sides[kind] = lambda backend=backend: backend.train(batch, 0)  # type: ignore[misc]
        seconds = turns(sides, rounds, time.process_time)
        for backend in opened:
            backend.close()
    torch.set_num_threads(before)
    tokens = groups * SAMPLES * (PROMPT + ANSWER)
    found = {name: tokens / median(of) for name, of in seconds.items()}
    ratios = {
        f"{name}_ratio": median(b / a for b, a in zip(seconds["bare"], of, strict=True)) for name, of in seconds.items()
    }
    return found | ratios


def _config(folder: Path, kind: str) -> TrainConfig:
    rules = {"train_backend": kind, "hf_checkpoint": folder, "device": "cpu", "num_rollout": 1}
    return TrainConfig.model_validate({**rules, "max_tokens_per_gpu": PASS * (PROMPT + ANSWER)})


def _bare(folder: Path, batch: list[Group]) -> Callable[[], object]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    rows = [q for group in batch for sample in group.samples for q in sample.sequences]
    tokens = torch.tensor(np.array([np.concatenate((q.prompt_tokens, q.tokens)) for q in rows])).long()
    advantages = torch.tensor([sample.reward or 0.0 for group in batch for sample in group.samples])
    advantages -= advantages.mean()

    def step() -> None:
        for some, worth in zip(torch.split(tokens, PASS), torch.split(advantages, PASS), strict=True):
            logits = model(input_ids=some[:, :-1], logits_to_keep=ANSWER, use_cache=False).logits
            logs = torch.log_softmax(logits, -1).gather(-1, some[:, -ANSWER:, None])[..., 0]
            loss = -(logs * worth[:, None]).sum() / (len(tokens) * ANSWER)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _groups(count: int) -> list[Group]:
    rng = np.random.default_rng(0)

    def ids(size: int) -> Any:
        return rng.integers(0, VOCABULARY, size).astype(np.int32)

    def sample(index: int, prompt: Any) -> Sample:
        one = np.ones(ANSWER)
        row = Sequence(prompt, ids(ANSWER), -6 * one.astype(np.float32), one.astype(np.uint8), (Span(1, 0, ANSWER),))
        return Sample(index=index, reward=float(index % 2), sequences=(row,), status=COMPLETED, text="", metadata={})

    prompts = [ids(PROMPT) for _ in range(count)]
    return [
        Group(Prompt(id, 1, 0, "{}"), tuple(sample(n, prompt) for n in range(SAMPLES)), "bench", 0.0)
        for id, prompt in enumerate(prompts)
    ]


def _make_model(folder: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
