"""Signs of life of the trainer and of workers."""

from __future__ import annotations

import time
from typing import Any

from rig import LIMIT, Rig

from pipeline.pulse import STUCK, TrainerPulse, WorkerPulse
from pipeline.replies import Pulse


def worker_pulse(real: Rig, heard: list[Any], silent_for: float = 0.0) -> WorkerPulse:
    def info() -> tuple[dict[str, Any], int, float]:
        return {"engine": "echo"}, 3, time.monotonic() - silent_for

    return WorkerPulse(real.url, real.keys, "w1", info, heard.append)


def test_the_trainers_pulse_keeps_it_from_being_replaced_while_it_trains(real: Rig) -> None:
    trainer = real.trainer()
    pulse = TrainerPulse(real.url, trainer)
    real.raw.hset(real.keys["state"], "trainer_seen", 1)
    pulse.beat()
    assert real.now() - int(trainer.state()["trainer_seen"]) < 5000
    pulse.broker.close()


def test_a_trainer_that_has_said_its_last_word_is_not_alive_again_for_its_last_pulse(real: Rig) -> None:
    trainer = real.trainer()
    pulse = TrainerPulse(real.url, trainer)
    trainer.finish("done", "all steps are done")
    pulse.beat()
    assert trainer.state()["trainer_seen"] == "0"
    trainer.renew(status="running")
    assert trainer.state()["trainer_seen"] != "0"
    pulse.broker.close()


def test_the_pulse_of_a_replaced_trainer_changes_nothing_and_leaves_the_raising_to_its_owner(real: Rig) -> None:
    zombie = real.trainer()
    real.new_trainer().takeover("second", force=True)
    real.raw.hset(real.keys["state"], "trainer_seen", 1)
    pulse = TrainerPulse(real.url, zombie)
    pulse.beat()
    assert real.raw.hget(real.keys["state"], "trainer_seen") == b"1"
    pulse.broker.close()


def test_a_workers_pulse_tells_of_it_and_brings_what_it_must_hear(real: Rig) -> None:
    trainer = real.trainer()
    real.worker("w1")
    real.silence("w1", LIMIT - 1000)
    heard: list[Any] = []
    pulse = worker_pulse(real, heard)
    pulse.beat()
    trainer.renew(paused="1", status="draining")
    pulse.beat()
    assert heard == [Pulse(True, "running", False, 1), Pulse(True, "draining", True, 1)]
    assert real.raw.hget(real.keys["workers:info"], "w1") == b'{"engine": "echo"}'
    assert real.raw.hget(real.keys["workers:spare"], "w1") == b"3"
    real.silence("w1")
    real.reap()
    pulse.beat()
    assert not heard[-1].known
    pulse.broker.close()


def test_a_worker_whose_event_loop_does_not_turn_gives_no_sign(real: Rig) -> None:
    real.trainer()
    real.worker("w1")
    real.silence("w1")
    heard: list[Pulse] = []
    pulse = worker_pulse(real, heard, silent_for=STUCK + 1)
    pulse.beat()
    assert heard == []
    assert real.reap() == ["w1"]
    pulse.broker.close()


def test_a_pulse_stops_when_told(real: Rig) -> None:
    pulse = TrainerPulse(real.url, real.trainer())
    pulse.start()
    pulse.stop()
    assert not pulse.is_alive()
