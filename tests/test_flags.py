from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline import flags, modes
from pipeline.audit import AuditLook
from pipeline.bench import BenchConfig
from pipeline.config import ROLES, FeedConfig, GenerateConfig, RunConfig, Section, TrainConfig, option
from pipeline.errors import UsageError
from pipeline.foreign import INSTEAD
from pipeline.inspect import InspectLook
from pipeline.log import mask
from pipeline.purge import PurgeLook
from pipeline.report import ReportLook
from pipeline.status import StatusLook
from pipeline.top import TopLook
from pipeline.track import TrackLook
from pipeline.why import WhyLook
from producers.eval_cli import EvalConfig
from producers.sglang_cpu.serve import ServeConfig

ROOT = Path(__file__).parents[1]
FIELDS = {name for role in ROLES.values() for name in role.model_fields}


def train(*argv: str, **environ: str) -> TrainConfig:
    return flags.parse(TrainConfig, argv, environ, "millpond train")


def mistake(*argv: str, model: type[Section] = TrainConfig, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        flags.parse(model, argv, environ, "millpond train")
    return str(caught.value)


def toml(folder: Path, text: str) -> str:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_each_source_wins_over_the_ones_below_it(tmp_path: Path) -> None:
    file = toml(tmp_path, "seed = 1\nlr = 0.1\nsave-interval = 7\nresume = true\n")
    config = train("--config", file, "--seed", "3", MILLPOND_SEED="2", MILLPOND_LR="0.2")
    assert (config.seed, config.lr, config.save_interval, config.resume, config.clip_grad) == (3, 0.2, 7, True, 1.0)
    assert config.model_fields_set == {"seed", "lr", "save_interval", "resume"}


def test_a_preset_goes_before_defaults_and_is_not_the_users_choice() -> None:
    config = flags.parse(RunConfig, ["--lr", "0.5"], {}, "millpond run", preset="shift")
    assert (config.lr, config.rm_type, config.entropy_coef) == (0.5, "positions", 0.02)
    assert config.model_fields_set == {"lr"}
    assert modes.check(config) == []


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    assert train(MILLPOND_CONFIG=toml(tmp_path, "seed = 9")).seed == 9
    assert train("--config", toml(tmp_path, "seed = 8"), MILLPOND_CONFIG="/nowhere").seed == 8


def test_switches_have_a_no() -> None:
    assert train("--fully-async").fully_async is True
    assert flags.parse(RunConfig, ["--no-fully-async"], {}, "millpond run").fully_async is False
    assert train("--no-use-tis").use_tis is False
    assert train(MILLPOND_DROP_LAST="1").drop_last is True


def test_none_and_nothing_unset_what_may_be_unset(tmp_path: Path) -> None:
    config = flags.parse(RunConfig, ["--max-weight-staleness", "none", "--rm-type="], {}, "millpond run", "shift")
    assert (config.max_weight_staleness, config.rm_type) == (None, None)
    assert train("--config", toml(tmp_path, 'max_weight_staleness = "none"')).max_weight_staleness is None
    assert train("--run", "none", MILLPOND_SEED="").run == "none"
    assert mistake("--seed", "none") == "--seed 'none': must be a valid integer"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--learning-rat", "1"], "unknown option --learning-rat; see millpond train --help"),
        (["--save-intervall=3"], "unknown option --save-intervall; did you mean --save-interval?"),
        (["--no-fuly-async"], "unknown option --no-fuly-async; did you mean --no-fully-async?"),
        (["--save-int", "3"], "unknown option --save-int; did you mean --save-interval?"),
        (
            ["--num-steps-per-rollout", "4"],
            "unknown option --num-steps-per-rollout: give --global-batch-size: --rollout-batch-size x "
            "--n-samples-per-prompt / that number",
        ),
        (["--save", "x"], "unknown option --save: --out is the run's folder, with its checkpoints"),
        (
            ["--sglang-ep-size", "2"],
            "unknown option --sglang-ep-size: engines are servers of their own, started with SGLang's options "
            "(docs/sglang.md)",
        ),
        (["--prompt-data", "x"], "--prompt-data is no option of millpond train; it belongs to millpond run, feed"),
        (["x.toml"], "unexpected argument 'x.toml': options start with --; see millpond train --help"),
        (["--lr", "abc"], "--lr 'abc': must be a valid number"),
        (["--lr=-1"], "--lr '-1': must be greater than 0"),
        (["--lr", "nan"], "--lr 'nan': must be a finite number"),
        (["--lr", "--resume"], "--lr needs a value; where it starts with -, write --lr=VALUE"),
        (["--resume=maybe"], "--resume/--no-resume takes no value, and has 'maybe'"),
        (["--max-weight-staleness", "x"], "--max-weight-staleness 'x': must be a valid integer, or none"),
        (["--train-backend", "jax"], "--train-backend 'jax': must be 'torch', 'megatron' or 'echo'"),
        (["--seed", "x", "--lr", "y"], "--seed 'x': must be a valid integer\n--lr 'y': must be a valid number"),
        (["--config", "/no/such.toml"], "--config /no/such.toml: No such file or directory"),
        (["--config", "/"], "--config /: Is a directory"),
    ],
)
def test_a_mistyped_flag_gets_a_sentence(argv: list[str], said: str) -> None:
    assert sorted(mistake(*argv).split("\n")) == sorted(said.split("\n"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr = 'abc'", ": lr = 'abc': must be a valid number"),
        ("lr = true", ": lr = True: must be a valid number"),
        ("save-interval = -1", ": save-interval = -1: must be greater than or equal to 0"),
        ("seed = [1]", ": seed = [1]: must be a valid integer"),
        ("sede = 1", ": unknown field 'sede'; did you mean seed?"),
        ("lr-warmup-fraction = 1", ": unknown field 'lr-warmup-fraction': give --lr-warmup-iters, in optimizer steps"),
        ("zzzzzz = 1", ": unknown field 'zzzzzz'; see millpond run --help"),
        ("[trainer]\nlr = 1", ": [trainer]: fields stand at the top of the file, outside any table"),
        ("save_interval = 1\nsave-interval = 2", ": 'save-interval' is given twice, with - and with _"),
    ],
)
def test_a_mistake_in_a_file_names_the_file(tmp_path: Path, text: str, said: str) -> None:
    path = toml(tmp_path, text)
    assert mistake("--config", path) == path + said


def test_what_is_said_of_another_systems_option_names_options_that_there_are() -> None:
    assert not FIELDS & INSTEAD.keys()
    named = {word for told in INSTEAD.values() for word in re.findall(r"--[a-z0-9-]+", told)}
    others = {word for word in named if word[2:].removeprefix("no-").replace("-", "_") not in FIELDS}
    assert others == {"--config", "--nproc-per-node"}


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    path = toml(tmp_path, "lr = \n")
    assert mistake("--config", path).startswith(f"--config {path}: not TOML: Invalid value (at line 1")
    Path(path).write_bytes(b"\xff\xfe")
    assert mistake("--config", path) == f"--config {path}: not UTF-8 text (byte 0)"


def test_a_mistake_in_the_environment_names_the_variable() -> None:
    assert mistake(MILLPOND_LR="abc") == "MILLPOND_LR=abc: must be a valid number"


def test_one_file_and_one_environment_serve_all_roles(tmp_path: Path) -> None:
    file = toml(tmp_path, "lr = 0.1\nprompt_data = 'x.jsonl'\ngenerators = 3\nengine = 'echo'\ntake_over = true\n")
    for model in (FeedConfig, GenerateConfig, TrainConfig, RunConfig):
        flags.parse(model, ["--config", file], {"MILLPOND_LR": "abc"} if model is FeedConfig else {}, "millpond")


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("role", ROLES)
def test_the_file_of_an_example_serves_all_roles(example: Path, role: str) -> None:
    modes.check(flags.parse(ROLES[role], ["--config", str(example)], {}, f"millpond {role}"))


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("SAVE_INTERVALL", "SAVE_INTERVAL"), ("SEEDS", "SEED"), ("ENGINE_APIKEY", "ENGINE_API_KEY")],
)
def test_a_variable_that_looks_like_a_slip_is_an_error(variable: str, meant: str) -> None:
    said = f"unknown variable MILLPOND_{variable}; did you mean MILLPOND_{meant}?"
    assert mistake(**{f"MILLPOND_{variable}": "3"}).startswith(said)
    train(**{f"MILLPOND_{variable}": ""})


OTHERS = {
    "MILLPOND_REDIS_SERVICE_HOST": "10.0.0.1",
    "MILLPOND_REDIS_PORT": "tcp://10.0.0.1:6379",
    "MILLPOND_PROMETHEUS_PORT_9100_TCP_PORT": "9100",
    "MILLPOND_CI": "1",
    "MILLPOND_REDIS_SERVER": "/bin/x",
    "MILLPOND_SGLANG_VENV": "/opt/sglang",
    "MILLPOND_GENERATORS": "2",
}
LIKE = ("USER", "GROUP", "WORKERS", "ENGINE_IMAGE", "ENGINE_PORT", "LEARNING_RATE")
"Names of others that are somewhat like an option's."


def test_a_variable_that_nobody_reads_is_a_warning_and_those_of_others_are_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(**{f"MILLPOND_{name}": "3" for name in LIKE}, **OTHERS)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"MILLPOND_{name} is not used: no option has that name; see millpond run --help" for name in LIKE
    ]


def test_what_one_command_reads_is_no_slip_for_the_others() -> None:
    models = (TrackLook, WhyLook, ReportLook, StatusLook, TopLook, InspectLook, AuditLook, PurgeLook, BenchConfig)
    for model in (*models, EvalConfig, ServeConfig):
        train(**{f"MILLPOND_{name.strip('_').upper()}": "x" for name in model.model_fields if name not in FIELDS})


def test_a_password_is_never_repeated(tmp_path: Path) -> None:
    secret = "s3c/r@t"
    said = [
        mistake(f"--redis-url=http://:{secret}@host"),
        mistake(MILLPOND_REDIS_URL=f"http://:{secret}@host"),
        mistake("--config", toml(tmp_path, f"redis_url = 'http://:{secret}@host'")),
        mistake(f"--redis-ulr=redis://:{secret}@host"),
        mistake(f"redis://me:{secret}@host/1"),
        mistake("--seed", f"redis://:{secret}@host"),
        flags.dump(train(MILLPOND_REDIS_URL=f"redis://me:{secret}@host/1")),
        mask(f"cannot reach 'unix:///run/redis.sock?db=1&password={secret}'"),
    ]
    assert all("s3c" not in text and "r@t" not in text for text in said)
    assert said[0] == "--redis-url: must start with redis://, rediss:// or unix://"
    assert said[4].startswith("unexpected argument 'redis://me:***@host/1'")


@pytest.mark.parametrize("argv", [[], ["--no-fully-async"], ["--no-use-tis", "--max-weight-staleness", "none"]])
def test_what_was_resolved_reads_back_the_same(tmp_path: Path, argv: list[str]) -> None:
    odd = 'a "quoted"\\ \t\x7f é 😀'
    config = flags.parse(RunConfig, [*argv, "--input-key", odd], {}, "millpond run", "shift")
    text = flags.dump(config, modes.idle(config))
    again = flags.parse(RunConfig, ["--config", toml(tmp_path, text)], {}, "millpond run")
    assert again.model_dump() == config.model_dump()
    assert flags.digest(again) == flags.digest(config)
    assert modes.check(again) == modes.check(config)
    assert again.model_fields_set > {"lr", "seed", "rollout_batch_size"}


def test_a_trainer_reads_what_run_resolved(tmp_path: Path) -> None:
    config = flags.parse(RunConfig, ["--no-fully-async"], {}, "millpond run", "shift")
    file = toml(tmp_path, flags.dump(config, modes.idle(config)))
    trainer = train("--config", file)
    assert (trainer.fully_async, trainer.max_weight_staleness, trainer.lr) == (False, None, config.lr)
    assert modes.agreed(trainer) == modes.agreed(config)


def test_the_digest_tells_options_apart_and_not_where_they_came_from() -> None:
    assert flags.digest(train("--seed", "1")) == flags.digest(train(MILLPOND_SEED="1"))
    assert flags.digest(train("--seed", "1")) != flags.digest(train("--seed", "2"))
    assert flags.digest(train("--redis-url", "redis://a")) == flags.digest(train())


@pytest.mark.parametrize("model", ROLES.values())
def test_help_lists_every_field_with_its_default(model: type[Section], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        flags.parse(model, ["--help"], {}, "millpond x")
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert all(flags.flag(name) in text for name in model.model_fields)
    assert "Where the run lives: --run TEXT" in text
    assert (model is FeedConfig) or "(default: local)" in text or "learning rate (default: 1e-06)" in text


def test_a_roles_own_fields_have_a_heading_and_may_end_in_an_underscore(capsys: Any) -> None:
    class Peek(Section):
        """Looks."""

        json_: bool = option(False, "as 100% JSON")

    assert flags.parse(Peek, ["--json"], {}, "millpond peek").json_ is True
    assert flags.parse(Peek, [], {"MILLPOND_JSON": "yes"}, "millpond peek").json_ is True
    with pytest.raises(SystemExit):
        flags.parse(Peek, ["--help"], {}, "millpond peek")
    assert "Options:\n  --json, --no-json" in capsys.readouterr().out
