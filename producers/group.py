"""From a lease to a group: render, sample n answers, score them. Knows nothing of Redis."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.config import Agreed
from pipeline.errors import EngineError, RequestRefused, RewardError
from pipeline.types import ABORTED, COMPLETED, TRUNCATED, Group, Prompt, Sample, Sequence, Tokens
from producers.engines.base import Completion, Engine, Request, Sampling
from producers.rewards.base import Scorer, reward_input
from producers.tokens import Tokenizer

STATUS = {"stop": COMPLETED, "length": TRUNCATED, "abort": ABORTED}


class SampleAborted(EngineError):
    """An engine ended a request that nobody here had cancelled."""


def seed_of(run_seed: int, prompt_id: int, index: int) -> int:
    """63 bits from run seed, prompt id and sample index: the same whichever worker samples, and at which attempt."""
    text = f"{run_seed}:{prompt_id}:{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass
class Progress:
    """How far a group is, for the generator's book-keeping."""

    running: int = 0
    "samples in the engine or waiting for it"
    finished: int = 0
    "samples finished, while the group is not"
    oldest: int | None = None
    "weight version when its first request was sent"


@dataclass(frozen=True)
class Maker:
    """Makes groups; one for all prompts of a worker."""

    engine: Engine
    tokenizer: Tokenizer
    scorer: Scorer
    rules: Agreed
    worker: str
    slots: asyncio.Semaphore
    "samples the engine may have at once"

    async def make(self, prompt: Prompt, progress: Progress, poke: asyncio.Event) -> Group:
        """A scored group. RequestRefused, EngineError and its kin say what became of it otherwise; a sample that fails
        cancels its siblings. `poke` is set whenever a sample has finished."""
        try:
            return await self._make(prompt, progress, poke)
        finally:
            progress.finished = 0  # from here on its place is asked for as a whole: by its push, or by its end

    async def _make(self, prompt: Prompt, progress: Progress, poke: asyncio.Event) -> Group:
        began = time.monotonic()
        tokens = self._render(prompt)
        n = self.rules.n_samples_per_prompt
        progress.running = n
        try:
            async with asyncio.TaskGroup() as siblings:
                tasks = [siblings.create_task(self._sample(prompt, tokens, i, progress, poke)) for i in range(n)]
        except BaseExceptionGroup as group:
            raise _decisive(group) from None
        samples = [task.result() for task in tasks]
        with _no_cancel(RewardError(f"prompt {prompt.id}: its reward was cancelled from within")):
            rewards = await self.scorer.score_group([reward_input(prompt, sample) for sample in samples])
        scored = (replace(sample, reward=reward) for sample, reward in zip(samples, rewards, strict=True))
        return Group(prompt, tuple(scored), self.worker, time.monotonic() - began)

    def _render(self, prompt: Prompt) -> Tokens:
        tokens = self.tokenizer.encode(prompt.fields["prompt"], self.rules.apply_chat_template, self._variables(prompt))
        longest = self.rules.rollout_max_prompt_len
        if longest is not None and len(tokens) > longest:
            raise RequestRefused(f"prompt {prompt.id} has {len(tokens)} tokens, --rollout-max-prompt-len is {longest}")
        return tokens

    def _variables(self, prompt: Prompt) -> dict[str, Any]:
        """What the chat template is given besides the messages."""
        tools = prompt.fields["metadata"].get("tools")
        return {**json.loads(self.rules.apply_chat_template_kwargs or "{}"), **({"tools": tools} if tools else {})}

    async def _sample(
        self, prompt: Prompt, tokens: Tokens, index: int, progress: Progress, poke: asyncio.Event
    ) -> Sample:
        left = max(1, self.engine.context_length - len(tokens))
        sampling = Sampling(
            min(self.rules.rollout_max_response_len, left),
            self.rules.rollout_temperature,
            self.tokenizer.stop_token_ids,
        )
        request = Request(uuid.uuid4().hex, tokens, sampling, seed_of(self.rules.rollout_seed, prompt.id, index))
        async with self.slots:
            if progress.oldest is None:
                progress.oldest = self.engine.version
            with _no_cancel(EngineError(f"prompt {prompt.id}, sample {index}: cancelled within the engine")):
                done = await self.engine.generate(request)
        progress.running -= 1
        progress.finished += 1
        poke.set()
        if done.finish == "abort":
            raise SampleAborted(f"prompt {prompt.id}, sample {index}: the engine aborted it")
        return self._record(tokens, index, done)

    def _record(self, tokens: Tokens, index: int, done: Completion) -> Sample:
        mask = np.ones(len(done.tokens), dtype=np.uint8)
        sequence = Sequence(tokens, done.tokens, done.logprobs, mask, done.versions)
        return Sample(index, STATUS[done.finish], self.tokenizer.decode(done.tokens), None, (sequence,))


@contextlib.contextmanager
def _no_cancel(instead: Exception) -> Iterator[None]:
    """A cancel that nobody asked this task for, out of some client library, becomes an error like any other: else it
    would end the task as if it had been told to, and its lease would be held for ever."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise instead from None


def _decisive(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of several failed siblings the one that decides: a bug, then what is final, then what may pass."""

    def rank(error: BaseException) -> int:
        return 0 if not isinstance(error, EngineError) else 1 if isinstance(error, RequestRefused) else 2

    return min(group.exceptions, key=rank)
