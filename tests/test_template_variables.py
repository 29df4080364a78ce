"""What a chat template is given besides the messages: a row's tools, and --apply-chat-template-kwargs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from make import maker_of
from rig import agreed
from test_tokens import CHAT, HELLO, ids, make

from pipeline.config import TrainConfig
from pipeline.errors import UsageError
from pipeline.flags import parse
from pipeline.modes import idle
from pipeline.types import Prompt, Tokens
from producers.engines.echo import EchoEngine
from producers.group import Progress
from producers.tokens import NONE, ByteTokenizer, HFTokenizer

TEMPLATE = "{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}{% if calm %}~{% endif %}" + CHAT


class Recorder(ByteTokenizer):
    def __init__(self) -> None:
        self.given: list[Mapping[str, Any]] = []

    def encode(self, prompt: str | list[dict[str, Any]], chat_template: bool, more: Mapping[str, Any] = NONE) -> Tokens:
        self.given.append(more)
        return super().encode(prompt, chat_template, more)


def given(metadata: dict[str, Any], **rules: Any) -> Mapping[str, Any]:
    """What the tokenizer is given for a row with this metadata."""
    recorder, engine = Recorder(), EchoEngine("0", 2)
    prompt = Prompt(1, 1, 0, json.dumps({"prompt": HELLO, "label": None, "metadata": metadata}))

    async def make_group() -> None:
        await engine.start()
        rules_ = agreed(apply_chat_template=True, n_samples_per_prompt=1, **rules)
        maker = maker_of(engine, rules_)
        object.__setattr__(maker, "tokenizer", recorder)
        await maker.make(prompt, Progress(), asyncio.Event())
        await engine.close()

    asyncio.run(make_group())
    return recorder.given[0]


def test_tools_of_the_row_and_the_runs_variables_reach_the_template(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    more = given({"tools": tools}, apply_chat_template_kwargs='{"calm": true}')
    assert more == {"tools": tools, "calm": True}
    assert given({}) == {}
    tokenizer = HFTokenizer(make(tmp_path, template=TEMPLATE))
    assert tokenizer.encode(HELLO, True, more).tolist() == ids("[add]~<user>hi#<a>")
    assert tokenizer.encode(HELLO, True).tolist() == ids("<user>hi#<a>")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", 'must be a JSON map, like {"enable_thinking": false}'),
        ("[1]", "must be a JSON map"),
        ('{"tokenize": true, "tools": []}', "must not have tokenize, tools"),
    ],
)
def test_variables_that_are_none_are_refused(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(TrainConfig, ["--apply-chat-template-kwargs", text], {}, "millpond train")
    assert problem in str(caught.value)


def test_variables_without_a_template_do_nothing() -> None:
    config = TrainConfig(num_rollout=1, apply_chat_template_kwargs='{"a": 1}')
    assert idle(config)["apply_chat_template_kwargs"] == "--apply-chat-template is off"
    assert "apply_chat_template_kwargs" not in idle(config.model_copy(update={"apply_chat_template": True}))
