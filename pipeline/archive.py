"""What each training step trained on, in files: FOLDER/00000012.msgpack of the step after which 12 are done.

A file is a stream of msgpack values: a map (`Record`, with the number of groups and the sha256 of what follows), then
each group in the order it was trained on, as a binary that `pipeline.codec` reads. Complete or invisible.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgpack

from pipeline.codec import decode
from pipeline.errors import MessageError, UsageError
from pipeline.types import Group

FORMAT = 1
NAME = re.compile(r"(\d{8,})\.msgpack")
LARGEST = (1 << 31) - 1
SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
"What tells models apart, of a config.json."


@dataclass(frozen=True)
class Record:
    """A step, but for its groups."""

    step: int
    "training steps done with it, as in metrics.jsonl"
    version: int
    "of the weights it began with"
    lineage: tuple[tuple[int, int], ...]
    exact: bool
    "what was published last is what it began with"
    figures: dict[str, Any]
    "of its line in metrics.jsonl: what does not follow from the groups, nor from training"
    options: dict[str, Any]
    "of the trainer, as resolved"
    model: dict[str, Any] = field(default_factory=dict)
    "as `shape_of` has it; empty where there was none"


def name_of(step: int) -> str:
    return f"{step:08d}.msgpack"


def steps(folder: Path) -> list[int]:
    """That are there, ascending."""
    return sorted(int(found[1]) for path in folder.glob("*.msgpack") if (found := NAME.fullmatch(path.name)))


def write(path: Path, record: Record, messages: list[bytes]) -> None:
    """A new private file, on the disk when this returns."""
    digest = hashlib.sha256(b"".join(messages)).hexdigest()
    head = {"millpond_archive": FORMAT, **asdict(record), "groups": len(messages), "sha256": digest}
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgpack.packb(head))
        file.writelines(msgpack.packb(message) for message in messages)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> tuple[Record, list[Group]]:
    """UsageError that names file and step where it is not whole, or not one of these."""
    record, messages = read_raw(path)
    groups = []
    for number, message in enumerate(messages, 1):
        try:
            groups.append(decode(message))
        except MessageError as error:
            raise UsageError(f"{path}: step {record.step}: group {number} of {len(messages)}: {error}") from None
    return record, groups


def read_raw(path: Path) -> tuple[Record, list[bytes]]:
    """The groups as they were encoded."""
    try:
        with path.open("rb") as file:
            head, values = _unpacked(path, file)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    record = _record(path, head)
    if path.name != name_of(record.step) and NAME.fullmatch(path.name):
        raise UsageError(f"{path}: it holds step {record.step}: was it renamed?")
    if len(values) != head["groups"]:
        raise UsageError(f"{path}: step {record.step}: it ends after {len(values)} of {head['groups']} groups")
    if hashlib.sha256(b"".join(values)).hexdigest() != head["sha256"]:
        raise UsageError(f"{path}: step {record.step}: it is damaged: its groups are not those that were written")
    return record, values


def _unpacked(path: Path, file: Any) -> tuple[dict[str, Any], list[bytes]]:
    """The head, and as many groups as are whole."""
    stream = msgpack.Unpacker(file, max_buffer_size=LARGEST, max_map_len=1 << 20, max_array_len=1 << 20)
    head: Any = None
    values: list[bytes] = []
    try:
        head = next(stream, None)
        values = [value for value in stream if isinstance(value, bytes)] if _ours(head) else []
    except (ValueError, UnicodeDecodeError, RecursionError):
        pass  # too few groups then, or no head
    if not _ours(head):
        raise UsageError(f"{path}: it is no file of a millpond archive")
    if head["millpond_archive"] != FORMAT:
        raise UsageError(f"{path}: an archive of format {head['millpond_archive']}; this program reads {FORMAT}")
    return head, values


def _ours(head: Any) -> bool:
    return isinstance(head, dict) and isinstance(head.get("millpond_archive"), int)


def _record(path: Path, head: dict[str, Any]) -> Record:
    try:
        values = {f.name: head[f.name] for f in fields(Record)}
        values["lineage"] = tuple((int(a), int(b)) for a, b in head["lineage"])
        if not isinstance(head["groups"], int) or not isinstance(head["sha256"], str):
            raise TypeError("groups or sha256")
        return Record(**{**values, "step": int(head["step"]), "version": int(head["version"])})
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: it is no whole file of a millpond archive ({error})") from None


def shape_of(checkpoint: Path | None) -> dict[str, Any]:
    """What can be told of a model by its config.json; empty where there is none."""
    if checkpoint is None:
        return {}
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        return {name: config[name] for name in SHAPE if name in config}
    except (OSError, ValueError, TypeError):
        return {}


def misfits(path: Path, record: Record, groups: list[Group], model: dict[str, Any]) -> Iterator[str]:
    """Why `model` cannot be trained on a step."""
    where = f"{path}: step {record.step}"
    for name, value in record.model.items():
        if model.get(name) != value:
            yield f"{where} was recorded with a model of {name} {value}; --hf-checkpoint has {model.get(name)}"
            return
    size = int(model.get("vocab_size") or 0)
    traces = ((g.prompt.id, q) for g in groups for s in g.samples for q in s.sequences)
    for id, trace in traces if size else ():
        most = max((int(part.max()) for part in (trace.prompt_tokens, trace.tokens) if part.size), default=0)
        if most >= size:
            yield f"{where}: token {most} of prompt {id} is outside the vocabulary of --hf-checkpoint, {size}"
            return
