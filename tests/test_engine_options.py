"""The options of SGLang engines: what is refused, and a key that is written nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import flags, modes
from pipeline.config import GenerateConfig, RunConfig
from pipeline.errors import UsageError
from producers import engines

URLS = "http://a:30000, https://b/c/"
SGLANG = ("--engine", "sglang", "--engine-url", URLS, "--rm-type", "exact")
KEY = "sk-f1shing"


def generate(*argv: str, **environ: str) -> GenerateConfig:
    return flags.parse(GenerateConfig, argv, environ, "millpond generate")


def run(*argv: str) -> RunConfig:
    return flags.parse(RunConfig, [*argv, "--num-rollout", "3"], {}, "millpond run")


def test_several_engines_stand_with_commas_between_and_each_has_its_share() -> None:
    config = generate(*SGLANG, "--server-concurrency", "5")
    assert config.engine_url == "http://a:30000,https://b/c"
    assert engines.slots(config) == 10
    assert engines.slots(generate("--server-concurrency", "5")) == 5


@pytest.mark.parametrize(
    "url",
    ["", "a:30000", "ftp://a", "http://", "http://user:pw@a", "http://a,", "http://a?key=1", "http://a,http://a/"],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--engine-url"):
        modes.check(generate("--engine", "sglang", "--rm-type", "exact", f"--engine-url={url}"))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--engine", "sglang"), "needs --engine-url"),
        ((*SGLANG, "--generators", "2"), "--generators 2"),
        (("--engine-url", URLS), "it belongs to --engine sglang"),
        (("--engine", "echo", "--engine-api-key", KEY), "--engine-api-key does nothing here"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        modes.check(run(*argv, "--rm-type", "exact"))
    assert said in str(caught.value)
    assert KEY not in str(caught.value)


def test_engines_need_the_folder_of_their_model() -> None:
    with pytest.raises(UsageError, match="--hf-checkpoint"):
        engines.build(generate(*SGLANG), "retract")


def test_a_router_does_not_go_with_a_cache_that_is_kept(tmp_path: Path) -> None:
    config = generate(*SGLANG, "--engine-router-url", "http://r", "--hf-checkpoint", str(tmp_path))
    with pytest.raises(UsageError, match="in_place"):
        engines.build(config, "in_place")


def test_a_key_is_in_no_dump_digest_or_repr_and_is_not_read_back_as_stars(tmp_path: Path) -> None:
    config = run(*SGLANG, "--engine-api-key", KEY)
    written = flags.dump(config, modes.idle(config))
    assert KEY not in written + repr(config) + str(config.model_dump(mode="json"))
    assert "give it in MILLPOND_ENGINE_API_KEY" in written
    assert flags.digest(config) == flags.digest(run(*SGLANG))
    (tmp_path / "c.toml").write_text(written)
    path = str(tmp_path / "c.toml")
    assert generate("--config", path).engine_api_key is None
    given = generate("--config", path, MILLPOND_ENGINE_API_KEY=KEY).engine_api_key
    assert given is not None
    assert given.get_secret_value() == KEY
