"""The Lua scripts as text: what a header says must be what the body does."""

from __future__ import annotations

import re

import pytest

from pipeline.keys import NAMES, Keys
from pipeline.scripts import FOLDER, HELPERS, Script, load

VERBS = sorted(p.stem for p in FOLDER.glob("*.lua") if not p.name.startswith("_"))
LOCALS = {name.replace(":", "_"): name for name in NAMES}
WRITES = re.compile(
    r"'(SET|SETBIT|DEL|INCRBY|BITOP|HSET|HDEL|HINCRBY|LTRIM|LPOP|RPUSH|RENAME|SADD|SREM|ZADD|ZREM|XADD|XACK|XDEL|XGROUP|"
    r"XREADGROUP|PUBLISH)'"
)
WAITS_FOR_MEMORY = {"feed", "refeed", "register", "lease", "push"}
"What takes memory and gives none back; all else must work when memory is full."


def names_used(text: str) -> set[str]:
    """Key locals that the code reads, strings, comments and fields of tables apart."""
    code = re.sub(r"--.*", "", text)
    code = re.sub(r"'[^']*'", "''", code)
    return {word for word in re.findall(r"(?<![.\w])[a-z_]+\b(?!\s*=[^=])", code) if word in LOCALS}


def body(script: Script) -> str:
    """Without the shebang and the line that makes locals of KEYS."""
    return script.text.split("\n", 2)[2]


@pytest.mark.parametrize("name", VERBS)
def test_a_script_declares_exactly_the_keys_it_uses(name: str) -> None:
    script = load(name)
    used = {LOCALS[word] for word in names_used(body(script))}
    assert used == set(script.keys)
    assert len(set(script.keys)) == len(script.keys)


@pytest.mark.parametrize("name", VERBS)
def test_no_script_reads_keys_or_spells_a_key_by_itself(name: str) -> None:
    assert "KEYS[" not in body(load(name))
    assert "millpond:" not in load(name).text


@pytest.mark.parametrize("name", VERBS)
def test_every_key_arrives_under_its_own_name(name: str) -> None:
    script = load(name)
    keys = Keys("r")
    count, *rest = script.call(keys, "a", 1)
    assert rest == [*(keys[k] for k in script.keys), "a", 1]
    assert count == len(script.keys)
    declared = script.text.split("\n", 2)[1]
    left, right = declared.removeprefix("local ").split(" = ")
    assert left.split(", ") == [k.replace(":", "_") for k in script.keys]
    assert right.split(", ") == [f"KEYS[{i + 1}]" for i in range(len(script.keys))]


@pytest.mark.parametrize("name", VERBS)
def test_a_script_may_write_when_memory_is_full_unless_it_only_takes_and_reads_if_it_only_reads(name: str) -> None:
    script = load(name)
    flags = script.text.split("\n", 1)[0].removeprefix("#!lua").split()
    if not WRITES.search(script.text):
        assert flags == ["flags=no-writes"]
    elif name in WAITS_FOR_MEMORY:
        assert flags == []
    else:
        assert flags == ["flags=allow-oom"]


@pytest.mark.parametrize("name", VERBS)
def test_taking_comments_out_leaves_the_code_whole(name: str) -> None:
    tokens = re.findall(r"'[^'\n]*'|--.*", (FOLDER / f"{name}.lua").read_text())
    assert not any("--" in token for token in tokens if token.startswith("'"))
    assert "--" not in load(name).text


@pytest.mark.parametrize("name", VERBS)
def test_a_script_carries_the_helpers_it_calls_each_once_and_before_its_use(name: str) -> None:
    text = load(name).text
    for helper in HELPERS:
        at = text.find(f"local function {helper}(")
        called = re.search(rf"(?<!function )\b{helper}\(", text)
        assert (at >= 0) == (called is not None)
        assert called is None or at < called.start()
        assert text.count(f"local function {helper}(") <= 1


def test_every_helper_is_listed_and_used() -> None:
    assert set(HELPERS) == {p.stem[1:] for p in FOLDER.glob("_*.lua")}
    for helper in HELPERS:
        assert any(f"local function {helper}(" in load(name).text for name in VERBS)


def test_a_key_that_does_not_exist_is_refused_by_name() -> None:
    assert set(LOCALS) == {name.replace(":", "_") for name in NAMES}
    with pytest.raises(KeyError, match="nonsense"):
        Keys("r")["nonsense"]


def test_push_travels_light() -> None:
    """Its text is sent with every group, since a missing script would not stop the MULTI it is in."""
    assert len(load("push").text) < 3700
