"""Values from numpy, torch and user code made plain, or refused by a MessageError that names the field.

torch is never imported: a tensor is known by what it can do.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import MessageError

MAX_ITEMS, MAX_DEPTH = 65536, 32
"entries in one list or map; levels of nesting in metadata"
MAX_TOTAL = 1 << 20
"lists, maps and their entries in one message: each takes a byte there, and up to 80 when it is read"

MAX_INT = 2**63 - 1

Item = TypeVar("Item")
Made = TypeVar("Made")


def plain(value: Any) -> Any:
    """A numpy scalar, a 0-d array or a 0-d torch tensor as Python's bool, int or float; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def number(field: str, value: Any) -> float:
    """bool, int, float or one of numpy's or torch's, as a finite float."""
    if type(value) is float and math.isfinite(value):
        return value
    value = plain(value)
    if not isinstance(value, (int, float)):
        raise MessageError(field, f"{kind(value)} where a number is expected")
    with contextlib.suppress(OverflowError):  # an int over 1e308
        if math.isfinite(made := float(value)):
            return made
    raise MessageError(field, f"{value} is not finite" if isinstance(value, float) else "too large for a float")


def integer(field: str, value: Any, low: int = 0) -> int:
    """An int, no bool, from `low` to 2^63 - 1."""
    if type(value) is int and low <= value <= MAX_INT:
        return value
    value = plain(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise MessageError(field, f"{kind(value)} where an integer is expected")
    if not low <= value <= MAX_INT:
        raise MessageError(field, f"an integer below {low} or above 2^63 - 1")
    return int(value)


def text(field: str, value: Any, wire: bool = False) -> str:
    """`wire`: text that is no Unicode (a lone surrogate) comes as its bytes."""
    if isinstance(value, str):
        return value
    if wire and type(value) is bytes:
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode("utf-8", "surrogatepass")
    raise MessageError(field, f"{kind(value)} where text is expected")


def array(field: str, value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A 1-d array of `dtype`: float16, float64 and a torch bfloat16 become float32; integers must fit."""
    if type(value) is np.ndarray and value.dtype == dtype and value.ndim == 1:
        return value
    try:
        found = np.asarray(_from_torch(value) if hasattr(value, "detach") else value)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise MessageError(field, f"no array of numbers: {error}") from None
    if found.ndim != 1:
        raise MessageError(field, f"shape {list(found.shape)} where one dimension is expected")
    whole = dtype.kind in "iu"
    if found.size and found.dtype.kind not in ("biu" if whole else "iuf"):
        raise MessageError(field, f"{found.dtype} where {dtype} is expected")
    if found.size and whole and (found.min() < np.iinfo(dtype).min or found.max() > np.iinfo(dtype).max):
        raise MessageError(field, f"values from {found.min()} to {found.max()} do not fit {dtype}")
    with np.errstate(over="ignore"):  # what overflows becomes infinite, which is refused later
        return found.astype(dtype)


def _from_torch(tensor: Any) -> Any:
    """numpy has no bfloat16."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def json_value(value: Any, wire: bool = False, depth: int = 0) -> Any:
    """What metadata may hold: JSON values with text keys. Tuples become lists, numpy and torch scalars plain."""
    if value is None or isinstance(value, (str, float, bool)):
        return value
    if isinstance(value, (list, tuple, dict)) and depth == MAX_DEPTH:
        raise MessageError("", f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return json_map(value, wire, depth + 1)
    if isinstance(value, (list, tuple)):
        return each("", value, lambda item: json_value(item, wire, depth + 1))
    if isinstance(value, bytes) and wire:
        return text("", value, wire)
    if isinstance(value := plain(value), (int, float)):
        return value if isinstance(value, (bool, float)) else integer("", value, low=-1 << 63)
    raise MessageError("", f"{kind(value)}; metadata holds None, bool, int, float, text, lists and maps")


def json_map(value: dict[Any, Any], wire: bool = False, depth: int = 1) -> dict[str, Any]:
    if len(value) > MAX_ITEMS:
        raise MessageError("", f"{len(value)} entries; at most {MAX_ITEMS}")
    made = {}
    for key, item in value.items():
        if not isinstance(key, str) and not (wire and isinstance(key, bytes)):
            raise MessageError("", f"the key {key!r:.40}; keys are text")
        try:
            made[text("", key, wire)] = json_value(item, wire, depth)
        except MessageError as error:
            raise below(f".{key!s:.40}", error) from None
    return made


def each(field: str, items: Collection[Item], make: Callable[[Item], Made]) -> list[Made]:
    """`make` of every item; a MessageError gets the item's place in front: `samples[3].text`."""
    if len(items) > MAX_ITEMS:
        raise MessageError(field, f"{len(items)} entries; at most {MAX_ITEMS}")
    made = []
    for index, item in enumerate(items):
        try:
            made.append(make(item))
        except MessageError as error:
            raise below(f"{field}[{index}]", error) from None
    return made


def below(prefix: str, error: MessageError) -> MessageError:
    dot = "" if not error.field or error.field[0] in ".[" else "."
    return MessageError(prefix + dot + error.field, error.problem)


def kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
