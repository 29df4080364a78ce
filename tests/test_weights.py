from __future__ import annotations

import hashlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.errors import WeightsError
from trainer.backends.echo import EchoBackend
from trainer.weights import aside, clean, digest, newest_version, save_aside


class Files(EchoBackend):
    """Weights that are some bytes; with `fail` the disk is full half-way."""

    def __init__(self, fail: bool = False, content: bytes = b"tensors") -> None:
        super().__init__(0.0)
        self.fail = fail
        self.content = content

    def save_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(self.content)
        if self.fail:
            raise OSError("No space left on device")
        (folder / "config.json").write_text("{}")


def test_weights_appear_under_their_version_with_their_digest(tmp_path: Path) -> None:
    path, found = save_aside(Files(), tmp_path / "weights", 12)
    assert path == tmp_path / "weights" / "00000012"
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "model.safetensors"]
    assert found == hashlib.sha256(b"model.safetensors\x007\x00tensors").hexdigest()
    assert newest_version(tmp_path / "weights") == 12


def test_only_the_owner_can_read_them(tmp_path: Path) -> None:
    path, _ = save_aside(Files(), tmp_path / "weights", 1)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.iterdir()} == {0o600}


def test_the_digest_tells_names_and_contents_apart(tmp_path: Path) -> None:
    def of(**files: bytes) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, content in files.items():
            (folder / f"{name}.safetensors").write_bytes(content)
        (folder / "config.json").write_text(str(time.time_ns()))
        return digest(folder)

    assert of(a=b"12", b=b"3") == of(b=b"3", a=b"12")
    assert len({of(a=b"12", b=b"3"), of(a=b"1", b=b"23"), of(a=b"123"), of(b=b"123")}) == 4


def test_a_backend_without_weights_has_an_empty_digest(tmp_path: Path) -> None:
    path, found = save_aside(EchoBackend(0.0), tmp_path, 3)
    assert found == ""
    assert list(path.iterdir()) == []
    assert newest_version(tmp_path) == 3


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        save_aside(Files(fail=True), tmp_path, 1)
    assert list(tmp_path.iterdir()) == []
    assert newest_version(tmp_path) == 0


def test_a_version_is_never_written_twice(tmp_path: Path) -> None:
    path, _ = save_aside(Files(), tmp_path, 1)
    with pytest.raises(WeightsError, match="00000001"):
        save_aside(Files(content=b"others"), tmp_path, 1)
    assert (path / "model.safetensors").read_bytes() == b"tensors"
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]


def test_a_writer_that_is_killed_leaves_nothing_visible_and_the_next_one_tidies_up(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, sys\n"
        "from trainer.weights import aside\n"
        "with aside(pathlib.Path(sys.argv[1]) / '00000001') as folder:\n"
        "    (folder / 'model.safetensors').write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=Path(__file__).parents[1], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    assert newest_version(tmp_path) == 0
    save_aside(Files(), tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]


def test_only_leftovers_of_the_dead_are_tidied_up(tmp_path: Path) -> None:
    host = socket.gethostname()
    left = {
        "living": tmp_path / f".aside-00000001-{os.getppid()}@{host}",
        "mine, from a former life": tmp_path / f".aside-00000001-{os.getpid()}@{host}",
        "elsewhere, at work": tmp_path / ".aside-00000001-1@elsewhere",
        "elsewhere, long silent": tmp_path / ".aside-00000002-1@elsewhere",
    }
    for folder in left.values():
        folder.mkdir()
    long_ago = time.time() - 100_000
    os.utime(left["elsewhere, long silent"], (long_ago, long_ago))
    save_aside(Files(), tmp_path, 3)
    assert [name for name, folder in left.items() if folder.exists()] == ["living", "elsewhere, at work"]


def test_clean_deletes_all_versions_but_those_to_keep(tmp_path: Path) -> None:
    for version in (1, 2, 3, 100_000_000):
        save_aside(Files(), tmp_path, version)
    other = tmp_path / "notes"
    other.mkdir()
    clean(tmp_path, {2, 7})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000002", "notes"]


def test_versions_are_compared_as_numbers(tmp_path: Path) -> None:
    for name in ("00000009", "100000000", "99999999", "junk", "123"):
        (tmp_path / name).mkdir()
    assert newest_version(tmp_path) == 100_000_000
    assert newest_version(tmp_path / "missing") == 0


def test_cleaning_where_nothing_is_does_nothing(tmp_path: Path) -> None:
    clean(tmp_path / "missing", set())


def test_a_filled_folder_takes_its_place_in_one_step(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "checkpoint"
    with aside(final) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
        assert not final.exists()
    assert (final / "sub" / "file").read_text() == "x"


def test_the_echo_backend_goes_on_counting_after_a_load(tmp_path: Path) -> None:
    first = EchoBackend(0.0)
    first.train([], 0)
    first.save(tmp_path)
    second = EchoBackend(0.0)
    second.load(tmp_path)
    assert second.steps == 1
    with pytest.raises(WeightsError):
        second.load(tmp_path / "missing")
