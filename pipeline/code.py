"""The user's own code, named by a dotted path `module.function`.

Paths come from a process's own command line, file or environment, never from Redis; the run's `config` only holds their
digests, so that a worker started with other code is told so.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from pipeline.errors import UsageError


def load(dotted: str, flag: str) -> Callable[..., Any]:
    """The function that `dotted` names; UsageError with `flag` where there is none.

    The current folder is searched last, so that a file in it never takes the place of an installed module. An exception
    that the module raises while it is imported, a missing import of its own included, passes through untouched.
    """
    module_name, _, name = dotted.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in dotted.split(".")):
        raise UsageError(f"{flag} {dotted!r}: not of the form module.function")
    module = _import(module_name, f"{flag} {dotted!r}")
    function = getattr(module, name, None)
    if function is None:
        where = getattr(module, "__file__", None) or "a package without __init__.py"
        raise UsageError(f"{flag} {dotted!r}: module {module_name!r} ({where}) has no {name!r}")
    if not callable(function):
        raise UsageError(f"{flag} {dotted!r}: {name!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def digest(dotted: str) -> str:
    """16 hex digits of the sha256 of the path: tells two paths apart, not two versions of the code."""
    return hashlib.sha256(dotted.encode(errors="surrogateescape")).hexdigest()[:16]


def _import(name: str, where: str) -> ModuleType:
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"{where}: there is no module {error.name!r}, neither installed, nor on PYTHONPATH, nor in {os.getcwd()}"
        ) from error
