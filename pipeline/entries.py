"""What stands in a run's queues and streams, as JSON values. Looked at, never consumed; anything may be broken."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import archive, codec, show
from pipeline.broker import Broker
from pipeline.errors import MessageError
from pipeline.replies import policy_of
from pipeline.room import lag
from pipeline.scripts import load
from pipeline.types import Group, Policy, Sample, Sequence

Entry = dict[str, Any]
NUMBERS = ("id", "attempt", "strikes", "epoch", "length")
HEAD = 64
"bytes of an undecodable message that are shown"


def groups(broker: Broker, limit: int) -> tuple[int, list[Entry]]:
    """How many groups are in the list, and the first `limit` of them."""

    def ask() -> list[Any]:
        pipe = broker.client.pipeline(transaction=True)
        pipe.llen(broker.keys["groups"])
        pipe.lrange(broker.keys["groups"], 0, limit - 1)
        pipe.hgetall(broker.keys["weights"])
        return pipe.execute()

    total, messages, weights = broker.patiently(ask)
    policy = policy_of(weights)
    return total, [group(message, policy) for message in messages]


def archived(path: Path, limit: int) -> tuple[int, list[Entry]]:
    """How many groups a file of an archive has, and the first `limit`; of a folder its steps, the newest first."""
    if path.is_dir():
        files = [path / archive.name_of(step) for step in reversed(archive.steps(path))]
        return len(files), [_step(file) for file in files[:limit]]
    record, messages = archive.read_raw(path)
    policy = Policy(record.version, "", "hf", "", record.step, 0.0, record.lineage)
    return len(messages), [group(message, policy) for message in messages[:limit]]


def _step(file: Path) -> Entry:
    record, messages = archive.read_raw(file)
    told = {"step": record.step, "version": record.version, "lineage": record.lineage, "groups": len(messages)}
    return {**told, "bytes": file.stat().st_size, "figures": record.figures, "options": record.options}


def group(message: bytes, policy: Policy | None) -> Entry:
    """A message decoded, or what can be said of it."""
    try:
        decoded = codec.decode(message)
    except MessageError as error:
        digest = hashlib.sha256(message).hexdigest()
        head = show.text(message[:HEAD])
        return {"undecodable": str(error), "bytes": len(message), "sha256": digest, "head": head}
    prompt = decoded.prompt
    return {
        "id": prompt.id,
        "attempt": prompt.attempt,
        "strikes": prompt.strikes,
        "worker": decoded.worker,
        "seconds": decoded.seconds,
        "bytes": len(message),
        "versions": sorted(decoded.versions, key=lambda v: -1 if v is None else v),
        "lag": group_lag(decoded, policy),
        "prompt": _record(prompt.record),
        "samples": [_sample(sample) for sample in decoded.samples],
    }


def group_lag(decoded: Group, policy: Policy | None) -> int | None:
    """Publications between its oldest token and the current weights; None where either is unknown."""
    lags = [lag(version, policy.version, policy.lineage) if policy else None for version in decoded.versions]
    known = [x for x in lags if x is not None]
    return max(known) if known and len(known) == len(lags) else None


def oldest_lag(broker: Broker, policy: Policy | None) -> int | None:
    """The lag of the group that is taken next; None without one."""
    message: Any = broker.patiently(lambda: broker.client.lindex(broker.keys["groups"], 0))
    return group(message, policy).get("lag") if message else None


def _sample(sample: Sample) -> Entry:
    return {
        "index": sample.index,
        "status": sample.status,
        "reward": sample.reward,
        "text": sample.text,
        "metadata": sample.metadata,
        "sequences": [_sequence(sequence) for sequence in sample.sequences],
    }


def _sequence(sequence: Sequence) -> Entry:
    return {
        "prompt_tokens": sequence.prompt_tokens.tolist(),
        "tokens": sequence.tokens.tolist(),
        "logprobs": sequence.logprobs.tolist(),
        "loss_mask": sequence.loss_mask.tolist(),
        "versions": [list(span) for span in sequence.versions],
    }


def _record(text: str) -> Any:
    """A prompt's record decoded; as it is where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def prompts(broker: Broker, limit: int) -> tuple[int, list[Entry]]:
    """How many entries are in the two streams, and the first `limit`: retry before fresh, leased ones included."""

    def ask() -> list[Any]:
        pipe = broker.client.pipeline(transaction=True)
        script = load("leased")
        pipe.execute_command("EVAL", script.text, *script.call(broker.keys))
        for name in ("prompts:retry", "prompts"):
            pipe.xlen(broker.keys[name])
            pipe.xrange(broker.keys[name], count=limit)
        return pipe.execute()

    leases, retries, retry, freshes, fresh = broker.patiently(ask)
    held = {(where, id): (show.text(worker), ms) for where, id, worker, ms, _ in leases}
    found: list[Entry] = []
    for name, entries in ((b"retry", retry), (b"fresh", fresh)):
        for id, fields in entries:
            worker, ms = held.get((name, id), (None, None))
            lease = {"stream": show.text(name), "entry": show.text(id), "worker": worker, "leased_ms": ms}
            found.append({**lease, **_fields(fields)})
    return retries + freshes, found[:limit]


def dead(broker: Broker, limit: int) -> tuple[int, list[Entry]]:
    return _stream(broker, "dead", limit)


def quarantine(broker: Broker, limit: int) -> tuple[int, list[Entry]]:
    return _stream(broker, "quarantine", limit)


def errors(broker: Broker, limit: int) -> tuple[int, list[Entry]]:
    return _stream(broker, "errors", limit)


def _stream(broker: Broker, name: str, limit: int) -> tuple[int, list[Entry]]:
    """Length, and the newest entries with the time they were written."""

    def ask() -> list[Any]:
        pipe = broker.client.pipeline(transaction=True)
        pipe.xlen(broker.keys[name])
        pipe.xrevrange(broker.keys[name], count=limit)
        return pipe.execute()

    total, entries = broker.patiently(ask)
    return total, [
        {"time": show.moment(int(id.split(b"-")[0])), "entry": show.text(id), **_fields(fields)}
        for id, fields in entries
    ]


def _fields(raw: Mapping[bytes, bytes]) -> Entry:
    """A stream entry's fields; `prompt` is the record decoded, and `record` as it is."""
    values: Entry = {show.text(key): show.text(value) for key, value in raw.items()}
    values |= {name: int(values[name]) for name in NUMBERS if values.get(name, "").isdecimal()}
    return {**values, "record": values["prompt"], "prompt": _record(values["prompt"])} if "prompt" in values else values
