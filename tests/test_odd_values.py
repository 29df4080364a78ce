"""Odd values from end to end: half characters, half precision, scalars of other libraries, keys that are no text."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make import at_work, drain_of, until
from rig import Rig

from consumers.staleness import Limit
from pipeline.config import FeedConfig
from pipeline.errors import UsageError
from pipeline.types import Span
from producers.engines.base import Completion, Request
from producers.engines.echo import EchoEngine
from producers.feeder import Feeder
from producers.rewards.base import RewardInput
from producers.sources import open_source

torch = pytest.importorskip("torch")
CUT = "so 😀".encode()[:-2]
"A response that ends in the middle of a character."


class Cut(EchoEngine):
    """Answers with bytes that are no text, in whatever precision it likes."""

    async def generate(self, request: Request) -> Completion:
        tokens = np.frombuffer(CUT, np.uint8).astype(np.int32)
        logprobs: Any = np.full(len(tokens), -0.5, (np.float16, np.float64)[request.seed % 2])
        return Completion(tokens, logprobs, "stop", (Span(self.version, 0, len(tokens)),))


class Scalars:
    """Rewards as numpy and torch have them."""

    async def score_group(self, inputs: list[RewardInput]) -> list[Any]:
        return [np.float32(0.5), torch.tensor(1)]


def test_half_characters_half_precision_and_foreign_scalars_arrive(real: Rig, tmp_path: Path) -> None:
    rows = [{"input": f"odd \ud83d {i}", "label": "\udc80", "metadata": {"\ud83d": ["\ud83d"]}} for i in range(2)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = FeedConfig.model_validate({"prompt_data": path, "num_epoch": 1})
    trainer, feeder = real.trainer(), real.feeder()
    source = open_source(config)
    feeder.feed(0, Feeder(source, config, feeder)._records(range(2)))

    async def work() -> None:
        async with at_work(real, Cut("0.001", 8), scorer=Scalars()):
            await until(lambda: real.raw.llen(real.keys["groups"]) == 2)

    asyncio.run(work())
    batch = drain_of(trainer, 2, starve_timeout=20).batch(Limit(1, (), 1))
    assert batch is not None
    for group, row in zip(batch.groups, rows, strict=True):
        assert group.prompt.fields == {"prompt": row["input"], "label": row["label"], "metadata": row["metadata"]}
        assert [(sample.reward, type(sample.reward)) for sample in group.samples] == [(0.5, float), (1.0, float)]
        for sample in group.samples:
            (sequence,) = sample.sequences
            assert bytes(sequence.tokens.tolist()) == CUT
            assert sequence.logprobs.dtype == np.float32
            assert sequence.logprobs.tolist() == [-0.5] * len(CUT)
            assert sample.text.startswith("so ")
    assert real.conserved()


def test_metadata_with_keys_that_are_no_text_is_made_text_or_refused_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_keys.py").write_text(
        "def some(config): return [{'input': 'a', 'metadata': {1: 'a', None: 'b', 't': (1, (2, 'x'))}}]\n"
        "def none(config): return [{'input': 'a', 'metadata': {(1, 2): 'a'}}]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("odd_keys", None)
    config = FeedConfig.model_validate({"task": "odd_keys.some", "num_epoch": 1})
    (record,) = open_source(config).records([0])
    assert json.loads(record)["metadata"] == {"1": "a", "null": "b", "t": [1, [2, "x"]]}
    with pytest.raises(UsageError, match=r"odd_keys\.none:0: is no JSON: keys must be"):
        open_source(FeedConfig.model_validate({"task": "odd_keys.none", "num_epoch": 1}))
