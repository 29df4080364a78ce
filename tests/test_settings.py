"""Settings that change at a resume: named, refused or taken up; by the trainer, and by generators that stayed."""

from __future__ import annotations

import logging
import stat
from pathlib import Path
from typing import Any

import pytest
from make import at_work, crew, feed, feeding, loop_of, metrics, run, train, train_config
from processes import Parts, eventually, prompts, steps
from rig import Rig, agreed
from test_resume import Kept, quick

from pipeline import changes, modes
from pipeline.config import TrainConfig
from pipeline.connect import connect
from pipeline.errors import MillpondError, UsageError
from pipeline.flags import digest, dump
from pipeline.modes import idle
from pipeline.plan import put_config
from pipeline.replies import OTHER_CONFIG
from producers.engines.echo import EchoEngine
from trainer import checkpoint, settings

GOES_ON: dict[str, Any] = {"resume": True, "take_over": True}

# -- generators that stay


def test_nothing_is_leased_by_other_settings_than_the_trainers(run: Rig) -> None:
    trainer = run.trainer(digest="old")
    run.feeder(4)
    worker, other = run.worker(), run.worker("w2")
    assert run.do(worker.agreed()) == agreed(digest="old")
    assert len(run.lease(worker, 1)) == 1
    trainer.configure(agreed(digest="new").model_dump_json())
    assert run.do(worker.lease(1, 0)).why == OTHER_CONFIG
    assert len(run.lease(other, 1)) == 1  # it has read none
    assert run.do(worker.agreed()) == agreed(digest="new")
    assert len(run.lease(worker, 1)) == 1


def test_a_generator_whose_settings_are_others_now_hands_all_back_without_a_strike(real: Rig) -> None:
    trainer = real.trainer(digest="old")
    feed(real, 2)

    async def go() -> bool:
        engine = EchoEngine("1e9", 4)
        async with at_work(real, engine) as generator:
            while len(generator.jobs) < 2:
                await generator.poke.wait()
            trainer.configure(agreed(digest="new").model_dump_json())
            feed(real, 1)
            generator.wakeful = True
            generator.poke.set()
            return await generator.over

    assert real.do(go()) is True
    assert [entry["strikes"] for entry in real.entries()] == ["0", "0"]


def test_a_generator_that_stayed_goes_on_with_what_a_resume_says_or_ends_with_a_reason(
    redis_url: str, tmp_path: Path
) -> None:
    pace = ("--save-interval", "2", "--echo-train-seconds", "0.02", "--max-prompt-attempts", "1000")
    with Parts(tmp_path, redis_url, prompts(tmp_path, 4000)) as parts:
        first = parts.trainer(*pace, "--num-rollout", "100000")
        generator = parts.generator()
        parts.feeder()
        eventually(lambda: len(steps(parts.out)) >= 2, "two steps")
        first.process.terminate()
        first.ends(130)
        done = len(steps(parts.out))
        second = parts.trainer(*pace, "--num-rollout", "100000", "--rollout-max-response-len", "3", "--resume")
        eventually(lambda: len(steps(parts.out)) >= done + 8, "eight steps more")
        assert [line["rollout/response_len/max"] for line in steps(parts.out)][-1] == 3
        assert generator.process.poll() is None
        second.process.terminate()
        second.ends(130)
        assert "--rollout-max-response-len 1024 -> 3" in (parts.out / "logs" / "trainer.log").read_text()
        third = parts.trainer(*pace, "--num-rollout", "100000", "--rm-type", "length", "--resume")
        assert "--rm-type is random here, and run's trainer was started with another one" in generator.ends(2)
        third.process.terminate()
        third.ends(130)


# -- what a resume changes


def resolved(folder: Path, **values: Any) -> Path:
    path = folder / "trainer.toml"
    config = train_config(**values)
    path.write_text(dump(config, idle(config)))
    return path


def test_changes_are_named_field_by_field(tmp_path: Path) -> None:
    path = resolved(tmp_path, lr=1e-4, train_backend="torch", hf_checkpoint=Path("a"), num_epoch=None)
    now = train_config(lr=5e-5, train_backend="torch", hf_checkpoint=Path("b"), num_epoch=2, drop_last=True)
    assert {str(change) for change in changes.since(path, now)} == {
        "--hf-checkpoint a -> b",
        "--lr 0.0001 -> 5e-05",
        "--drop-last off -> on",
        "--num-epoch unset -> 2",
    }


def test_how_a_start_is_made_and_what_does_nothing_are_no_changes(tmp_path: Path) -> None:
    path = resolved(tmp_path, use_tis=False, redis_url="redis://a")
    now = train_config(use_tis=False, redis_url="redis://b", resume=True, out=Path("x"), tis_clip=3.0)
    assert changes.since(path, now) == []
    assert changes.since(tmp_path / "nowhere.toml", now) == []


def test_a_file_of_another_version_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "trainer.toml").write_text("flux = 1\n")
    found, why = changes.readable(tmp_path / "trainer.toml", train_config())
    assert (found, "unknown field 'flux'" in why) == ([], True)


def test_the_trainers_options_stand_in_its_folder_and_their_digest_in_redis(real: Rig, tmp_path: Path) -> None:
    feed(real, 4)
    with crew(real, quick):
        loop = train(real, tmp_path, num_rollout=1, rm_api_key="s3cret", seed=7)
    path = tmp_path / "trainer.toml"
    assert "seed = 7" in path.read_text()
    assert "s3cret" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert loop.broker.state()["settings"] == digest(loop.config)
    assert digest(loop.config) != digest(train_config(num_rollout=1))


def test_a_resume_tells_what_changed_and_warns_where_groups_were_made_with_the_old(
    real: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    feed(real, 8)
    with crew(real, quick):
        train(real, tmp_path, num_rollout=1)
    caplog.set_level(logging.INFO)
    with crew(real, quick, name="w2"):
        train(real, tmp_path, num_rollout=2, rollout_temperature=0.5, **GOES_ON)
    told = {record.levelname: record.getMessage() for record in caplog.records if "changed since" in record.msg}
    assert told["INFO"] == "changed since the last start: --num-rollout 1 -> 2"
    assert "--rollout-temperature 1.0 -> 0.5; groups that wait were made with the old" in told["WARNING"]


@pytest.mark.parametrize(
    "values",
    [{"debug_rollout_only": True}, {"train_backend": "torch", "hf_checkpoint": Path("x")}, {"n_samples_per_prompt": 3}],
)
def test_what_a_checkpoint_or_a_waiting_group_is_may_not_change(
    values: dict[str, Any], real: Rig, tmp_path: Path
) -> None:
    feed(real, 4)
    with crew(real, quick):
        train(real, tmp_path, num_rollout=1)
    before = (tmp_path / "trainer.toml").read_text()
    name = next(iter(values)).replace("_", "-")
    with pytest.raises(UsageError, match=f"--resume with --{name} "):
        loop_of(real, tmp_path, **values, **GOES_ON)
    assert (tmp_path / "trainer.toml").read_text() == before


def test_adapters_go_on_upon_the_model_that_they_were_trained_upon(tmp_path: Path) -> None:
    values = {"train_backend": "torch", "hf_checkpoint": tmp_path / "a"}
    resolved(tmp_path, lora_rank=8, **values)
    for folder, adapters in ((tmp_path / "b" / ".." / "a", True), (tmp_path / "b", False)):
        found = settings.changed(train_config(lora_rank=8, **values | {"hf_checkpoint": folder}), tmp_path)
        assert [change.name for change in found] == ["hf_checkpoint"]
        settings.refuse(found, True, adapters)
    with pytest.raises(UsageError, match=r"--resume with --hf-checkpoint .*a -> .*b: the adapters in a checkpoint"):
        settings.refuse(found, True, True)


def test_the_digest_of_what_is_agreed_tells_settings_of_workers_apart_and_no_others() -> None:
    told = modes.agreed(train_config()).digest
    assert told
    assert modes.agreed(train_config(lr=0.5, train_backend="torch", num_rollout=7)).digest == told
    for change in ({"rollout_temperature": 0.5}, {"max_weight_staleness": 2}, {"rm_type": "exact"}):
        assert modes.agreed(train_config(**change)).digest != told


def test_every_rule_names_an_option() -> None:
    assert {*settings.REFUSED, *settings.MADE} <= {*TrainConfig.model_fields}


# -- the data


def wiped(rig: Rig) -> None:
    for key in rig.keys.all():
        rig.raw.delete(key)


@pytest.mark.parametrize("first", ["feeder", "trainer"])
def test_other_data_is_seen_though_redis_was_lost(first: str, real: Rig, tmp_path: Path) -> None:
    with feeding(real, tmp_path, 10, None), crew(real, quick):
        train(real, tmp_path, num_rollout=2)
    found = checkpoint.read(tmp_path / "checkpoints" / "00000002")
    assert found.ledger.data.startswith("10 rows, sha256 ")
    wiped(real)
    other = real.feeder()
    if first == "feeder":
        other.describe_data(11, None, "other")
        with pytest.raises(UsageError, match="was trained on other data"):
            loop_of(real, tmp_path, num_rollout=4, **GOES_ON)
        assert "data" not in other.state()
        assert not real.raw.exists(real.keys["feed"])
    backend = Kept()
    with crew(real, quick, name="w2"):
        loop = loop_of(real, tmp_path, backend, num_rollout=4, **GOES_ON)
        with pytest.raises(UsageError, match="was fed from other data"):
            other.describe_data(11, None, "other")
        with feeding(real, tmp_path, 10, None):
            run(loop)
    assert len(metrics(tmp_path)) == 4
    assert len(backend.batches) == 2


# -- mistakes


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://:pass@h/0?flux=1&db=2", "--redis-url: flux: a connection to Redis has no such option"),
        ("unix:///x?flux=1", "--redis-url: flux: a connection to Redis has no such option"),
        ("redis://h?db=x", "--redis-url: db has a value there that it cannot have"),
        ("redis://h?protocol=9", "--redis-url: protocol must be either 2 or 3"),
    ],
)
def test_an_odd_option_in_the_url_is_named(url: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        connect(url, "test")
    assert str(caught.value) == said


def test_a_config_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.toml.new").mkdir()
    with pytest.raises(MillpondError, match=r"config.toml cannot be written: "):
        put_config(tmp_path, "x = 1")
