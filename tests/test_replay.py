"""--archive keeps what each step trained on; `millpond replay` trains on it without Redis and without generators."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from make import crew, feed, feeding, loop_of, metrics, run, train, train_config
from rig import Rig
from test_resume import Kept

from pipeline import archive, cli
from pipeline.codec import encode
from pipeline.config import TrainConfig
from pipeline.errors import UsageError
from pipeline.modes import check
from pipeline.types import Group
from producers.engines.echo import EchoEngine
from trainer import replay
from trainer.backends.echo import EchoBackend
from trainer.keeper import Keeper
from trainer.workshop import Workshop


def quick() -> EchoEngine:
    return EchoEngine("0.001", 4)


def recorded(real: Rig, folder: Path, backend: Kept | None = None, **fields: Any) -> list[list[bytes]]:
    """The groups of a run's archive, step by step."""
    feed(real, 40)
    with crew(real, quick):
        run(loop_of(real, folder, backend, **{"archive": True, "num_rollout": 4, **fields}))
    return kept(folder / "archive")


def kept(folder: Path) -> list[list[bytes]]:
    return [archive.read_raw(folder / archive.name_of(step))[1] for step in archive.steps(folder)]


def encoded(batches: list[list[Group]]) -> list[list[bytes]]:
    return [[encode(group) for group in batch] for batch in batches]


def replayed(folder: Path, *flags: str) -> list[dict[str, Any]]:
    """By the echo backend."""
    out = folder / "replayed"
    job = replay.asked([str(folder / "archive"), "--out", str(out), *flags], {})
    assert check(job.config) == []
    replay.train(job, EchoBackend(0.0), replay._out(job.own))
    return metrics(out)


# -- what is kept


def test_a_file_has_what_a_step_trained_on_in_order_with_all_that_the_objective_needs(
    real: Rig, tmp_path: Path
) -> None:
    backend = Kept()
    assert recorded(real, tmp_path, backend) == encoded(backend.batches)
    record, groups = archive.read(tmp_path / "archive" / "00000003.msgpack")
    assert (record.step, record.version, record.lineage, record.exact) == (3, 3, (), True)
    assert [encode(group) for group in groups] == encoded(backend.batches)[2]
    assert record.options["rollout_batch_size"] == 2
    line = metrics(tmp_path)[2]
    assert record.figures.items() <= line.items()
    assert "train/weight_version" in record.figures
    files = [*(tmp_path / "archive").glob("*.msgpack")]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert not {"redis_url", "rm_api_key"} & record.options.keys()


def test_what_a_sample_filter_took_out_is_kept_as_taken_out(real: Rig, tmp_path: Path) -> None:
    recorded(real, tmp_path, num_rollout=1, rollout_sample_filter_path="test_replay.without_the_first")
    _, groups = archive.read(tmp_path / "archive" / "00000001.msgpack")
    assert [sample.metadata.get("remove_sample") for sample in groups[0].samples] == [True, None]


def without_the_first(groups: list[Group]) -> list[Group]:
    from dataclasses import replace

    from consumers.filters import remove

    return [replace(g, samples=(remove(g.samples[0]), *g.samples[1:])) for g in groups]


def test_a_step_that_is_trained_again_after_a_resume_replaces_its_file_and_nothing_is_beyond_the_history(
    real: Rig, tmp_path: Path
) -> None:
    first, second = Kept(dies_at=5), Kept()
    with pytest.raises(KeyboardInterrupt):
        recorded(real, tmp_path, first, num_rollout=9)  # a checkpoint after 4 steps, 5 are archived
    assert archive.steps(tmp_path / "archive") == [1, 2, 3, 4, 5]
    goes_on = {"archive": True, "resume": True, "take_over": True}
    loop_of(real, tmp_path, **goes_on).report.file.close()
    assert archive.steps(tmp_path / "archive") == [1, 2, 3, 4]
    with crew(real, quick, name="w2"):
        run(loop_of(real, tmp_path, second, num_rollout=6, **goes_on))
    assert kept(tmp_path / "archive") == encoded([*first.batches[:4], *second.batches])
    assert archive.read(tmp_path / "archive" / "00000006.msgpack")[0].lineage


def test_the_archive_of_another_run_is_left_alone(real: Rig, tmp_path: Path) -> None:
    before = recorded(real, tmp_path / "one", num_rollout=2)
    other = Rig(real.url)
    elsewhere = {"archive": True, "archive_folder": tmp_path / "one" / "archive"}
    with pytest.raises(UsageError, match="--archive-folder names another"):
        loop_of(other, tmp_path / "two", **elsewhere)
    other.close()
    assert kept(tmp_path / "one" / "archive") == before


# -- replay


def test_a_replay_gives_the_figures_of_the_run_that_are_not_times(real: Rig, tmp_path: Path) -> None:
    recorded(real, tmp_path)
    was = [{k: v for k, v in line.items() if k.startswith(("rollout/", "train/"))} for line in metrics(tmp_path)]
    again = [{k: v for k, v in line.items() if k.startswith(("rollout/", "train/"))} for line in replayed(tmp_path)]
    assert again == was
    assert len(was) == 4
    assert stat.S_IMODE((tmp_path / "replayed" / "weights").stat().st_mode) == 0o700


def test_a_replay_may_be_shorter_and_begin_at_a_checkpoint(real: Rig, tmp_path: Path) -> None:
    recorded(real, tmp_path)
    at = str(tmp_path / "checkpoints" / "00000002")
    assert [line["step"] for line in replayed(tmp_path, "--load", at, "--num-rollout", "3")] == [3]


def test_what_is_not_given_is_as_it_was_recorded_and_what_is_given_wins(tmp_path: Path) -> None:
    run = train_config(train_backend="torch", lr=0.5, seed=7, tis_clip=3.0, rollout_temperature=0.7)
    record = archive.Record(1, 1, (), True, {}, json.loads(run.model_dump_json()))
    options = {name: record.options[name] for name in replay.KNOWN}
    own = replay.parse(replay.ReplayConfig, ["--lr", "0.1", "--no-use-tis"], {}, "millpond replay", options)
    config = replay._trained(own, record, tmp_path)
    assert (config.lr, config.seed, config.rollout_temperature, config.use_tis) == (0.1, 7, 0.7, False)
    assert config.model_fields_set == {"lr", "use_tis"}
    assert check(config) == ["groups may be stale and nothing corrects for it; --use-tis does"]


def test_a_replay_of_a_run_that_began_with_other_weights_asks_for_them(tmp_path: Path) -> None:
    run = train_config(train_backend="torch", hf_checkpoint=tmp_path / "model", load=tmp_path / "other")
    options = Keeper(run, Workshop(tmp_path, 1), 0).options
    assert "load" not in Keeper(run.model_copy(update={"resume": True}), Workshop(tmp_path, 1), 0).options
    archive.write(tmp_path / archive.name_of(1), archive.Record(1, 1, (), True, {}, options), [])
    with pytest.raises(UsageError, match=r"was begun with --load .*other: give its checkpoint of step 0"):
        replay.asked([str(tmp_path)], {})
    words = [str(tmp_path), "--hf-checkpoint", str(tmp_path / "other"), "--out", str(tmp_path / "out")]
    assert replay.asked(words, {}).steps == [1]
    assert cli.main(["replay", *words]) == 2  # there is no such model
    assert not any((tmp_path / "out").iterdir())


def test_options_that_changed_within_a_run_are_told_of(
    real: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorded(real, tmp_path, num_rollout=2)
    with crew(real, quick, name="w2"):
        train(real, tmp_path, archive=True, num_rollout=4, seed=5, resume=True, take_over=True)
    caplog.set_level(logging.WARNING)
    replayed(tmp_path)
    assert "from step 3 on the run was trained with --num-rollout 2 -> 4, --seed 1234 -> 5" in caplog.text


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def swap(path: Path) -> None:
    path.write_text('{"step": 3}\n')


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, "00000003.msgpack: step 3: it ends after 1 of 2 groups"),
        (flip, "00000003.msgpack: step 3: it is damaged"),
        (swap, "00000003.msgpack: it is no file of a millpond archive"),
        (Path.unlink, "00000003.msgpack: step 3 is missing; there are 1 to 2, 4 to 4"),
        (lambda path: path.write_bytes(path.with_name("00000002.msgpack").read_bytes()), "it holds step 2"),
    ],
)
def test_a_spoilt_file_is_named_with_its_step(
    spoil: Callable[[Path], object], said: str, real: Rig, tmp_path: Path
) -> None:
    recorded(real, tmp_path)
    spoil(tmp_path / "archive" / "00000003.msgpack")
    with pytest.raises(UsageError) as caught:
        replayed(tmp_path)
    assert said in str(caught.value)


def test_another_model_or_vocabulary_is_refused_with_the_step(real: Rig, tmp_path: Path) -> None:
    recorded(real, tmp_path, num_rollout=1)
    path = tmp_path / "archive" / "00000001.msgpack"
    record, groups = archive.read(path)
    (said,) = archive.misfits(path, record, groups, {"vocab_size": 8})
    assert said.startswith(f"{path}: step 1: token ")
    assert "outside the vocabulary" in said
    wider = archive.Record(1, 1, (), True, {}, {}, {"hidden_size": 16, "vocab_size": 256})
    (said,) = archive.misfits(path, wider, groups, {"hidden_size": 8, "vocab_size": 256})
    assert "recorded with a model of hidden_size 16; --hf-checkpoint has 8" in said
    assert [*archive.misfits(path, record, groups, {"vocab_size": 256})] == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "which archive?"),
        (["nowhere"], "nowhere is not there: an archive is made by"),
        (["."], ". holds no step"),
        (["file"], "file is no folder"),
    ],
)
def test_a_replay_without_an_archive_says_where_one_comes_from(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert cli.main(["replay", *argv]) == 2
    assert said in capsys.readouterr().err


def test_inspect_decodes_a_file_and_lists_a_folder(
    real: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(real, tmp_path, num_rollout=2)
    assert cli.main(["inspect", "archive", str(tmp_path / "archive"), "--json"]) == 0
    assert [entry["step"] for entry in json.loads(capsys.readouterr().out)["entries"]] == [2, 1]
    file = tmp_path / "archive" / "00000002.msgpack"
    assert cli.main(["inspect", "archive", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["entries"]
    assert [entry["id"] for entry in found] == [group.prompt.id for group in archive.read(file)[1]]
    assert cli.main(["inspect", "archive", str(file)]) == 0
    assert "2 of 2 groups, as they were trained on" in capsys.readouterr().out
    assert cli.main(["inspect", "archive"]) == 2


# -- generating only


def test_rollouts_alone_are_archived_and_no_weights_change(real: Rig, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "w.safetensors").write_bytes(b"never read")
    config = {"debug_rollout_only": True, "hf_checkpoint": model, "train_backend": "torch", "lr": 0.5, "num_epoch": 1}
    with feeding(real, tmp_path, 10), crew(real, quick):
        loop = loop_of(real, tmp_path, **{**config, "rollout_batch_size": 4})
        run(loop)
    policy = loop.broker.policy()
    assert policy is not None
    assert (policy.version, policy.path) == (4, str(model))
    assert not [*(tmp_path / "weights").glob("0*")]
    assert [len(messages) for messages in kept(tmp_path / "archive")] == [4, 4, 2]
    assert archive.read(tmp_path / "archive" / "00000001.msgpack")[0].options["lr"] == 0.5
    assert real.ended() == set(range(10))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"archive_folder": Path("x")}, "--archive-folder does nothing here: --archive is off"),
        ({"debug_train_only": True}, "`millpond replay ARCHIVE`"),
        ({"load_debug_rollout_data": "x"}, "`millpond replay ARCHIVE`"),
        ({"save_debug_rollout_data": "x"}, "--archive"),
    ],
)
def test_what_does_nothing_or_is_another_systems_name_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(TrainConfig(num_rollout=3, **values))
    assert said in str(caught.value)


def test_a_mock_trainer_has_a_pace() -> None:
    for values in ({"train_backend": "echo"}, {"debug_rollout_only": True}):
        assert check(TrainConfig.model_validate({"num_rollout": 3, "echo_train_seconds": 2.0, **values})) == []
