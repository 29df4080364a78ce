"""`millpond eval`: evaluates weights by hand, on sets of prompts, and prints a table.

millpond eval --hf-checkpoint FOLDER --eval-prompt-data NAME PATH --rm-type exact
millpond eval runs/demo                            its newest checkpoint, with its model, sets and reward
millpond eval runs/demo/checkpoints/best           another one
millpond eval runs/demo/weights/00000012           what was published, merged or as adapters alone
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pipeline import show
from pipeline.agreed import Agreed
from pipeline.config import EvalWork, Positive, PositiveFloat, option
from pipeline.errors import MillpondError, Stopped, UsageError
from pipeline.evals import Ask, ask_of
from pipeline.evaluation import EvalSampling, names
from pipeline.find import RUNS, settings
from pipeline.flags import parse
from pipeline.metrics import Values
from pipeline.modes import check
from pipeline.sections import JsonMap
from pipeline.types import ADAPTERS, HF, PEFT, Policy
from producers.checkpoint_weights import as_folder, base_of, rank_of
from producers.evaluate import evaluate


class EvalConfig(EvalWork, EvalSampling):
    """Evaluates weights by hand: millpond eval [RUN or CHECKPOINT] [options]; without one, those of --hf-checkpoint."""

    rollout_temperature: PositiveFloat = option(1.0, "sampling temperature where --eval-temperature is not given")
    rollout_max_response_len: Positive = option(1024, "tokens an answer may have without --eval-max-response-len")
    rollout_seed: int = option(42, "seed of all samplers", ge=0)
    apply_chat_template: bool = option(False, "render prompts with the tokenizer's chat template")
    apply_chat_template_kwargs: JsonMap | None = option(None, "what the template is given besides, a JSON map")
    eval_timeout: PositiveFloat = option(86400.0, "seconds it may take")
    json_: bool = option(False, "one JSON document instead of a table")


@dataclass(frozen=True)
class Meant:
    """What a word on the command line means."""

    run: Path | None = None
    "folder whose options go before the defaults"
    checkpoint: Path | None = None
    adapters: Path | None = None
    "folder of adapters alone, as published or in a checkpoint"


def main(argv: list[str]) -> int:
    """Evaluate weights by hand. A reward or function that hangs is not waited for at the end."""
    before = set(threading.enumerate())
    try:
        return _main(argv)
    except (MillpondError, KeyboardInterrupt) as error:
        if any(not thread.daemon for thread in set(threading.enumerate()) - before):
            end = error if isinstance(error, MillpondError) else Stopped("asked to stop")
            sys.stderr.write(f"millpond: {end}\n")
            sys.stderr.flush()
            os._exit(end.exit_code)
        raise


def _main(argv: list[str]) -> int:
    word, flags = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)
    meant = _meant(Path(word)) if word else Meant()
    if word and meant == Meant():
        flags = ["--hf-checkpoint", word, *flags]
    preset = str(meant.run / _settings(meant.run)) if meant.run else None
    config = parse(EvalConfig, [*_aside(meant.run, flags), *flags], os.environ, "millpond eval", preset)
    check(config)
    if config.eval_prompt_data is None and config.eval_function_path is None:
        raise UsageError("nothing to evaluate on: give --eval-prompt-data NAME PATH")
    if config.eval_shared_engines:
        raise UsageError(
            "--eval-shared-engines is a trainer's, who publishes what they serve; name others with --engine-url"
        )
    logging.basicConfig(level=logging.WARNING, format="millpond: %(message)s")
    with ExitStack() as stack:
        weights = meant.adapters or config.hf_checkpoint
        if meant.adapters and config.hf_checkpoint is None:
            config = config.model_copy(update={"hf_checkpoint": base_of(meant.adapters)})
        elif meant.checkpoint and not meant.adapters and config.engine != "echo":
            if weights is None:
                raise UsageError("--hf-checkpoint is needed: the folder of the model that the checkpoint is of")
            weights = stack.enter_context(as_folder(meant.checkpoint, weights))
        found = asyncio.run(evaluate(*_work(config, weights)))
    _show(config, found)
    return 0


def _meant(path: Path) -> Meant:
    """A run by folder or name, a checkpoint, adapters, or none of these: a model's folder."""
    if not path.exists() and (RUNS / path).is_dir():
        path = RUNS / path
    path = path.resolve()
    if (path / ADAPTERS).is_file():
        run = path.parents[1]
        return Meant(run if _settings(run) else None, adapters=path)
    if (path / "state.json").is_file() and (path / "model").is_dir():
        if not _settings(path.parents[1]):
            raise UsageError(f"{path}: a checkpoint is evaluated where its run is, and {path.parents[1]} is none")
        return _checkpoint(path.parents[1], path)
    if _settings(path):
        found = sorted(p for p in (path / "checkpoints").glob("[0-9]*") if p.name.isdigit())
        if not found:
            raise UsageError(f"{path} has no checkpoint yet; a folder under weights/ can be evaluated as well")
        return _checkpoint(path, found[-1])
    if not (path / "config.json").is_file():
        raise UsageError(f"{path}: neither a run, nor a checkpoint, nor a model's folder")
    return Meant()


def _checkpoint(run: Path, path: Path) -> Meant:
    adapters = path / "model" / "adapter"
    return Meant(run, path, adapters if (adapters / ADAPTERS).is_file() else None)


def _settings(run: Path) -> str:
    """The name of the file with a run's options, of `millpond run` or else `train`; empty where there is none."""
    return next((name for name in ("config", "trainer") if (run / f"{name}.toml").is_file()), "")


def _aside(run: Path | None, flags: Sequence[str]) -> list[str]:
    """Flags that leave a run's engines alone, unless they are named: they would be given other weights."""
    if run is None:
        return []
    own = ["--engine", "local"] if settings(run).get("engine") == "sglang" and "--engine" not in flags else []
    engines = ("--engine-url", "--engine-router-url", "--eval-engine-url", *(["--engine-api-key"] if own else []))
    named = [flag for flag in engines if flag not in flags]
    return [*own, *(f"{flag}=" for flag in named), "--no-eval-shared-engines"]


def _work(config: EvalConfig, weights: Path | None) -> tuple[Ask, EvalConfig, Agreed]:
    """What `evaluate` is given. Without a trainer there are no rules of a run but those in `config`."""
    path = str(weights.absolute()) if weights and config.engine != "echo" else ""
    rank = rank_of(weights) if weights and (weights / ADAPTERS).is_file() else 0
    policy = Policy(1, path, PEFT if rank else HF, "", 0, 0.0)
    fields = ("rollout_seed", "apply_chat_template", "apply_chat_template_kwargs")
    rules = Agreed(
        **{name: getattr(config, name) for name in fields},
        group_rm=config.group_rm,
        code={},
        bound=1,
        in_flight=1,
        max_weight_staleness=None,
        queue_capacity=1,
        queue_max_bytes=1,
        max_group_bytes=1,
        rollout_submission_granularity="sample",
        pause_generation_mode="retract",
        adapter_rank=rank,
    )
    return ask_of(config, policy), config, rules


def _show(config: EvalConfig, found: Values) -> None:
    del found["eval/weight_version"]
    if config.json_:
        return show.document(found)
    if config.eval_function_path is not None:
        return show.pairs([(name, f"{value:.6g}") for name, value in found.items()])
    sets = names(config)
    columns = list(dict.fromkeys(key for name in sets for key in _row(found, name)))
    head = ["set", *(c.strip("-/") or "reward" for c in columns)]
    cells = {name: _row(found, name) for name in sets}
    show.table(head, [[name, *(_cell(cells[name].get(c)) for c in columns)] for name in sets])
    show.line(f"{found['eval/seconds']:.1f} s")
    return None


def _row(found: Values, name: str) -> dict[str, float]:
    """The metrics of one set by what follows its name: empty for the reward itself, `-pass@1`, `/response_len/mean`."""
    head, rest = f"eval/{name}", ("", "-pass@", "-truncated_ratio", "/response_len/mean", "/unscored")
    return {
        key.removeprefix(head): value
        for key, value in found.items()
        if key == head or any(key.startswith(head + part) for part in rest if part)
    }


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
