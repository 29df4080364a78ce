"""How a sample is made: by one turn of the model, or by the function that --custom-generate-function-path names.

`async def play(episode: Episode) -> Trace | list[Trace] | Answer`. There is one mechanism: without a function of the
user's, one of ours does it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from pipeline import code
from pipeline.errors import GenerateError, MessageError, RequestRefused, UsageError
from pipeline.message import read_metadata, read_status
from pipeline.plain import kind
from pipeline.types import COMPLETED, TRUNCATED, Sample
from producers.episode import Episode
from producers.trace import Answer, Trace

FLAG = "--custom-generate-function-path"


@dataclass(frozen=True)
class Play:
    """A generate function."""

    name: str
    "dotted path, for messages"
    function: Callable[[Episode], Coroutine[Any, Any, Any]]


async def once(episode: Episode) -> Trace:
    """The answer in one turn."""
    trace = episode.trace()
    await episode.turn(trace)
    return trace


ONCE = Play("once", once)


def load(dotted: str) -> Play:
    """UsageError where there is no such function, or one that would hold up all other samples."""
    function = code.load(dotted, FLAG)
    inner = inspect.unwrap(function)
    if not (inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)):
        raise UsageError(f"{FLAG} {dotted!r}: it must be an async function; what blocks belongs in asyncio.to_thread")
    return Play(dotted, function)


def sample(value: object, episode: Episode, name: str) -> Sample:
    """What the function gave, as a sample without a reward. GenerateError where it gave something else."""
    where = f"generate function {name}: prompt {episode.prompt.id}, sample {episode.index}"
    answer = value if isinstance(value, Answer) else Answer(value)  # type: ignore[arg-type]
    traces = _traces(answer, where)
    turns = [turn for trace in traces for turn in trace.turns]
    spoken = [turn for turn in turns if len(turn.tokens)]
    if turns and not spoken:
        raise RequestRefused(f"{where}: a context of {episode.bounds.context_length} tokens has no room for a turn")
    if not spoken:
        raise GenerateError(f"{where}: it gave traces in which the model has sampled nothing")
    text = spoken[-1].text if answer.text is None else answer.text
    if not isinstance(text, str):
        raise GenerateError(f"{where}: its text is {kind(text)}")
    try:
        status = read_status(answer.status) if answer.status is not None else _status(turn.finish for turn in turns)
        metadata = read_metadata(answer.metadata)
    except MessageError as error:
        raise GenerateError(f"{where}: {error}") from None
    kept = (trace.sequence() for trace in traces if any(len(turn.tokens) for turn in trace.turns))
    return Sample(episode.index, status, text, None, tuple(kept), metadata)


def _traces(answer: Answer, where: str) -> list[Trace]:
    given: list[Any] = list(answer.traces) if isinstance(answer.traces, list | tuple) else [answer.traces]
    other = next((one for one in given if not isinstance(one, Trace)), None)
    if other is not None or not given or given == [None]:
        what = kind(other) if given else "an empty list"
        raise GenerateError(f"{where}: it gave {what}; expected is a Trace, a list of them, or an Answer")
    if len({id(trace) for trace in given}) < len(given):
        raise GenerateError(f"{where}: it gave the same trace twice")
    return given


def _status(finishes: Iterable[str]) -> str:
    return TRUNCATED if "length" in finishes else COMPLETED
