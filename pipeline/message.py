"""What must hold in a message, whichever way it goes: shapes, spans, values. Each refusal names the field."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import MessageError
from pipeline.plain import below, each, integer, json_map, kind, number
from pipeline.types import ABORTED, COMPLETED, TRUNCATED, Span

MAX_BYTES = 512 << 20
"what Redis takes as one value"
WIRE: dict[str, np.dtype[Any]] = {"int32": np.dtype("<i4"), "float32": np.dtype("<f4"), "uint8": np.dtype("u1")}
COLUMNS = {"prompt_tokens": "int32", "tokens": "int32", "logprobs": "float32", "loss_mask": "uint8"}


class Shape(NamedTuple):
    """What a message says of a sequence; its values are the next so many of each column."""

    prompt_length: int
    length: int
    versions: list[Span]


Shapes = list[list[Shape]]
"by sample and sequence"


def check_values(columns: list[NDArray[Any]], shapes: Shapes) -> None:
    """The columns' lengths against those of the sequences, then each value."""
    prompt_length = sum(shape.prompt_length for sample in shapes for shape in sample)
    length = sum(shape.length for sample in shapes for shape in sample)
    for name, column, expected in zip(COLUMNS, columns, (prompt_length, length, length, length), strict=True):
        if column.size != expected:
            raise MessageError(name, f"{column.size} values where the sequences have {expected}")
    prompts, tokens, logprobs, mask = columns
    if prompts.min(initial=0) < 0:
        raise _at(shapes, "prompt_tokens", prompts < 0, "a negative token id")
    if tokens.min(initial=0) < 0:
        raise _at(shapes, "tokens", tokens < 0, "a negative token id")
    if not np.isfinite(logprobs).all():
        raise _at(shapes, "logprobs", ~np.isfinite(logprobs), "not finite")
    if mask.max(initial=0) > 1:
        raise _at(shapes, "loss_mask", mask > 1, "neither 0 nor 1")


def _at(shapes: Shapes, name: str, bad: NDArray[np.bool_], problem: str) -> MessageError:
    """The error of the first bad value, with the sequence it belongs to."""
    place = int(bad.argmax())
    for i, sample in enumerate(shapes):
        for j, shape in enumerate(sample):
            length = shape.prompt_length if name == "prompt_tokens" else shape.length
            if place < length:
                return MessageError(f"samples[{i}].sequences[{j}].{name}", f"{problem}, at token {place}")
            place -= length
    return MessageError(name, problem)


def read_shape(fields: tuple[Any, ...], aborted: bool) -> Shape:
    """`fields` are those of Shape. The spans cover all tokens in order, without gaps; only an abort may leave none."""
    prompt_length, length, versions = fields
    if not isinstance(versions, (tuple, list)):
        raise MessageError("versions", f"{kind(versions)} where a list is expected")
    spans = each("versions", versions, read_span)
    shape = Shape(integer("prompt_length", prompt_length), integer("length", length), spans)
    at = 0
    for index, (_, start, end) in enumerate(spans):
        if start != at or end <= start:
            raise MessageError(f"versions[{index}]", f"tokens {start}:{end} where {at}:... is expected")
        at = end
    if at != shape.length:
        raise MessageError("versions", f"cover {at} of {shape.length} tokens")
    if not at and not aborted:
        raise MessageError("tokens", "none, in a sample that was not aborted")
    return shape


def read_span(span: Any) -> Span:
    if not isinstance(span, (tuple, list)) or len(span) != 3:
        raise MessageError("", f"{kind(span)} where [version, start, end] is expected")
    version, start, end = span
    if type(start) is not int or type(end) is not int:
        start, end = integer("start", start), integer("end", end)
    return Span(version if version is None else integer("version", version), start, end)


def read_status(value: Any) -> str:
    if value not in (COMPLETED, TRUNCATED, ABORTED):
        raise MessageError("status", f"{value!r:.40} where {COMPLETED}, {TRUNCATED} or {ABORTED} is expected")
    return str(value)


def read_reward(value: Any) -> float | None:
    return None if value is None else number("reward", value)


def read_seconds(value: Any) -> float:
    made = number("seconds", value)
    if made < 0:
        raise MessageError("seconds", f"{made} is negative")
    return made


def read_metadata(value: Any, wire: bool = False) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MessageError("metadata", f"{kind(value)} where a map is expected")
    try:
        return json_map(value, wire)
    except MessageError as error:
        raise below("metadata", error) from None


def filled(field: str, items: Any) -> Any:
    if not isinstance(items, (tuple, list)):
        raise MessageError(field, f"{kind(items)} where a list is expected")
    if not items:
        raise MessageError(field, "empty")
    return items


def check_size(data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise MessageError("message", f"{len(data)} bytes; at most {MAX_BYTES}")
