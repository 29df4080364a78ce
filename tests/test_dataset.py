"""Prompt files: what loads, what is refused and how it is named, and the order of the rows."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import UsageError
from producers.dataset import Dataset, order, row_of
from producers.demo import write_prompts
from producers.rows import RowKeys

GOOD = '{"input": "1+1=", "label": "2"}'


def load(path: Path, content: str | bytes) -> Dataset:
    path = path / "data.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return Dataset.open(path)


def records(dataset: Dataset) -> list[Any]:
    return [json.loads(dataset.record(row)) for row in range(len(dataset))]


def refusal(path: Path, content: str | bytes) -> str:
    with pytest.raises(UsageError) as caught:
        load(path, content)
    return str(caught.value)


def test_a_record_holds_prompt_label_and_metadata_and_nothing_else(tmp_path: Path) -> None:
    row = {"input": "a", "label": 42, "metadata": {"k": [1, {"x": None}]}, "other": 1}
    dataset = load(tmp_path, json.dumps(row))
    assert records(dataset) == [{"prompt": "a", "label": 42, "metadata": {"k": [1, {"x": None}]}}]


def test_a_missing_label_is_null_and_missing_metadata_an_empty_map(tmp_path: Path) -> None:
    dataset = load(tmp_path, '{"input": "a"}\n{"input": "b", "metadata": null}\n')
    assert records(dataset) == [{"prompt": p, "label": None, "metadata": {}} for p in "ab"]


def test_keys_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"question": "q", "answer": 1.5, "extra": {"a": 1}}')
    dataset = Dataset.open(path, RowKeys("question", "answer", "extra"))
    assert records(dataset) == [{"prompt": "q", "label": 1.5, "metadata": {"a": 1}}]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\r"])
def test_line_ends_of_other_alphabets_are_text(tmp_path: Path, mark: str) -> None:
    lines = [f'{{"input": "a{mark}b", "label": "{n}{mark}"}}' for n in range(3)]
    dataset = load(tmp_path, "\n".join(lines) + "\n")
    assert records(dataset) == [{"prompt": f"a{mark}b", "label": f"{n}{mark}", "metadata": {}} for n in range(3)]


@pytest.mark.parametrize(
    "content",
    [
        f"\ufeff{GOOD}\n{GOOD}\n",
        f"{GOOD}\r\n{GOOD}\r\n",
        f"\n\n{GOOD}\n  \t\n\r\n{GOOD}\n\n",
        f"{GOOD}\n{GOOD}",
        f"\ufeff\r\n{GOOD}\r\n{GOOD}",
        f"\ufeff  {GOOD}\n{GOOD}",
    ],
)
def test_marks_blank_lines_and_a_missing_last_newline_do_no_harm(tmp_path: Path, content: str) -> None:
    assert records(load(tmp_path, content)) == [{"prompt": "1+1=", "label": "2", "metadata": {}}] * 2


def test_lone_surrogates_survive_and_records_are_ascii(tmp_path: Path) -> None:
    dataset = load(tmp_path, '{"input": "a\\ud83d é 😀", "label": "\\udc80"}')
    assert dataset.record(0).isascii()
    assert records(dataset) == [{"prompt": "a\ud83d é 😀", "label": "\udc80", "metadata": {}}]


def test_chat_messages_keep_every_key_and_may_have_empty_content(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "hi", "name": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]},
        {"role": "tool", "content": "42"},
    ]
    assert records(load(tmp_path, json.dumps({"input": chat})))[0]["prompt"] == chat


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b"{", "broken JSON at column 2"),
        (b'{"input": "a"} x', "broken JSON at column 16: Extra data"),
        (b'{"input": "a",\r', "broken JSON at column 15"),
        (b'{"input": "\xff"}', "not UTF-8 at byte 12"),
        (b'["input"]', "is a list, not a map"),
        (b'"input"', "is text, not a map"),
        (b"null", "is null, not a map"),
        (b'{"prompt": "a", "x": 1}', "no key 'input', only 'prompt', 'x' (--input-key)"),
        (b"{}", "no key 'input', only none"),
        (b'{"input": 5}', "'input' is a number, neither text nor a list"),
        (b'{"input": null}', "'input' is null"),
        (b'{"input": {"role": "user"}}', "'input' is a map"),
        (b'{"input": ""}', "'input' is empty"),
        (b'{"input": []}', "'input' is empty"),
        (b'{"input": ["hi"]}', "message 0 is not a map with a role"),
        (b'{"input": [{"role": "user"}]}', "message 0 is not"),
        (b'{"input": [{"role": "user", "content": "a"}, {"role": 1, "content": "b"}]}', "message 1 is not"),
        (b'{"input": [{"role": "user", "content": null}]}', "message 0 is not"),
        (b'{"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', "ends with a turn"),
        (b'{"input": "a", "label": ["b"]}', "'label' is a list"),
        (b'{"input": "a", "label": {}}', "'label' is a map"),
        (b'{"input": "a", "label": NaN}', "NaN is not a finite number"),
        (b'{"input": "a", "metadata": {"x": [-Infinity]}}', "-Infinity is not a finite number"),
        (b'{"input": "a", "metadata": {"x": 1e999}}', "1e999 is not a finite number"),
        (b'{"input": "a", "metadata": [1]}', "'metadata' is a list, not a map"),
        (b'{"input": "a", "input": "b"}', "key 'input' stands twice"),
        (b'{"input": "a", "label": ' + b"9" * 5000 + b"}", "cannot be decoded"),
        (b'{"input": "a", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "cannot be decoded"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_reason(tmp_path: Path, row: bytes, problem: str) -> None:
    good = b'{"input": "a"}'
    message = refusal(tmp_path, b"\xef\xbb\xbf" + good + b"\r\n\n" + row + b"\n" + good)
    assert f"{tmp_path / 'data.jsonl'}:3: " in message
    assert problem in message
    assert message.startswith("--prompt-data: 1 bad row")


def test_text_and_chat_prompts_in_one_file_are_refused(tmp_path: Path) -> None:
    chat = '{"input": [{"role": "user", "content": "a"}]}'
    message = refusal(tmp_path, f"\n{GOOD}\n{chat}\n{GOOD}\n{chat}\n")
    assert "data.jsonl:3: 'input' is a list, but text in line 2" in message
    assert "data.jsonl:5: 'input' is a list, but text in line 2" in message
    assert "data.jsonl:4: " not in message


def test_the_first_ten_bad_rows_are_named_and_all_are_counted(tmp_path: Path) -> None:
    message = refusal(tmp_path, f"{GOOD}\n{{}}\n" * 25)
    assert "25 bad rows" in message
    assert message.count("data.jsonl:") == 10
    assert "data.jsonl:20: " in message
    assert message.endswith("... and 15 more")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (gzip.compress(GOOD.encode(), mtime=0), "this is gzip"),
        (GOOD.encode("utf-16"), "UTF-16: convert it"),
        (GOOD.encode("utf-16-le"), "UTF-16: convert it"),
        (GOOD.encode("utf-16-be"), "UTF-16: convert it"),
        (b"PAR1....", "not to be read as Parquet"),
        (b"", "no rows"),
        (b"\xef\xbb\xbf \r\n\n", "no rows"),
    ],
)
def test_other_formats_and_empty_files_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    message = refusal(tmp_path, content)
    assert problem in message
    assert str(tmp_path / "data.jsonl") in message


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "none.jsonl", "No such file"), (tmp_path, "not a file")):
        with pytest.raises(UsageError, match=f"--prompt-data {path}: {problem}"):
            Dataset.open(path)


def test_a_file_that_changes_under_way_is_refused(tmp_path: Path) -> None:
    dataset = load(tmp_path, f"{GOOD}\n{GOOD}\n")
    other = tmp_path / "other"
    other.write_text(f"{GOOD}\n{GOOD}\n")
    os.replace(other, dataset.path)
    with pytest.raises(UsageError, match="has changed"):
        dataset.record(1)
    dataset.path.unlink()
    with pytest.raises(UsageError, match="No such file"):
        dataset.record(1)


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    first, again, other = (load(tmp_path, text).digest for text in (GOOD, GOOD, GOOD + "\n"))
    assert first == again != other


def test_each_epoch_is_a_full_permutation_and_epochs_and_seeds_differ() -> None:
    epochs = [order(7, epoch, 20, True).tolist() for epoch in range(3)] + [order(8, 0, 20, True).tolist()]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_order_is_the_same_on_every_machine() -> None:
    assert order(42, 0, 8, True).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]
    assert order(42, 5, 4, False).tolist() == [0, 1, 2, 3]


def test_an_id_goes_through_the_epochs_in_turn() -> None:
    rows = [row_of(id, 7, 20, True) for id in range(60)]
    assert rows == np.concatenate([order(7, epoch, 20, True) for epoch in range(3)]).tolist()


def test_demo_prompts_are_the_same_for_a_seed_and_written_once(tmp_path: Path) -> None:
    one, two, other = (write_prompts(tmp_path / str(n) / "p.jsonl", seed, 100) for n, seed in enumerate((1, 1, 2)))
    assert one.read_bytes() == two.read_bytes() != other.read_bytes()
    assert os.listdir(one.parent) == ["p.jsonl"]
    write_prompts(one, 2, 100)
    assert one.read_bytes() == two.read_bytes()
    found = records(Dataset.open(one))
    assert len({r["prompt"] for r in found}) == 100
    for r in found:
        digits = r["prompt"].removeprefix("A:").removesuffix("=")
        assert (len(digits), r["label"]) == (4, "".join("1234567890"[int(d)] for d in digits))
