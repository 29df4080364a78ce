"""How much memory publishing takes: weights are gathered and written a file at a time, so it must follow the size of a
file, not the model's. In processes of their own: what a peak was cannot be forgotten.

And what adapters published alone save beside the whole model with them merged: bytes, and seconds until the folder is
complete, on the disk and has its digest."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from pipeline.config import TrainConfig
from pipeline.measure import Figure, ratio, turns
from pipeline.types import HF, PEFT
from trainer import weights
from trainer.workshop import Workshop

STATUS = Path("/proc/self/status")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node")


def measure(quick: bool) -> Iterator[Figure]:
    """Of one process, and of rank 0 of two that hold the model together."""
    with TemporaryDirectory(prefix="millpond-bench-") as name:
        folder, limit = Path(name), 1 << 18 if quick else 16 << 20
        _make_model(folder / "model", 128 if quick else 768, 4 if quick else 12)
        yield Figure("weights", sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors")), "bytes")
        yield Figure("file", limit, "bytes")
        for ranks in (1,) if quick else (1, 2):
            words = ["-m"] if ranks == 1 else ["-m", *TORCHRUN, str(ranks), "-m"]
            own = ["trainer.bench_publish", str(folder / "model"), str(folder / f"out-{ranks}"), str(limit)]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run([sys.executable, *words, *own], capture_output=True, text=True, check=True, env=env)
            peak = float(done.stdout.split()[-1])
            yield Figure(f"peak_{ranks}", peak, "bytes")
            yield Figure(f"peak_{ranks}_over_file", peak / limit, "x", at_most=4)
        if find_spec("peft"):
            yield from _adapters(folder, 4 if quick else 16, 1 if quick else 5)


def _adapters(folder: Path, rank: int, rounds: int) -> Iterator[Figure]:
    """Taking turns."""
    from trainer.backends.torch import TorchBackend

    config = TrainConfig(hf_checkpoint=folder / "model", device="cpu", lora_rank=rank)
    backend, shop, version = TorchBackend(config, True), Workshop(folder / "weights", 1), count(1)
    shop.folder.mkdir(parents=True)
    sizes: dict[str, int] = {}

    def publish(form: str) -> None:
        path, _ = weights.save(backend, shop, next(version), form)
        sizes[form] = sum(file.stat().st_size for file in path.iterdir())
        shop.take_away(path)

    seconds = turns({form: partial(publish, form) for form in (HF, PEFT)}, rounds)
    for name, form in (("merged", HF), ("adapter", PEFT)):
        yield Figure(f"{name}_bytes", sizes[form], "bytes")
        yield Figure(f"{name}_seconds", median(seconds[form]), "s")
    yield Figure("merged_over_adapter_bytes", sizes[HF] / sizes[PEFT], "x")
    yield Figure("merged_over_adapter_seconds", ratio(seconds[HF], seconds[PEFT]), "x")


def _make_model(folder: Path, hidden: int, layers: int) -> None:
    """A Qwen3 with random weights, in bfloat16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as chatter

    chatter.disable_progress_bar()
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=2048, **shape, **heads)).to(torch.bfloat16).save_pretrained(folder)


def main(model: str, out: str, largest: str) -> None:
    """One of several ranks. The lead writes to stdout by how many bytes its memory grew at most."""
    from trainer import outline
    from trainer.backends.hf import CausalModel
    from trainer.backends.torch import device_of, form_of
    from trainer.ranks import meet

    config = TrainConfig(hf_checkpoint=Path(model), device="cpu")
    ranks = meet(10, device_of(config))
    held = CausalModel(config.hf_checkpoint, device_of(config), form_of(config, ranks, device_of(config)))
    for name in ("first", "second"):  # what libraries take once is not counted
        if ranks.lead:
            (Path(out) / name).mkdir(parents=True)
            before = _forget()
            outline.write(Path(out) / name, held.outline(), held.pieces(), int(largest))
        else:
            for _ in held.pieces(lead=False):
                pass
    if ranks.lead:
        sys.stdout.write(f"{_memory('VmHWM') - before}\n")
    ranks.part()


def _forget() -> int:
    """From here on the peak is a new one. What memory there is."""
    ctypes.CDLL(None).malloc_trim(0)  # or what the first took, and the heap kept, would hide the second
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())
    return int(found[1]) << 10 if found else 0


if __name__ == "__main__":
    main(*sys.argv[1:])
