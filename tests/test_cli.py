from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import COMMANDS, main
from pipeline.errors import Fenced

ROOT = Path(__file__).parents[1]


def fenced(argv: list[str]) -> int:
    raise Fenced(f"another trainer took over {argv[0]}")


def interrupted(argv: list[str]) -> int:
    raise KeyboardInterrupt


def bug(argv: list[str]) -> int:
    return 1 // len(argv)


def lost_socket(argv: list[str]) -> int:
    raise BrokenPipeError


def count(argv: list[str]) -> int:
    return len(argv)


OURS = {f.__name__: (f"{__name__}:{f.__name__}", "") for f in (fenced, interrupted, bug, lost_socket, count)}


def test_help_names_every_command(capsys: Any) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if f"\n  {name} " not in text] == []


def test_without_a_command_the_help_goes_to_stderr(capsys: Any) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: millpond COMMAND")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("statsu", "unknown command 'statsu'; did you mean status?"),
        ("xyzzy", "unknown command 'xyzzy'; see millpond --help"),
        ("--run", "unknown option '--run'; did you mean run?"),
    ],
)
def test_an_unknown_command_gets_the_nearest_one(capsys: Any, word: str, said: str) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == f"millpond: {said}\n"


def test_a_command_gets_the_arguments_after_its_name_and_gives_the_exit_code() -> None:
    assert main(["count", "--a", "b", "c"], OURS) == 3


def test_an_error_of_millponds_is_a_sentence_and_its_exit_code(capsys: Any) -> None:
    assert main(["fenced", "demo"], OURS) == 4
    assert capsys.readouterr().err == "millpond: another trainer took over demo\n"


def test_an_interrupt_is_130() -> None:
    assert main(["interrupted"], OURS) == 130


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        main(["bug"], OURS)


def test_a_reader_that_leaves_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    for unbuffered in ("", "1"):
        done = subprocess.run(
            [sys.executable, "-m", "pipeline.cli", "--help"],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
    os.close(write)


def test_a_broken_socket_is_a_bug_all_the_same() -> None:
    code = f"from pipeline.cli import main; main(['lost_socket'], {OURS})"
    path = f"{Path(__file__).parent}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.endswith("\nBrokenPipeError\n")
