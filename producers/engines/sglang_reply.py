"""What SGLang answers, checked before it can train: token ids, log-probabilities and weight versions of a sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import EngineDown, EngineError, RequestRefused
from pipeline.types import Logprobs, Span
from producers.engines.base import Completion
from producers.engines.sglang_http import NONE, Reply

ABORTED = Completion(np.empty(0, np.int32), np.empty(0, np.float32), "abort", ())
LOWEST, HIGHEST = -150.0, 1e-3
"""Log-probabilities of sampled tokens lie between: float32 has no probability below e^-104, and rounding goes barely
above 0. What is lower is a placeholder, such as -1e9."""

KEY_REFUSED = (401, 403)
PASSES = (NONE, 408, 425, 429)
"and all from 500 on: the same request may do better later, or elsewhere"


@dataclass(frozen=True)
class Asked:
    """What a reply is held against."""

    limit: int
    "tokens at most"
    vocab_size: int
    sent: int | None
    "weight version that was served when the request was sent"
    known: Container[int]
    "versions that this process has loaded there; another label says nothing about the weights behind it"
    label: str | None = None
    "of the model, where `sent` is an adapter beside it: that samples all"


def passing(reply: Reply) -> bool:
    return reply.status in PASSES or reply.status >= 500


def problem(reply: Reply, url: str, adapter: str | None = None) -> EngineError:
    """What a /generate that failed means for its prompt; that the server lacks the adapter is no fault of it."""
    text = f"{url}: {reply.text}"
    if adapter and reply.status == 400 and adapter in text:
        return EngineDown(text)
    if reply.status == 500:
        return EngineError(text)
    if passing(reply) or reply.status in (*KEY_REFUSED, 404, 405) or reply.status < 400:
        return EngineDown(text)
    return RequestRefused(text)


def as_version(label: object) -> int | None:
    """`7` and `"7"` are 7; `"default"`, `""` and nothing are None."""
    if isinstance(label, str):
        return int(label) if label.isascii() and label.isdigit() and len(label) < 19 else None
    return label if isinstance(label, int) and not isinstance(label, bool) and label >= 0 else None


def completion(reply: Reply, asked: Asked) -> Completion:
    """EngineError says what is wrong with it. An abort may come without tokens, or with those it had."""
    data = reply.fields
    meta = data.get("meta_info")
    if not isinstance(meta, dict):
        raise EngineError("a reply without meta_info")
    finish = _finish(meta)
    if finish == "abort" and not isinstance(meta.get("output_token_logprobs"), list):
        return ABORTED
    tokens = _tokens(data.get("output_ids"), asked)
    logprobs = _logprobs(meta.get("output_token_logprobs"), tokens)
    if meta.get("completion_tokens", len(tokens)) != len(tokens):
        raise EngineError(f"{len(tokens)} output_ids where completion_tokens is {meta['completion_tokens']}")
    if not tokens and finish != "abort":
        raise EngineError(f"no tokens, and the finish reason {finish}")
    return Completion(np.array(tokens, np.int32), logprobs, finish, _versions(meta, len(tokens), asked))


def _finish(meta: dict[str, Any]) -> str:
    reason = meta.get("finish_reason")
    finish = reason.get("type") if isinstance(reason, dict) else reason
    if finish not in ("stop", "length", "abort"):
        raise EngineError(f"the finish reason {reason!r}")
    return str(finish)


def _tokens(ids: Any, asked: Asked) -> list[int]:
    if not isinstance(ids, list):
        raise EngineError("a reply without output_ids")
    if len(ids) > asked.limit:
        raise EngineError(f"{len(ids)} tokens where {asked.limit} were asked for")
    for token in ids:
        if type(token) is not int or not 0 <= token < asked.vocab_size:
            raise EngineError(f"the token {token!r}, outside the vocabulary of {asked.vocab_size}")
    return ids


def _logprobs(entries: Any, tokens: list[int]) -> Logprobs:
    """Entries are [log-probability, token id, text]."""
    if not isinstance(entries, list) or len(entries) != len(tokens):
        size = len(entries) if isinstance(entries, list) else "no"
        raise EngineError(f"{len(tokens)} tokens and {size} log-probabilities")
    values: list[float] = []
    for token, entry in zip(tokens, entries, strict=True):
        if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
            raise EngineError(f"a log-probability {entry!r} at the token {token}")
        value = entry[0]
        if type(value) not in (float, int) or not math.isfinite(value) or not LOWEST <= value <= HIGHEST:
            raise EngineError(f"the log-probability {value!r} of a sampled token")
        values.append(min(value, 0.0))
    return np.array(values, np.float32)


def _versions(meta: dict[str, Any], size: int, asked: Asked) -> tuple[Span, ...]:
    def trusted(label: object) -> int | None:
        version = as_version(label)
        return version if version is not None and version in asked.known else None

    spans = meta.get("weight_versions")
    if asked.label is not None:
        labels = {meta.get("weight_version"), *(s.get("version") for s in spans or () if isinstance(s, dict))}
        return (Span(asked.sent if labels == {asked.label} else None, 0, size),) if size else ()
    if isinstance(spans, list):
        return _tiles(spans, size, trusted)
    return _guess(trusted(meta.get("weight_version")), asked.sent, size)


def _tiles(spans: list[Any], size: int, trusted: Callable[[object], int | None]) -> tuple[Span, ...]:
    found: list[Span] = []
    at = 0
    for span in spans:
        start, end = (span.get("start"), span.get("end")) if isinstance(span, dict) else (None, None)
        if type(start) is not int or type(end) is not int or start != at or end < start:
            raise EngineError(f"weight_versions that do not follow one another: {spans!r}"[:300])
        if end > start:
            found.append(Span(trusted(span.get("version")), start, end))
        at = end
    if at != size:
        raise EngineError(f"weight_versions of {at} tokens where there are {size}")
    return tuple(found)


def _guess(now: int | None, sent: int | None, size: int) -> tuple[Span, ...]:
    """SGLang before 0.5.19 says only what it served at the end. If that is not what it served when the request was
    sent, all tokens but the last count as the older ones': where between they changed is not known."""
    if size == 0:
        return ()
    if now is None or sent is None:
        return (Span(None, 0, size),)
    if now == sent or size == 1:
        return (Span(sent, 0, size),)
    return (Span(sent, 0, size - 1), Span(now, size - 1, size))


def window_of(reply: Reply) -> int | None:
    """Prompt and response together; None where the server does not say."""
    models = reply.fields.get("data") if reply.status != NONE else None
    sizes = [m.get("max_model_len") for m in models if isinstance(m, dict)] if isinstance(models, list) else []
    return min((size for size in sizes if type(size) is int), default=None)
