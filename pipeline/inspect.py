"""`millpond inspect`: what stands in the queues and streams, decoded; nothing is consumed.

groups and prompts are listed as they will be taken, dead, quarantine and errors newest first. What does not decode is
shown as what it is: bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import show
from pipeline.broker import Broker
from pipeline.config import Positive, option
from pipeline.entries import Entry, archived, dead, errors, groups, prompts, quarantine
from pipeline.errors import UsageError
from pipeline.find import Look, found
from pipeline.flags import arguments


class InspectLook(Look):
    """Looks into a run: millpond inspect groups|prompts|dead|quarantine|errors [FOLDER or NAME], archive PATH; consumes
    nothing."""

    limit: Positive = option(10, "entries to show")
    json_: bool = option(False, "one JSON document instead of text, with all texts and tokens")


@dataclass(frozen=True)
class Kind:
    """One thing to look into."""

    read: Callable[[Broker, int], tuple[int, list[Entry]]]
    "how many there are, and the first of them"
    order: str
    head: tuple[str, ...]
    row: Callable[[Entry], tuple[object, ...]]
    below: str = ""
    "field whose lines stand below the row"


def main(argv: list[str]) -> int:
    options, words = arguments(InspectLook, argv, "millpond inspect")
    if words[:1] == ["archive"]:
        return _archive(options, words[1:])
    if not words or words[0] not in KINDS:
        got = f", not {words[0]!r}" if words else ""
        raise UsageError(
            f"say what to inspect: {', '.join(KINDS)}, archive{got}; then, if needed, a run's folder or name"
        )
    name, kind = words[0], KINDS[words[0]]
    with found(options, words[1:]) as run:
        total, entries = kind.read(run.broker, options.limit)
        if options.json_:
            show.document({"run": run.run, "kind": name, "total": total, "entries": entries})
        else:
            show.line(f"run {run.run}: {len(entries)} of {total} {name}, {kind.order}")
            _report(kind, entries)
    return 0


def _archive(options: InspectLook, words: list[str]) -> int:
    if len(words) != 1 or not Path(words[0]).exists():
        raise UsageError("which archive? Give its folder, or one of its files: runs/NAME/archive/00000001.msgpack")
    path = Path(words[0])
    total, entries = archived(path, options.limit)
    steps = path.is_dir()
    if options.json_:
        show.document({"archive": str(path), "total": total, "entries": entries})
    else:
        what = "steps, newest first" if steps else "groups, as they were trained on"
        show.line(f"{path}: {len(entries)} of {total} {what}")
        _report(STEPS if steps else KINDS["groups"], entries)
    return 0


def _report(kind: Kind, entries: list[Entry]) -> None:
    rows = [tuple(_cell(value) for value in kind.row(entry)) for entry in entries]
    if kind.below:
        for entry, row in zip(entries, rows, strict=True):
            show.line("\n" + "  ".join(row))
            for line in str(entry.get(kind.below, "")).splitlines():
                show.line("    " + show.clean(line))
    elif rows:
        show.table(kind.head, rows)


def _cell(value: object) -> str:
    return "-" if value is None else show.shorten(show.clean(str(value)), 200)


def _group(entry: Entry) -> tuple[object, ...]:
    if "undecodable" in entry:
        return ("?", "", "", "", "", "", "", show.size(entry["bytes"]), f"undecodable: {entry['undecodable']}")
    samples = entry["samples"]
    status: dict[str, int] = {}
    for sample in samples:
        status[sample["status"]] = status.get(sample["status"], 0) + 1
    return (
        entry["id"],
        entry["attempt"],
        _span([v for v in entry["versions"] if v is not None]) + ("?" if None in entry["versions"] else ""),
        "?" if entry["lag"] is None else entry["lag"],
        show.shorten(" ".join("-" if s["reward"] is None else f"{s['reward']:.3g}" for s in samples), 24),
        _span([sum(len(q["tokens"]) for q in s["sequences"]) for s in samples]),
        ", ".join(f"{n} {word}" for word, n in sorted(status.items())),
        show.size(entry["bytes"]),
        entry["worker"],
    )


def _span(values: list[int]) -> str:
    low, high = min(values, default=None), max(values, default=None)
    return "" if low is None else str(low) if low == high else f"{low}-{high}"


def _prompt(entry: Entry) -> tuple[object, ...]:
    return (
        *_fields(entry, "id", "attempt", "strikes", "stream"),
        f"{entry['worker']}, {show.ago(entry['leased_ms'] / 1000)}" if entry["worker"] else "waits",
        entry.get("record"),
    )


def _fields(entry: Mapping[str, Any], *names: str) -> Iterator[object]:
    return (entry.get(name) for name in names)


KINDS = {
    "groups": Kind(
        groups,
        "oldest first",
        ("id", "attempt", "versions", "lag", "rewards", "tokens", "samples", "size", "worker"),
        _group,
    ),
    "prompts": Kind(
        prompts, "as they are leased", ("id", "attempt", "strikes", "stream", "leased by", "record"), _prompt
    ),
    "dead": Kind(
        dead,
        "newest first",
        ("time", "id", "attempt", "strikes", "reason", "record"),
        lambda e: (*_fields(e, "time", "id", "attempt", "strikes", "reason", "record"),),
    ),
    "quarantine": Kind(
        quarantine,
        "newest first",
        ("time", "bytes", "sha256", "problem", "head"),
        lambda e: (*_fields(e, "time", "length"), str(e.get("sha256"))[:12], *_fields(e, "problem", "head")),
    ),
    "errors": Kind(
        errors,
        "newest first",
        ("time", "worker", "epoch", "what"),
        lambda e: (*_fields(e, "time", "worker", "epoch", "what"),),
        below="trace",
    ),
}

STEPS = Kind(
    lambda broker, limit: (0, []),
    "newest first",
    ("step", "version", "groups", "size"),
    lambda e: (*_fields(e, "step", "version", "groups"), show.size(e["bytes"])),
)
"Files of an archive."
