"""producers -> pipeline <- consumers <- trainer; what `millpond --help` loads; how long files and functions are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "pipeline": {"pipeline"},
    "producers": {"producers", "pipeline"},
    "consumers": {"consumers", "pipeline"},
    "trainer": {"trainer", "consumers", "pipeline"},
}
SHIM = ROOT / "producers" / "sglang_cpu" / "shim"
"Of another environment: what SGLang lacks on a CPU."
FILES = [
    path.relative_to(ROOT)
    for package in MAY_IMPORT
    for path in sorted((ROOT / package).rglob("*.py"))
    if not path.is_relative_to(SHIM)
]
FINDS_MODULES_BY_NAME = {Path("pipeline/cli.py"), Path("pipeline/code.py")}
"The dispatcher, and what loads the user's own functions. The supervisor starts the others as processes."


def tree(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def imported(file: Path) -> Iterator[str]:
    """Modules that `file` imports anywhere, inside functions too."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write imports in full"
            yield node.module or ""


def tops(file: Path) -> set[str]:
    return {module.partition(".")[0] for module in imported(file)}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_follow_the_directions(file: Path) -> None:
    ours = tops(file) & set(MAY_IMPORT)
    assert ours <= MAY_IMPORT[file.parts[0]]


@pytest.mark.parametrize("file", [f for f in FILES if f.parts[0] != "trainer"], ids=str)
def test_torch_stays_in_the_trainer_and_the_local_engine(file: Path) -> None:
    assert "torch" not in tops(file) or file.match("producers/engines/local*.py")


@pytest.mark.parametrize("file", FILES, ids=str)
def test_modules_are_found_by_name_in_two_places_only(file: Path) -> None:
    names = {node.attr for node in ast.walk(tree(file)) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree(file)) if isinstance(node, ast.Name)}
    assert not names & {"import_module", "__import__", "run_module", "run_path"} or file in FINDS_MODULES_BY_NAME


@pytest.mark.parametrize("file", FILES, ids=str)
def test_files_and_functions_stay_small(file: Path) -> None:
    functions = [n for n in ast.walk(tree(file)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [f"{f.name}: {size} lines" for f in functions if (size := (f.end_lineno or 0) - f.lineno + 1) > 50]
    assert long == []
    lines = (ROOT / file).read_bytes().count(b"\n")
    assert lines <= 250


@pytest.mark.parametrize("file", FILES, ids=str)
def test_checks_that_users_depend_on_survive_python_o(file: Path) -> None:
    assert not [node.lineno for node in ast.walk(tree(file)) if isinstance(node, ast.Assert)]


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `code`, which may print."""
    code = f"{code}\nimport sys; sys.stdout.write(chr(10) + ' '.join({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_loads_nothing_heavy() -> None:
    loaded = loaded_after("from pipeline.cli import main; main(['--help'])")
    assert "pipeline" in loaded
    assert not loaded & {"pydantic", "redis", "torch", "transformers", "numpy", "rich", "asyncio", "logging"}


def test_the_help_of_a_role_loads_no_engine() -> None:
    loaded = loaded_after("from pipeline import flags, modes")
    assert not loaded & {"redis", "torch", "transformers", "rich", "producers", "trainer", "consumers"}


def test_pipeline_and_consumers_load_no_torch() -> None:
    modules = [".".join(f.with_suffix("").parts) for f in FILES if f.parts[0] in ("pipeline", "consumers")]
    assert "torch" not in loaded_after("import " + ", ".join(m.removesuffix(".__init__") for m in modules))
