"""What torchrun tells each process that it starts: how many there are, and which one it is."""

from __future__ import annotations

import os

from pipeline.errors import UsageError

SIZE = "WORLD_SIZE"
NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"what besides it several processes need to meet"
START = "torchrun --nproc-per-node N --no-python -- millpond train ... sets it all; for one process unset WORLD_SIZE"


def world() -> int:
    """Processes that train as one; 1 without torchrun. Errors: UsageError, as of `rank`."""
    size = _number(SIZE, "1")
    if size < 1:
        raise UsageError(f"{SIZE}={size}: there is at least one process; {START}")
    return size


def rank() -> int:
    """Of this process. UsageError where the variables are not what torchrun sets."""
    size, found = world(), _number("RANK", "0")
    if lacking := [name for name in NEEDED if size > 1 and not os.environ.get(name)]:
        raise UsageError(f"{SIZE}={size} is set without {', '.join(lacking)}; {START}")
    if not 0 <= found < size:
        raise UsageError(f"RANK={found}: the ranks of {SIZE}={size} are 0 to {size - 1}; {START}")
    if size > 1 and not 0 < _number("MASTER_PORT", "") < 1 << 16:
        raise UsageError(f"MASTER_PORT={os.environ['MASTER_PORT']} is no port: 1 to 65535; {START}")
    return found


def without() -> dict[str, str]:
    """The environment for a process that is to be the only one."""
    return {name: value for name, value in os.environ.items() if name not in (SIZE, *NEEDED)}


def address() -> str:
    """Where they meet."""
    return f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"


def _number(name: str, default: str) -> int:
    text = os.environ.get(name) or default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text} is no number; {START}") from None
