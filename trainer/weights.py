"""Weights on disk: complete or invisible, one folder a version. `aside` serves checkpoints too.

ROOT/00000012/               complete
ROOT/.aside-NAME-PID@HOST/   being written or deleted, or left by a dead process
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.errors import WeightsError
from trainer.backends.base import Backend

ABANDONED = 3600.0
"seconds after which another host's unfinished folder, to which no file was added, counts as left behind"

_VERSION = re.compile(r"\d{8,}")
_ASIDE = re.compile(r"\.aside-.+-(\d+)@(.+)", re.DOTALL)


def save_aside(backend: Backend, root: Path, version: int) -> tuple[Path, str]:
    """The backend's weights as ROOT/VERSION, durable and complete, and their digest, which is empty if it has none.

    A version that exists already is never written again: WeightsError.
    """
    final = root / f"{version:08d}"
    with aside(final) as folder:
        backend.save_weights(folder)
        found = digest(folder)
    return final, found


@contextmanager
def aside(final: Path) -> Iterator[Path]:
    """A private folder to fill, which becomes `final` in one step when the block ends, and vanishes if it raises.

    One writer a process and parent folder: what an earlier one left under this process's name is deleted.
    """
    final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(final.parent)
    folder = _hidden(final)
    folder.mkdir(mode=0o700)
    try:
        yield folder
        _settle(folder)
        try:
            folder.rename(final)
        except OSError as error:
            raise WeightsError(f"{final}: cannot be put in place, it may be there already: {error}") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _fsync(final.parent)


def digest(folder: Path) -> str:
    """sha256, in hex, over the *.safetensors by name, of each: name, NUL, decimal size, NUL, bytes. No file: empty."""
    paths = sorted(folder.glob("*.safetensors"))
    total = hashlib.sha256()
    for path in paths:
        total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                total.update(block)
    return total.hexdigest() if paths else ""


def newest_version(root: Path) -> int:
    """The highest complete version under `root`, 0 where there is none."""
    return max(_versions(root), default=0)


def clean(root: Path, keep: set[int]) -> None:
    """Delete every complete version but these; nobody sees one half deleted."""
    for version, path in _versions(root).items():
        if version in keep:
            continue
        hidden = _hidden(path)
        with suppress(FileNotFoundError):  # another process was faster
            path.rename(hidden)
            shutil.rmtree(hidden)


def _versions(root: Path) -> dict[int, Path]:
    if not root.is_dir():
        return {}
    return {int(path.name): path for path in root.iterdir() if _VERSION.fullmatch(path.name)}


def _hidden(final: Path) -> Path:
    return final.with_name(f".aside-{final.name}-{os.getpid()}@{socket.gethostname()}")


def _sweep(root: Path) -> None:
    for path in root.glob(".aside-*"):
        found = _ASIDE.fullmatch(path.name)
        if found and _left_behind(path, int(found[1]), found[2]):
            shutil.rmtree(path, ignore_errors=True)


def _left_behind(path: Path, pid: int, host: str) -> bool:
    if host != socket.gethostname():
        with suppress(FileNotFoundError):
            return time.time() - path.stat().st_mtime > ABANDONED
        return False
    if pid == os.getpid():  # a container's new process often has the dead one's name
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _settle(folder: Path) -> None:
    """Private and on the disk, every file before its folder."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.chmod(0o700 if path.is_dir() else 0o600)
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
