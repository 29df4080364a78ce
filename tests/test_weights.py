from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.errors import WeightsError
from trainer.backends.echo import EchoBackend
from trainer.weights import clean, digest, newest_version, save
from trainer.workshop import Workshop, last_epoch, made


class Files(EchoBackend):
    """Weights that are some bytes; with `fail` the disk is full half-way."""

    def __init__(self, fail: bool = False, content: bytes = b"tensors") -> None:
        super().__init__(0.0)
        self.fail = fail
        self.content = content

    def save_weights(self, folder: Path, form: str = "hf") -> None:
        (folder / "model.safetensors").write_bytes(self.content)
        if self.fail:
            raise OSError("No space left on device")
        (folder / "config.json").write_text("{}")


def shop(root: Path, epoch: int = 1) -> Workshop:
    """That of a trainer at work."""
    found = Workshop(root, epoch)
    found.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return found


def seen(root: Path) -> list[str]:
    """What is in place under `root`."""
    return sorted(path.name for path in root.iterdir() if not path.name.startswith(".trainer-"))


def test_weights_appear_under_their_version_with_their_digest(tmp_path: Path) -> None:
    path, found = save(Files(), shop(tmp_path / "weights"), 12)
    assert path == tmp_path / "weights" / "00000012"
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "model.safetensors"]
    assert found == hashlib.sha256(b"model.safetensors\x007\x00tensors").hexdigest()
    assert newest_version(tmp_path / "weights") == 12


def test_only_the_owner_can_read_them(tmp_path: Path) -> None:
    path, _ = save(Files(), shop(tmp_path), 1)
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
    path, found = save(EchoBackend(0.0), shop(tmp_path), 3)
    assert found == ""
    assert list(path.iterdir()) == []
    assert newest_version(tmp_path) == 3


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        save(Files(fail=True), shop(tmp_path), 1)
    assert seen(tmp_path) == []
    assert newest_version(tmp_path) == 0


def test_a_version_is_never_written_twice(tmp_path: Path) -> None:
    path, _ = save(Files(), shop(tmp_path), 1)
    with pytest.raises(WeightsError, match="00000001"):
        save(Files(content=b"others"), shop(tmp_path), 1)
    assert (path / "model.safetensors").read_bytes() == b"tensors"
    assert seen(tmp_path) == ["00000001"]


def test_a_writer_that_is_killed_leaves_nothing_visible(tmp_path: Path) -> None:
    shop(tmp_path)
    script = (
        "import os, pathlib, signal, sys\n"
        "from trainer.workshop import Workshop\n"
        "with Workshop(pathlib.Path(sys.argv[1]), 1).making('00000001') as folder:\n"
        "    (folder / 'model.safetensors').write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=Path(__file__).parents[1], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert seen(tmp_path) == []
    assert newest_version(tmp_path) == 0
    assert os.listdir(shop(tmp_path).folder) == ["00000001"]
    save(Files(), shop(tmp_path, 2), 1)
    assert seen(tmp_path) == ["00000001"]


def test_without_its_workshop_a_trainer_puts_nothing_in_place_and_takes_nothing_away(tmp_path: Path) -> None:
    old, new = shop(tmp_path, 1), shop(tmp_path, 2)
    save(Files(), old, 1)
    late = old.making("00000002")
    (late.__enter__() / "model.safetensors").write_bytes(b"made by the old one")
    new.take_away(old.folder)
    with pytest.raises(FileNotFoundError):
        late.__exit__(None, None, None)
    with pytest.raises(FileNotFoundError), old.making("00000003"):
        pass
    clean(old, set())
    with pytest.raises(FileNotFoundError):
        old.set_aside(tmp_path / "00000001", "00000001.given-up")
    assert seen(tmp_path) == ["00000001"]
    assert (tmp_path / "00000001/model.safetensors").read_bytes() == b"tensors"


def test_the_last_epoch_is_that_of_the_newest_workshop_anywhere(tmp_path: Path) -> None:
    assert last_epoch(tmp_path / "nowhere") == 0
    for place, epoch in ((tmp_path, 2), (tmp_path / "weights", 11), (tmp_path / "checkpoints", 9)):
        shop(place, epoch)
    (tmp_path / ".trainer-x").mkdir()
    assert last_epoch(tmp_path) == 11


def test_clean_deletes_all_versions_but_those_to_keep(tmp_path: Path) -> None:
    for version in (1, 2, 3, 100_000_000):
        save(Files(), shop(tmp_path), version)
    other = tmp_path / "notes"
    other.mkdir()
    clean(shop(tmp_path), {2, 7})
    assert seen(tmp_path) == ["00000002", "notes"]


def test_versions_are_compared_as_numbers(tmp_path: Path) -> None:
    for name in ("00000009", "100000000", "99999999", "junk", "123"):
        (tmp_path / name).mkdir()
    assert newest_version(tmp_path) == 100_000_000
    assert newest_version(tmp_path / "missing") == 0


def test_cleaning_where_nothing_is_does_nothing(tmp_path: Path) -> None:
    clean(Workshop(tmp_path / "missing", 1), set())


def test_a_filled_folder_takes_its_place_in_one_step(tmp_path: Path) -> None:
    folder, final = tmp_path / "making", tmp_path / "checkpoint"
    folder.mkdir()
    with made(folder, final):
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
        assert not final.exists()
    assert (final / "sub" / "file").read_text() == "x"


def test_not_even_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "00000001").mkdir()
    with pytest.raises(WeightsError, match="there already"), shop(tmp_path).making("00000001"):
        pass


def test_the_echo_backend_goes_on_counting_after_a_load(tmp_path: Path) -> None:
    first = EchoBackend(0.0)
    first.train([], 0)
    first.save(tmp_path)
    second = EchoBackend(0.0)
    second.load(tmp_path)
    assert second.steps == 1
    with pytest.raises(WeightsError):
        second.load(tmp_path / "missing")
