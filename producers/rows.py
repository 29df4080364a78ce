"""One row of a prompt file: decoded, checked, and made into the record that travels with the prompt."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

_NAMES = {str: "text", list: "a list", dict: "a map", bool: "a bool", int: "a number", float: "a number"}


class RowKeys(NamedTuple):
    """Where the parts of a record stand in a row."""

    input: str
    label: str
    metadata: str


class BadRow(ValueError):
    """The row cannot be used; the message lacks file and line, which the reader of the file adds."""


def record(line: bytes, keys: RowKeys) -> tuple[str, str]:
    """The record, a map of prompt, label and metadata in ASCII JSON, and the kind of its prompt: "text" or "a list".

    A missing label becomes null, missing metadata an empty map; other keys of the row are left behind. Lone surrogates
    survive, as escapes.
    """
    row = _decode(line)
    if keys.input not in row:
        raise BadRow(f"no key {keys.input!r}, only {', '.join(map(repr, row)) or 'none'} (--input-key)")
    prompt, label, metadata = row[keys.input], row.get(keys.label), row.get(keys.metadata)
    _check_prompt(prompt, keys.input)
    if isinstance(label, list | dict):
        raise BadRow(f"{keys.label!r} is {_name(label)}, not text, a number, a bool or null (--label-key)")
    if not isinstance(metadata, dict | None):
        raise BadRow(f"{keys.metadata!r} is {_name(metadata)}, not a map (--metadata-key)")
    return json.dumps({"prompt": prompt, "label": label, "metadata": metadata or {}}), _name(prompt)


def _decode(line: bytes) -> dict[str, Any]:
    try:
        row = _DECODER.decode(line.decode().strip(" \t\r\n"))
    except BadRow:
        raise
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 at byte {error.start + 1} of the line") from error
    except json.JSONDecodeError as error:
        raise BadRow(f"broken JSON at column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # an integer of more than 4300 digits; a thousand brackets
        raise BadRow(f"cannot be decoded: {error}") from error
    if not isinstance(row, dict):
        raise BadRow(f"is {_name(row)}, not a map")
    return row


def _check_prompt(prompt: Any, key: str) -> None:
    if not isinstance(prompt, str | list):
        raise BadRow(f"{key!r} is {_name(prompt)}, neither text nor a list of chat messages")
    if not prompt:
        raise BadRow(f"{key!r} is empty")
    if isinstance(prompt, str):
        return
    for index, message in enumerate(prompt):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise BadRow(f"{key!r}: message {index} is not a map with a role and a content, both text")
    if prompt[-1]["role"] == "assistant":
        raise BadRow(f"{key!r} ends with a turn of the assistant: there is nothing to answer")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise BadRow(f"key {name!r} stands twice in one map")
        found[name] = value
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadRow(f"{text} is not a finite number")
    return value


def _name(value: Any) -> str:
    return _NAMES.get(type(value), "null")


# Not strict: control characters that stand unescaped in a string are taken as text.
_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
