"""Prompts to token ids, answers to text. Responses are never tokenised again: training uses the sampled ids.

Special tokens: a chat template's text is taken as it is, plain text gets what the tokenizer adds by itself; never
both. Text that spells a control marker (`<|im_end|>`) becomes that control token: clean prompts you do not trust.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np

from pipeline.errors import RequestRefused, UsageError
from pipeline.types import Tokens

Messages = list[dict[str, Any]]
Variables = Mapping[str, Any]
NONE: Variables = {}
ANSWER = "MILLPOND-ANSWER"
BEFORE: Messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
"What stands before the messages that a chat goes on with; what the template makes of it is cut off again."


class Tokenizer(Protocol):
    stop_token_ids: tuple[int, ...]
    "an answer ends with the first of these"

    def encode(self, prompt: str | Messages, chat_template: bool, more: Variables = NONE) -> Tokens:
        """int32 [P]. With `chat_template` text is one user turn; an assistant's last turn is continued; the template is
        given `more`, tools and what --apply-chat-template-kwargs says.

        UsageError where the prompt's kind and the flag or the tokenizer do not go together, RequestRefused where this
        one prompt cannot be encoded.
        """
        ...

    def follow(self, what: str | Messages, more: Variables = NONE) -> Tokens:
        """int32: how a sequence goes on that an answer stands in. Text as it stands, without a begin token; chat
        messages behind the end of the assistant's turn, up to where its next one begins.

        UsageError where there is no template or it cannot be continued, RequestRefused where it refuses the messages.
        """
        ...

    def decode(self, tokens: Tokens) -> str:
        """The text without stop and special tokens; bytes that are no UTF-8 become U+FFFD."""
        ...


def as_messages(prompt: str | Messages, chat_template: bool) -> Messages | None:
    """The chat messages to render, or None for text that is encoded as it stands."""
    if chat_template:
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if isinstance(prompt, str):
        return None
    raise UsageError("the prompt is a list of chat messages: set --apply-chat-template, or give text")


class HFTokenizer:
    """The tokenizer of a Hugging Face folder. Safe from any thread: fast tokenizers are not by themselves."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        if not path.is_dir():
            raise UsageError(f"--hf-checkpoint {path}: no such folder")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:  # ImportError: it needs a package such as sentencepiece
            raise UsageError(f"--hf-checkpoint {path}: no usable tokenizer there: {error}") from error
        self._path, self._lock = path, Lock()
        self.stop_token_ids = _stop_token_ids(path, self._tokenizer.eos_token_id)

    def encode(self, prompt: str | Messages, chat_template: bool, more: Variables = NONE) -> Tokens:
        messages = as_messages(prompt, chat_template)
        with self._lock:
            text = prompt if messages is None else self._render(messages, more)
            ids = self._tokenizer.encode(_valid(text), add_special_tokens=messages is None, verbose=False)
        return np.array(ids, np.int32)

    def follow(self, what: str | Messages, more: Variables = NONE) -> Tokens:
        with self._lock:
            text = what if isinstance(what, str) else self._next_turn(what, more)
            return np.array(self._tokenizer.encode(_valid(text), add_special_tokens=False, verbose=False), np.int32)

    def _next_turn(self, messages: Messages, more: Variables) -> str:
        _, found, rest = self._render([*BEFORE, *messages], more).rpartition(ANSWER)
        if not found:
            raise UsageError(
                f"the chat template in {self._path} does not show an assistant's words as they are, so its text cannot "
                "be continued; observe text instead of messages"
            )
        return rest

    def _render(self, messages: Messages, more: Variables) -> str:
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise UsageError(
                f"--apply-chat-template: the tokenizer in {self._path} has no chat template; "
                "use an instruction-tuned model, or text prompts without the flag"
            )
        ends = bool(messages) and messages[-1].get("role") == "assistant"
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not ends, continue_final_message=ends, **more
            )
        except (TemplateError, ValueError) as error:
            raise RequestRefused(f"the chat template refuses the prompt: {error}") from error
        return text

    def decode(self, tokens: Tokens) -> str:
        ids = [token for token in tokens.tolist() if token not in self.stop_token_ids]
        with self._lock:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _valid(text: str | Messages) -> str:
    try:
        str(text).encode()
    except UnicodeEncodeError as error:
        raise RequestRefused(f"the prompt is not valid Unicode: {error}") from error
    return str(text)


def _stop_token_ids(path: Path, own: int | None) -> tuple[int, ...]:
    """The tokenizer's end token and those of the model's configuration: chat models end turns with another one."""
    found: set[int] = set() if own is None else {own}
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            value = json.loads((path / name).read_text(encoding="utf-8")).get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(found))


class ByteTokenizer:
    """One token a byte of UTF-8, for the echo engine; byte 0 ends an answer. Chat turns are `role: content` lines."""

    stop_token_ids: tuple[int, ...] = (0,)

    def encode(self, prompt: str | Messages, chat_template: bool, more: Variables = NONE) -> Tokens:
        messages = as_messages(prompt, chat_template)
        return _bytes(str(prompt) if messages is None else _lines(messages))

    def follow(self, what: str | Messages, more: Variables = NONE) -> Tokens:
        return _bytes(what if isinstance(what, str) else "\n" + _lines(what))

    def decode(self, tokens: Tokens) -> str:
        return bytes(token for token in tokens.tolist() if token != 0).decode("utf-8", "replace")


def _lines(messages: Messages) -> str:
    return "".join(f"{m.get('role')}: {m.get('content')}\n" for m in messages) + "assistant: "


def _bytes(text: str) -> Tokens:
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)
