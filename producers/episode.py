"""One sample under way: what a generate function is given.

Consumes one prompt; each turn waits for one of the worker's slots, and no tool holds one; is over, with all that it has
in the engine, as soon as its function is, or its sample is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipeline.errors import EngineError, RequestRefused
from pipeline.types import Prompt, Tokens
from producers.engines.base import Completion, Request, Sampling
from producers.tokens import Messages, Tokenizer
from producers.trace import Ids, Trace, Turn, as_tokens

log = logging.getLogger(__name__)

CUT = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "length", ())
"What there is where the context has no room."
KEPT = 8
"Tokens of the context that an engine may keep to itself: what it refuses there, after a first turn, has no room."
AGAIN = 2.0
"Seconds that a cancelled function has to clean up before it is cancelled again."


@dataclass(frozen=True)
class Bounds:
    """What an engine can be sent."""

    vocab_size: int
    context_length: int
    "prompt and response together"


@dataclass
class Episode:
    """What a generate function needs to make its one sample."""

    prompt: Prompt
    "`prompt.fields` has the row's prompt, label and metadata"
    tokens: Tokens
    "int32 [P]: the prompt as it was rendered"
    index: int
    "of the sample in its group"
    sampling: Sampling
    "of each turn; its length is the most that a turn may have"
    tokenizer: Tokenizer
    bounds: Bounds
    _variables: Callable[[], dict[str, Any]]
    "what the chat template is given besides the messages"
    _seeds: Callable[[int], int]
    "turn, from 0, to the seed of its sampler"
    _send: Callable[[Request], Awaitable[Completion]]
    _turn: int = 0
    _calls: set[asyncio.Task[Any]] = field(default_factory=set)
    "tasks that wait for the engine"
    _over: bool = False
    _failed: EngineError | None = None

    @property
    def seed(self) -> int:
        """63 bits for what the function itself draws: the same whichever worker runs it, at whatever attempt."""
        return self._seeds(-1)

    def trace(self) -> Trace:
        """One that begins with the prompt."""
        return Trace(self.tokens)

    async def turn(self, trace: Trace, max_new_tokens: int | None = None) -> Turn:
        """The model's next turn, which `trace` then has."""
        turn = await self.generate(trace.tokens, max_new_tokens)
        trace.sampled(turn)
        return turn

    def observe(self, trace: Trace, what: str | Messages) -> None:
        """What the model sees next: text as it stands, or the chat's next messages, up to where its turn begins."""
        ids = self.tokenizer.follow(what, self._variables())
        stops = self.tokenizer.stop_token_ids
        ended = trace.turns and len(trace.tokens) and int(trace.tokens[-1]) in stops
        if ended and not isinstance(what, str) and len(ids) and ids[0] == trace.tokens[-1]:
            ids = ids[1:]  # the end of its turn, which the model has sampled itself
        trace.observed(ids)

    async def generate(self, tokens: Ids, max_new_tokens: int | None = None) -> Turn:
        """What the model samples after `tokens`: at most `max_new_tokens`, never more than `sampling` says.

        Engine errors are not the function's to handle: whatever it makes of one, it decides what becomes of the prompt.
        """
        sent = self._checked(tokens)
        limit = self.sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        if limit < 1:
            raise ValueError(f"max_new_tokens is {limit}: a turn has at least one token")
        number, self._turn = self._turn, self._turn + 1
        room = self.bounds.context_length - len(sent)
        if room < 1:
            await asyncio.sleep(0)  # a function that does not look may ask for ever
            done = CUT
        else:
            sampling = replace(self.sampling, max_new_tokens=min(limit, self.sampling.max_new_tokens, room))
            done = await self._called(Request(uuid.uuid4().hex, sent, sampling, self._seeds(number)))
        text = self.tokenizer.decode(done.tokens)
        return Turn(done.tokens, done.logprobs, done.finish, done.versions, sent, text)

    def _checked(self, tokens: Ids) -> Tokens:
        sent = as_tokens(tokens)
        if not len(sent):
            raise ValueError("there is nothing to sample after: no tokens were given")
        if sent.max() >= self.bounds.vocab_size:
            raise ValueError(f"token {sent.max()} is outside the engine's vocabulary of {self.bounds.vocab_size}")
        return sent

    async def _called(self, request: Request) -> Completion:
        task = asyncio.current_task()
        if self._failed is not None:
            raise self._failed
        if task is None or self._over:
            raise asyncio.CancelledError("the sample is over")
        self._calls.add(task)
        try:
            return await self._send(request)
        except EngineError as error:
            room = self.bounds.context_length - len(request.tokens)
            if isinstance(error, RequestRefused) and room <= KEPT and self._turn > 1:
                return CUT
            self._failed = self._failed or error
            raise
        finally:
            self._calls.discard(task)

    async def run(self, function: Callable[[Episode], Coroutine[Any, Any, Any]]) -> Any:
        """What `function` gives; when this ends, nothing of the sample is left in the engine.

        The function has a task of its own, so what it does with cancels there is not taken for ours, nor ours lost: a
        task group that fails leaves its task marked as being cancelled (Python 3.11).
        """
        task = asyncio.ensure_future(function(self))
        try:
            await asyncio.wait([task])
        finally:
            self._over = True
            await self._end(task)
        if self._failed is not None:
            raise self._failed
        return task.result()

    async def _end(self, task: asyncio.Task[Any]) -> None:
        told = task.done()
        while pending := [one for one in (task, *self._calls) if not one.done()]:
            for one in pending:
                one.cancel()
            await asyncio.wait(pending, timeout=AGAIN)
        if not task.cancelled() and (error := task.exception()) and not told:
            where = f"prompt {self.prompt.id}, sample {self.index}"
            log.warning("%s: its generate function raised while it was cancelled", where, exc_info=error)
