"""Each kind of reward by itself: the rule it has, on examples; several together; rows that choose."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from pipeline.config import GenerateConfig
from pipeline.errors import RewardError, UsageError
from pipeline.types import COMPLETED
from producers.rewards import BUILT_IN, RewardInput, opened
from producers.rewards.base import Grading
from producers.rewards.custom import Custom
from producers.rewards.ifeval_checks import CHECKS


def given(response: str = "", label: Any = None, index: int = 0, **metadata: Any) -> RewardInput:
    return RewardInput("q", label, metadata, response, COMPLETED, index, 7)


def reward(rm_type: str, one: RewardInput, **fields: Any) -> float | None:
    async def main() -> float | None:
        async with opened(GenerateConfig(rm_type=rm_type, **fields), False) as scorer:
            return (await scorer.score_group([one]))[0]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        ("so\n#### 72", "48/2=24\n#### 72", 1),
        ("#### 72", 72, 1),
        ("#### $1,234.", "1234", 1),
        ("#### -5", "-5", 1),
        ("#### 72.0", 72, 1),
        ("#### 5\n#### 72", 72, 1),
        ("#### 72\n#### 5", 72, 0),
        ("72", 72, 0),
        (r"\boxed{72}", 72, 0),
        ("<think>#### 72</think> so", 72, 0),
        ("#### many", 72, 0),
    ],
)
def test_gsm8k_wants_the_number_behind_the_last_mark(response: str, label: Any, right: float) -> None:
    assert reward("gsm8k", given(response, label)) == right


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("so\nAnswer: 34", 34, 1),
        ("answer : 34", "34", 1),
        ("Answer: 5\nAnswer: 34", "34", 1),
        ("Answer: 34\nAnswer: 5", "34", -1),
        ("Answer: $34$.", "34", 1),
        ("Answer: x = 34", "34", 1),
        (r"Answer: \boxed{34}", "34.0", 1),
        ("Answer: 1,234", "1234", 1),
        ("Answer: 34 km", 34, 1),
        (r"Answer: \frac12", r"\frac{1}{2}", 1),
        (r"Answer: 34\text{ cm}", "34", 1),
        ("34", 34, -1),
        (r"\boxed{34}", 34, -1),
        ("Answer: 34" + " " * 300, 34, -1),
        ("Answer: " + "9" * 400, "9" * 400, -1),
    ],
)
def test_dapo_reads_the_last_answer_of_the_last_300_characters(response: str, label: Any, score: float) -> None:
    assert reward("dapo", given(response, label)) == score
    assert reward("dapo", given(response, label), reward_key="acc") == (score == 1)


@pytest.mark.parametrize(
    ("answer", "label", "right"),
    [
        ("34", 34, 1),
        ("0.5", r"\frac{1}{2}", 1),
        (r"\frac12", "1/2", 1),
        ("x=5", 5, 1),
        (r"12 \text{ cm}", 12, 1),
        ("12 cm", 12, 1),
        (r"50\%", "50", 1),
        ("1,234", 1234, 1),
        ("5.0", 5, 1),
        (r"\text{Tuesday}", "tuesday", 1),
        (r"7 3/4", r"7\frac{3}{4}", 1),
        ("(1,2)", "(1, 2)", 1),
        ("34", r"so \boxed{34}", 1),
        ("2/4", "1/2", 0),  # fractions must be reduced
        (r"\sqrt{16}", "4", 0),  # an integer must be written as one
        ("2^{10}", "3x", 0),  # powers are not worked out
        ("[0,1)", "[0,1]", 0),
        ("(1,2,3)", "(1,2)", 0),
        ("5", "", 0),
        ("", "5", 0),
    ],
)
def test_deepscaler_has_its_own_idea_of_equal(answer: str, label: Any, right: float) -> None:
    assert BUILT_IN["deepscaler"](given(rf"<think>t</think> \boxed{{{answer}}}", label)) == right


def test_deepscaler_wants_the_thinking_part_to_be_over_and_leaves_mathematics_to_the_sandbox() -> None:
    score = BUILT_IN["deepscaler"]
    assert score(given(r"\boxed{34}", 34)) == 0
    assert score(given(r"<think> \boxed{34}", 34)) == 0
    assert score(given(r"###Response \boxed{34}", 34)) == 1
    assert score(given(r"</think> \boxed{34", 34)) == 0
    assert score(given(r"</think> \boxed{" + "1" * 3000 + "}", 34)) is None
    mathematics = Grading("math", {"solution": r"2\sqrt{3}", "answer": r"\sqrt{12}"})
    assert score(given(r"</think> \boxed{\sqrt{12}}", r"2\sqrt{3}")) == mathematics


@pytest.mark.parametrize(
    ("response", "label", "metadata", "right"),
    [
        ("The answer is (B).", "B", {}, 1),
        ("Answer: **B**", "B", {}, 1),
        ("It may be A, but the correct answer is C.", "C", {}, 1),
        ("I choose option A. No: option D", "D", {}, 1),
        (r"\boxed{B}", "B", {}, 1),
        (r"answer: A, so \boxed{\text{(B)}}", "B", {}, 1),
        (r"answer: B, so \boxed{7}", "B", {}, 0),
        ("<think>the answer is B</think> A", "B", {}, 0),
        ("It is a mix of things", "A", {}, 0),
        ("B", 1, {"choices": ["x", "y"]}, 1),
        ("B", "Y ", {"choices": {"A": "x", "B": "y"}}, 1),
        (r"\boxed{y}", "B", {"choices": ["x", "y"]}, 1),
        ("C", "whatever", {"correct_letter": "c", "choices": ["x", "y", "z"]}, 1),
        ("The answer is E", "A", {"choices": ["x", "y"]}, 0),
        ("Q", "Q", {"valid_letters": ["P", "Q"]}, 1),
        ("", "A", {}, 0),
    ],
)
def test_gpqa_finds_the_letter_chosen(response: str, label: Any, metadata: dict[str, Any], right: float) -> None:
    assert reward("gpqa", given(response, label, **metadata)) == right


def test_gpqa_says_when_a_row_has_no_right_letter() -> None:
    with pytest.raises(RewardError, match=r"gpqa: prompt 7: .* the label \('w'\) is one of A, B or"):
        reward("gpqa", given("A", "w", choices=["x", "y"]))


@pytest.mark.parametrize(
    ("response", "label", "share"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("the tall eiffel tower", "eiffel tower", 0.8),
        ("big ben", "eiffel tower", 0.0),
        ("<think>eiffel tower</think> big ben", "eiffel tower", 0.0),
        ("yes it is", "yes", 0.0),
        ("Yes.", "yes", 1.0),
        ("no", "yes", 0.0),
        ("a a a b", "a b b", 2 / 3),
        ("", "x", 0.0),
    ],
)
def test_f1_is_the_overlap_of_words(response: str, label: str, share: float) -> None:
    assert reward("f1", given(response, label)) == pytest.approx(share)


@pytest.mark.parametrize(
    ("name", "arguments", "follows", "breaks"),
    [
        ("keywords:existence", {"keywords": ["Mill", "pond"]}, "a millpond", "a mill"),
        ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "a b a", "a b"),
        ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "less than"}, "a b", "a b a"),
        ("keywords:forbidden_words", {"forbidden_words": ["art"]}, "start", "Art!"),
        ("keywords:letter_frequency", {"letter": "z", "let_frequency": 2, "let_relation": "at least"}, "Zz", "z"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
        ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "One.", "One. Two!"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\nb"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
            "a\n\nSo, b",
            "so\n\na",
        ),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "bye\nP.S. more", "bye"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n**b**"),
        ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and **"),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "SECTION", "num_sections": 2},
            "SECTION 1 a SECTION 2 b",
            "SECTION a",
        ),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
        ("detectable_format:json_format", {}, "[1]", "[" * 100_000),
        ("detectable_format:title", {}, "<<A title>>\ntext", "<< >>"),
        ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "say hi. Hi!", "Hi!"),
        ("startend:end_checker", {"end_phrase": "The end."}, 'So. "The end."', "The end. Or not."),
        ("startend:quotation", {}, '"all of it"', '"'),
        ("change_case:english_capital", {}, "ALL OF 2", "ALL OF it"),
        ("change_case:english_lowercase", {}, "all of it", "All"),
        (
            "change_case:capital_word_frequency",
            {"capital_frequency": 2, "capital_relation": "at least"},
            "A BIG b",
            "A",
        ),
        ("punctuation:no_comma", {}, "a; b", "a, b"),
    ],
)
def test_each_instruction_has_an_answer_that_follows_it_and_one_that_does_not(
    name: str, arguments: dict[str, Any], follows: str, breaks: str
) -> None:
    filled = {**arguments, "of_another_instruction": None}
    for text, kept in ((follows, True), (breaks, False)):
        one = given(f"<think>{breaks}</think>\n{text}", instruction_id_list=[name], kwargs=[filled])
        assert reward("ifeval", one) == kept, text


def test_ifeval_wants_all_instructions_followed_and_counts_them() -> None:
    asked = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
    assert reward("ifeval", given("no comma", **asked)) == 0
    assert reward("ifeval", given("no comma", **asked), reward_key="share") == 0.5
    assert reward("ifeval", given("", **asked), reward_key="share") == 0.0
    assert len(CHECKS) == 24


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({}, "metadata.instruction_id_list is missing or empty"),
        ({"instruction_id_list": ["language:response_language"]}, "no check for 'language:response_language'"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": None}]}, "no 'keywords' for one of"),
    ],
)
def test_an_instruction_that_cannot_be_checked_is_named(metadata: dict[str, Any], problem: str) -> None:
    with pytest.raises(RewardError, match=f"ifeval: prompt 7: .*{problem}"):
        reward("ifeval", given("text", **metadata))


def test_several_rewards_are_added_by_weight() -> None:
    assert reward("exact:2, length:0.5", given("42", 42)) == 3.0
    assert reward("length:-1,exact", given("41", 42)) == -2.0
    assert reward("math:1,length:0.5", given(r"\boxed{" + "1" * 3000 + "}", 42)) is None


def test_a_box_before_a_name_hands_the_reward_what_stands_in_the_last_box() -> None:
    assert reward("boxed_exact", given(r"so \boxed{42}", 42)) == 1
    assert reward("boxed_length", given("no box")) == 0


def test_a_row_has_the_last_word() -> None:
    assert reward("length", given("42", 42, rm_type="exact")) == 1
    assert reward("length", given("42", 42, rm_type=" exact:3 ,length")) == 5
    assert reward("length", given("42", 42, rm_type="")) == 2
    assert reward("length", given("#### 42", 42, data_source="openai/gsm8k")) == 7


def test_rows_that_name_a_source_have_its_reward() -> None:
    assert reward("row", given("#### 42", 42, data_source="openai/gsm8k")) == 1
    assert reward("row", given("Answer: 42", 42, data_source="aime2024")) == 1
    assert reward("row", given(r"\boxed{42}", 42, data_source="lighteval/MATH", rm_type="length")) == 10


@pytest.mark.parametrize(
    ("rm_type", "metadata", "problem"),
    [
        ("row", {}, "prompt 7: --rm-type row, and the row names no reward"),
        ("row", {"data_source": "mine"}, "its data_source is none of openai/gsm8k"),
        ("length", {"rm_type": "lenght"}, "prompt 7: 'lenght': there are .* did you mean length"),
        ("length", {"rm_type": "no.such.path"}, "prompt 7: 'no.such.path': there are"),
    ],
)
def test_a_row_without_a_reward_is_named(rm_type: str, metadata: dict[str, Any], problem: str) -> None:
    with pytest.raises(RewardError, match=problem):
        reward(rm_type, given("x", **metadata))


def test_a_row_that_needs_a_judge_ends_this_worker_where_there_is_none() -> None:
    with pytest.raises(UsageError, match="remote_rm: where is the judge"):
        reward("length", given("x", rm_type="remote_rm"))


def test_the_place_of_the_reward_in_a_map_is_the_users_to_name() -> None:
    custom = Custom("m.f", lambda one: {"score": 0.5, "format": one.index, "pred": "x", "none": None}, "format")
    assert asyncio.run(custom.score_group([given(index=0), given(index=3)])) == [0.0, 3.0]
    for key, problem in (
        ("missing", "no 'missing' in {.*--reward-key"),
        ("pred", "'x' is a str"),
        (None, "--reward-key"),
    ):
        with pytest.raises(RewardError, match=problem):
            asyncio.run(Custom("m.f", custom.function, key).score_group([given()]))
    assert asyncio.run(Custom("m.f", custom.function, "none").score_group([given()])) == [None]
    assert asyncio.run(Custom("m.f", lambda one: 1, "format").score_group([given()])) == [1.0]


def test_a_missing_package_ends_the_worker_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from producers.rewards import grade

    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "producers.rewards.symbolic", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'millpond\[math\]'"):
        grade.load("math")


LONG = 200_000
NASTY = [
    *(
        "answer" + " " * LONG,
        "#### " + " " * LONG + "$" + " " * LONG,
        "<answer>" * (LONG // 8),
        "[" * LONG,
        "." * LONG + "a",
    ),
    *(
        "*a" * (LONG // 2),
        "P " * (LONG // 2),
        "A-" + "-" * LONG,
        r"\boxed{" * (LONG // 7),
        "<think>" * (LONG // 7),
        "the " * LONG,
    ),
    *("answer: " * (LONG // 8), "a,\n" * (LONG // 3), "é" * LONG, "####" * (LONG // 4), "*" * LONG, "<<" * (LONG // 2)),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "reasoning_gym"])
def test_the_event_loop_is_not_held_up_by_what_a_model_writes(name: str) -> None:
    """Time grows with the length of a response, not with its square: that would be minutes here."""
    asked = {
        "keywords": ["a"],
        "forbidden_words": ["a"],
        "keyword": "a",
        "frequency": 1,
        "letter": "a",
        "end_phrase": "x",
    }
    asked |= {"let_frequency": 1, "num_words": 1, "num_sentences": 1, "num_paragraphs": 1, "nth_paragraph": 1}
    asked |= {"first_word": "a", "num_placeholders": 1, "postscript_marker": "P.S.", "num_bullets": 1}
    asked |= {
        "num_highlights": 1,
        "section_spliter": "S",
        "num_sections": 1,
        "prompt_to_repeat": "a",
        "capital_frequency": 1,
    }
    metadata = {"instruction_id_list": list(CHECKS), "kwargs": [asked] * len(CHECKS)}
    for text in NASTY:
        BUILT_IN[name](given(f"</think>{text}", "A", **metadata))
        BUILT_IN[name](given(rf"</think>{text} \boxed{{{text}", "A", **metadata))
