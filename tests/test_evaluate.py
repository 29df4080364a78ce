"""Evaluations beside a trainer that goes on: real queue, a real worker, which does each in a process of its own."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make import crew, feed, loop_of, metrics, run
from rig import Rig, agreed
from rq.results import Result
from safetensors.numpy import save_file
from test_evaluation import asked

from pipeline.agreed import Agreed
from pipeline.broker import Broker
from pipeline.causes import causes
from pipeline.code import digest
from pipeline.config import WorkerConfig
from pipeline.errors import Stopped, UsageError
from pipeline.evaluation import Terms
from pipeline.glance import look
from pipeline.jobs import EVAL, REWARD, Jobs
from pipeline.join import Place
from pipeline.status import evaluated
from producers.engines.echo import EchoEngine
from producers.worker import Crew
from trainer import checkpoint
from trainer.backends.echo import EchoBackend
from trainer.loop import Loop
from trainer.weights import versions

OWN: dict[str, Any] = {"eval_function_path": "eval_functions.weigh"}


@pytest.fixture(autouse=True)
def own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's processes find tests/eval_functions.py."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


class Weighty(EchoBackend):
    """Its one weight is the number of steps it has made; `at_N` is called before step N."""

    def __init__(self, **at: Callable[[], object]) -> None:
        super().__init__(0.0)
        self.at = at

    def train(self, groups: Any, step: int, at: Any = None) -> dict[str, float]:
        self.at.get(f"at_{step + 1}", int)()
        return super().train(groups, step, at)

    def save_weights(self, folder: Path, form: str = "hf") -> None:
        save_file({"w": np.array([self.steps], np.float32)}, folder / "model.safetensors")


class Gate:
    """When evaluations end, and how."""

    def __init__(self, folder: Path, word: str = "go") -> None:
        self.path = folder / "gate"
        self.say(word)

    def say(self, word: str) -> None:
        self.path.write_text(word)

    @property
    def options(self) -> dict[str, Any]:
        return {**OWN, "eval_prompt_data": f"gate {self.path}"}


def quick() -> EchoEngine:
    return EchoEngine("0.001", 4)


@contextmanager
def worker(rig: Rig, rules: Agreed | None = None, **options: Any) -> Iterator[None]:
    """`millpond worker` for evaluations, in a thread."""
    config = WorkerConfig.model_validate({"engine": "echo", "rm_type": "random", "worker_jobs": "evals", **options})
    broker = Broker(rig.url, rig.keys, "jobs", 20)
    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(Crew(config, Place(rig.url, rig.keys.run, None), rules or agreed(), broker).work)
        try:
            yield
        finally:
            broker.stop.set()
            working.result()
            broker.close()


def lines(folder: Path) -> dict[int, dict[str, float]]:
    """What evals.jsonl tells, by step; one line each."""
    found = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in found}) == len(found)
    return {line["step"]: {n: v for n, v in line.items() if n != "time"} for line in found}


def eventually(met: Callable[[], Any]) -> Any:
    end = time.monotonic() + 120
    while not (found := met()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def train(rig: Rig, folder: Path, backend: EchoBackend | None = None, **fields: Any) -> Loop:
    """A fresh run of 6 steps with an evaluation every 2, to its end."""
    values = {"eval_interval": 2, "save_interval": 0, "num_rollout": 6, "skip_eval_before_train": True, **OWN, **fields}
    feed(rig, 4 * values["num_rollout"])
    with crew(rig, quick):
        return run(loop_of(rig, folder, backend or Weighty(), **values))


def answer(rig: Rig, step: int, values: dict[str, float] | None = None) -> None:
    """A worker ends the evaluation of a step, with `values` or by failing; once the trainer has asked for it."""
    with closing(Jobs(rig.url, rig.keys, "worker")) as jobs:
        end = time.monotonic() + 120
        while not (names := list(rig.raw.scan_iter(f"rq:job:{jobs.id(EVAL, f'{step}-')}*"))):
            assert time.monotonic() < end
            time.sleep(0.01)
        queue = jobs._queue(EVAL)
        job = queue.job_class.fetch(names[0].decode()[7:], connection=jobs.client, serializer=queue.serializer)
        if values is None:
            Result.create_failure(job, 100, "failed: RuntimeError: the judge is out")
        else:
            Result.create(job, Result.Type.SUCCESSFUL, 100, return_value=values)


def bare(lines: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    return {step: {n: v for n, v in line.items() if n != "step"} for step, line in lines.items()}


# -- with a real worker


def test_a_late_evaluation_stands_at_its_step_with_the_weights_it_is_pinned_to(real: Rig, tmp_path: Path) -> None:
    gate = Gate(tmp_path, "hold")
    backend = Weighty(at_6=lambda: gate.say("go"))
    with worker(real, **gate.options):
        train(real, tmp_path, backend, **gate.options, eval_max_in_flight=9)
    found = lines(tmp_path)
    assert {step: line["eval/w"] for step, line in found.items()} == {2: 2, 4: 4, 6: 6}
    assert {step: line["eval/weight_version"] for step, line in found.items()} == {2: 3, 4: 5, 6: 7}
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert set(versions(tmp_path / "weights")) <= {5, 6, 7}


def test_one_fails_one_is_killed_and_run_again_and_the_last_is_waited_for(real: Rig, tmp_path: Path) -> None:
    gate = Gate(tmp_path, "fail")

    def failed() -> None:
        eventually(lambda: [*real.raw.scan_iter("rq:results:*eval-2-3")])
        gate.say("kill")

    with worker(real, **gate.options):
        train(real, tmp_path, Weighty(at_4=failed), **gate.options, eval_max_in_flight=9, num_rollout=4)
    found = lines(tmp_path)
    assert found[2] == {"step": 2, "eval/failed": 1}
    assert (found[4]["eval/w"], len(found)) == (4, 2)
    assert (tmp_path / "gate.killed").exists()
    assert real.raw.hget(real.keys["state"], "status") == b"done"


TERMS = Terms(sets=(), shared=False, code={"eval_function_path": digest(OWN["eval_function_path"])})


def test_a_worker_that_does_not_fit_leaves_an_evaluation_to_one_that_does_and_says_why(
    real: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It scores answers meanwhile."""
    Weighty().save_weights(tmp_path)
    broker, rules = real.feeder(), agreed(rm_place="worker", evals=TERMS)
    real.trainer()
    ask = asked(sets=(), code=TERMS.code, path=str(tmp_path))
    with closing(Jobs(real.url, real.keys, "test")) as jobs:
        id = jobs.put(EVAL, "6-7", {"ask": ask.model_dump(mode="json")}, 100, 100)
        with worker(real, rules, worker_jobs="all", rm_workers=1, eval_function_path="eval_functions.other"):
            eventually(lambda: jobs.workers(REWARD))
            cause = eventually(lambda: {c.name: c for c in causes(look(broker))}.get("no worker for evals"))
            assert "leaves evaluations to others: --eval-function-path: the trainer has another value" in cause.what
            assert not jobs.workers(EVAL)
            with worker(real, rules, **OWN):
                eventually(lambda: jobs.ended([id]))
        assert jobs.ended([id])[id].state == "done"
    assert caplog.text.count("this worker leaves evaluations to others: --eval-function-path: the trainer has") == 1


def test_a_worker_that_fits_for_nothing_ends_with_the_reason(real: Rig) -> None:
    with (
        pytest.raises(
            UsageError, match="nothing to do for this worker: --eval-function-path, --rm-type: the trainer has"
        ),
        worker(real, agreed(evals=TERMS), worker_jobs="all"),
    ):
        pass


# -- with answers


def test_one_that_fails_is_told_at_its_step_and_training_ends_well(
    real: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Weighty(at_3=lambda: answer(real, 2), at_5=lambda: answer(real, 4, {"eval/a": 0.5}))
    with ThreadPoolExecutor(1) as threads:
        last = threads.submit(answer, real, 6, {"eval/a": 1.0})
        train(real, tmp_path, backend)
        last.result()
    assert bare(lines(tmp_path)) == {2: {"eval/failed": 1}, 4: {"eval/a": 0.5}, 6: {"eval/a": 1}}
    assert "the evaluation of step 2 (version 3) has failed: failed: RuntimeError: the judge is out" in caplog.text
    told = look(real.feeder()).evals
    why = "step 2 failed: RuntimeError: the judge is out"
    assert told == {"in_flight": [], "ended": 3, "failed": 1, "why": why}
    assert evaluated({**told, "in_flight": [8]}) == f"3 (failed 1); in flight: step 8; {why}"
    assert not [*real.raw.scan_iter("rq:job:*" + real.keys.job_tag + "*")]


def test_one_too_many_is_left_out_and_counted(real: Rig, tmp_path: Path) -> None:
    """The last is not: it waits for its turn."""

    def late() -> None:
        eventually(lambda: b"room for" in (real.raw.hget(real.keys["state"], "doing") or b""))
        answer(real, 2, {"eval/a": 0.5})
        answer(real, 6, {"eval/a": 1.0})

    with ThreadPoolExecutor(1) as threads:
        last = threads.submit(late)
        train(real, tmp_path)
        last.result()
    assert bare(lines(tmp_path)) == {2: {"eval/a": 0.5}, 4: {"eval/skipped": 1}, 6: {"eval/a": 1}}


def test_under_backpressure_training_waits_and_says_so(
    real: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    doing: list[bytes | None] = []

    def first() -> None:
        eventually(lambda: b"room for" in (real.raw.hget(real.keys["state"], "doing") or b""))
        doing.append(real.raw.hget(real.keys["state"], "doing"))
        answer(real, 2, {"eval/a": 0.5})
        answer(real, 4, {"eval/a": 0.75})

    with ThreadPoolExecutor(1) as threads:
        answers = threads.submit(first)
        train(real, tmp_path, eval_overflow_policy="backpressure", num_rollout=4)
        answers.result()
    assert bare(lines(tmp_path)) == {2: {"eval/a": 0.5}, 4: {"eval/a": 0.75}}
    assert doing == [b"waiting for room for the evaluation of step 4 (--eval-max-in-flight)"]
    assert "(--eval-max-in-flight): the evaluation of step 2 (version 3)" in caplog.text


def test_what_nobody_does_is_given_up_in_time(real: Rig, tmp_path: Path) -> None:
    train(real, tmp_path, eval_timeout=0.3, num_rollout=3)
    assert bare(lines(tmp_path)) == {2: {"eval/missing": 1}, 3: {"eval/missing": 1}}


def test_at_the_end_nobody_is_waited_for_where_no_worker_is(
    real: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    feed(real, 20)
    loop = loop_of(real, tmp_path, Weighty(), **OWN, eval_interval=9, num_rollout=2, save_interval=0)
    assert loop.evals
    loop.evals.alone = 0.2
    with crew(real, quick):
        run(loop)
    assert bare(lines(tmp_path)) == {0: {"eval/missing": 1}, 2: {"eval/missing": 1}}
    assert "no `millpond worker` has been there for 0 s" in caplog.text


def test_a_job_that_redis_has_lost_is_asked_for_again(real: Rig, tmp_path: Path) -> None:
    def lose() -> None:
        real.raw.delete(*real.raw.scan_iter(f"rq:job:{real.keys.job_tag}*"))

    with ThreadPoolExecutor(1) as threads:
        last = threads.submit(answer, real, 4, {"eval/a": 1.0})
        train(real, tmp_path, Weighty(at_3=lose, at_4=lambda: answer(real, 2, {"eval/a": 0.5})), num_rollout=4)
        last.result()
    assert bare(lines(tmp_path)) == {2: {"eval/a": 0.5}, 4: {"eval/a": 1}}


def test_weights_stay_while_they_are_evaluated_and_some_of_those_that_were(real: Rig, tmp_path: Path) -> None:
    there: list[set[int]] = []

    def look() -> None:
        there.append(set(versions(tmp_path / "weights")))

    def ends() -> None:
        look()
        answer(real, 2, {"eval/a": 0.5, "eval/weight_version": 3})
        answer(real, 4, {"eval/a": 0.5, "eval/weight_version": 5})

    with ThreadPoolExecutor(1) as threads:
        last = threads.submit(answer, real, 8, {"eval/a": 1.0, "eval/weight_version": 9})
        train(real, tmp_path, Weighty(at_7=ends, at_8=look), num_rollout=8, eval_max_in_flight=2, eval_keep_snapshots=2)
        last.result()
    assert {3, 5, 6, 7} <= there[0]
    assert 3 not in versions(tmp_path / "weights")
    assert {5, 8, 9} <= set(versions(tmp_path / "weights"))


# -- resume


def stopped(rig: Rig, folder: Path, **fields: Any) -> Loop:
    """A run that is told to stop before step 6, with checkpoints of steps 2 and 4, all its evaluations in flight."""
    values = {**OWN, "eval_interval": 2, "save_interval": 2, "save_keep": 9, "eval_max_in_flight": 9, **fields}
    feed(rig, 40)
    holder: list[Loop] = []
    backend = Weighty(at_5=lambda: holder[0].broker.stop.set())
    loop = loop_of(rig, folder, backend, **values)
    holder.append(loop)
    with crew(rig, quick), pytest.raises(Stopped):
        run(loop)
    return loop


def resumed(rig: Rig, folder: Path, **fields: Any) -> Loop:
    values = {**OWN, "eval_interval": 2, "save_interval": 2, "save_keep": 9, "eval_max_in_flight": 9, **fields}
    with crew(rig, quick):
        return run(loop_of(rig, folder, Weighty(), resume=True, take_over=True, num_rollout=6, **values))


def test_what_was_in_flight_is_taken_in_after_a_resume_once(real: Rig, tmp_path: Path) -> None:
    stopped(real, tmp_path)
    assert [ask["step"] for ask in json.loads((tmp_path / "evals.open.json").read_text())] == [0, 2, 4]
    for step in (0, 2):
        answer(real, step, {"eval/a": float(step)})
    with ThreadPoolExecutor(1) as threads:
        later = threads.submit(lambda: [answer(real, step, {"eval/a": float(step)}) for step in (4, 6)])
        resumed(real, tmp_path)
        later.result()
    assert bare(lines(tmp_path)) == {step: {"eval/a": step} for step in (0, 2, 4, 6)}
    assert json.loads((tmp_path / "evals.open.json").read_text()) == []


def test_what_belongs_to_a_discarded_branch_is_forgotten_and_gone_weights_are_missing(
    real: Rig, tmp_path: Path
) -> None:
    stopped(real, tmp_path)
    shutil.rmtree(versions(tmp_path / "weights")[1])
    answer(real, 4, {"eval/a": -1.0})
    with ThreadPoolExecutor(1) as threads:
        later = threads.submit(lambda: [answer(real, step, {"eval/a": float(step)}) for step in (2, 6)])
        loop = resumed(real, tmp_path, load=tmp_path / "checkpoints/00000002", eval_interval=6)
        later.result()
    assert bare(lines(tmp_path)) == {0: {"eval/missing": 1}, 2: {"eval/a": 2}, 6: {"eval/a": 6}}
    assert loop.now.step == 6


def test_what_was_asked_for_with_other_options_is_missing_after_a_resume(real: Rig, tmp_path: Path) -> None:
    stopped(real, tmp_path, skip_eval_before_train=True, eval_interval=4)
    other = {"eval_function_path": "eval_functions.other", "eval_interval": 6}
    with ThreadPoolExecutor(1) as threads:
        later = threads.submit(answer, real, 6, {"eval/a": 6.0})
        resumed(real, tmp_path, **other)
        later.result()
    assert bare(lines(tmp_path)) == {4: {"eval/missing": 1}, 6: {"eval/a": 6}}


# -- the best checkpoint


def test_the_best_checkpoint_is_kept_and_pointed_to(real: Rig, tmp_path: Path) -> None:
    values = {2: 0.5, 4: 0.75, 6: 0.75, 8: 0.25, 10: 0.5}
    seen: list[str] = []

    def ended(step: int) -> Callable[[], None]:
        def end() -> None:
            answer(real, step, {"eval/a": values[step]})
            seen.append(os.readlink(tmp_path / "checkpoints/best") if step > 2 else "")

        return end

    backend = Weighty(**{f"at_{step + 1}": ended(step) for step in (2, 4, 6, 8)})
    with ThreadPoolExecutor(1) as threads:
        last = threads.submit(answer, real, 10, {"eval/a": 0.5})
        keep = {"save_interval": 2, "save_keep": 1, "save_best": "eval/a", "eval_prompt_data": "a x"}
        train(real, tmp_path, backend, num_rollout=10, **keep)
        last.result()
    assert seen == ["", "00000002", "00000004", "00000004"]
    assert checkpoint.best(tmp_path / "checkpoints") == 4
    assert checkpoint.read(tmp_path / "checkpoints/best").step == 4
    assert sorted(versions(tmp_path / "checkpoints")) == [4, 10]


def test_a_checkpoint_that_is_being_evaluated_is_kept_and_may_be_the_best(real: Rig, tmp_path: Path) -> None:
    kept: list[list[int]] = []

    def late() -> None:
        kept.append(sorted(versions(tmp_path / "checkpoints")))
        for step, value in ((2, 0.75), (4, 0.5), (6, 0.25)):
            answer(real, step, {"eval/a": value})

    with ThreadPoolExecutor(1) as threads:
        last = threads.submit(answer, real, 8, {"eval/a": 0.5})
        keep = {"save_interval": 2, "save_keep": 1, "save_best": "eval/a", "eval_prompt_data": "a x"}
        train(real, tmp_path, Weighty(at_8=late), num_rollout=8, eval_max_in_flight=9, **keep)
        last.result()
    assert kept == [[2, 4, 6]]
    assert checkpoint.best(tmp_path / "checkpoints") == 2
    assert sorted(versions(tmp_path / "checkpoints")) == [2, 8]


def test_a_resume_behind_the_best_points_to_the_best_of_what_is_left(real: Rig, tmp_path: Path) -> None:
    best = {"save_best": "eval/a", "eval_prompt_data": "a x"}
    stopped(real, tmp_path, **best)
    for step in (2, 4):
        answer(real, step, {"eval/a": float(step)})
    with ThreadPoolExecutor(1) as threads:
        later = threads.submit(lambda: [answer(real, step, {"eval/a": 0.0}) for step in (0, 6)])
        resumed(real, tmp_path, **best)
        later.result()
    assert checkpoint.best(tmp_path / "checkpoints") == 4
    with ThreadPoolExecutor(1) as threads:
        later = threads.submit(lambda: [answer(real, step, {"eval/a": 0.0}) for step in (4, 6)])
        resumed(real, tmp_path, load=tmp_path / "checkpoints/00000002", **best)
        later.result()
    assert checkpoint.best(tmp_path / "checkpoints") == 2
