"""Rewards: the built-in ones, the user's own, what counts as a reward, and how a function is found."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import code
from pipeline.config import GenerateConfig
from pipeline.errors import RewardError, UsageError
from pipeline.types import COMPLETED, TRUNCATED, Prompt, Sample
from producers.rewards import RewardInput, Scorer, build, reward_input
from producers.rewards.custom import Custom, CustomGroup


def given(response: str = "", label: Any = None, index: int = 0, status: str = COMPLETED, id: int = 7) -> RewardInput:
    return RewardInput("p", label, {}, response, status, index, id)


def group(count: int = 4) -> list[RewardInput]:
    return [given(str(index), index=index) for index in range(count)]


def scores(scorer: Scorer, inputs: Sequence[RewardInput]) -> list[float | None]:
    return asyncio.run(asyncio.wait_for(scorer.score_group(inputs), 20))


def built_in(name: str, one: RewardInput) -> float | None:
    return scores(build(GenerateConfig(rm_type=name), False), [one])[0]


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [("42", 42, 1), (" 42\n", "42", 1), ("42", " 42", 1), ("43", 42, 0), ("", "", 1), ("42.", 42, 0), ("1.5", 1.5, 1)],
)
def test_exact_compares_stripped_text(response: str, label: Any, reward: float) -> None:
    assert built_in("exact", given(response, label)) == reward


@pytest.mark.parametrize(
    ("response", "status", "right"),
    [
        ("4018", COMPLETED, 5),
        ("4018", TRUNCATED, 4),
        ("40189", TRUNCATED, 4),
        ("40", COMPLETED, 2),
        ("9999", COMPLETED, 1),
        ("4918", COMPLETED, 4),
        ("0184", COMPLETED, 1),
        ("99999", TRUNCATED, 0),
        ("", COMPLETED, 0),
    ],
)
def test_positions_is_the_share_of_right_characters_and_of_the_right_end(
    response: str, status: str, right: int
) -> None:
    assert built_in("positions", given(response, 4018, status=status)) == right / 5


def test_length_counts_characters() -> None:
    assert [built_in("length", given(text)) for text in ("", "abc", "é😀")] == [0, 3, 2]


def test_random_depends_on_prompt_and_sample_alone() -> None:
    table = [[built_in("random", given(text, index=i, id=p)) for p in range(4) for i in range(4)] for text in "ab"]
    assert table[0] == table[1]
    assert len(set(table[0])) == 16
    assert all(value is not None and 0 <= value < 1 for value in table[0])


@pytest.mark.parametrize("name", ["exact", "positions"])
def test_a_reward_that_needs_a_label_says_so(name: str) -> None:
    with pytest.raises(RewardError, match=f"{name}: prompt 7 has no label: name its key with --label-key"):
        built_in(name, given("None"))


def test_an_input_is_made_from_the_pristine_record_and_shared_with_nobody() -> None:
    prompt = Prompt(5, 1, 0, '{"prompt": [{"role": "user", "content": "q"}], "label": 3, "metadata": {"a": []}}')
    first, second = (reward_input(prompt, Sample(n, TRUNCATED, "text", None, ())) for n in range(2))
    assert first == RewardInput([{"role": "user", "content": "q"}], 3, {"a": []}, "text", TRUNCATED, 0, 5)
    first.metadata["a"].append(1)
    assert second.metadata == prompt.fields["metadata"] == {"a": []}


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (False, 0.0),
        (None, None),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.int64(-3), -3.0),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
    ],
)
def test_finite_numbers_and_bools_are_rewards(value: object, reward: float | None) -> None:
    found = scores(Custom("m.f", lambda one: value), [given()])[0]
    assert found == reward
    assert type(found) is type(reward)


def test_torch_scalars_are_rewards_and_longer_tensors_are_not() -> None:
    import torch

    value: Any = torch.tensor(0.5, dtype=torch.bfloat16)
    assert scores(Custom("m.f", lambda one: value), [given()]) == [0.5]
    assert scores(CustomGroup("m.f", lambda many: torch.tensor([0.5, 1.0])), group(2)) == [0.5, 1.0]
    with pytest.raises(RewardError):
        scores(Custom("m.f", lambda one: value.reshape(1)), [given()])


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        np.float32("-inf"),
        10**400,
        "1.0",
        b"1",
        [1.0],
        (1.0,),
        {},
        {"score": 1.0},
        1j,
        np.array([1.0]),
        np.str_("1"),
        np.datetime64("2020-01-01"),
        object(),
    ],
)
def test_anything_else_is_refused_with_function_prompt_and_sample(value: object) -> None:
    for custom in (
        Custom("m.f", lambda one: value if one.index == 2 else 1),
        CustomGroup("m.f", lambda many: [1, 1, value, 1]),
    ):
        with pytest.raises(RewardError, match=r"reward function m\.f: prompt 7, sample 2: .* is "):
            scores(custom, group())


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([1.0, 1.0, 1.0], "3 rewards for samples 0 to 3"),
        ([1.0] * 5, "5 rewards"),
        ([1.0], "1 rewards"),
        (np.ones(3), "3 rewards"),
        (1.0, "a float, not a list of 4 rewards"),
        ("1111", "a str, not a list"),
        ({0: 1.0}, "a dict, not a list"),
        (np.ones((4, 1)), "a ndarray, not a list"),
        (None, "a NoneType, not a list"),
    ],
)
def test_a_group_reward_must_give_a_list_of_the_right_length(values: object, problem: str) -> None:
    with pytest.raises(RewardError, match=f"m.f: prompt 7: {problem}"):
        scores(CustomGroup("m.f", lambda many: values), group())


def test_functions_may_be_sync_or_async_of_a_sample_or_a_group() -> None:
    async def one(x: RewardInput) -> float:
        await asyncio.sleep(0.01 * (4 - x.index))
        return float(x.response)

    async def many(xs: list[RewardInput]) -> list[float | None]:
        return [None if x.index == 1 else float(x.response) for x in xs]

    class Object:
        async def __call__(self, x: RewardInput) -> float:
            return float(x.response)

    for function in (one, lambda x: int(x.response), lambda x: one(x), Object()):
        assert scores(Custom("m.f", function), group()) == [0, 1, 2, 3]
    for function in (many, lambda xs: many(xs), lambda xs: [None if x.index == 1 else x.index for x in xs]):
        assert scores(CustomGroup("m.f", function), group()) == [0, None, 2, 3]


def test_a_sync_function_does_not_hold_up_the_event_loop() -> None:
    turned = threading.Event()

    def waits_for_the_loop(one: RewardInput) -> bool:
        return turned.wait(20)

    async def main() -> list[float | None]:
        task = asyncio.create_task(Custom("m.f", waits_for_the_loop).score_group(group()))
        await asyncio.sleep(0)
        turned.set()
        return await task

    assert asyncio.run(main()) == [1.0] * 4


def test_samples_are_scored_side_by_side() -> None:
    barrier = threading.Barrier(4)
    assert scores(Custom("m.f", lambda one: barrier.wait(20) >= 0), group()) == [1.0] * 4


def fails(x: object) -> float:
    raise KeyError("my own bug")


async def fails_async(x: object) -> float:
    return fails(x)


@pytest.mark.parametrize("kind", [Custom, CustomGroup])
@pytest.mark.parametrize("function", [fails, fails_async])
def test_an_exception_keeps_its_type_and_traceback(kind: type[Custom], function: Callable[..., Any]) -> None:
    with pytest.raises(KeyError, match="my own bug") as caught:
        scores(kind("m.f", function), group())
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fails"


def test_one_failure_cancels_the_other_samples() -> None:
    ended: list[int] = []

    async def one(x: RewardInput) -> float:
        if x.index == 1:
            await asyncio.sleep(0)
            raise KeyError
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(x.index)
        return 0.0

    async def main() -> int:
        with pytest.raises(KeyError):
            await Custom("m.f", one).score_group(group())
        return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1
    assert sorted(ended) == [0, 2, 3]


def test_a_bare_next_is_an_error_and_no_endless_wait() -> None:
    empty: Iterator[float] = iter(())
    with pytest.raises(RuntimeError, match=r"m\.f raised StopIteration"):
        scores(Custom("m.f", lambda one: next(empty)), group())


@pytest.mark.parametrize(
    ("fields", "group_rm", "problem"),
    [
        ({}, False, "no reward: give one of --rm-type (math, gsm8k,"),
        ({"rm_type": "exact", "custom_rm_path": "a.b"}, False, "two rewards: give one of --rm-type"),
        (
            {"rm_type": "exakt"},
            False,
            "random, reasoning_gym, remote_rm, row; did you mean exact?",
        ),
        ({"rm_type": "mat,exact"}, False, "--rm-type: 'mat,exact': there are math, gsm8k,"),
        ({"rm_type": "exact:x"}, False, "the weight 'x' of exact is no number"),
        ({"rm_type": "exact:0.5,length:nan"}, False, "the weight 'nan' of length is no number"),
        ({"rm_type": "exact,exact:2"}, False, "a reward stands in it twice"),
        ({"rm_type": "length:0.1,remote_rm"}, False, "remote_rm: where is the judge? --rm-url"),
        ({"rm_type": "exact"}, True, "--group-rm: --rm-type exact scores single samples"),
        ({"custom_rm_path": "no_such.thing"}, False, "--custom-rm-path 'no_such.thing': there is no module 'no_such'"),
    ],
)
def test_flags_that_select_no_reward_are_refused(fields: dict[str, str], group_rm: bool, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(GenerateConfig.model_validate(fields), group_rm)
    assert problem in str(caught.value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    return tmp_path


def test_a_function_in_the_current_folder_is_found(here: Path) -> None:
    (here / "my_rewards_one.py").write_text("def f(x): return len(x.response)\ndef g(xs): return [2] * len(xs)\n")
    assert scores(build(GenerateConfig(custom_rm_path="my_rewards_one.f"), False), group()) == [1.0] * 4
    assert scores(build(GenerateConfig(custom_rm_path="my_rewards_one.g"), True), group()) == [2.0] * 4


def test_a_file_in_the_current_folder_shadows_no_installed_module(here: Path) -> None:
    (here / "colorsys.py").write_text("hls_to_rgb = 1\n")
    assert callable(code.load("colorsys.hls_to_rgb", "--flag"))


@pytest.mark.parametrize(
    ("dotted", "problem"),
    [
        ("function", "not of the form module.function"),
        ("", "not of the form"),
        (".f", "not of the form"),
        ("a..f", "not of the form"),
        ("a:f", "not of the form"),
        ("./rewards.py", "not of the form"),
        ("no_such_module.f", "there is no module 'no_such_module', neither installed"),
        ("json.no_such.f", "there is no module 'json.no_such'"),
        ("json.no_such", "has no 'no_such'"),
        ("json.__name__", "'__name__' is a str, not a function"),
    ],
)
def test_a_path_that_names_no_function_is_refused_with_flag_and_value(dotted: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        code.load(dotted, "--some-path")
    assert str(caught.value).startswith(f"--some-path {dotted!r}: ")
    assert problem in str(caught.value)


def test_a_bug_in_the_users_module_is_the_users_to_see(here: Path) -> None:
    (here / "my_rewards_two.py").write_text("import no_such_thing\n")
    (here / "my_rewards_three.py").write_text("1 / 0\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        code.load("my_rewards_two.f", "--flag")
    with pytest.raises(ZeroDivisionError):
        code.load("my_rewards_three.f", "--flag")


def test_a_digest_tells_paths_apart() -> None:
    assert code.digest("a.b") == code.digest("a.b") != code.digest("a.c")
    assert len(code.digest("a.b")) == 16
