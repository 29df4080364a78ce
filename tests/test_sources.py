"""Where prompts come from: other systems' files as they are, Parquet, several files with weights, tasks, own code."""

from __future__ import annotations

import datetime
import json
import logging
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pipeline.config import FeedConfig
from pipeline.errors import UsageError
from pipeline.prompts import Part, parts
from producers import feeder
from producers.dataset import Dataset
from producers.rows import RowKeys
from producers.sources import Source, open_source

DATA = Path(__file__).parent / "data"


def source(prompt_data: object = None, **fields: Any) -> Source:
    return open_source(FeedConfig.model_validate({"prompt_data": prompt_data, **fields}))


def records(found: Source, places: range | None = None) -> list[Any]:
    return [json.loads(record) for record in found.records(places or range(found.rows or 0))]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered(path: Path, name: str, rows: int) -> Path:
    return write(path / f"{name}.jsonl", *({"input": f"{name}{n}", "label": n} for n in range(rows)))


def prompts(found: Source, places: range | None = None) -> list[str]:
    return [record["prompt"] for record in records(found, places)]


# -- other systems' rows


@pytest.mark.parametrize(
    ("name", "labels", "metadata"),
    [
        ("gsm8k", ["blades.\n#### 72", "#### 1,240", "#### 17"], {}),
        ("slime-dapo-math", ["72", "1240", "17"], {}),
        ("verl-gsm8k", ["72", "1240", "17"], {"data_source": "openai/gsm8k", "split": "train", "index": 0}),
        ("verl-dapo-math", ["72", "1240", "17"], {"data_source": "math_dapo", "index": "0000-0"}),
    ],
)
@pytest.mark.parametrize("parquet", [False, True])
def test_known_data_loads_unchanged(
    name: str, labels: list[str], metadata: dict[str, Any], parquet: bool, tmp_path: Path
) -> None:
    path = DATA / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if parquet:
        path = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    found = records(source(path, rm_type="row" if "verl" in name else "math"))
    assert [record["prompt"] for record in found] == [row.get("prompt", row.get("question")) for row in rows]
    assert all(record["label"].endswith(label) for record, label in zip(found, labels, strict=True))
    assert metadata.items() <= found[0]["metadata"].items()


def test_slimes_metadata_and_tools_travel_with_the_row() -> None:
    choice, sum_ = records(source(DATA / "slime-metadata.jsonl", rm_type="length"))
    assert choice["metadata"]["rm_type"] == "gpqa"
    assert sum_ == {
        "prompt": "Add 2 and 2.",
        "label": 4,
        "metadata": {"rm_type": "math", "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]},
    }


# -- keys


def test_a_key_may_lead_through_maps_and_a_key_with_dots_goes_before(tmp_path: Path) -> None:
    row = {"a": {"b": {"c": "q"}}, "x": {"y": 1}, "x.y": 2, "m": {"n": {"k": 3}}}
    (found,) = records(source(write(tmp_path / "d", row), input_key="a.b.c", label_key="x.y", metadata_key="m.n"))
    assert found == {"prompt": "q", "label": 2, "metadata": {"k": 3}}


def test_keys_that_are_not_named_are_the_same_for_all_rows_of_a_file(tmp_path: Path) -> None:
    """A row that has another file's key beside none of its own has no label: it must not get the wrong one."""
    path = write(
        tmp_path / "d",
        {"prompt": "a"},
        {"prompt": "b", "answer": "two"},
        {"prompt": "c", "label": 3},
        {"prompt": "d", "question": "?", "answer": "four", "extra_info": {"k": 1}},
        {"prompt": "e", "metadata": {"k": 2}},
    )
    dataset = Dataset.open(path)
    assert dataset.keys == RowKeys("prompt", "answer", "extra_info", None)
    found = records(dataset)
    assert [record["label"] for record in found] == [None, "two", None, "four", None]
    assert [record["metadata"] for record in found] == [{}, {}, {}, {"k": 1}, {}]


@pytest.mark.parametrize(
    ("row", "fields", "problem"),
    [
        ({"text": "a"}, {}, "no key 'input', only 'text' (none of input, prompt, question, messages, problem;"),
        ({"a": 1}, {"input_key": "a.b"}, "no key 'a.b', only 'a' (--input-key)"),
        ({"input": "a", "tools": {"x": 1}}, {}, "'tools' is a map, not a list of maps (--tool-key)"),
        ({"input": "a", "t": "[1]"}, {"tool_key": "t"}, "'t' is a list, not a list of maps"),
        ({"input": "a", "t": "["}, {"tool_key": "t"}, "broken JSON"),
        ({"prompt": "a", "extra_info": [1]}, {}, "'extra_info' is a list, not a map (--metadata-key)"),
        ({"input": "a"}, {"rm_type": "math"}, "no label under 'label', and the reward math needs one"),
        ({"input": "a", "label": None}, {"rm_type": "length,boxed_f1"}, "and the reward boxed_f1 needs one"),
        ({"input": "a", "x": 1}, {"rm_type": "exact", "label_key": "y"}, "no label under 'y', and the reward exact"),
        ({"input": "a", "metadata": {"rm_type": "mth"}}, {"rm_type": "length"}, "'mth': there are math, "),
        ({"input": "a", "label": 1}, {"rm_type": "row"}, "the row names no reward"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, row: Any, fields: Any, problem: str) -> None:
    sound = {"input": "a", "a": {"b": "c"}, "label": 1, "y": 1, "metadata": {"rm_type": "random"}}
    path = write(tmp_path / "d", *([row] if row.keys() & {"text", "prompt"} else [sound, row]))
    with pytest.raises(UsageError) as caught:
        source(path, **fields)
    assert problem in str(caught.value)
    assert f"{path}:{1 if row.keys() & {'text', 'prompt'} else 2}: " in str(caught.value)


def test_a_reward_that_does_not_exist_is_said_once_and_not_of_each_row(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--rm-type: 'mth': there are math, .* did you mean math\?$"):
        source(numbered(tmp_path, "a", 3), rm_type="mth")


def test_a_row_needs_no_label_for_the_reward_it_names_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "d", {"input": "a", "metadata": {"rm_type": "length"}}, {"input": "b", "label": False})
    assert source(path, rm_type="math").rows == 2


def test_tools_may_be_json_text_or_empty(tmp_path: Path) -> None:
    rows = [{"input": "a", "tools": '[{"x": 1}]'}, {"input": "b", "tools": ""}, {"input": "c", "tools": []}]
    found = records(source(write(tmp_path / "d", *rows)))
    assert [record["metadata"] for record in found] == [{"tools": [{"x": 1}]}, {}, {}]


def test_missing_labels_and_ids_that_stand_twice_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = write(tmp_path / "one", {"id": "x", "input": "a", "label": 0}, {"id": 7, "input": "b"}, {"input": "c"})
    two = write(tmp_path / "two", {"id": "y", "input": "a", "label": ""}, {"id": "7", "input": "b", "label": "l"})
    with caplog.at_level(logging.WARNING):
        source(f"{one},{two}")
    assert [record.message for record in caplog.records] == [
        f"2 rows have no label, the first is {one}:2 (--label-key)",
        f"1 rows have an id that another has too: {one}:2 and {two}:2, for one",
    ]


# -- Parquet


def table(path: Path, rows: list[dict[str, Any]], **schema: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, **schema), path, row_group_size=3)
    return path


def test_what_a_table_filled_in_is_left_out_again(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"input": [{"role": "user", "content": "q"}], "metadata": {"a": 1}, "label": None},
        {"input": [{"role": "system", "content": "s"}, {"role": "user", "content": "q", "name": "n"}], "label": 1.5},
        {"input": [{"role": "user", "content": "é\u2028"}], "metadata": {"b": [None, {"c": None, "d": 2}]}},
    ]
    found = records(source(table(tmp_path / "d.parquet", rows)))
    assert [record["prompt"] for record in found] == [row["input"] for row in rows]
    assert [record["metadata"] for record in found] == [{"a": 1}, {}, {"b": [None, {"d": 2}]}]
    assert [record["label"] for record in found] == [None, 1.5, None]


def test_other_columns_are_not_even_read(tmp_path: Path) -> None:
    rows = [{"input": "q", "label": n, "when": datetime.datetime(2026, 1, 1), "image": b"\x00"} for n in range(5)]
    found = source(table(tmp_path / "d.parquet", rows))
    assert [record["label"] for record in records(found, range(3, 12))] == [3, 4, 0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"input": "q", "label": "1"}] * 2 + [{"input": "", "label": "1"}], "d.parquet:3: 'input' is empty"),
        ([{"input": "q", "label": float("nan")}], "d.parquet:1: NaN is not a finite number"),
        ([{"input": "q", "label": datetime.date(2026, 1, 1)}], "d.parquet:1: Object of type date is not JSON"),
        ([{"text": "q"}], "d.parquet:1: no key 'input'"),
    ],
)
def test_a_bad_row_of_a_table_is_named_by_its_number(tmp_path: Path, rows: list[Any], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        source(table(tmp_path / "d.parquet", rows))
    assert problem in str(caught.value)


def test_a_table_is_read_once_and_what_becomes_of_the_file_then_does_no_harm(tmp_path: Path) -> None:
    path = table(tmp_path / "d.parquet", [{"input": f"p{n}"} for n in range(4)])
    found = source(path)
    digest = found.digest
    path.unlink()
    assert prompts(found) == ["p0", "p1", "p2", "p3"]
    assert source(table(path, [{"input": f"p{n}"} for n in range(4)])).digest == digest


# -- several files


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a.jsonl", [Part(Path("a.jsonl"))]),
        ("a.jsonl, b.jsonl", [Part(Path("a.jsonl")), Part(Path("b.jsonl"))]),
        ("*.jsonl", [Part(Path("a.jsonl")), Part(Path("b.jsonl"))]),
        ("a.jsonl:2,b.jsonl:.5", [Part(Path("a.jsonl"), weight=2.0), Part(Path("b.jsonl"), weight=0.5)]),
        ("a.jsonl@[1:]", [Part(Path("a.jsonl"), 1)]),
        ("a.jsonl@[-9:4]:0.25", [Part(Path("a.jsonl"), -9, 4, 0.25)]),
        ("a.jsonl@[:4],a.jsonl@[4:]:2", [Part(Path("a.jsonl"), None, 4), Part(Path("a.jsonl"), 4, None, 2.0)]),
        ("odd,name:2", [Part(Path("odd,name:2"))]),
        ("?dd,*:2", "no such file"),
        ("[ab].jsonl:3", [Part(Path("a.jsonl"), weight=3.0), Part(Path("b.jsonl"), weight=3.0)]),
    ],
)
def test_files_are_named_one_by_one_or_by_pattern(
    text: str, found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "odd,name:2"):
        Path(name).touch()
    if isinstance(found, str):
        with pytest.raises(UsageError, match=found):
            parts(text)
    else:
        assert parts(text) == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("none.jsonl", "none.jsonl: there is no such file"),
        ("a.jsonl,", "'': not a path"),
        ("a.jsonl:0", "a weight of 0"),
        ("a.jsonl,*.jsonl", "a.jsonl stands in it twice"),
        ("a.jsonl@[1]", "no such file"),
    ],
)
def test_what_names_no_file_is_refused(
    text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").touch()
    with pytest.raises(UsageError) as caught:
        parts(text)
    assert problem in str(caught.value)


def test_files_follow_each_other_and_each_epoch_goes_on_where_a_weight_stopped(tmp_path: Path) -> None:
    a, b, c = (numbered(tmp_path, name, rows) for name, rows in (("a", 3), ("b", 4), ("c", 2)))
    found = source(f"{a}:2,{b}:0.5,{c}")
    assert found.rows == 6 + 2 + 2
    assert prompts(found) == ["a0", "a1", "a2", "a0", "a1", "a2", "b0", "b1", "c0", "c1"]
    assert prompts(found, range(16, 20)) == ["b2", "b3", "c0", "c1"]
    assert Counter(prompts(found, range(20))) == Counter(a0=4, a1=4, a2=4, b0=1, b1=1, b2=1, b3=1, c0=2, c1=2)


def test_a_slice_is_a_file_of_its_own_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    a = numbered(tmp_path, "a", 5)
    assert prompts(source(f"{a}@[1:3]"), range(3)) == ["a1", "a2", "a1"]
    assert prompts(source(f"{a}@[-1:],{a}@[:1]")) == ["a4", "a0"]
    assert len({source(f"{a}{end}").digest for end in ("", "@[:3]", "@[:4]", ":2", "@[:3]:2")}) == 5
    with pytest.raises(UsageError, match=r"@\[5:\]: no row of 5 is in it"):
        source(f"{a}@[5:]")


def test_bad_rows_of_all_files_are_said_at_once_and_all_must_be_of_one_form(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"input": "t"}, {"input": ""})
    b = write(tmp_path / "b", {"messages": [{"role": "user", "content": "c"}]})
    with pytest.raises(UsageError) as caught:
        source(f"{a},{b}")
    assert str(caught.value).splitlines() == [
        "--prompt-data: 2 bad rows, none is used",
        f"{a}:2: 'input' is empty",
        f"{b}:1: 'messages' is a list, but text in {a}:1: use one form in all rows",
    ]


# -- tasks and own code


class Memory:
    """A broker that remembers what was fed, and ends the run after so much."""

    def __init__(self, until: int) -> None:
        self.until = until
        self.fed: list[str] = []
        self.data: tuple[Any, ...] = ()

    def describe_data(self, *data: Any) -> None:
        self.data = data

    def cursor(self) -> int:
        return len(self.fed)

    def feed(self, cursor: int, records: list[str]) -> int:
        self.fed += records
        return len(self.fed)

    def backlog(self) -> int:
        return 0

    def refeed_ids(self, limit: int) -> list[int]:
        return []

    def refeed(self, records: dict[int, str]) -> None: ...

    def stopping(self) -> bool:
        return len(self.fed) >= self.until


def fed(until: int, **fields: Any) -> Memory:
    memory = Memory(until)
    feeder.main(FeedConfig.model_validate({"feed_low_water": 5, **fields}), memory, threading.Event())
    return memory


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_prompts.py").write_text(
        "import itertools\n"
        "calls = itertools.count()\n"
        "class Endless:\n"
        "    digest = 'one'\n"
        "    def __getitem__(self, i): return {'input': f'p{i}', 'label': i}\n"
        "class Shifting(list):\n"
        "    def __getitem__(self, i): return {'input': f'p{next(calls)}'}\n"
        "def rows(config): return [{'question': f'{config.rollout_seed}+{n}', 'answer': n} for n in range(4)]\n"
        "def bad(config): return [{'input': 'a'}, {'input': {1}}, {'input': ''}]\n"
        "def none(config): return []\n"
        "def nothing(config): return None\n"
        "def endless(config): return Endless()\n"
        "def shifting(config): return Shifting('abc')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])


@pytest.mark.usefixtures("own")
def test_own_rows_are_checked_like_a_file() -> None:
    memory = fed(8, task="own_prompts.rows", num_epoch=2, rollout_seed=3, rm_type="math")
    assert memory.data[:2] == (4, 8)
    assert [json.loads(record)["prompt"] for record in memory.fed] == ["3+0", "3+1", "3+2", "3+3"] * 2
    with pytest.raises(UsageError) as caught:
        source(task="own_prompts.bad")
    assert "own_prompts.bad:1: is no JSON" in str(caught.value)
    assert "own_prompts.bad:2: 'input' is empty" in str(caught.value)
    for name, problem in (("none", "no rows in it"), ("nothing", "gave a NoneType"), ("missing", "has no 'missing'")):
        with pytest.raises(UsageError, match=problem):
            source(task=f"own_prompts.{name}")


@pytest.mark.usefixtures("own")
def test_own_rows_may_have_no_end_and_must_not_change() -> None:
    memory = fed(600, task="own_prompts.endless", feed_low_water=300)
    assert memory.data[:2] == (None, None)
    assert json.loads(memory.fed[599]) == {"prompt": "p599", "label": 599, "metadata": {}}
    with pytest.raises(UsageError, match="row 0 is not the one that was checked"):
        source(task="own_prompts.shifting").records([0])


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "--prompt-data is missing: a file of prompts, or --task"),
        ({"task": "own_prompts.endless", "prompt_data": "x"}, "both say where prompts come from"),
        ({"task": "own_prompts.endless", "num_epoch": 1}, "--num-epoch: --task own_prompts.endless has no end"),
        ({"task": "own_prompts.endless", "rollout_shuffle": True}, "--rollout-shuffle: --task"),
        ({"task": "reasoning_gym:chain_sum", "label_key": "x"}, "has no keys to be named"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: Any, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        fed(1, **fields)
    assert problem in str(caught.value)
