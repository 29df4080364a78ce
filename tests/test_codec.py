from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp

from pipeline import message as rules
from pipeline.codec import decode, encode
from pipeline.errors import MessageError
from pipeline.plain import plain
from pipeline.types import Group, Prompt, Sample, Sequence, Span

DOCS = Path(__file__).parents[1] / "docs" / "message.md"


def sequence(prompt: int = 3, length: int = 4, **changes: Any) -> Sequence:
    made = Sequence(
        np.arange(prompt, dtype=np.int32),
        np.arange(length, dtype=np.int32) + 10,
        -np.arange(length, dtype=np.float32) / np.float32(3),
        np.ones(length, np.uint8),
        (Span(7, 0, length),) if length else (),
    )
    return dataclasses.replace(made, **changes)


def sample(index: int = 0, *sequences: Sequence, **changes: Any) -> Sample:
    made = Sample(index, "completed", "an answer", 0.5, sequences or (sequence(),), {"turns": 1})
    return dataclasses.replace(made, **changes)


def group(*samples: Sample) -> Group:
    return Group(Prompt(5, 2, 1, '{"prompt": "1+1"}'), samples or (sample(0), sample(1)), "host-1-ab", 1.25)


def tree(given: Group | None = None) -> Any:
    return msgpack.unpackb(encode(given or group()))


def same(a: Any, b: Any) -> bool:
    """Equal in values and types; NaN equals NaN."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


def refused(given: Group | bytes, field: str, problem: str = "") -> None:
    with pytest.raises(MessageError) as caught:
        decode(given) if isinstance(given, bytes) else encode(given)
    assert caught.value.field == field
    assert problem in caught.value.problem


# round trips

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
IDS = st.integers(0, 2**31 - 1)


@st.composite
def sequences(draw: st.DrawFn, least: int = 1) -> Sequence:
    cuts = draw(st.lists(st.integers(1, 5), min_size=least, max_size=4))
    ends = np.cumsum(cuts).tolist()
    spans = [Span(draw(st.none() | st.integers(0, 9)), end - cut, end) for cut, end in zip(cuts, ends, strict=True)]
    length = sum(cuts)
    return Sequence(
        draw(stnp.arrays(np.int32, st.integers(0, 6), elements=IDS)),
        draw(stnp.arrays(np.int32, length, elements=IDS)),
        draw(stnp.arrays(np.float32, length, elements=st.floats(-100, 0, width=32))),
        draw(stnp.arrays(np.uint8, length, elements=st.integers(0, 1))),
        tuple(spans),
    )


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    status = draw(st.sampled_from(["completed", "truncated", "aborted"]))
    return Sample(
        draw(st.integers(0, 2**63 - 1)),
        status,
        draw(st.text(st.characters())),
        draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        tuple(draw(st.lists(sequences(0 if status == "aborted" else 1), min_size=1, max_size=3))),
        draw(st.dictionaries(st.text(st.characters()), JSON, max_size=3)),
    )


GROUPS = st.builds(
    Group,
    st.builds(
        Prompt, st.integers(0, 2**63 - 1), st.integers(1, 2**63 - 1), st.integers(0, 9), st.text(st.characters())
    ),
    st.lists(samples(), min_size=1, max_size=4).map(tuple),
    st.text(st.characters()),
    st.floats(0, 1e9),
)


@given(GROUPS)
@settings(deadline=None)
def test_a_group_comes_back_as_it_was(given: Group) -> None:
    assert same(decode(encode(given)), given)


def test_the_message_is_a_plain_map_that_begins_with_its_schema() -> None:
    def walk(value: Any) -> set[type]:
        if isinstance(value, dict):
            assert all(type(key) is str for key in value)
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return {type(value)}.union(*map(walk, inner))

    message = tree()
    assert next(iter(message.items())) == ("schema", 1)
    assert walk(message) <= {dict, list, str, bytes, int, float, type(None)}
    assert message["tokens"] == {
        "dtype": "int32",
        "shape": [8],
        "data": bytes.fromhex("0a000000 0b000000 0c000000 0d000000") * 2,
    }
    assert {name: message[name]["dtype"] for name in ("logprobs", "loss_mask")} == {
        "logprobs": "float32",
        "loss_mask": "uint8",
    }


def test_the_documented_reader_reads_each_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    exec(code, {"data": encode(group(sample(0, sequence(), sequence(2, 2)), sample(1, sequence(1, 1))))})
    said = capsys.readouterr().out.splitlines()
    assert [line.split("[")[0].split() for line in said] == [["5", "0", "0.5"], ["5", "0", "0.5"], ["5", "1", "0.5"]]
    assert [line.split("[")[1].split("]")[0] for line in said] == ["10 11 12 13", "10 11", "10"]


def test_the_documented_fields_are_those_of_the_message() -> None:
    message = tree()
    fields = {*message, *message["samples"][0], *message["samples"][0]["sequences"][0]}
    assert set(re.findall(r"^\| `(\w+)`", DOCS.read_text(), re.MULTILINE)) == fields


def test_a_group_costs_nine_bytes_a_token() -> None:
    data = encode(group(*(sample(i, sequence(300, 2000), text="8 letters" * 1000) for i in range(8))))
    payload = 8 * (300 * 4 + 2000 * 9 + 9000)
    assert payload < len(data) < payload * 1.01


def test_decoded_arrays_are_aligned_and_read_only() -> None:
    got = decode(encode(group(sample(0, sequence(1, 3)), sample(1, sequence(2, 5)))))
    for made in (made for s in got.samples for made in s.sequences):
        for array in (made.prompt_tokens, made.tokens, made.logprobs, made.loss_mask):
            assert array.flags.aligned
            assert not array.flags.writeable


# values made plain


def torch_scalars() -> list[tuple[Any, float]]:
    torch = pytest.importorskip("torch")
    return [
        (torch.tensor(0.5), 0.5),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (torch.tensor(3), 3.0),
        (torch.tensor(True), 1.0),
    ]


def test_rewards_of_every_kind_of_scalar_become_floats() -> None:
    kinds = [
        (np.float16(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
    ]
    for value, expected in [*kinds, (np.array(0.5, np.float32), 0.5), (True, 1.0), (2, 2.0), *torch_scalars()]:
        reward = decode(encode(group(sample(reward=value)))).samples[0].reward
        assert (reward, type(reward)) == (expected, float)


def test_scalars_are_made_plain_and_other_values_left_alone() -> None:
    array = np.zeros(1)
    assert plain(array) is array
    assert plain("text") == "text"
    assert [type(plain(value)) for value in (np.float32(1), np.int8(1), np.bool_(1), np.array(1.0))] == [
        float,
        int,
        bool,
        float,
    ]


def test_half_precision_log_probabilities_go_as_float32() -> None:
    torch = pytest.importorskip("torch")
    values = [-0.5, -1.25, 0.0, -3.0]
    for logprobs in (
        np.array(values, np.float16),
        np.array(values, np.float64),
        np.array([*values, 9.0], np.float32)[:4],
        np.repeat(np.array(values, np.float32), 2)[::2],
        torch.tensor(values, dtype=torch.bfloat16, requires_grad=True),
        torch.tensor(values, dtype=torch.float16),
        values,
    ):
        got = decode(encode(group(sample(0, sequence(logprobs=logprobs))))).samples[0].sequences[0].logprobs
        assert got.dtype == np.float32
        assert got.tolist() == values


def test_token_ids_and_masks_of_other_integer_types_go_as_their_own() -> None:
    torch = pytest.importorskip("torch")
    for tokens in (np.arange(4), [0, 1, 2, 3], torch.arange(4), np.arange(4, dtype=np.uint64)):
        for mask in (np.arange(4) > 1, [False, False, True, True], torch.arange(4) > 1, np.arange(4) // 2):
            (got,) = decode(encode(group(sample(0, sequence(tokens=tokens, loss_mask=mask))))).samples[0].sequences
            assert (got.tokens.dtype.name, got.loss_mask.dtype.name) == ("int32", "uint8")
            assert (got.tokens.tolist(), got.loss_mask.tolist()) == ([0, 1, 2, 3], [0, 0, 1, 1])


def test_metadata_tuples_become_lists_and_numpy_scalars_numbers() -> None:
    given = {"a": (1, (2, "x")), "b": np.float32(0.5), "c": {"d": np.int64(7)}, "e": np.float64(2.5)}
    assert decode(encode(group(sample(metadata=given)))).samples[0].metadata == {
        "a": [1, [2, "x"]],
        "b": 0.5,
        "c": {"d": 7},
        "e": 2.5,
    }


@pytest.mark.parametrize("odd", ["\ud83d", "cut \ud83d\n\x00", "\ud83d\ude00 as two halves", "\udc80 last"])
def test_lone_surrogates_survive_and_any_msgpack_library_reads_the_message(
    odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = dataclasses.replace(group(sample(text=odd, metadata={odd: [odd, "plain"]})), worker=odd)
    data = encode(given)
    assert same(decode(data), given)
    assert type(msgpack.unpackb(data)["samples"][0]["text"]) is bytes
    assert "prompt 5:" in caplog.text


def test_the_record_is_never_re_encoded() -> None:
    record = '{"prompt":  "\\ud83d \u2028 1e400", "label": 1.10}'
    assert decode(encode(dataclasses.replace(group(), prompt=Prompt(0, 1, 0, record)))).prompt.record == record


# refusals before the push


def placed(changes: dict[str, Any], **of_sample: Any) -> Group:
    return group(sample(0), sample(1), sample(2), sample(3, sequence(), sequence(**changes), **of_sample))


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"logprobs": np.array([0, np.nan, 0, 0], np.float32)}, "logprobs", "not finite, at token 1"),
        ({"logprobs": np.array([0, 0, 0, -np.inf], np.float32)}, "logprobs", "not finite, at token 3"),
        ({"logprobs": np.array([0, 0, -1e300, 0])}, "logprobs", "not finite, at token 2"),
        ({"logprobs": np.zeros(3, np.float32)}, "logprobs", "3 values for 4 tokens"),
        ({"logprobs": np.zeros((4, 1), np.float32)}, "logprobs", "shape [4, 1]"),
        ({"logprobs": None}, "logprobs", "shape []"),
        ({"logprobs": ["a", "b", "c", "d"]}, "logprobs", "float32 is expected"),
        ({"logprobs": [[1], [2, 3]]}, "logprobs", "no array of numbers"),
        ({"logprobs": np.zeros(4, np.complex64)}, "logprobs", "complex64"),
        ({"loss_mask": np.ones(5, np.uint8)}, "loss_mask", "5 values for 4 tokens"),
        ({"loss_mask": np.array([0, 1, 2, 1], np.uint8)}, "loss_mask", "neither 0 nor 1, at token 2"),
        ({"loss_mask": np.array([0, 1, 256, 1])}, "loss_mask", "do not fit uint8"),
        ({"loss_mask": np.ones(4)}, "loss_mask", "float64 where uint8 is expected"),
        ({"tokens": np.array([1, 2, 3, -1], np.int32)}, "tokens", "negative token id, at token 3"),
        ({"tokens": np.array([1, 2, 3, 2**31])}, "tokens", "do not fit int32"),
        ({"prompt_tokens": np.array([1, -5], np.int32)}, "prompt_tokens", "negative token id, at token 1"),
        ({"versions": ()}, "versions", "cover 0 of 4"),
        ({"versions": (Span(1, 0, 2),)}, "versions", "cover 2 of 4"),
        ({"versions": (Span(1, 0, 2), Span(1, 3, 4))}, "versions[1]", "tokens 3:4 where 2:"),
        ({"versions": (Span(1, 0, 3), Span(1, 2, 4))}, "versions[1]", "tokens 2:4 where 3:"),
        ({"versions": (Span(1, 0, 0), Span(1, 0, 4))}, "versions[0]", "tokens 0:0"),
        ({"versions": (Span(1, 0, 5),)}, "versions", "cover 5 of 4"),
        ({"versions": (Span("default", 0, 4),)}, "versions[0].version", "type str"),  # type: ignore[arg-type]
        ({"versions": (Span(True, 0, 4),)}, "versions[0].version", "type bool"),
        ({"versions": (Span(1, 0, 4.0),)}, "versions[0].end", "type float"),  # type: ignore[arg-type]
        ({"versions": None}, "versions", "None where a list is expected"),
        ({"length": 0}, "tokens", "none, in a sample that was not aborted"),
    ],
)
def test_a_sequence_that_cannot_be_right_is_refused_by_its_place(
    changes: dict[str, Any], field: str, problem: str
) -> None:
    refused(placed(changes), f"samples[3].sequences[1].{field}", problem)


def test_only_an_aborted_sample_may_have_no_tokens() -> None:
    given = placed({"length": 0}, status="aborted", reward=None)
    assert same(decode(encode(given)), given)


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"reward": float("nan")}, "reward", "nan is not finite"),
        ({"reward": np.float32("inf")}, "reward", "inf is not finite"),
        ({"reward": 10**400}, "reward", "too large"),
        ({"reward": "1"}, "reward", "type str"),
        ({"reward": np.ones(1)}, "reward", "type ndarray"),
        ({"index": -1}, "index", "below 0"),
        ({"index": 2**63}, "index", "above 2^63 - 1"),
        ({"index": True}, "index", "type bool"),
        ({"status": "done"}, "status", "'done'"),
        ({"text": b"bytes"}, "text", "type bytes"),
        ({"text": None}, "text", "None where text"),
        ({"sequences": ()}, "sequences", "empty"),
        ({"metadata": None}, "metadata", "None where a map"),
        ({"metadata": {1: "a"}}, "metadata", "the key 1; keys are text"),
        ({"metadata": {"a": {None: 1}}}, "metadata.a", "the key None"),
        ({"metadata": {"a": {(1, 2): 1}}}, "metadata.a", "the key (1, 2)"),
        ({"metadata": {"a": [1, {"b": {1, 2}}]}}, "metadata.a[1].b", "type set"),
        ({"metadata": {"a": b"x"}}, "metadata.a", "type bytes"),
        ({"metadata": {"a": np.zeros(2)}}, "metadata.a", "type ndarray"),
        ({"metadata": {"a": [2**64]}}, "metadata.a[0]", "above 2^63 - 1"),
        ({"metadata": {"a": 1j}}, "metadata.a", "type complex"),
        ({"metadata": {"a": [0] * 65537}}, "metadata.a", "65537 entries"),
        ({"metadata": dict.fromkeys(map(str, range(65537)))}, "metadata", "65537 entries"),
    ],
)
def test_a_sample_that_cannot_be_right_is_refused_by_its_place(
    changes: dict[str, Any], field: str, problem: str
) -> None:
    refused(group(sample(0), dataclasses.replace(sample(1), **changes)), f"samples[1].{field}", problem)


def test_metadata_that_holds_itself_is_refused() -> None:
    circle: dict[str, Any] = {}
    circle["a"] = circle
    refused(group(sample(metadata=circle)), "samples[0].metadata" + ".a" * 32, "nested deeper than 32 levels")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": Prompt(-1, 1, 0, "{}")}, "id"),
        ({"prompt": Prompt(0, 0, 0, "{}")}, "attempt"),
        ({"prompt": Prompt(0, 1, -1, "{}")}, "strikes"),
        ({"prompt": Prompt(0, 1, 0, b"{}")}, "record"),  # type: ignore[arg-type]
        ({"samples": ()}, "samples"),
        ({"worker": None}, "worker"),
        ({"seconds": float("nan")}, "seconds"),
        ({"seconds": -1.0}, "seconds"),
    ],
)
def test_a_group_that_cannot_be_right_is_refused(changes: dict[str, Any], field: str) -> None:
    refused(dataclasses.replace(group(), **changes), field)


# refusals of what comes


def test_every_truncation_is_refused() -> None:
    data = encode(group())
    for length in range(len(data)):
        with pytest.raises(MessageError):
            decode(data[:length])


def decodes_or_is_refused(data: bytes) -> None:
    try:
        made = decode(data)
    except MessageError:
        return
    assert same(decode(encode(made)), made)


@given(st.binary(max_size=300))
@example(b"")
@example(b"\x91" * 100_000)
@example(b"\xdd\xff\xff\xff\xff" * 3000)
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\x81\xa1a\xd6\xff\x00\x00\x00\x00")
@settings(deadline=None)
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(data)


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_flipped_bits_decode_to_a_valid_group_or_are_refused(data: st.DataObject) -> None:
    message = bytearray(encode(group(sample(metadata={"a": [1, {"b": "c"}]}))))
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, len(message) * 8 - 1))
        message[bit // 8] ^= 1 << bit % 8
    decodes_or_is_refused(bytes(message))


HOSTILE = JSON.filter(lambda value: _packs(value)) | st.binary(max_size=8) | st.just(msgpack.ExtType(5, b""))


def _packs(value: Any) -> bool:
    try:
        return bool(msgpack.packb(value))
    except UnicodeEncodeError:
        return False


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_any_field_replaced_decodes_to_a_valid_group_or_is_refused(data: st.DataObject) -> None:
    message = tree()
    node: Any = message
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(HOSTILE)
    decodes_or_is_refused(msgpack.packb(message))


@pytest.mark.parametrize("name", ["schema", "id", "samples", "tokens"])
def test_a_missing_field_is_named(name: str) -> None:
    message = tree()
    del message[name]
    refused(msgpack.packb(message), name)


@pytest.mark.parametrize("place", ["samples[1]", "samples[1].sequences[0]", "tokens"])
def test_a_missing_field_is_named_with_its_place(place: str) -> None:
    for name in list(at(tree(), place)):
        message = tree()
        del at(message, place)[name]
        refused(msgpack.packb(message), f"{place}.{name}", "missing")


def at(message: Any, place: str) -> Any:
    for step in re.findall(r"\w+", place):
        message = message[int(step) if step.isdigit() else step]
    return message


def change(edit: Callable[[Any], Any]) -> bytes:
    message = tree()
    edit(message)
    return bytes(msgpack.packb(message))


@pytest.mark.parametrize("schema", [0, 2, True, 1.0, "1", None, [1]])
def test_an_unknown_schema_is_refused(schema: Any) -> None:
    refused(change(lambda m: m.update(schema=schema)), "schema", "this program reads version 1")


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (lambda m: m["tokens"].update(dtype="int64"), "tokens.dtype"),
        (lambda m: m["tokens"].update(shape=[4_000_000_000]), "tokens.data"),
        (lambda m: m["tokens"].update(shape=[4, 2]), "tokens.shape"),
        (lambda m: m["tokens"].update(data="text"), "tokens.data"),
        (lambda m: m["tokens"].update(data=m["tokens"]["data"][1:]), "tokens.data"),
        (lambda m: m.update(tokens=[1, 2]), "tokens"),
        (lambda m: m.update(logprobs=m["loss_mask"]), "logprobs.dtype"),
        (lambda m: m["samples"][1]["sequences"][0].update(length=3), "samples[1].sequences[0].versions"),
        (lambda m: m["samples"][1]["sequences"][0].update(prompt_length=2**62), "prompt_tokens"),
        (lambda m: m["samples"].pop(), "prompt_tokens"),
        (lambda m: m["samples"].append(3), "samples[2]"),
        (lambda m: m["samples"][0].update(sequences=[]), "samples[0].sequences"),
        (lambda m: m["samples"][0].update(sequences={"a": 1}), "samples[0].sequences"),
        (lambda m: m["samples"][1].update(reward=float("nan")), "samples[1].reward"),
        (lambda m: m["samples"][1].update(text=b"\xff"), "samples[1].text"),
        (lambda m: m["samples"][1].update(metadata={"a": msgpack.ExtType(1, b"")}), "message"),
        (lambda m: m["samples"][1].update(metadata={"a": [msgpack.Timestamp(0)]}), "message"),
        (lambda m: m["samples"][1].update(metadata={1: 2}), "message"),
        (lambda m: m["samples"][1].update(metadata={"a": [0] * 65537}), "message"),
        (
            lambda m: m["samples"][1].update(metadata={"a": json.loads("[" * 40 + "]" * 40)}),
            "samples[1].metadata.a" + "[0]" * 31,
        ),
    ],
)
def test_what_is_wrong_in_a_message_is_named(edit: Callable[[Any], Any], field: str) -> None:
    refused(change(edit), field)


def test_a_bad_value_is_found_in_its_sequence() -> None:
    def edit(message: Any) -> None:
        values = np.frombuffer(message["logprobs"]["data"], "<f4").copy()
        values[6] = np.inf
        message["logprobs"]["data"] = values.tobytes()

    refused(change(edit), "samples[1].sequences[0].logprobs", "not finite, at token 2")


def test_bytes_after_the_message_are_refused() -> None:
    refused(encode(group()) + b"\x00", "message", "extra data")


def test_a_message_that_is_no_map_is_refused() -> None:
    refused(msgpack.packb([1]), "message", "type list where a map is expected")


def test_a_message_over_the_limit_is_refused_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(group())
    monkeypatch.setattr(rules, "MAX_BYTES", len(data) - 1)
    refused(data, "message", f"{len(data)} bytes; at most")
    refused(group(), "message", f"{len(data)} bytes; at most")
