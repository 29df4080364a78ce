"""--deterministic-mode: figures that do not depend on timing, and what it cannot go with."""

from __future__ import annotations

from pathlib import Path

import pytest
from make import Hand, at_work, calm, feed, hired, until
from processes import Stage, steps
from rig import Rig

from pipeline.config import GenerateConfig, RunConfig, Section, TrainConfig
from pipeline.errors import UsageError
from pipeline.modes import agreed as told
from pipeline.modes import check
from producers import waves
from producers.engines.echo import EchoEngine
from trainer.weights import digest

LOCK_STEP = {"deterministic_mode": True, "max_weight_staleness": 0, "bound": 2, "in_flight": 2}


def figures(folder: Path) -> list[dict[str, float]]:
    """All but times."""
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith("perf/")} for line in steps(folder)]


# -- two runs


def weights(folder: Path) -> str:
    """Digest of the last."""
    return digest(folder / "weights" / "00000004")


def test_two_runs_of_the_default_job_and_a_replay_of_one_give_the_same_figures_whatever_threads_they_are_offered(
    tmp_path: Path,
) -> None:
    """Wherever answers are scored, too."""
    small = ("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--num-rollout", "3")
    run = ("run", "--deterministic-mode", "--no-fully-async", *small)
    with Stage(tmp_path) as stage:
        runs = [
            stage.millpond(*run, "--out", "a", "--archive"),
            stage.millpond(*run, "--out", "b", "--rm-place", "worker", OMP_NUM_THREADS="2"),
        ]
        for one in runs:
            one.ends(0, seconds=250)
        stage.millpond("replay", "a/archive", "--out", "c", OMP_NUM_THREADS="2").ends(0, seconds=120)
    first, second, third = (figures(tmp_path / name) for name in "abc")
    assert len(first) == 3
    assert len({line["train/grad_norm"] for line in first}) == 3
    assert first == second == third
    assert weights(tmp_path / "a") == weights(tmp_path / "b") == weights(tmp_path / "c")


# -- waves


def test_a_wave_begins_when_it_is_whole_and_its_groups_are_pushed_as_they_were_leased(real: Rig) -> None:
    real.trainer(**LOCK_STEP)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine, kind=waves.Waves):
            feed(real, 1)
            await until(lambda: real.raw.xpending(real.keys["prompts"], "generators")["pending"] == 1)
            await calm(engine)
            assert engine.sent == []
            feed(real, 1)
            await until(lambda: len(engine.held) == 4)
            engine.end(1)
            await until(lambda: engine.prompts() == [0])
            assert real.groups() == []
            engine.end(0)
            await until(lambda: len(real.groups()) == 2)
        assert engine.sent == [(0, 0), (0, 1), (1, 0), (1, 1)]

    real.do(go())
    opened = [real.raw.zscore(real.keys["unsettled"], str(id)) for id in (0, 1)]
    assert opened == sorted(opened)


def test_the_last_wave_of_the_data_is_smaller(real: Rig) -> None:
    real.trainer(**LOCK_STEP)

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine, kind=waves.Waves):
            feed(real, 1, ends=True)
            await until(lambda: len(engine.held) == 2)
            engine.end(0)
            await until(lambda: len(real.groups()) == 1)

    real.do(go())


def test_no_token_is_sampled_before_all_requests_of_a_wave_are_there(real: Rig) -> None:
    real.trainer(**LOCK_STEP)

    class Gate(EchoEngine):
        seen: list[int]

        async def resume(self) -> None:
            self.seen = [len(self._flights), sum(f.timer is not None for f in self._flights.values())]
            await super().resume()

    async def go() -> None:
        engine = Gate("0", 4)
        async with at_work(real, engine, kind=waves.Waves):
            feed(real, 2)
            await until(lambda: len(real.groups()) == 2)
        assert engine.seen == [4, 0]

    real.do(go())


def test_a_prompt_that_is_refused_does_not_hold_its_wave_up(real: Rig) -> None:
    real.trainer(**LOCK_STEP, rollout_max_prompt_len=2)

    async def go() -> None:
        async with at_work(real, EchoEngine("0", 4), kind=waves.Waves):
            feed(real, 11, ends=True)  # p10 is too long
            await until(lambda: len(real.groups()) == 2)

    real.do(go())


# -- what cannot be


def mode(role: type[TrainConfig] | type[RunConfig] = RunConfig, **values: object) -> Section:
    reward = {} if role is TrainConfig else {"rm_type": "exact"}
    return role(**{"num_rollout": 3, "deterministic_mode": True, "fully_async": False, **reward, **values})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (mode(fully_async=True), "use --no-fully-async"),
        (mode(TrainConfig, fully_async=True), "use --no-fully-async"),
        (mode(TrainConfig, update_weights_interval=2), "--update-weights-interval 2"),
        (mode(generators=2), "--generators 2"),
        (mode(torch_threads=2), "--torch-threads 2"),
        (mode(TrainConfig, torch_threads=2), "--torch-threads 2"),
        (mode(server_concurrency=4), "the 8 samples of a group could not begin together"),
        (mode(custom_generate_function_path="mine.agent"), "use --server-concurrency 1"),
    ],
)
def test_what_timing_would_decide_is_refused_with_a_remedy(config: Section, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(config)
    assert str(caught.value).startswith("--deterministic-mode with ")
    assert "\n" not in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        mode(),
        mode(fully_async=True, max_weight_staleness=0),
        mode(custom_generate_function_path="mine.agent", server_concurrency=1),
    ],
)
def test_what_lock_step_pins_is_let_through(config: RunConfig) -> None:
    assert check(config) == []
    assert told(config).deterministic_mode


def test_a_judge_elsewhere_is_a_warning() -> None:
    (said,) = check(mode(rm_type="remote_rm", rm_url="http://localhost:1/"))
    assert "--rm-url" in said


def test_a_second_generator_is_refused_by_name(real: Rig) -> None:
    real.trainer(**LOCK_STEP)
    real.worker("w0")

    async def go() -> None:
        async with hired(real, EchoEngine("0", 4)) as generator:
            config = GenerateConfig(rm_type="random", engine="echo")
            await waves.check(generator.engine, config, generator.worker, patience=0)

    with pytest.raises(UsageError, match="w0 works on this run already"):
        real.do(go())


def test_a_wave_that_is_not_whole_waits_though_the_run_is_paused(real: Rig) -> None:
    trainer = real.trainer(**LOCK_STEP)
    worker = real.worker("w1")
    feed(real, 1)
    assert len(real.lease(worker, 1)) == 1
    trainer.renew(paused="1")

    async def go() -> None:
        engine = Hand()
        async with at_work(real, engine, kind=waves.Waves) as generator:
            generator.broker.suspect = True  # it finds what it holds
            generator.poke.set()
            await until(lambda: len(generator.held) == 1)
            await calm(engine)
            assert engine.sent == []

    real.do(go())
