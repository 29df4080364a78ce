"""One row of prompts: decoded, checked, and made into the record that travels with the prompt.

The record is ASCII JSON: `prompt`, `label`, `metadata`. Keys may have dots (`reward_model.ground_truth`). A key that
the user does not name is the first of its ALIASES that a row of the file has; slime's and verl's files need no flags.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

ALIASES = {
    "input": ("input", "prompt", "question", "messages", "problem"),
    "label": ("label", "answer", "ground_truth", "reward_model.ground_truth"),
    "metadata": ("metadata", "extra_info"),
    "tools": ("tools",),
}

_MISSING = object()

_NAMES = {str: "text", list: "a list", dict: "a map", bool: "a bool", int: "a number", float: "a number"}


class RowKeys(NamedTuple):
    """Where the parts of a record stand in a row; None: not named, and none of the aliases found so far."""

    input: str | None = None
    label: str | None = None
    metadata: str | None = None
    tools: str | None = None


class Row(NamedTuple):
    """What is asked of a row when its file is checked."""

    record: str
    kind: str
    "of its prompt: text, or a list"
    label: bool
    "whether there is one"
    rm_type: str
    "its own, or empty"
    source: str
    "verl's data_source, or empty"
    id: str | int | None
    "what stands under `id`"


class BadRow(ValueError):
    """The row cannot be used; the message lacks file and line, which the reader of the file adds."""


class Reader:
    """Reads the rows of one file. Keys that are not named are found out on the way, and then hold for all rows."""

    def __init__(self, keys: RowKeys) -> None:
        self.keys = keys

    def read(self, line: bytes) -> Row:
        row = _decode(line)
        if None in self.keys:
            named = self.keys._asdict()
            for part, aliases in ALIASES.items():
                named[part] = named[part] or next((a for a in aliases if _get(row, a) not in (None, _MISSING)), None)
            self.keys = RowKeys(**named)
        return _row(row, self.keys)


def record(line: bytes, keys: RowKeys) -> str:
    """The record of a row that has been read before, with the keys that were found then."""
    return _row(_decode(line), keys).record


def _row(row: dict[str, Any], keys: RowKeys) -> Row:
    """A missing label becomes null, missing metadata an empty map; other keys are left behind. Lone surrogates survive,
    as escapes."""
    key = keys.input or ALIASES["input"][0]
    prompt, label = _get(row, key), _get(row, keys.label)
    if prompt is _MISSING:
        flag = "--input-key" if keys.input else f"none of {', '.join(ALIASES['input'])}; --input-key"
        raise BadRow(f"no key {key!r}, only {', '.join(map(repr, row)) or 'none'} ({flag})")
    _check_prompt(prompt, key)
    if isinstance(label, list | dict):
        raise BadRow(f"{keys.label!r} is {_name(label)}, not text, a number, a bool or null (--label-key)")
    label = None if label is _MISSING else label
    metadata = _metadata(row, keys)
    own, id = metadata.get("rm_type"), row.get("id")
    return Row(
        json.dumps({"prompt": prompt, "label": label, "metadata": metadata}),
        _name(prompt),
        label is not None,
        own.strip() if isinstance(own, str) else "",
        str(metadata.get("data_source", "")),
        id if isinstance(id, str | int) and not isinstance(id, bool) else None,
    )


def _metadata(row: dict[str, Any], keys: RowKeys) -> dict[str, Any]:
    """With verl's `data_source` where the metadata's key is one of ours, and the tools for the chat template."""
    metadata = _get(row, keys.metadata)
    if metadata is not _MISSING and not isinstance(metadata, dict | None):
        raise BadRow(f"{keys.metadata!r} is {_name(metadata)}, not a map (--metadata-key)")
    source = row.get("data_source") if keys.metadata in (None, *ALIASES["metadata"]) else None
    more = {"data_source": source} if isinstance(source, str) else {}
    tools = _tools(_get(row, keys.tools), keys.tools)
    return {**more, **(metadata if isinstance(metadata, dict) else {}), **({"tools": tools} if tools else {})}


def _tools(value: Any, key: str | None) -> list[Any]:
    """A list of maps, or that list as JSON text."""
    if value in (None, _MISSING, ""):
        return []
    if isinstance(value, str):
        value = _json(value)
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow(f"{key!r} is {_name(value)}, not a list of maps (--tool-key)")
    return value


def _get(row: dict[str, Any], key: str | None) -> Any:
    """The value at `key`. A key that has the dots itself goes before a way through maps."""
    if key is None or key in row or "." not in key:
        return _MISSING if key is None else row.get(key, _MISSING)
    value: Any = row
    for part in key.split("."):
        value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
    return value


def _decode(line: bytes) -> dict[str, Any]:
    try:
        row = _json(line.decode())
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 at byte {error.start + 1} of the line") from error
    if not isinstance(row, dict):
        raise BadRow(f"is {_name(row)}, not a map")
    return row


def _json(text: str) -> Any:
    """Strictly: no key twice in a map, no number that is not finite."""
    try:
        return _DECODER.decode(text.strip(" \t\r\n"))
    except BadRow:
        raise
    except json.JSONDecodeError as error:
        raise BadRow(f"broken JSON at column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # an integer of more than 4300 digits; a thousand brackets
        raise BadRow(f"cannot be decoded: {error}") from error


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
