"""Prompts to ids and back."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import RequestRefused, UsageError
from producers.tokens import ByteTokenizer, HFTokenizer

TURN = "<{{ m['role'] }}>{{ m['content'] }}#"
CHAT = "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
HELLO = [{"role": "user", "content": "hi"}]


def make(
    folder: Path, *, bos: bool = False, template: str | None = None, generation: dict[str, Any] | None = None
) -> Path:
    """A character tokenizer; with `bos` it puts <bos> before plain text, as Llama's does."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>", "<bos>"]
    words = {t: i for i, t in enumerate([*special, *(chr(c) for c in range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 3)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<bos>"
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def ids(text: str) -> list[int]:
    return [ord(c) - 32 + 4 for c in text]


def test_plain_text_gets_what_the_tokenizer_adds_and_no_more(tmp_path: Path) -> None:
    without, with_bos = HFTokenizer(make(tmp_path / "a")), HFTokenizer(make(tmp_path / "b", bos=True))
    assert without.encode("1+2", chat_template=False).tolist() == ids("1+2")
    encoded = with_bos.encode("1+2", chat_template=False)
    assert encoded.tolist() == [3, *ids("1+2")]
    assert encoded.dtype == np.int32


def test_a_template_decides_alone_about_the_begin_token(tmp_path: Path) -> None:
    names_it = HFTokenizer(make(tmp_path / "a", bos=True, template="{{ bos_token }}" + CHAT))
    leaves_it = HFTokenizer(make(tmp_path / "b", bos=True, template=CHAT))
    assert names_it.encode(HELLO, chat_template=True).tolist() == [3, *ids("<user>hi#<a>")]
    assert leaves_it.encode(HELLO, chat_template=True).tolist() == ids("<user>hi#<a>")


def test_text_under_a_template_is_one_user_turn(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(make(tmp_path, template=CHAT))
    assert tokenizer.encode("hi", chat_template=True).tolist() == tokenizer.encode(HELLO, chat_template=True).tolist()


def test_an_assistants_last_turn_is_continued(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(make(tmp_path, template=CHAT))
    turns = [*HELLO, {"role": "assistant", "content": "well"}]
    assert tokenizer.encode(turns, chat_template=True).tolist() == ids("<user>hi#<assistant>well")


def test_a_tokenizer_without_template_refuses_to_render(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(make(tmp_path))
    for prompt in (HELLO, "hi"):
        with pytest.raises(UsageError, match="no chat template"):
            tokenizer.encode(prompt, chat_template=True)


def test_chat_messages_without_the_flag_are_refused(tmp_path: Path) -> None:
    for tokenizer in (HFTokenizer(make(tmp_path, template=CHAT)), ByteTokenizer()):
        with pytest.raises(UsageError, match="--apply-chat-template"):
            tokenizer.encode(HELLO, chat_template=False)


def test_a_prompt_the_template_refuses_is_refused_alone(tmp_path: Path) -> None:
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHAT
    tokenizer = HFTokenizer(make(tmp_path, template=strict))
    with pytest.raises(RequestRefused, match="user first"):
        tokenizer.encode([{"role": "system", "content": "x"}], chat_template=True)
    assert len(tokenizer.encode(HELLO, chat_template=True))


def test_a_lone_surrogate_is_refused_as_a_prompt(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(make(tmp_path, template=CHAT))
    with pytest.raises(RequestRefused, match="Unicode"):
        tokenizer.encode("a\ud800", chat_template=False)
    with pytest.raises(RequestRefused, match="Unicode"):
        tokenizer.encode([{"role": "user", "content": "a\ud800"}], chat_template=True)


def test_an_empty_prompt_has_no_tokens(tmp_path: Path) -> None:
    assert HFTokenizer(make(tmp_path)).encode("", chat_template=False).shape == (0,)
    assert ByteTokenizer().encode("", chat_template=False).shape == (0,)


def test_decoding_skips_stop_and_special_tokens_and_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(make(tmp_path, generation={"eos_token_id": [1, ids("!")[0]]}))
    tokens = np.array([3, *ids("42"), 0, 5000, *ids("!"), 1], np.int32)
    assert tokenizer.decode(tokens) == "42"


def test_stop_tokens_are_the_tokenizers_and_the_generation_configs(tmp_path: Path) -> None:
    assert HFTokenizer(make(tmp_path / "a")).stop_token_ids == (1,)
    assert HFTokenizer(make(tmp_path / "b", generation={"eos_token_id": [7, 9]})).stop_token_ids == (1, 7, 9)
    assert HFTokenizer(make(tmp_path / "c", generation={"eos_token_id": 7})).stop_token_ids == (1, 7)
    assert HFTokenizer(make(tmp_path / "d", generation={"eos_token_id": None})).stop_token_ids == (1,)


def test_many_threads_may_share_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(make(tmp_path, template=CHAT))
    texts = [f"{i}+{i}=" * (1 + i % 7) for i in range(400)]
    with ThreadPoolExecutor(16) as pool:
        encoded = list(pool.map(lambda text: tokenizer.encode(text, chat_template=False), texts))
    assert [tokenizer.decode(tokens) for tokens in encoded] == texts


def test_a_folder_that_is_missing_or_holds_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        HFTokenizer(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no usable tokenizer"):
        HFTokenizer(tmp_path)


def test_bytes_go_round_whatever_the_text() -> None:
    tokenizer = ByteTokenizer()
    for text in ("A:1=", "é\u2028漢", ""):
        assert tokenizer.decode(tokenizer.encode(text, chat_template=False)) == text
    assert tokenizer.encode("a\ud800", chat_template=False).max() < 256


def test_bytes_cut_inside_a_character_still_decode() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("né", chat_template=False)[:-1]
    assert tokenizer.decode(np.append(tokens, np.int32(0))) == "n\ufffd"


def test_bytes_render_messages_as_lines() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(HELLO, chat_template=True)) == "user: hi\nassistant: "
    assert tokenizer.encode("hi", chat_template=True).tolist() == tokenizer.encode(HELLO, chat_template=True).tolist()
