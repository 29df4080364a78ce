"""The supervisor's processes: each in a session of its own, gone when the supervisor is, its stderr kept in a file."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.tether import spawn

log = logging.getLogger(__name__)


@dataclass
class Child:
    """One process of the run, started again when it was killed."""

    name: str
    command: Callable[[int], list[str]]
    "arguments of millpond, by how often it was restarted"
    folder: Path
    "for NAME.err"
    env: dict[str, str] = field(repr=False)
    restarts: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.errors.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(self.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            self.process = spawn(
                [sys.executable, "-P", "-m", "pipeline.cli", *self.command(self.restarts)],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        finally:
            os.close(file)

    @property
    def errors(self) -> Path:
        return self.folder / f"{self.name}.err"

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    def poll(self) -> int | None:
        """Its exit code, negative if a signal ended it; None while it runs."""
        return self.process.poll() if self.process else 0

    def signal(self, number: int) -> None:
        if self.process and self.poll() is None:
            os.kill(self.process.pid, number)

    def restart(self) -> None:
        self.restarts += 1
        self.start()

    def last_words(self) -> str:
        """What it said on stderr, from its last traceback on."""
        text = self.errors.read_text(errors="replace").strip()
        start = text.rfind("Traceback (most recent call last)")
        return text[start:] if start >= 0 else "\n".join(text.splitlines()[-12:])


def end(children: list[Child], patience: Callable[[], float]) -> None:
    """SIGTERM to all, SIGKILL to who is still there after `patience` seconds; it may lessen meanwhile."""
    for child in children:
        child.signal(signal.SIGTERM)
    begun = time.monotonic()
    while any(child.poll() is None for child in children) and time.monotonic() - begun < patience():
        time.sleep(0.05)
    for child in children:
        if child.poll() is None:
            log.warning("%s did not end in %.0f s and is killed", child.name, time.monotonic() - begun)
            child.signal(signal.SIGKILL)
            if child.process:
                child.process.wait()
