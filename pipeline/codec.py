"""A group as one plain msgpack map, and back. `docs/message.md` has the layout, field by field.

`encode` makes values plain and refuses what cannot be right; `decode` trusts nothing. Both raise MessageError, which
names the field, and nothing else. The arrays of all sequences are joined into one column a kind: few large pieces are
packed, checked and unpacked faster than 32 small ones. The arrays that `decode` returns are read-only parts of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, Never

import msgpack
import numpy as np
from numpy.typing import NDArray

from pipeline.errors import MessageError
from pipeline.message import (
    COLUMNS,
    WIRE,
    Shape,
    Shapes,
    check_size,
    check_values,
    filled,
    read_metadata,
    read_reward,
    read_seconds,
    read_shape,
    read_status,
)
from pipeline.plain import MAX_ITEMS, MAX_TOTAL, array, below, each, integer, kind, text
from pipeline.types import ABORTED, Group, Prompt, Sample, Sequence

SCHEMA = 1

MESSAGE_FIELDS = itemgetter("id", "attempt", "strikes", "record", "worker", "seconds", "samples")
SAMPLE_FIELDS = itemgetter("index", "status", "text", "reward", "metadata", "sequences")
SEQUENCE_FIELDS = itemgetter("prompt_length", "length", "versions")
COLUMN_FIELDS = itemgetter("dtype", "shape", "data")

log = logging.getLogger(__name__)

Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
"in the order of COLUMNS: those of one sequence, or the columns"


def encode(group: Group) -> bytes:
    """About 9 bytes a response token and 4 a prompt token."""
    prompt = group.prompt
    parts = each("samples", filled("samples", group.samples), _parts)
    shapes = [[shape for shape, _ in sample] for sample in parts]
    by_sequence = [arrays for sample in parts for _, arrays in sample]
    columns = [np.concatenate(arrays) for arrays in zip(*by_sequence, strict=True)]
    check_values(columns, shapes)
    message = {
        "schema": SCHEMA,
        "id": integer("id", prompt.id),
        "attempt": integer("attempt", prompt.attempt, low=1),
        "strikes": integer("strikes", prompt.strikes),
        "record": text("record", prompt.record),
        "worker": text("worker", group.worker),
        "seconds": read_seconds(group.seconds),
        "samples": each("samples", list(zip(group.samples, shapes, strict=True)), _pack_sample),
    }
    for (name, dtype), column in zip(COLUMNS.items(), columns, strict=True):
        message[name] = {"dtype": dtype, "shape": [column.size], "data": column.data}
    return _packb(message)


def _parts(sample: Sample) -> list[tuple[Shape, Arrays]]:
    aborted = read_status(sample.status) == ABORTED
    return each("sequences", filled("sequences", sample.sequences), lambda sequence: _part(sequence, aborted))


def _part(sequence: Sequence, aborted: bool) -> tuple[Shape, Arrays]:
    prompt, tokens, logprobs, mask = (array(name, getattr(sequence, name), WIRE[COLUMNS[name]]) for name in COLUMNS)
    for name, values in (("logprobs", logprobs), ("loss_mask", mask)):
        if values.size != tokens.size:
            raise MessageError(name, f"{values.size} values for {tokens.size} tokens")
    return read_shape((prompt.size, tokens.size, sequence.versions), aborted), (prompt, tokens, logprobs, mask)


def _pack_sample(part: tuple[Sample, list[Shape]]) -> dict[str, Any]:
    sample, shapes = part
    return {
        "index": integer("index", sample.index),
        "status": sample.status,
        "text": text("text", sample.text),
        "reward": read_reward(sample.reward),
        "metadata": read_metadata(sample.metadata),
        "sequences": [{"prompt_length": p, "length": r, "versions": versions} for p, r, versions in shapes],
    }


def _packb(message: dict[str, Any]) -> bytes:
    try:
        data: bytes = msgpack.packb(message)
    except UnicodeEncodeError:
        log.warning("prompt %s: a text in its group is no Unicode (a lone surrogate) and goes as bytes", message["id"])
        data = msgpack.packb(_odd_text_as_bytes(message))
    check_size(data)
    if len(data) - sum(column["data"].nbytes for name, column in message.items() if name in COLUMNS) > MAX_TOTAL:
        _unpackb(data)  # who reads it counts its entries, each of which takes a byte
    return data


def _odd_text_as_bytes(value: Any) -> Any:
    if isinstance(value, dict):
        return {_odd_text_as_bytes(key): _odd_text_as_bytes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_odd_text_as_bytes(item) for item in value]
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        return value if raw.decode("utf-8", "replace") == value else raw
    return value


def decode(data: bytes) -> Group:
    message = _unpackb(data)
    number, attempt, strikes, record, worker, seconds, packed = _fields(message, MESSAGE_FIELDS)
    prompt = Prompt(
        id=integer("id", number),
        attempt=integer("attempt", attempt, low=1),
        strikes=integer("strikes", strikes),
        record=text("record", record, True),
    )
    shapes = each("samples", filled("samples", packed), _unpack_shapes)
    columns = [_unpack_column(message, name, dtype) for name, dtype in COLUMNS.items()]
    check_values(columns, shapes)
    sequences = _cut(columns, shapes)
    samples = each("samples", packed, lambda sample: _unpack_sample(sample, sequences))
    return Group(prompt, tuple(samples), text("worker", worker, True), read_seconds(seconds))


def _unpackb(data: bytes) -> dict[str, Any]:
    check_size(data)
    most = min(len(data), MAX_ITEMS)  # a header may announce 4 billion entries, for which room is made at once
    count = _counter()
    try:
        message = msgpack.unpackb(
            data,
            max_array_len=most,
            max_map_len=most,
            max_ext_len=0,
            ext_hook=_no_extension,
            list_hook=count,
            object_hook=count,
        )
    except ValueError as error:  # all of msgpack's own errors, and those about Unicode, are of this kind
        raise MessageError("message", f"not msgpack: {str(error) or type(error).__name__}") from None
    if type(message) is not dict:
        raise MessageError("message", f"{kind(message)} where a map is expected")
    schema = message.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise MessageError("schema", f"version {schema!r:.40}; this program reads version {SCHEMA}")
    return message


def _counter() -> Callable[[Any], Any]:
    """A hook that lets lists and maps through until there are too many of them, or in them."""
    left = MAX_TOTAL

    def count(items: Any) -> Any:
        nonlocal left
        left -= 1 + len(items)
        if left < 0:
            raise ValueError(f"more than {MAX_TOTAL} entries")
        return items

    return count


def _no_extension(code: int, data: bytes) -> Never:
    raise ValueError(f"extension type {code}")


def _unpack_shapes(sample: Any) -> list[Shape]:
    _, status, *_, sequences = _fields(sample, SAMPLE_FIELDS)
    aborted = read_status(status) == ABORTED
    filled("sequences", sequences)
    return each("sequences", sequences, lambda packed: read_shape(_fields(packed, SEQUENCE_FIELDS), aborted))


def _unpack_column(message: dict[str, Any], name: str, dtype: str) -> NDArray[Any]:
    try:
        found, shape, data = _fields(message.get(name), COLUMN_FIELDS)
    except MessageError as error:
        raise below(name, error) from None
    if found != dtype:
        raise MessageError(f"{name}.dtype", f"{found!r:.40} where {dtype!r} is expected")
    if type(data) is not bytes:
        raise MessageError(f"{name}.data", f"{kind(data)} where bytes are expected")
    if type(shape) is not list or len(shape) != 1 or type(shape[0]) is not int:
        raise MessageError(f"{name}.shape", f"{shape!r:.40} where [length] is expected")
    if shape[0] * WIRE[dtype].itemsize != len(data):
        raise MessageError(f"{name}.data", f"{len(data)} bytes for {shape[0]} x {dtype}")
    return np.frombuffer(data, WIRE[dtype])


def _cut(columns: list[NDArray[Any]], shapes: Shapes) -> Iterator[Sequence]:
    prompts, tokens, logprobs, mask = columns
    p = t = 0
    for sample in shapes:
        for prompt_length, length, versions in sample:
            q, u = p + prompt_length, t + length
            yield Sequence(prompts[p:q], tokens[t:u], logprobs[t:u], mask[t:u], tuple(versions))
            p, t = q, u


def _unpack_sample(packed: dict[str, Any], sequences: Iterator[Sequence]) -> Sample:
    index, status, words, reward, metadata, shapes = SAMPLE_FIELDS(packed)
    return Sample(
        integer("index", index),
        status,
        text("text", words, True),
        read_reward(reward),
        tuple(islice(sequences, len(shapes))),
        read_metadata(metadata, True),
    )


def _fields(packed: Any, fields: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    if type(packed) is not dict:
        raise MessageError("", f"{kind(packed)} where a map is expected")
    try:
        return fields(packed)
    except KeyError as missing:
        raise MessageError(missing.args[0], "missing") from None
