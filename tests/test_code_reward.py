"""Programs against their tests: what counts as the program, what as a test, and what a program must not do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import GenerateConfig
from pipeline.errors import RewardError, UsageError
from pipeline.types import COMPLETED
from producers.rewards import RewardInput, opened
from producers.rewards.programs import code, last_block
from producers.rewards.run_code import run_code

try:
    run_code("", [{"input": "", "output": ""}], 10.0)
except UsageError as error:
    pytest.skip(str(error), allow_module_level=True)

DOUBLE = {"inputs": ["1\n", "21"], "outputs": ["2", "42\n"]}


def given(program: str, label: Any = None, **metadata: Any) -> RewardInput:
    return RewardInput("q", label, metadata, f"Here:\n```python\n{program}\n```\n", COMPLETED, 0, 7)


def shares(*programs: RewardInput) -> list[float | None]:
    async def main() -> list[float | None]:
        async with opened(GenerateConfig(rm_type="code", reward_key="share", rm_memory=512), False) as scorer:
            return [(await scorer.score_group([one]))[0] for one in programs]

    return asyncio.run(main())


def test_a_program_is_run_where_it_can_be_killed_and_scored_by_its_tests() -> None:
    programs = (
        given("print(2 * int(input()))", metadata_is="ignored", tests=DOUBLE),
        given("print(2)", json.dumps(DOUBLE)),
        given("def f(x): return 2 * x", test_list=["assert f(1) == 2", "assert f(2) == 5"]),
        given("def f(x): return 2 * x", "for n in range(9):\n    assert f(n) == n + n"),
        given("x = bytearray(1 << 31)", tests=[{"input": "", "output": ""}]),
        given("no program", tests=DOUBLE),
    )
    assert shares(*programs) == [1.0, 0.5, 0.5, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.socket()",
        "import socket; socket.socketpair()",
        "import os; os.fork()",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.kill(os.getppid(), 0)",
        "import os; os.kill(-1, 0)",
        "open('{folder}/new', 'w')",
        "open('{folder}/there', 'a')",
        "import os; os.unlink('{folder}/there')",
        "import os; os.rename('{folder}/there', '{folder}/other')",
        "import os; os.chmod('{folder}/there', 0o777)",
        "import os; os.truncate('{folder}/there', 0)",
        "import os; os.utime('{folder}/there')",
        "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (9, 9))",
        "while True: pass",
        "print('x' * (1 << 21))",
        "import time; time.sleep(60)",
        "import os; os._exit(0)",
        "import sys; sys.exit()",
        "raise SystemExit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGUSR2)",
    ],
)
def test_what_a_program_must_not_do_fails_its_test(program: str, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("as it was")
    there.chmod(0o640)
    before = there.stat()
    assert run_code(program.replace("{folder}", str(tmp_path)), [{"code": "print('end')"}], 0.5)["score"] == 0
    after = there.stat()
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert there.read_text() == "as it was"
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_what_a_program_may_do() -> None:
    program = "import threading, json\nt = threading.Thread(target=lambda: print(json.dumps([1])))\nt.start()\nt.join()"
    assert run_code(program, [{"input": "", "output": "[1]\n\n"}], 2.0) == {"score": 1.0, "share": 1.0}
    assert run_code("print(open('/etc/hostname').read() != '')", [{"input": "", "output": "True"}], 2.0)["score"] == 1


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```\na\n```", "a"),
        ("```python\na\n\n b\n```\nand\n```py\nc\n```\nend", "c"),
        ("```python\na\n```\nand\n```py\nc", "a"),
        ("text ``` a ``` text", None),
        ("```python\na", None),
        ("  ```python\n  a\n  ```", "  a"),
        ("", None),
        ("```\n" * 100_001, ""),
    ],
)
def test_the_program_is_the_last_complete_block(text: str, block: str | None) -> None:
    assert last_block(text) == block


@pytest.mark.parametrize(
    ("label", "metadata"),
    [
        (None, {}),
        ("", {}),
        (5, {}),
        ('{"inputs": [1], "outputs": [2], "fn_name": "f"}', {}),
        (None, {"tests": []}),
        (None, {"tests": {"inputs": ["1"], "outputs": []}}),
        (None, {"tests": [{"stdin": "1"}]}),
        (None, {"test_list": ["assert True", 5]}),
    ],
)
def test_a_row_without_tests_is_named(label: Any, metadata: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match="code: prompt 7 has no tests that can be run"):
        code(given("pass", label, **metadata))
