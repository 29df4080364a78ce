"""Which trackers a configuration asks for: what is idle without them, what they need installed, how one is started."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from pydantic import SecretStr

from pipeline.config import Section, Tracking
from pipeline.options import flag

KINDS = {"tensorboard": "use_tensorboard", "wandb": "use_wandb", "prometheus": "prometheus_port"}
"tracker -> the field that asks for it"
NEEDS = {"wandb": ("wandb", "wandb"), "prometheus": ("prometheus_client", "prometheus")}
"tracker -> module, and the extra that installs it"


def asked(config: Tracking) -> list[str]:
    return [kind for kind, field in KINDS.items() if getattr(config, field)]


def fields(kind: str) -> tuple[str, ...]:
    """The options of one tracker."""
    prefixes = ("tensorboard_", "tb_") if kind == "tensorboard" else (f"{kind}_",)
    return KINDS[kind], *(name for name in Tracking.model_fields if name.startswith(prefixes) and name != KINDS[kind])


def idle(config: Section) -> list[tuple[bool, str, tuple[str, ...]]]:
    """Rules as `modes.idle` has them."""
    if not isinstance(config, Tracking):
        return []
    wanted = asked(config)
    return [(kind not in wanted, f"it belongs to {flag(field)}", fields(kind)[1:]) for kind, field in KINDS.items()]


def missing(config: Section) -> Iterator[str]:
    """What is not installed, before anything starts."""
    for kind in asked(config) if isinstance(config, Tracking) else ():
        if kind in NEEDS and find_spec(NEEDS[kind][0]) is None:
            module, extra = NEEDS[kind]
            yield f"{flag(KINDS[kind])} needs the package {module}: pip install 'millpond[{extra}]'"


def flags(config: Tracking, kind: str) -> list[str]:
    """Of `millpond track` for one tracker; a key is no flag."""
    values = {name: getattr(config, name) for name in fields(kind)}
    given = {name: value for name, value in values.items() if value is not None and not isinstance(value, SecretStr)}
    return [flag(name) if value is True else f"{flag(name)}={value}" for name, value in given.items()]
