"""Models as the trainer holds them, and the small one that ships with the project."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import local_models
import pytest
import torch

from pipeline.rendezvous import Piece
from trainer import demo_model
from trainer.backends.hf import CausalModel
from trainer.outline import saved, write

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "demo"
    demo_model.make(folder, 0)
    return folder


def tiny(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model of another make, with random weights large enough for its logits to differ; saved and returned."""
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    shape = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.3}
    if kind == "llama, tied":
        model: Any = LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=True))
    else:
        caps = {"final_logit_softcapping": 2.0, "sliding_window": 3}
        model = Gemma2ForCausalLM(Gemma2Config(**shape, **heads, **caps))
    model.to(dtype).save_pretrained(folder)
    return model.float().eval()


@pytest.mark.parametrize("kind", ["llama, tied", "gemma, capped, sliding window"])
def test_logits_at_chosen_positions_of_padded_rows_are_those_of_a_plain_forward_pass(kind: str, tmp_path: Path) -> None:
    model = tiny(kind, tmp_path)
    rows = [[3, 4, 5, 6, 7, 8, 9], [10, 11, 12]]
    padded = torch.tensor([rows[0], rows[1] + [0] * 4])
    with torch.no_grad():
        found = CausalModel(tmp_path, CPU).logits(padded, torch.tensor([4, 6, 8, 9]))
        first, second = (model(input_ids=torch.tensor([row])).logits[0] for row in rows)
    expected = torch.stack([first[4], first[6], second[1], second[2]])
    assert float((found - expected).abs().max()) < 1e-5
    assert float(expected.std()) > 0.1


def test_weights_are_published_in_the_checkpoints_dtype_and_tied_ones_once(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoConfig

    for name in ("from", "to"):
        (tmp_path / name).mkdir()
    tiny("llama, tied", tmp_path / "from", torch.bfloat16)
    model = CausalModel(tmp_path / "from", CPU)
    assert {p.dtype for p in model.module.parameters()} == {torch.float32}
    model.save(tmp_path / "to")
    written = load_file(tmp_path / "to" / "model.safetensors")
    assert {t.dtype for t in written.values()} == {torch.bfloat16}
    original = load_file(tmp_path / "from" / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
    assert AutoConfig.from_pretrained(tmp_path / "to").dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["qwen3", "moe", "recurrent"])
def test_a_folder_of_several_files_has_the_checkpoints_own_tensors_and_is_said_before_it_is_written(
    tmp_path: Path, kind: str
) -> None:
    """Experts lie together in memory and apart in files."""
    original = local_models.load(local_models.save(kind, tmp_path / "from"))
    model = CausalModel(tmp_path / "from", CPU)
    (tmp_path / "to").mkdir()
    write(tmp_path / "to", model.outline(), model.pieces(), 40_000)
    assert len(list((tmp_path / "to").glob("model-*-of-*.safetensors"))) > 2
    assert sorted(saved(tmp_path / "to")) == sorted(saved(tmp_path / "from")) == sorted(model.outline())
    (tmp_path / "to" / "config.json").write_bytes((tmp_path / "from" / "config.json").read_bytes())
    again = local_models.load(tmp_path / "to").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in original.state_dict().items())


class Counted:
    """Tensors of 1,000 bytes; how many of them were alive at once."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def tensors(self, count: int) -> Iterator[torch.Tensor]:
        for _ in range(count):
            self.alive = [ref for ref in self.alive if ref() is not None]
            self.most = max(self.most, len(self.alive) + 1)
            tensor = torch.zeros(250)
            self.alive.append(weakref.ref(tensor))
            yield tensor
            del tensor


def test_what_is_written_is_in_memory_a_file_at_a_time(tmp_path: Path) -> None:
    outline, counted = [Piece(f"t{n:02}", "float32", (250,), 1000) for n in range(40)], Counted()
    write(tmp_path, outline, counted.tensors(40), 5_500)
    assert len(saved(tmp_path)) == 40
    assert len(list(tmp_path.glob("*.safetensors"))) == 8
    assert counted.most <= 6


def test_the_demo_model_follows_its_seed_and_is_made_once(checkpoint: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for name, seed in (("same", 0), ("other", 1)):
        demo_model.make(tmp_path / name, seed)
    assert torch.equal(torch.get_rng_state(), before)
    made = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
    assert made == {p.name: p.read_bytes() for p in (tmp_path / "same").iterdir()}
    assert made["model.safetensors"] != (tmp_path / "other" / "model.safetensors").read_bytes()
    demo_model.make(tmp_path / "other", 0)
    assert made["model.safetensors"] != (tmp_path / "other" / "model.safetensors").read_bytes()


def test_the_demo_tokenizer_has_one_token_a_character(checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("A:3907=").input_ids
    assert len(ids) == 7
    assert tokenizer.decode(ids) == "A:3907="
    assert tokenizer.eos_token_id == 1
