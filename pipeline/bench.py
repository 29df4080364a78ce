"""`millpond bench [codec|broker|overlap|engine|train|sglang|all]`: what it costs, on this machine.

Everything is compared with something else in the same run: other machines and other days give other microseconds, and
much the same ratios. `docs/benchmarks.md` says what each figure means.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from pipeline import code, show
from pipeline.config import Positive, Section, option
from pipeline.errors import UsageError
from pipeline.flags import arguments
from pipeline.measure import Figure
from pipeline.options import closest
from pipeline.urls import EngineUrls

# sglang needs servers that run, and is not one of all
PROG = "millpond bench [codec|broker|overlap|engine|train|publish|sglang|all]"
BENCHES = {
    "codec": "pipeline.bench_codec.measure",
    "broker": "pipeline.bench_broker.measure",
    "overlap": "pipeline.bench_overlap.measure",
    "engine": "pipeline.bench.engine",
    "train": "pipeline.bench.train",
    "publish": "trainer.bench_publish.measure",
}
"name -> (quick) -> figures"
SGLANG = "producers.engines.bench_sglang.of_servers"
"(config) -> figures, of servers that run"


class BenchConfig(Section):
    """Measures codec, broker, overlap, engine and training on this machine, without a network. Takes some minutes."""

    json_: bool = option(False, "one JSON document instead of tables")
    quick: bool = option(False, "tiny sizes: whether it runs, not how fast")
    engine_url: EngineUrls | None = option(None, "sglang: URLs of running servers, with commas between")
    engine_api_key: SecretStr | None = option(None, "sglang: API key of the servers; best given in the environment")
    hf_checkpoint: Path | None = option(None, "sglang: folder of the model that they serve")
    server_concurrency: Positive = option(32, "sglang: requests in one server at once")


def main(argv: list[str]) -> int:
    """Exit code 0 whether aims are reached or not: they are for people to read."""
    config, words = arguments(BenchConfig, argv, PROG)
    names = _names(words)
    found: dict[str, list[Figure]] = {}
    for name in names:
        measure: Callable[[Any], Iterator[Figure]] = code.load(BENCHES.get(name, SGLANG), "millpond bench")
        found[name] = list(measure(config.quick if name in BENCHES else config))
        if not config.json_:
            _table(name, found[name])
    if config.json_:
        figures = {name: {f.name: f.document() for f in found[name]} for name in names}
        show.document({"machine": _machine(), "quick": config.quick, **figures})
    return 0


def _names(words: list[str]) -> list[str]:
    for word in words:
        if word not in (*BENCHES, "sglang", "all"):
            raise UsageError(f"there is no benchmark {word!r}{closest(word, [*BENCHES, 'sglang', 'all'], PROG)}")
    return list(BENCHES) if not words or "all" in words else list(dict.fromkeys(words))


def engine(quick: bool) -> Iterator[Figure]:
    """The local sampler beside transformers' `generate`: same model, same prompts, same numbers of tokens."""
    compare = code.load("producers.engines.bench.compare", "millpond bench")
    for name, uneven, aim in (("even", False, 1.3), ("uneven", True, 2.0)):
        found: dict[str, float] = compare(4 if quick else 32, uneven, 1 if quick else 5)
        yield Figure(f"local_{name}", found["local_tokens_per_s"], "tokens/s")
        yield Figure(f"generate_{name}", found["generate_tokens_per_s"], "tokens/s")
        yield Figure(f"local_over_generate_{name}", found["ratio"], "x", at_least=aim)


def train(quick: bool) -> Iterator[Figure]:
    """A step of each backend beside a bare training loop: same model, same rows, same passes."""
    found: dict[str, float] = code.load("trainer.bench.compare", "millpond bench")(1 if quick else 8, 1 if quick else 9)
    for name in ("bare", "torch", "megatron"):
        if name in found:
            yield Figure(name, found[name], "tokens/s")
    for name in ("torch", "megatron"):
        if name in found:
            yield Figure(f"{name}_over_bare", found[f"{name}_ratio"], "x", at_least=0.8)


def _table(name: str, figures: list[Figure]) -> None:
    rows = [(f.name, f"{f.value:.4g}", f.unit, f.aim, {None: "", True: "yes", False: "NO"}[f.met]) for f in figures]
    show.line()
    show.table((name, "value", "unit", "aim", "reached"), rows)


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(terse=True),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "redis-py": metadata.version("redis"),
        "numpy": metadata.version("numpy"),
    }
