"""Flags, environment, files: one field of a role's model is `--save-interval 5`, `MILLPOND_SAVE_INTERVAL=5` and
`save_interval = 5` in the TOML file that `--config` (or `MILLPOND_CONFIG`) names.

Precedence: flag, environment, file, preset, default. Values travel as text to the model, which alone decides what is
allowed, so a mistake reads the same wherever it stands, and names where. An empty value unsets an optional field, and
so does `none` where the field is no text; an empty variable counts as not given. One file and one environment serve all
roles: fields of other roles are passed over; what no role knows is an error in a file, and in the environment where it
is near to a name that one knows, else a warning.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from pipeline.config import ROLES, Section
from pipeline.errors import UsageError
from pipeline.log import mask
from pipeline.options import closest, flag, kinds, optional, read, titled

S = TypeVar("S", bound=Section)

PREFIX = "MILLPOND_"
OTHER_VARIABLES = (
    *("MILLPOND_CONFIG", "MILLPOND_REDIS_SERVER", "MILLPOND_SUPERVISED", "MILLPOND_CI"),
    *("MILLPOND_SGLANG_VENV", "MILLPOND_TRACKER_TIMEOUT"),
)
"MILLPOND_* that are no role's fields"
NEAR = 0.84
"How like a field's name an unknown variable must be to be taken for a slip; there may be others' under our prefix."
SECRET = frozenset({"redis_url", "engine_api_key", "rm_api_key", "wandb_key"})
ONCE = frozenset({"out", "resume", "auto_resume", "take_over", "wait", "load"})
"Fields that say how or where a start is made, and nothing of what the run is."
PRESETS = Path(__file__).with_name("presets")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Given:
    """A value and where it stands."""

    value: Any
    source: str
    "for people; a secret field's value is not in it"


Layer = dict[str, Given]
"By field name"


Preset = str | Mapping[str, Any] | None
"What goes before a model's defaults: the name of a file of pipeline/presets, or values by field"


def parse(model: type[S], argv: Sequence[str], environ: Mapping[str, str], prog: str, preset: Preset = None) -> S:
    """`model` filled from all sources.

    `model_fields_set` of the result holds what the user chose: a preset's values are not in it. Raises UsageError that
    names each mistake and its source; prints help and exits 0 after `--help`.
    """
    try:
        flags = read(model, argv, prog)
        path = str(flags.pop("config", "")) or environ.get(PREFIX + "CONFIG")
        chosen = {
            **(_from_file(model, Path(path)) if path else {}),
            **_from_environ(model, environ),
            **_from_flags(flags),
        }
        result = _build(model, {**_base(model, preset), **chosen})
    except UsageError as error:
        raise UsageError(mask(str(error))) from None
    result.model_fields_set.intersection_update(chosen)
    return result


def arguments(model: type[S], argv: Sequence[str], prog: str) -> tuple[S, list[str]]:
    """Flags, environment and file as `model`; and the words that belong to no flag."""
    flags, words = parted(model, argv)
    return parse(model, flags, os.environ, prog), words


def parted(model: type[Section], argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What belongs to flags, and the words that do not."""
    takes = {"--config", *(flag(name) for name, field in model.model_fields.items() if kinds(field) != [bool])}
    words: list[str] = []
    flags: list[str] = []
    before = ""
    for word in argv:
        (flags if word.startswith("-") or before in takes else words).append(word)
        before = "" if before in takes else word
    return flags, words


def dump(config: Section, idle: Mapping[str, str] | None = None) -> str:
    """`config` as TOML that `parse` reads back, by section.

    Commented out: what is unset, what is idle in this mode (`modes.idle`: field -> why), a key, a URL with a password.
    """
    parts = ["# All options of this run, as resolved from flags, environment, file and defaults.\n"]
    for heading, names in titled(type(config)).items():
        lines = (_toml(config, name, (idle or {}).get(name)) for name in names)
        parts.append(f"# --- {heading}\n" + "".join(f"{line}\n" for line in lines))
    return "\n".join(parts)


def digest(config: Section) -> str:
    """12 hex digits of the sha256 over all values but secrets; where a value came from does not count."""
    values = plain(config)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def plain(config: Section) -> dict[str, Any]:
    """All values as JSON has them, but secrets, and how this start came about."""
    return config.model_dump(mode="json", exclude=set(SECRET | ONCE))


# --- layers


def _base(model: type[Section], preset: Preset) -> Layer:
    if isinstance(preset, str):
        return _from_file(model, PRESETS / f"{preset}.toml")
    return {name: Given(value, f"{name} = {value!r}, as recorded") for name, value in (preset or {}).items()}


def _known(model: type[Section]) -> list[str]:
    """Fields of `model` and of all roles."""
    return list(dict.fromkeys(n for m in [model, *ROLES.values()] for n in m.model_fields))


def _given(name: str, value: Any, where: str, shown: str) -> Given:
    return Given(value, where if name in SECRET else where + shown)


def _from_flags(flags: Mapping[str, str | bool]) -> Layer:
    return {
        name: _given(name, value, flag(name), "" if isinstance(value, bool) else f" {value!r}")
        for name, value in flags.items()
    }


def _from_environ(model: type[Section], environ: Mapping[str, str]) -> Layer:
    fields = {PREFIX + name.strip("_").upper(): name for name in _known(model)}
    for variable, value in environ.items():
        known = variable in fields or variable in OTHER_VARIABLES or _of_kubernetes(variable, value)
        if variable.startswith(PREFIX) and value and not known:
            _unknown(variable, fields)
    return {
        name: _given(name, environ[variable], variable, f"={environ[variable]}")
        for variable, name in fields.items()
        if environ.get(variable)
    }


def _unknown(variable: str, fields: Mapping[str, str]) -> None:
    """UsageError where it looks like a slip, else a warning."""
    names = [name.removeprefix(PREFIX) for name in fields]
    if near := difflib.get_close_matches(variable.removeprefix(PREFIX), names, 1, NEAR):
        raise UsageError(
            f"unknown variable {variable}; did you mean {PREFIX}{near[0]}? Unset it if it is not meant for Millpond"
        )
    log.warning("%s is not used: no option has that name; see millpond run --help", variable)


def _of_kubernetes(variable: str, value: str) -> bool:
    """What it puts into every pod for a Service whose name begins with `millpond-`."""
    return re.search(r"_SERVICE_|_PORT_\d", variable) is not None or ("://" in value and variable.endswith("_PORT"))


def _from_file(model: type[Section], path: Path) -> Layer:
    fields = {name.strip("_"): name for name in _known(model)}
    layer: Layer = {}
    for key, value in _load(path).items():
        name = fields.get(key.replace("-", "_"))
        if name is None and isinstance(value, dict):
            raise UsageError(f"{path}: [{key}]: fields stand at the top of the file, outside any table")
        if name is None:
            raise UsageError(f"{path}: unknown field {key!r}{closest(key.replace('-', '_'), fields, 'millpond run')}")
        if name in layer:
            raise UsageError(f"{path}: {key!r} is given twice, with - and with _")
        layer[name] = _given(name, value, f"{path}: {key}", f" = {value!r}")
    return layer


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path}: not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--config {path}: not TOML: {error}") from None


# --- values


def _build(model: type[S], layers: Layer) -> S:
    mine = {name: given for name, given in layers.items() if name in model.model_fields}
    try:
        return model(**{name: _plain(model.model_fields[name], given.value) for name, given in mine.items()})
    except ValidationError as error:
        raise UsageError("\n".join(_problems(model, error, mine))) from None


def _plain(field: FieldInfo, value: Any) -> Any:
    """The value as a command line would give it; None where it unsets; tables and lists as they are, to be refused."""
    if isinstance(value, bool | int | float):
        value = json.dumps(value)
    if optional(field) and (value == "" or (value == "none" and _none_unsets(field))):
        return None
    return value


def _none_unsets(field: FieldInfo) -> bool:
    return optional(field) and not {str, Path} & set(kinds(field))


def _problems(model: type[Section], error: ValidationError, layers: Layer) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0])
        text = re.sub(r"^(Input should|String should|Value error, it must)", "must", problem["msg"])
        text = text.partition(", unable to")[0] + (", or none" if _none_unsets(model.model_fields[name]) else "")
        yield f"{layers[name].source if name in layers else flag(name)}: {text}"


def _toml(config: Section, name: str, idle: str | None) -> str:
    value, default = getattr(config, name), type(config).model_fields[name].default
    if value is None:
        return f"# {name} is unset" if default is None else f'{name} = "none"'
    text = json.dumps(value if isinstance(value, bool | int | float) else str(value), ensure_ascii=False)
    line = f"{name} = {text}".replace("\x7f", "\\u007f")
    if isinstance(value, SecretStr) or (name in SECRET and mask(line) != line):
        return f"# {mask(line)}  (not written; give it in {PREFIX}{name.upper()})"
    return f"# {line}  ({idle})" if idle else line
