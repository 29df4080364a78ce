"""`millpond sglang`: a real SGLang server on CPUs, for those who want to see one work without a GPU.

It lives in an environment of its own, because its pinned packages do not go with the project's: `--install` makes it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from pydantic import SecretStr

from pipeline.config import Positive, Section, option
from pipeline.errors import UsageError
from pipeline.flags import parse

HERE = Path(__file__).parent
PINS = HERE / "pins.txt"
VERSION = "0.5.23"
TORCH = "2.13.0"


class ServeConfig(Section):
    """SGLang on CPUs"""

    hf_checkpoint: Path | None = option(None, "model and tokenizer folder in the Hugging Face layout")
    sglang_venv: Path = option(Path(f"~/.cache/millpond/sglang-{VERSION}"), "the server's environment")
    install: bool = option(False, "make the environment first: about 2.6 GB")
    host: str = option("127.0.0.1", "address to listen on")
    port: Positive = option(30000, "port to listen on")
    engine_api_key: SecretStr | None = option(None, "API key to ask for; best given in the environment")
    max_total_tokens: Positive = option(16384, "tokens of all requests in the cache at once")
    lora_rank: int = option(0, "room for adapters of a run (--lora-publish adapter) up to that rank; 0: none", ge=0)


def main(argv: list[str]) -> int:
    """Becomes the server; with --install and no model it ends when the environment is there."""
    config = parse(ServeConfig, argv, os.environ, "millpond sglang")
    venv = config.sglang_venv.expanduser()
    python = venv / "bin" / "python"
    if config.install and not complete(venv):
        install(venv, python)
    if config.hf_checkpoint is None:
        if config.install:
            return 0
        raise UsageError("which model? Give --hf-checkpoint DIR")
    if not complete(venv):
        raise UsageError(f"there is no SGLang in {venv}: `millpond sglang --install` makes it (2.6 GB, some minutes)")
    if not (config.hf_checkpoint / "config.json").is_file():
        raise UsageError(f"--hf-checkpoint {config.hf_checkpoint}: no folder with a Hugging Face model")
    return become(python, config)


def become(python: Path, config: ServeConfig) -> NoReturn:
    """So that signals, exit code and pid are the server's."""
    sys.stdout.flush()
    os.execve(python, [str(python), *arguments(config)], environment(config))


def install(venv: Path, python: Path) -> None:
    """By name and version; a run that was cut short is made up for by the next."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(venv)],
        [*pip, f"torch=={TORCH}"],
        [*pip, "--no-deps", "-r", str(PINS)],
    ):
        done = subprocess.run(command, check=False)
        if done.returncode:
            raise UsageError(f"`{' '.join(command)}` failed with code {done.returncode}")
    (venv / "complete").write_text(PINS.read_text())


def complete(venv: Path) -> bool:
    """Whether all packages are there, as they are pinned today."""
    marker = venv / "complete"
    return marker.is_file() and marker.read_text() == PINS.read_text()


def arguments(config: ServeConfig) -> list[str]:
    """What the interpreter is given; the key goes by the environment (see LAUNCH), where others cannot read it."""
    return [
        *("-c", LAUNCH),
        *("--model-path", str(config.hf_checkpoint), "--host", config.host, "--port", str(config.port)),
        *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--dtype", "float32", "--disable-overlap-schedule", "--max-total-tokens", str(config.max_total_tokens)),
        "--sleep-on-idle",  # or it takes a whole processor for doing nothing
        *(_adapters(config.lora_rank) if config.lora_rank else ()),
    ]


def _adapters(rank: int) -> tuple[str, ...]:
    """With SGLang's one way of adding them up that needs no GPU."""
    room = ("--enable-lora", "--max-lora-rank", str(rank), "--lora-target-modules", "all")
    return (*room, "--lora-backend", "torch_native")


LAUNCH = """
import os, runpy, sys
key = os.environ.pop("MILLPOND_ENGINE_API_KEY", "")
sys.argv = ["launch_server", *sys.argv[1:], *(["--api-key", key] if key else [])]
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""


def environment(config: ServeConfig) -> dict[str, str]:
    """Of the server. More than one thread makes it ten times slower on such machines."""
    path = [str(HERE / "shim"), os.environ.get("PYTHONPATH", "")]
    key = config.engine_api_key.get_secret_value() if config.engine_api_key else ""
    own = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MILLPOND_ENGINE_API_KEY": key}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, path))}
