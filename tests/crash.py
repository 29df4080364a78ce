"""A Redis that is killed and comes back without the end of its log."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.server import EmbeddedServer


def log_of(server: EmbeddedServer) -> Path:
    """The file that commands are appended to."""
    (log,) = (server.data / "appendonlydir").glob("*.incr.aof")
    return log


def log_size(server: EmbeddedServer) -> int:
    """Where the log ends now; with durability `process` all that was answered is in it."""
    return log_of(server).stat().st_size


def crash(server: EmbeddedServer, keep: int | None = None) -> None:
    """SIGKILL, and a start on what stands in the first `keep` bytes of the log."""
    server.kill()
    if keep is not None:
        os.truncate(log_of(server), keep)
    server.start()
