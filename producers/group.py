"""From a lease to a group: render, sample n answers, score them. Knows nothing of Redis."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipeline.agreed import Agreed
from pipeline.errors import EngineError, GenerateError, RequestRefused, RewardError
from pipeline.types import Group, Prompt, Sample, Tokens
from producers.custom_generate import ONCE, Play, sample
from producers.engines.base import Completion, Engine, Request, Sampling
from producers.engines.limits import budget
from producers.episode import Bounds, Episode
from producers.rewards.base import Scorer, reward_input
from producers.tokens import Tokenizer


class SampleAborted(EngineError):
    """An engine ended a request that nobody here had cancelled."""


def seed_of(run_seed: int, prompt_id: int, index: int, turn: int = 0) -> int:
    """63 bits from run seed, prompt id, sample index, turn: the same whichever worker samples, at whatever attempt."""
    text = f"{run_seed}:{prompt_id}:{index}{f':{turn}' if turn else ''}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass
class Progress:
    """How far a group is, for the generator's book-keeping."""

    running: int = 0
    "samples under way: in the engine, waiting for it, or with their function"
    unsent: int = 0
    "samples whose first request was not given to the engine yet"
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
    "requests the engine may have at once"
    play: Play = ONCE
    "what makes a sample"
    sampling: Sampling | None = None
    "other than the run's: an evaluation's"

    async def make(self, prompt: Prompt, progress: Progress, poke: asyncio.Event) -> Group:
        """A scored group. RequestRefused, EngineError and its kin say what became of it otherwise; a sample that fails
        cancels its siblings. `poke` is set whenever a sample has finished."""
        try:
            return await self._make(prompt, progress, poke)
        finally:
            progress.unsent = 0
            progress.finished = 0  # from here on its place is asked for as a whole: by its push, or by its end

    async def _make(self, prompt: Prompt, progress: Progress, poke: asyncio.Event) -> Group:
        began = time.monotonic()
        tokens = self._render(prompt)
        n = self.rules.n_samples_per_prompt
        progress.running = n
        try:
            async with asyncio.TaskGroup() as siblings:
                begun = [self._episode(prompt, tokens, i, progress) for i in range(n)]
                tasks = [siblings.create_task(self._sample(episode, progress, poke)) for episode in begun]
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
        budget(Request("", tokens, self._sampling(), 0), self.engine.vocab_size, self.engine.context_length)
        return tokens

    def _variables(self, prompt: Prompt) -> dict[str, Any]:
        """What the chat template is given besides the messages."""
        tools = prompt.fields["metadata"].get("tools")
        return {**json.loads(self.rules.apply_chat_template_kwargs or "{}"), **({"tools": tools} if tools else {})}

    def _episode(self, prompt: Prompt, tokens: Tokens, index: int, progress: Progress) -> Episode:
        return Episode(
            prompt,
            tokens,
            index,
            self._sampling(),
            self.tokenizer,
            Bounds(self.engine.vocab_size, self.engine.context_length),
            partial(self._variables, prompt),
            partial(seed_of, self.rules.rollout_seed, prompt.id, index),
            partial(self._send, progress, f"prompt {prompt.id}, sample {index}"),
        )

    async def _sample(self, episode: Episode, progress: Progress, poke: asyncio.Event) -> Sample:
        where = f"prompt {episode.prompt.id}, sample {episode.index}"
        with _no_cancel(GenerateError(f"generate function {self.play.name}: {where}: cancelled from within")):
            value = await episode.run(self.play.function)
        done = sample(value, episode, self.play.name)
        progress.running -= 1
        progress.finished += 1
        poke.set()
        return done

    def _sampling(self) -> Sampling:
        rules = self.rules
        return self.sampling or Sampling(
            rules.rollout_max_response_len, rules.rollout_temperature, self.tokenizer.stop_token_ids
        )

    async def _send(self, progress: Progress, where: str, request: Request) -> Completion:
        """One request, in a slot of its own."""
        async with self.slots:
            if progress.oldest is None:
                progress.oldest = self.engine.version
            progress.unsent -= 1
            with _no_cancel(EngineError(f"{where}: cancelled within the engine")):
                done = await self.engine.generate(request)
        if done.finish == "abort":
            raise SampleAborted(f"{where}: the engine aborted it")
        covered = sum(span.end - span.start for span in done.versions)
        if not 0 < len(done.tokens) == len(done.logprobs) == covered:
            found = f"{len(done.tokens)} tokens, {len(done.logprobs)} log-probabilities, versions of {covered}"
            raise EngineError(f"{where}: the engine gave {found}")
        return done


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
