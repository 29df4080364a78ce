"""The Lua scripts, one a verb, made callable.

Each file says in its header what it is given: `-- keys:` names the keys of the run (pipeline.keys) it touches, which
become KEYS in that order and locals of the same name (`:` as `_`); `-- flags:` are Redis script flags. A helper in
`_name.lua` is put in front of every script that calls `name(`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipeline.keys import NAMES, Keys

FOLDER = Path(__file__).parent / "scripts"
HELPERS = (
    "now",
    "fence",
    "agreed",
    "pending",
    "room",
    "fields",
    "proper",
    "settle",
    "owned",
    "opened",
    "done",
    "again",
    "popped",
    "fed",
    "vanished",
    "readopt",
)
"In the order they may call each other."

Arg = str | bytes | int | float


@dataclass(frozen=True)
class Script:
    """One verb's script."""

    name: str
    keys: tuple[str, ...]
    "names in pipeline.keys"
    text: str
    "what Redis is sent"

    @property
    def sha(self) -> str:
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def call(self, keys: Keys, *args: Arg) -> list[Arg]:
        """numkeys, keys and arguments: what follows the text in EVAL, or the digest in EVALSHA."""
        return [len(self.keys), *(keys[name] for name in self.keys), *args]


def _header(body: str, word: str) -> list[str]:
    found = re.search(rf"^-- {word}: (.*)$", body, re.MULTILINE)
    return found.group(1).split() if found else []


def _bare(lua: str) -> str:
    """Without comments and indentation: push sends its text with every group."""
    lines = (re.sub(r"(^|\s)--.*$", "", line).strip() for line in lua.splitlines())
    return "\n".join(line for line in lines if line)


@cache
def load(name: str) -> Script:
    """The script of `scripts/NAME.lua` with all it needs in front."""
    body = (FOLDER / f"{name}.lua").read_text()
    names = tuple(_header(body, "keys"))
    unknown = [n for n in names if n not in NAMES]
    if unknown:
        raise KeyError(f"{name}.lua names keys that do not exist: {unknown}")
    called = body
    parts: list[str] = []
    for helper in reversed(HELPERS):
        if re.search(rf"\b{helper}\(", called):
            text = (FOLDER / f"_{helper}.lua").read_text()
            parts.insert(0, text)
            called += text
    shebang = "#!lua" + "".join(f" flags={flag}" for flag in _header(body, "flags"))
    local_names = ", ".join(n.replace(":", "_") for n in names)
    values = ", ".join(f"KEYS[{i + 1}]" for i in range(len(names)))
    return Script(name, names, f"{shebang}\nlocal {local_names} = {values}\n" + _bare("".join(parts) + body))
