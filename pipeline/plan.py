"""What `millpond run` runs: the resolved configuration, the run's folder, the small model and its prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.changes import readable
from pipeline.config import RunConfig
from pipeline.errors import MillpondError, RunExists, UsageError
from pipeline.evaluation import sets
from pipeline.flags import dump, parse
from pipeline.join import RUNS
from pipeline.keys import Keys
from pipeline.modes import idle
from pipeline.origin import weights_in
from pipeline.prompts import parts

PRESET = "shift"
"The job of a run that names neither a model nor prompts."
MADE_FIRST = {"logs", "redis", "prompts.jsonl", "model"}
"All that a start which failed before config.toml can have left: no run that --resume could go on with."


def resolve(argv: Sequence[str]) -> RunConfig:
    """The resolved configuration, `run`, `out`, model and prompts filled in."""
    first = parse(RunConfig, argv, os.environ, "millpond run", PRESET)
    folder = first.out or (RUNS / first.run if first.run else None)
    if first.resume:
        if folder is None:
            raise UsageError("--resume: which run? Give its folder with --out, or --run NAME")
        if not (folder / "config.toml").is_file():
            raise UsageError(f"--resume: {folder} holds no run (no config.toml)")
        if "--config" not in argv:
            argv = ["--config", str(folder / "config.toml"), *argv]
        first = parse(RunConfig, argv, os.environ, "millpond run")
    demo = first.hf_checkpoint is None and first.prompt_data is None and first.task is None
    config = parse(RunConfig, argv, os.environ, "millpond run", PRESET if demo else None)
    name = config.run or (folder.absolute().name if folder else time.strftime("run-%Y%m%d-%H%M%S"))
    _name(name, config)
    if config.resume and folder and not config.redis_url and not (folder / "redis").is_dir():
        raise UsageError(f"--resume: the run in {folder} is in a Redis of yours: give the same --redis-url again")
    if config.eval_interval is not None:
        _try_evaluations(config, argv)
    folder = folder or RUNS / name
    if config.load and not config.resume:
        weights_in(config.load, config.train_backend)
    if not demo:
        _complete(config)
    given = config.model_fields_set
    values = {"run": name, "out": folder.absolute()}
    if demo:
        values |= {"prompt_data": str(folder.absolute() / "prompts.jsonl")}
        values |= {} if config.engine == "echo" else {"hf_checkpoint": folder.absolute() / "model"}
    elif (config.task or "").startswith("reasoning_gym:") and not (config.rm_type or config.custom_rm_path):
        values |= {"rm_type": "reasoning_gym"}
    filled = config.model_copy(update=values)
    filled.model_fields_set.intersection_update(given)
    return filled


def _try_evaluations(config: RunConfig, argv: Sequence[str]) -> None:
    """UsageError for what the worker would find out minutes later; asked of a process, as nothing here knows them."""
    if config.eval_prompt_data is not None:
        sets(config.eval_prompt_data)
    asked = subprocess.run([sys.executable, "-P", "-m", "producers.try_out", *argv], stderr=subprocess.PIPE, text=True)
    if asked.returncode:
        kind = UsageError if asked.returncode == UsageError.exit_code else MillpondError
        raise kind(asked.stderr.strip() or f"the evaluations' options could not be tried: {asked.returncode}")


def others_of(config: RunConfig) -> list[tuple[str, str]]:
    """(name, command) of the processes beside the trainer; a worker only where there are jobs for one."""
    jobs = config.rm_place == "worker" or config.eval_interval is not None
    worker = [("worker", "worker")] if jobs else []
    return [("feeder", "feed"), *((f"generator-{i}", "generate") for i in range(config.generators)), *worker]


def write_config(config: RunConfig, folder: Path) -> None:
    """What the processes of this run and a resume read; how this start came about is left out. Says what a resume has
    other than the start before."""
    for change in readable(folder / "config.toml", config)[0] if config.resume else ():
        sys.stdout.write(f"Changed since the last start: {change}\n")
    once = config.model_copy(update={"resume": False, "take_over": False, "wait": False, "load": None})
    put_config(folder, dump(once, idle(once)))


def saved_since(folder: Path, load: Path) -> bool:
    """Whether the run has checkpoints of later steps than `load`, which may have been pruned since."""

    def step(checkpoint: Path) -> int:
        return int(json.loads((checkpoint / "state.json").read_text())["step"])

    try:
        return any(step(p) > step(load) for p in (folder / "checkpoints").glob("[0-9]*") if p.name.isdigit())
    except FileNotFoundError:
        return True


def put_config(folder: Path, text: str) -> None:
    """Whole or not at all."""
    aside = folder / "config.toml.new"
    try:
        aside.touch(mode=0o600)
        aside.write_text(text)
        aside.replace(folder / "config.toml")
    except OSError as error:
        raise MillpondError(f"{folder / 'config.toml'} cannot be written: {error.strerror}") from None


def _name(name: str, config: RunConfig) -> None:
    try:
        Keys(name)
    except UsageError as error:
        if config.run:
            raise
        raise UsageError(
            f"--out '{config.out}': the folder's name would be the run's; give another --run. {error}"
        ) from None


def _complete(config: RunConfig) -> None:
    if config.prompt_data is None and config.task is None:
        raise UsageError("--hf-checkpoint is given and --prompt-data is not: a file of prompts is needed, or a --task")
    if config.prompt_data is not None:
        parts(config.prompt_data)
    needed = config.engine != "echo" or config.train_backend != "echo"
    if config.hf_checkpoint is None and needed:
        data = "--task" if config.prompt_data is None else "--prompt-data"
        raise UsageError(
            f"{data} is given and --hf-checkpoint is not: a model folder is needed to train on the prompts"
        )
    if needed and not (config.hf_checkpoint or Path()).is_dir():
        raise UsageError(f"--hf-checkpoint {config.hf_checkpoint}: there is no such folder")
    if needed and config.hf_checkpoint and not (config.hf_checkpoint / "config.json").is_file():
        raise UsageError(f"--hf-checkpoint {config.hf_checkpoint}: no Hugging Face model (it has no config.json)")


def make_folder(config: RunConfig) -> Path:
    folder = config.out or RUNS
    try:
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: no folder for a run can be made there: {error.strerror}") from None
    if {name for name in names - MADE_FIRST if not name.startswith((".model-", ".prompts."))} and not config.resume:
        raise RunExists(f"{folder} is there already: --resume goes on with that run, another --out starts a new one")
    return folder


def make_files(config: RunConfig, folder: Path) -> None:
    """The small model and its prompts, where the run is to make them; both at once."""
    jobs = []
    if config.prompt_data == str(folder.absolute() / "prompts.jsonl"):
        jobs.append(f"from producers.demo import write_prompts as f; f(Path({config.prompt_data!r}), 0)")
    if config.hf_checkpoint == folder.absolute() / "model":
        jobs.append(f"from trainer.demo_model import make as f; f(Path({str(config.hf_checkpoint)!r}), {config.seed})")
    running = [subprocess.Popen([sys.executable, "-c", f"from pathlib import Path; {job}"]) for job in jobs]
    if [code for process in running if (code := process.wait())]:
        raise MillpondError("the small model or its prompts could not be made; the reason stands above")
