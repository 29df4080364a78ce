"""docs/rewards.md is the rule of what counts as the answer; its table of graded examples is this test."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import GenerateConfig
from pipeline.types import COMPLETED
from producers.rewards import RewardInput, opened
from producers.rewards.answer import after_thinking, answer, last_box
from producers.rewards.math import math

DOC = Path(__file__).parents[1] / "docs" / "rewards.md"


def given(response: str, label: Any = None, id: int = 0, **metadata: Any) -> RewardInput:
    return RewardInput("q", label, metadata, response, COMPLETED, 0, id)


def rows() -> list[tuple[str, Any, float]]:
    """Response, label and reward of the table; a label in quotes is text, with single backslashes, else a number."""
    _, _, rest = DOC.read_text(encoding="utf-8").partition("<!-- graded:")
    table, _, _ = rest.partition("\n\n")
    found = re.findall(r"^\| `(.+)` \| (.+) \| (\d) \|$", table, re.MULTILINE)
    assert len(found) == table.count("\n") - 2 > 40  # below the mark, a head and a rule
    return [(response, json.loads(label.replace("\\", "\\\\")), float(reward)) for response, label, reward in found]


def test_the_examples_of_the_rule_are_graded_as_it_says() -> None:
    table = rows()

    async def grade() -> list[float | None]:
        async with opened(GenerateConfig(rm_type="math"), False) as scorer:
            groups = [scorer.score_group([given(response, label, id)]) for id, (response, label, _) in enumerate(table)]
            return [reward for (reward,) in await asyncio.gather(*groups)]

    found = asyncio.run(grade())
    wrong = [(*row, reward) for row, reward in zip(table, found, strict=True) if row[2] != reward]
    assert wrong == []


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{" + "1" * 200_000 + "}",
        r"\boxed{" + "{" * 5_000 + "5" + "}" * 5_000 + "}",
        r"\boxed{" + r"\sqrt{" * 101 + "5" + "}" * 102,
        r"\boxed{" + "(" * 5_000,
    ],
    ids=["200 kB", "5,000 braces", "101 roots", "no end"],
)
def test_what_no_parser_should_see_is_settled_without_one(response: str) -> None:
    assert math(given(response, 5)) == (0.0 if response.endswith("(") else None)


def test_an_answer_that_is_the_label_is_right_without_a_parser() -> None:
    response = "ab " * 600
    assert math(given(rf"\boxed{{{response}}}", response)) == 1.0


def test_the_thinking_part_and_the_box_are_found_in_time_that_grows_with_the_text() -> None:
    text = "<think>" + r"\boxed{" * 200_000 + "</think>" + r"\boxed{" * 200_000 + "}"
    assert last_box(after_thinking(text)) == ""
    assert answer(text[:-1]) is None


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a\\{b}}", r"a\\{b}"),
        (r"\boxed{5\}", None),
        (r"\boxedx{5}", None),
        (r"\boxed 5", None),
        (r"\boxed{\frac{1}{2}} and } more {", r"\frac{1}{2}"),
    ],
)
def test_braces_of_latex_are_told_from_braces_of_text(text: str, box: str | None) -> None:
    assert last_box(text) == box
