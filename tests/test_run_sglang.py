"""Workers and whole runs on SGLang servers that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import FakeSGLang, in_a_thread
from make import at_work, feed, until
from processes import PATIENT, SMALL, Stage, audited, contiguous, eventually, prompts, steps
from rig import Rig, policy
from test_engine_sglang import QUICK

from pipeline.audit import audit
from pipeline.codec import decode
from pipeline.types import Group
from producers.engines.sglang import SGLangEngine
from producers.engines.sglang_pool import Servers
from producers.group import seed_of

KEY = "sk-f1shing"


def null_logprob(reply: dict[str, Any]) -> dict[str, Any]:
    reply["meta_info"]["output_token_logprobs"][0][0] = None
    return reply


def aborted(reply: dict[str, Any]) -> dict[str, Any]:
    reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted"}
    return reply


class Bench:
    """One worker on one server, and the run they work for."""

    def __init__(self, rig: Rig, folder: Path, **agreed: Any) -> None:
        self.rig, self.folder = rig, folder
        self.trainer = rig.trainer(**{"rollout_max_response_len": 6, "queue_max_bytes": 10**6, **agreed})
        self.fake = FakeSGLang(vocab=256, context=200)
        self.fake.weighs |= {f"weights/{version}" for version in range(1, 30)}

    def run(self, go: Callable[[], Coroutine[Any, Any, None]], seconds: float = 20.0) -> None:
        """`go` beside a worker that is at work."""
        (self.folder / "config.json").write_text('{"vocab_size": 256}')

        async def main() -> None:
            async with self.fake as fake:
                engine = SGLangEngine(self.folder, Servers((fake.url,)), "retract", seconds, replace(QUICK, start=9))
                async with at_work(self.rig, engine, concurrency=16):
                    await go()

        self.rig.do(main())
        assert audit(self.rig.feeder()).holds

    @property
    def queued(self) -> list[Group]:
        return [decode(message) for message in self.rig.groups()]

    async def all_queued(self, prompts: int) -> None:
        await until(lambda: len(self.rig.groups()) == prompts)


@pytest.mark.parametrize(
    ("what", "reason"),
    [("500", "bad_sample"), (null_logprob, "bad_sample"), ("stall", "bad_sample"), (aborted, "aborted")],
)
def test_a_prompt_of_which_one_sample_fails_goes_round_with_a_strike(
    what: Any, reason: str, real: Rig, tmp_path: Path
) -> None:
    """BB-12: each prompt ends in one place, the worker outlives all of it, and no failure becomes a sample."""
    bench = Bench(real, tmp_path, n_samples_per_prompt=8)
    if what == "500":
        bench.fake.poison[seed_of(42, 1, 3)] = 3
    else:
        bench.fake.order("/generate", lambda reply: reply)  # the greeting
        bench.fake.order("/generate", what)
    feed(real, 3)
    bench.run(lambda: bench.all_queued(3), seconds=3.0 if what == "stall" else 20.0)
    assert sum(group.prompt.strikes for group in bench.queued) == real.counter(f"strikes:{reason}") == 1
    for group in bench.queued:
        assert [len(sample.sequences[0].tokens) > 0 for sample in group.samples] == [True] * 8


@pytest.mark.parametrize("what", ["drop", "503"])
def test_a_server_that_fails_in_passing_costs_no_strike(what: str, real: Rig, tmp_path: Path) -> None:
    bench = Bench(real, tmp_path)
    bench.fake.order("/generate", what, times=12)
    feed(real, 3)
    bench.run(lambda: bench.all_queued(3))
    assert [group.prompt.strikes for group in bench.queued] == [0, 0, 0]


def test_a_server_that_is_killed_costs_no_strike_and_no_prompt(real: Rig, tmp_path: Path) -> None:
    bench = Bench(real, tmp_path)
    feed(real, 6)
    bench.fake.hold_at = 2

    async def go() -> None:
        await bench.fake.tokens_out(2, requests=8)
        await bench.fake.stop()
        bench.fake.hold_at = None
        await asyncio.sleep(0.1)
        await bench.fake.start()
        await bench.all_queued(6)

    bench.run(go)
    assert [group.prompt.strikes for group in bench.queued] == [0] * 6
    assert {version for group in bench.queued for version in group.versions} == {1}


def test_what_is_published_is_loaded_under_the_requests_and_they_keep_both_versions(real: Rig, tmp_path: Path) -> None:
    bench = Bench(real, tmp_path)
    feed(real, 4)
    bench.fake.hold_at = 2

    async def go() -> None:
        await bench.fake.tokens_out(2, requests=8)
        await asyncio.to_thread(bench.trainer.publish, policy(2), [])
        await until(lambda: bench.fake.label == "2")
        await bench.fake.release()
        await bench.all_queued(4)

    bench.run(go)
    assert {version for group in bench.queued for version in group.versions} == {1, 2}
    assert [group.prompt.attempt for group in bench.queued] == [1] * 4
    assert "/abort_request" not in bench.fake.calls


def test_a_prompt_that_fills_the_window_is_dropped_once_under_a_reason(real: Rig, tmp_path: Path) -> None:
    bench = Bench(real, tmp_path)
    feeder = feed(real, 1)
    feeder.feed(1, [json.dumps({"prompt": "x" * size, "label": None, "metadata": {}}) for size in (190, 199, 200)])

    async def go() -> None:
        await bench.all_queued(2)
        await until(lambda: real.counter("dropped:refused") == 2)

    bench.run(go)
    assert {group.prompt.id for group in bench.queued} == {0, 1}
    assert real.ended("dropped") == {2, 3}


# -- whole runs


def model(folder: Path) -> Path:
    """A tokenizer of characters, and the sizes of a model that only the server has."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {t: i for i, t in enumerate(["<eos>", "<unk>", *(chr(c) for c in range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(words), "max_position_embeddings": 4096}))
    return folder


def run_of(stage: Stage, fake: FakeSGLang, rows: int, **env: str) -> Any:
    folder = stage.folder
    return stage.millpond(
        *("run", "--out", folder / "run", "--engine", "sglang", "--engine-url", fake.url, *SMALL),
        *("--hf-checkpoint", model(folder / "model"), "--train-backend", "echo", "--rm-type", "random"),
        *("--rollout-max-response-len", "12", "--echo-train-seconds", "0.05"),
        *("--prompt-data", prompts(folder, rows), "--num-epoch", "1", "--max-weight-staleness", "2", *PATIENT),
        **env,
    )


def test_a_whole_run_survives_a_killed_server_and_writes_its_key_nowhere(tmp_path: Path) -> None:
    fake = FakeSGLang(context=128, vocab=97, key=KEY)
    fake.pace = 0.003
    with in_a_thread(fake) as loop, Stage(tmp_path) as stage:
        run = run_of(stage, fake, 48, MILLPOND_ENGINE_API_KEY=KEY)
        eventually(lambda: len(steps(tmp_path / "run")) > 2, "three steps")
        asyncio.run_coroutine_threadsafe(fake.stop(), loop).result()
        asyncio.run_coroutine_threadsafe(fake.start(), loop).result()
        said = run.ends(0)
        places = audited(stage, tmp_path / "run")
    lines = steps(tmp_path / "run")
    assert contiguous(lines) == 12
    assert places == {**dict.fromkeys(places, 0), "committed": 48}
    assert max(line["rollout/fully_async/max_staleness"] for line in lines) > 0
    named = [int(body["new_version"]) for body in fake.bodies("/update_weight_version")]
    assert named == sorted(named)
    assert named[-1] > 5
    assert {len(body["rid"]) for body in fake.bodies("/generate")} == {32}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in said
