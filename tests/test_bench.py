"""The benchmarks run, measure what they say, and give what docs/benchmarks.md promises. How fast is not asked here."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import bench, bench_overlap
from pipeline.bench_life import Bare, Life
from pipeline.bench_run import Mode, Outcome, run
from pipeline.config import GenerateConfig
from pipeline.errors import MillpondError, UsageError
from pipeline.measure import Figure, ratio, turns
from producers.engines.base import Request, Sampling
from producers.engines.echo_count import CountingEcho

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def figures(capsys: Any, name: str) -> dict[str, dict[str, Any]]:
    """Of `millpond bench NAME --json --quick`."""
    assert bench.main([name, "--json", "--quick"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"machine", "quick", name}
    assert document["quick"] is True
    return document[name]  # type: ignore[no-any-return]


def check(found: dict[str, dict[str, Any]], aims: dict[str, str]) -> None:
    """Every figure is whole and documented, and the aims are those of the issue."""
    assert {frozenset(figure) for figure in found.values()} == {frozenset({"value", "unit", "aim", "met"})}
    assert all(figure["value"] >= 0 and figure["unit"] for figure in found.values())
    assert {name: figure["aim"] for name, figure in found.items() if figure["aim"]} == aims
    assert [name for name in found if f"`{name}`" not in DOCUMENT.read_text(encoding="utf-8")] == []
    assert all((figure["met"] is None) == (figure["aim"] is None) for figure in found.values())


def test_the_codec_is_measured_beside_lists(capsys: Any) -> None:
    found = figures(capsys, "codec")
    check(found, {})
    assert 215_000 < found["message"]["value"] < 225_000
    assert found["lists_over_message"]["value"] > 1.3


def test_the_broker_is_measured_beside_a_list_at_depth_and_in_a_crowd(capsys: Any) -> None:
    found = figures(capsys, "broker")
    aims = {"life_over_bare_64k": "at most 2", "life_over_bare_1m": "at most 1.5"}
    check(found, {**aims, "deep_over_shallow": "at most 1.1", "many_workers_over_one": "at most 1.1"})
    assert {"feed_64k", "lease_64k", "push_64k", "take_64k", "check_64k", "publish_64k", "commit_64k"} <= set(found)


def test_the_engine_is_measured_beside_generate(capsys: Any) -> None:
    check(
        figures(capsys, "engine"),
        {"local_over_generate_even": "at least 1.3", "local_over_generate_uneven": "at least 2"},
    )


def test_a_training_step_is_measured_beside_a_bare_loop(capsys: Any) -> None:
    found = figures(capsys, "train")
    backends = [name for name in ("torch", "megatron") if name in found]
    check(found, {f"{name}_over_bare": "at least 0.8" for name in backends})
    assert "torch" in found


def test_what_publishing_takes_of_memory_is_measured_and_what_adapters_alone_save(capsys: Any) -> None:
    found = figures(capsys, "publish")
    check(found, {"peak_1_over_file": "at most 4"})
    assert found["merged_over_adapter_bytes"]["value"] > 3
    assert found["merged_over_adapter_seconds"]["value"] > 0


def test_a_table_says_which_aims_are_reached(capsys: Any) -> None:
    assert bench.main(["codec", "--quick"]) == 0
    head, *rows = capsys.readouterr().out.strip().splitlines()
    assert head.split() == ["codec", "value", "unit", "aim", "reached"]
    assert rows[0].split()[::2] == ["message", "bytes"]


def test_an_unknown_benchmark_gets_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="no benchmark 'brokr'; did you mean broker"):
        bench.main(["brokr"])


# -- the measuring itself


def test_an_aim_is_reached_from_its_own_side() -> None:
    assert Figure("a", 2.0, "x", at_most=2.0).met
    assert not Figure("a", 2.1, "x", at_most=2.0).met
    assert Figure("a", 1.3, "x", at_least=1.3).met
    assert not Figure("a", 1.2, "x", at_least=1.3).met
    assert Figure("a", 1.2, "x").met is None


def test_sides_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    seconds = turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}


def test_a_ratio_is_the_median_of_the_rounds_own() -> None:
    assert ratio([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == 3.0


# -- the broker's


@pytest.fixture
def life(redis_url: str) -> Iterator[Life]:
    with Life(redis_url, 100, 4) as life:
        yield life


def test_a_round_takes_prompts_from_feed_to_commit(life: Life) -> None:
    life.fill(10)
    for _ in range(3):
        life.round()
    stand = life.feeder.standing()
    assert (stand.places() == 1).all()
    assert (stand.feed, stand.queued, stand.pending, len(stand.open)) == (22, 10, 0, 10)
    assert life.feeder.counters()["committed"] == 12


def test_a_worker_that_was_declared_dead_between_rounds_goes_on(life: Life) -> None:
    life.feeder.client.delete(life.keys["workers"])
    life.round()
    assert life.feeder.counters()["committed"] == 4


def test_a_round_without_prompts_is_an_error(life: Life) -> None:
    life.feeder.client.hset(life.keys["state"], "paused", "1")
    with pytest.raises(MillpondError, match="0 prompts leased of 4"):
        life.round()


def test_the_bare_list_moves_the_same_bytes(life: Life) -> None:
    bare = Bare(life)
    bare.round()
    assert life.feeder.client.exists(bare.key) == 0
    assert life.feeder.client.info("commandstats")["cmdstat_blpop"]["calls"] >= 4  # type: ignore[index]


# -- overlap


def overlap_figures() -> list[Figure]:
    """For a training step of 2 s, out of made-up outcomes."""
    seconds = {"generation": 1.25, "lock_step": 6.0, "generation_bound": 1.5}
    modes = [mode.name for mode in bench_overlap.modes(20, 1.0)]
    found = {name: Outcome(seconds.get(name, 2.1), 0.02, 3, 4) for name in modes}
    return list(bench_overlap.figures(found, 2.0))


def test_overlap_is_held_against_the_longer_of_training_and_generation() -> None:
    found = {f.name: f for f in overlap_figures()}
    check(
        {name: f.document() for name, f in found.items()},
        {
            "fully_async_over_longest": "at most 1.05",
            "generation_bound_over_longest": "at most 1.05",
            "fully_async_never_trained": "at most 1",
        },
    )
    assert found["lock_step_over_longest"].value == 3.0
    assert found["fully_async_over_longest"].value == 1.05
    assert found["generation_bound_over_longest"].value == 1.2
    assert found["fully_async_never_trained"].value == 2.0


def test_all_three_ways_of_running_do_the_same_work() -> None:
    modes = {mode.name: mode for mode in bench_overlap.modes(20, 1.0)}
    three = [modes[name].options for name in ("lock_step", "one_step_off", "fully_async")]
    assert len({options["echo_latency"] for options in three}) == len({o["echo_train_seconds"] for o in three}) == 1
    kept, tail = modes["tail_kept"], modes["tail"]
    assert (kept.options, kept.steps, kept.cancels, tail.cancels) == (tail.options, tail.steps, False, True)


def test_a_run_trains_all_prompts_and_says_what_it_wasted(redis_url: str, tmp_path: Path) -> None:
    options = {"fully_async": True, "max_weight_staleness": 1, "rollout_batch_size": 4, "echo_latency": "0.01"}
    mode = Mode(f"bench-{tmp_path.name}", options, 5, cancels=False)
    outcome = run(mode, bench_overlap.SHARED, tmp_path, redis_url, threading.Event())
    assert outcome.step > 0
    assert 0 <= outcome.wasted < 0.5
    assert outcome.cancelled == 0
    assert len((tmp_path / mode.name / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_run_whose_trainer_fails_says_what_it_said(redis_url: str, tmp_path: Path) -> None:
    mode = Mode(f"bench-{tmp_path.name}", {"train_backend": "none"}, 5)
    with pytest.raises(MillpondError, match=r"ended with 2(.|\n)*train_backend"):
        run(mode, bench_overlap.SHARED, tmp_path, redis_url, threading.Event())


def test_what_a_cancelled_request_had_sampled_is_counted(tmp_path: Path) -> None:
    prompt = np.frombuffer(b"prompt 7", np.uint8).astype(np.int32)
    config = GenerateConfig(engine="echo", echo_latency="0.2")

    async def sample(engine: CountingEcho, seconds: float) -> None:
        task = asyncio.create_task(engine.generate(Request("1", prompt, Sampling(100, 1.0, ()), 1)))
        await asyncio.wait([task], timeout=seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def both() -> None:
        engine = CountingEcho(tmp_path / "count", config)
        await engine.start()
        await sample(engine, 0.02)
        await sample(engine, 10)
        await engine.close()

    asyncio.run(both())
    count = json.loads((tmp_path / "count").read_text())
    assert count["cancelled"] == 1
    assert count["prompts"] == {"prompt 7": 0.2}
    assert 0.2 < count["sampled"] < 0.4
