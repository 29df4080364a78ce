"""The data folder of an embedded Redis: its lock, its password and where its socket is. All 0600 in a 0700 folder.

lock        held (flock) by the server itself for as long as it lives
password    made once for a folder
socket      path of the unix socket; in a short private folder of its own, since such a path has 104 bytes at most
redis.log   what the server says
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from pipeline.errors import ServerError

SOCKET_BYTES = 103
LIVING_PATIENCE, DYING_PATIENCE = 2.0, 30.0
"seconds to wait for the lock of a server that answers (it may be stopping), and of one that does not"


@dataclass(frozen=True)
class Access:
    """How to reach a server."""

    socket: Path
    password: str = field(repr=False)

    @property
    def url(self) -> str:
        return f"unix://:{self.password}@{quote(str(self.socket))}"

    def ask(self) -> str:
        """The answer to PING: `+PONG`, an error such as `-LOADING ...`, or nothing."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5.0)
            connection.connect(str(self.socket))
            connection.sendall(f"AUTH {self.password}\r\nPING\r\n".encode())
            with connection.makefile("rb") as replies:
                replies.readline()
                return replies.readline().decode("ascii", "replace").strip()
        return ""


def read(data: Path) -> Access | None:
    """None where the files are missing or torn."""
    try:
        password, path = (data / "password").read_text(), (data / "socket").read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Access(Path(path), password) if re.fullmatch(r"[\w-]{20,}", password) and path else None


def prepare(data: Path) -> Access:
    """Call with the lock held. Password and, where possible, socket are those of the last time: clients reconnect."""
    last = read(data)
    access = Access(_socket(last), last.password if last else secrets.token_urlsafe(32))
    _write(data / "password", access.password)
    _write(data / "socket", str(access.socket))
    return access


def _write(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".new")
    aside.unlink(missing_ok=True)
    with open(aside, "x", opener=private) as file:
        file.write(text)
    aside.replace(path)


def private(path: str, flags: int) -> int:
    """An opener for `open`: what it creates is 0600."""
    return os.open(path, flags, 0o600)


def _socket(last: Access | None) -> Path:
    if last and _ours(last.socket.parent) and not last.ask():  # it answers: this folder is a copy of a living run's
        return last.socket
    for parent in (tempfile.gettempdir(), "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix="millpond-", dir=parent))
        if len(os.fsencode(folder / "redis.sock")) <= SOCKET_BYTES:
            return folder / "redis.sock"
        folder.rmdir()
    raise ServerError("no folder with a short path for a unix socket: set TMPDIR to one")


def _ours(folder: Path) -> bool:
    """Made now, or a folder (no link) of ours that nobody else may enter: /tmp is everybody's."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def lock(data: Path) -> int:
    """The locked file, for the server to inherit. A ServerError where a server lives in the folder."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        data.chmod(0o700)
        file = os.open(data / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ServerError(f"{data} cannot hold Redis data: {error.strerror}") from None
    begun = time.monotonic()
    while not _try(file, fcntl.LOCK_EX):
        waited = time.monotonic() - begun
        if waited > DYING_PATIENCE or (waited > LIVING_PATIENCE and (access := read(data)) and access.ask()):
            os.close(file)
            raise ServerError(f"a server is already running on the Redis data in {data}: stop that run first")
        time.sleep(0.05)
    return file


def _try(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def locate(data: Path) -> str | None:
    """The URL of the server that lives in `data`, for any process of the same user; None where none lives."""
    try:
        file = os.open(data / "lock", os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        free = _try(file, fcntl.LOCK_SH)  # for an instant: `lock` waits longer
    finally:
        os.close(file)
    access = None if free else read(data)
    return access.url if access else None
