"""A role's model as a command line: one flag a field, in groups by section; and what is said about an unknown flag."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from pipeline.config import ROLES, RunConfig, Section
from pipeline.errors import UsageError
from pipeline.foreign import instead
from pipeline.sections import Words


def flag(name: str) -> str:
    """`--save-interval` of `save_interval`; the underscore that keeps a field off another name is left out: `json_`."""
    return "--" + name.strip("_").replace("_", "-")


def optional(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


def kinds(field: FieldInfo) -> list[Any]:
    """The types a field's value may have, limits and None left out: `[int]` of `Positive | None`."""
    parts = get_args(field.annotation) if optional(field) else (field.annotation,)
    return [get_args(part)[0] if hasattr(part, "__metadata__") else part for part in parts if part is not type(None)]


def several(field: FieldInfo) -> bool:
    """Whether the flag takes several words."""
    marks = [mark for part in get_args(field.annotation) for mark in getattr(part, "__metadata__", ())]
    return any(isinstance(mark, Words) for mark in marks)


def titled(model: type[Section]) -> dict[str, list[str]]:
    """Field names by section: the first line of its docstring. A field that a role declares by itself stands in the
    section that RunConfig has it from, else under the role's own heading, `Options`."""
    sections = [c for c in (*RunConfig.__mro__[1:], *model.__mro__[1:]) if issubclass(c, Section)]
    left = dict.fromkeys(model.model_fields)
    groups: dict[str, list[str]] = {}
    for section in sections:
        names = [name for name in section.__annotations__ if name in left]
        for name in names:
            groups.setdefault((section.__doc__ or "").partition("\n")[0], []).append(name)
            del left[name]
    return {**groups, "Options": list(left)} if left else groups


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        if match := re.fullmatch(r"(\S+): expected (?:one|at least one) argument", message):
            message = f"{match[1]} needs a value; where it starts with -, write {match[1]}=VALUE"
        if match := re.fullmatch(r"(\S+): ignored explicit argument (.+)", message):
            message = f"{match[1]} takes no value, and has {match[2]}"
        raise UsageError(message)


def read(model: type[Section], argv: Sequence[str], prog: str) -> dict[str, str | bool]:
    """The flags in `argv` as text (`config` among them); raises UsageError; prints help and exits 0 after `--help`."""
    values, unknown = _parser(model, prog).parse_known_args(argv)
    if unknown:
        raise UsageError(_unknown(model, next((word for word in unknown if word.startswith("-")), unknown[0]), prog))
    return {name: shlex.join(value) if isinstance(value, list) else value for name, value in vars(values).items()}


def _parser(model: type[Section], prog: str) -> argparse.ArgumentParser:
    result = _Parser(
        prog=prog,
        usage="%(prog)s [options]",
        description=model.__doc__,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    result.add_argument("--config", metavar="FILE.toml", help="fields by name; flags and the environment win over it")
    for heading, names in titled(model).items():
        group = result.add_argument_group(heading)
        for name in names:
            field = model.model_fields[name]
            if kinds(field) == [bool]:
                group.add_argument(flag(name), dest=name, action=argparse.BooleanOptionalAction, help=_help(field))
            else:
                words = "+" if several(field) else None
                group.add_argument(flag(name), dest=name, nargs=words, metavar=_metavar(field), help=_help(field))
    return result


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    if field.default is None or "(default" in text:
        return text
    default = ("off", "on")[field.default] if kinds(field) == [bool] else field.default
    return f"{text} (default: {default})"


def _metavar(field: FieldInfo) -> str:
    for kind in kinds(field):
        if get_origin(kind) is Literal:
            return "{" + ",".join(map(str, get_args(kind))) + "}"
    return next((word for kind, word in ((int, "N"), (float, "X"), (Path, "PATH")) if kind in kinds(field)), "TEXT")


def _unknown(model: type[Section], word: str, prog: str) -> str:
    name = word.partition("=")[0]
    if not name.startswith("-"):
        return f"unexpected argument {word!r}: options start with --; see {prog} --help"
    owners = [role for role, other in ROLES.items() if name in map(flag, other.model_fields)]
    if owners:
        return f"{name} is no option of {prog}; it belongs to millpond {', '.join(owners)}"
    flags = ["--config", "--help", *map(flag, model.model_fields)]
    flags += [f"--no-{flag(name)[2:]}" for name, field in model.model_fields.items() if kinds(field) == [bool]]
    return f"unknown option {name}{closest(name, flags, prog)}"


def closest(word: str, words: Iterable[str], prog: str) -> str:
    """What to say after `word` was not among `words`: what another system's option is here, the nearest of them, or
    where they are listed."""
    if told := instead(word):
        return told
    found = difflib.get_close_matches(word, list(words), 1, 0.6)
    return f"; did you mean {found[0]}?" if found else f"; see {prog} --help"
