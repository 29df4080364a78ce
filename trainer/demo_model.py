"""The small model that ships with the project: made from a seed, without a download.

A stock Qwen3 of 85,120 parameters over single characters; it learns the default task from nothing in a minute or two.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from trainer.workshop import made

CHARACTERS = "0123456789+=CRSNAM:"
SPECIAL = ("<pad>", "<eos>", "<unk>")
HIDDEN, LAYERS, HEADS, FEED_FORWARD, CONTEXT = 64, 2, 4, 128, 64


def make(folder: Path, seed: int) -> None:
    """Model and tokenizer in the Hugging Face layout; nothing is done where a config.json stands already."""
    if (folder / "config.json").is_file():
        return
    from transformers.utils import logging as chatter

    chatter.disable_progress_bar()
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(prefix=".model-", dir=folder.parent))
    with made(hidden, folder):
        _tokenizer().save_pretrained(hidden)
        _model(seed).save_pretrained(hidden)


def _tokenizer() -> Any:
    """One token a character, in a form that AutoTokenizer loads."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    result.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"  # characters know no roles
    return result


def _model(seed: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=CONTEXT,
        initializer_range=0.02,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state is its own
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
