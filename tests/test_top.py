"""`millpond top` on a terminal of 80 columns: what it shows, how it ends, and that the terminal is as it was."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_see_it import Capture, Place, filled, told

from pipeline import top
from pipeline.server import EmbeddedServer

ROOT = Path(__file__).parents[1]


@pytest.fixture
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("here") / "demo"
    with EmbeddedServer(folder / "redis") as server:
        filled(server.url, "demo").close()
        lines = [{"step": i, "time": i, "rollout/raw_reward": i / 8} for i in range(1, 9)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        yield Place(folder, server.url)


class Terminal:
    """80 x 40, and `millpond top` on it."""

    def __init__(self, *argv: str) -> None:
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        self.before = termios.tcgetattr(self.theirs)
        env = {**os.environ, "TERM": "xterm"}
        env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.cli", "top", *argv],
            cwd=ROOT, env=env, stdin=self.theirs, stdout=self.theirs, stderr=self.theirs, start_new_session=True,
        )  # fmt: skip
        self.shown = b""

    def until(self, word: bytes) -> None:
        end = time.monotonic() + 60
        while word not in self.shown:
            assert time.monotonic() < end, self.shown
            if select.select([self.ours], [], [], 0.2)[0]:
                self.shown += os.read(self.ours, 1 << 16)

    def ends(self) -> int:
        """The exit code; what is written meanwhile is read."""
        end = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < end, self.shown
            if select.select([self.ours], [], [], 0.1)[0]:
                self.shown += os.read(self.ours, 1 << 16)
        while select.select([self.ours], [], [], 0)[0]:
            self.shown += os.read(self.ours, 1 << 16)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def terminal(demo: Place) -> Iterator[Terminal]:
    made = Terminal(str(demo.folder), "--run", "demo", "--every", "0.1")
    yield made
    made.close()


def test_q_leaves_and_the_terminal_is_as_it_was(terminal: Terminal) -> None:
    terminal.until(b"q leaves")
    assert termios.tcgetattr(terminal.theirs) != terminal.before
    os.write(terminal.ours, b"q")
    assert terminal.ends() == 0
    assert termios.tcgetattr(terminal.theirs) == terminal.before
    assert terminal.shown.rindex(b"\x1b[?1049l") > terminal.shown.rindex(b"\x1b[?1049h")
    assert terminal.shown.rindex(b"\x1b[?25h") > terminal.shown.rindex(b"\x1b[?25l")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_terminal_is_as_it_was_after_a_signal(terminal: Terminal, number: int) -> None:
    terminal.until(b"q leaves")
    terminal.process.send_signal(number)
    assert terminal.ends() == 130
    assert termios.tcgetattr(terminal.theirs) == terminal.before
    assert terminal.shown.rindex(b"\x1b[?1049l") > terminal.shown.rindex(b"\x1b[?1049h")


def test_each_picture_fits_80_columns_and_40_lines(terminal: Terminal) -> None:
    for _ in range(2):
        terminal.until(b"q leaves")
        picture = terminal.shown.partition(b"q leaves")[0].rpartition(b"\x1b[H")[2].decode()
        lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", picture).splitlines()
        assert max(map(len, lines)) <= 80
        assert 20 < len(lines) <= 40
        terminal.shown = terminal.shown.partition(b"q leaves")[2]


def test_without_a_terminal_it_prints_once(demo: Place, capsys: Capture) -> None:
    text = told(capsys, top.main, str(demo.folder), "--run", "demo")
    for words in (
        "run demo in", "running", "It stands still", "a fatal error waits", "version      3, step 1", "40 fed of 80",
        "1 of 8 groups", "5 of 12 groups may be leased", "1: zero_std 1", "node-a", "99.5", "▁▂▃▄▅▆▇█ 1",
    ):  # fmt: skip
        assert words in text, words
    assert "q leaves" not in text


def test_a_curve_of_equal_values_is_flat() -> None:
    assert top.bars([2.0, 2.0]) == "▁▁"
    assert top.bars([0.0, 1.0, 0.5]) == "▁█▅"
