"""What a resume has other than the start before it, field by field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipeline.errors import UsageError
from pipeline.flags import ONCE, SECRET, parse
from pipeline.modes import idle
from pipeline.options import flag
from pipeline.sections import Section

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Change:
    name: str
    "of the field"
    before: object
    now: object

    def __str__(self) -> str:
        return f"{flag(self.name)} {_shown(self.before)} -> {_shown(self.now)}"


def _shown(value: object) -> str:
    return "unset" if value is None else ("off", "on")[value] if isinstance(value, bool) else str(value)


def since(path: Path, now: S) -> list[Change]:
    """What `now` has other than the resolved options in `path` (pipeline.flags.dump); none where there is no such file.

    Secrets, where a start is made, and what does nothing now are left out. UsageError where `path` cannot be read.
    """
    if not path.exists():
        return []
    before = parse(type(now), ["--config", str(path)], {}, "millpond")
    passed = {*SECRET, *ONCE, *idle(now)}
    pairs = ((name, getattr(before, name), getattr(now, name)) for name in type(now).model_fields if name not in passed)
    return [Change(*pair) for pair in pairs if pair[1] != pair[2]]


def readable(path: Path, now: S) -> tuple[list[Change], str]:
    """As `since`; where the file is another version's, why it cannot be compared."""
    try:
        return since(path, now), ""
    except UsageError as error:
        return [], str(error)
