"""Logging: the standard library's, one line a record: `2026-11-29 20:16:31,123 INFO trainer step step=3 reward=0.52`.

    log = logging.getLogger(__name__)
    log.info("step %s", fields(step=3, reward=0.52))

What follows a record's first line (a traceback) is indented: a record starts where a line starts with a date.
Passwords in Redis URLs are masked in all of it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path

_PASSWORD = re.compile(
    r"(?P<start>\b(?:rediss?|unix)://[^\s:@/]*:)\S*@"  # up to the last @: a password may hold any character
    r"|(?P<query>[?&]password=)[^&\s'\"]*"
)


def mask(text: str) -> str:
    """`text` with the password of every Redis URL in it as ***."""
    return _PASSWORD.sub(lambda m: f"{m['start']}***@" if m["start"] else f"{m['query']}***", text)


class fields:  # used like a function
    """`key=value` pairs, put together only when the record is written; floats get 4 digits, odd text gets quotes."""

    def __init__(self, **values: object) -> None:
        self._values = values

    def __str__(self) -> str:
        return " ".join(f"{key}={_show(value)}" for key, value in self._values.items())


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if re.fullmatch(r"[^\s\"=]+", text) else json.dumps(text, ensure_ascii=False)


class _Lines(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {role} %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return mask(super().format(record)).replace("\n", "\n    ")


def setup(role: str, folder: Path | None, level: int | str = logging.INFO, terminal: bool | None = None) -> None:
    """Send all records to stderr (if `terminal`; by default unless a supervisor started this process) and to
    `folder`/logs/`role`.log, which only its owner may read.

    A second call takes the first one's place.
    """
    handlers: list[logging.Handler] = []
    if "MILLPOND_SUPERVISED" not in os.environ if terminal is None else terminal:
        handlers.append(logging.StreamHandler(sys.stderr))
    if folder is not None:
        path = folder / "logs" / f"{role}.log"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        handlers.append(logging.FileHandler(path, encoding="utf-8", errors="backslashreplace"))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h.formatter, _Lines)]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(_Lines(role))
        root.addHandler(handler)
    root.setLevel(level)
