"""Evaluation beside training: the options, under slime's names, and which of them go together."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from pipeline.errors import UsageError
from pipeline.sections import Fraction, Positive, PositiveFloat, Section, Words, option
from pipeline.urls import EngineUrls

_NAME = re.compile(r"[A-Za-z0-9._-]+")
TAKEN = {"failed", "missing", "skipped", "seconds", "weight_version"}
"Names under `eval/` that are no set's, nor a function's to give."


def _pairs(value: Any) -> str:
    """Words as a shell would part them, from a file a list of them as well; as that text again."""
    words = value if isinstance(value, list) else _split(str(value))
    names, paths = words[::2], words[1::2]
    if not words or len(names) != len(paths):
        raise ValueError(f"it must be pairs, NAME PATH NAME PATH, and has {len(words)} words")
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"it must be pairs, NAME PATH; {name!r} is no name (letters, digits, . _ -)")
    if taken := sorted(TAKEN & set(names)):
        raise ValueError(f"it must have other names than {', '.join(taken)}: eval/{taken[0]} says something else")
    if len(set(names)) < len(names):
        raise ValueError("it must have each name once: they are the metrics' names")
    return shlex.join(map(str, words))


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"it must be words as in a shell: {error}") from None


Pairs = Annotated[str, Words(), BeforeValidator(_pairs)]


class EvalSets(Section):
    """Evaluation: on what"""

    eval_prompt_data: Pairs | None = option(None, "NAME PATH, as many as you like: JSONL or Parquet, by metric name")
    eval_input_key: str | None = option(None, "as --input-key, in these files")
    eval_label_key: str | None = option(None, "as --label-key, in these files")
    eval_rm_type: str | None = option(None, "built-in reward of evaluations (default: the run's reward)")
    eval_function_path: str | None = option(None, "what evaluates in our place, module.function")
    eval_shared_engines: bool = option(
        False, "on the generators' SGLang servers: nothing is leased meanwhile, and no other weights are loaded there"
    )


class EvalEngine(Section):
    """Evaluation: engine"""

    eval_engine_url: EngineUrls | None = option(
        None, "SGLang servers for evaluations alone, with commas between (default: an engine as --engine says)"
    )


class EvalSampling(Section):
    """Evaluation: sampling"""

    n_samples_per_eval_prompt: Positive = option(1, "answers to each prompt; pass@k for k = 1, 2, 4, ... up to it")
    eval_temperature: float | None = option(
        None, "sampling temperature; 0: the likeliest token (default: --rollout-temperature)", ge=0
    )
    eval_top_p: Fraction = option(1.0, "the likeliest tokens that have this probability together")
    eval_max_response_len: Positive | None = option(
        None, "tokens an answer may have (default: --rollout-max-response-len)"
    )


class EvalSchedule(Section):
    """Evaluation: when"""

    eval_interval: Positive | None = option(None, "training steps between evaluations; also before the first and last")
    skip_eval_before_train: bool = option(False, "none of the weights that a run begins with")
    eval_max_in_flight: Positive = option(1, "evaluations asked for and not ended, at most")
    eval_overflow_policy: Literal["skip", "backpressure"] = option(
        "skip", "one more than that is left out and counted, or training waits"
    )
    eval_timeout: PositiveFloat = option(3600.0, "seconds after which an evaluation that has not ended is given up")
    eval_keep_snapshots: int = option(0, "weights of so many ended evaluations are kept in weights/", ge=0)
    save_best: str | None = option(
        None, "also keep the checkpoint whose evaluation has the highest value of this metric, such as eval/NAME"
    )


class Evaluation(EvalSchedule, EvalSets, EvalSampling):
    """Evaluation, as a trainer asks for it"""


class Terms(Section):
    """What evaluations of a run are: who evaluates must have it so as well"""

    sets: tuple[str, ...]
    "names"
    shared: bool
    "on the generators' engines"
    code: dict[str, str]
    "digests of functions and rewards, by field"


def sets(text: str) -> dict[str, Path]:
    """Name -> file of `--eval-prompt-data`; UsageError where one does not exist."""
    words = shlex.split(text)
    found = {name: Path(path) for name, path in zip(words[::2], words[1::2], strict=True)}
    for name, path in found.items():
        if not path.is_file():
            wrong = "it is a folder; give a file" if path.is_dir() else "there is no such file"
            raise UsageError(f"--eval-prompt-data {name} {path}: {wrong}")
    return found


def names(config: EvalSets) -> list[str]:
    """Of the sets."""
    return shlex.split(config.eval_prompt_data or "")[::2]


def metrics(config: Any) -> list[str]:
    """Of which one checkpoint can be the best."""
    rates = [f"-pass@{1 << n}" for n in range(config.n_samples_per_eval_prompt.bit_length())]
    return [f"eval/{name}{end}" for name in names(config) for end in ("", *rates)]


Rule = tuple[bool, str, tuple[str, ...]]


def idle(config: Section) -> list[Rule]:
    """Rules as `modes.idle` has them."""
    rules: list[Rule] = []
    if isinstance(config, EvalSchedule):
        models = (EvalSets, EvalEngine, EvalSampling, EvalSchedule)
        rest = tuple(name for model in models for name in model.model_fields if name in type(config).model_fields)
        off = "without --eval-interval nothing is evaluated"
        rules.append((config.eval_interval is None, off, tuple(name for name in rest if name != "eval_interval")))
    if isinstance(config, EvalSets):
        own = ("eval_input_key", "eval_label_key", "eval_rm_type")
        rules.append((config.eval_function_path is not None, "--eval-function-path takes its place", own))
    if isinstance(config, EvalSets) and isinstance(config, EvalEngine):
        engines = ("eval_engine_url", "eval_shared_engines")
        rules.append((config.eval_function_path is not None, "--eval-function-path brings its own engine", engines))
    return rules


def refused(config: Any) -> Iterator[str]:
    """A sentence for each thing that cannot work; `config` is a trainer's, and in `millpond run` the worker's too."""
    every = config.eval_interval
    if every is None:
        return
    if config.eval_prompt_data is None and config.eval_function_path is None:
        yield "--eval-interval has nothing to evaluate: give --eval-prompt-data NAME PATH, or --eval-function-path"
    if config.rollout_function_path is not None and config.eval_function_path is None:
        yield (
            f"--rollout-function-path {config.rollout_function_path} would have to evaluate as well, and takes batches "
            "for training alone; name what evaluates with --eval-function-path"
        )
    if every % config.update_weights_interval:
        yield (
            f"--eval-interval {every}: only published weights are evaluated, and they are every "
            f"{config.update_weights_interval} steps (--update-weights-interval); give a multiple of that"
        )
    if config.eval_shared_engines and config.eval_max_in_flight > 1:
        yield (
            f"--eval-max-in-flight {config.eval_max_in_flight} with --eval-shared-engines: they have the weights of "
            "one evaluation at a time; use 1"
        )
    if config.save_best is not None and (config.save_interval == 0 or every % config.save_interval):
        yield (
            f"--save-best {config.save_best} keeps the checkpoint that was evaluated: --eval-interval {every} must be "
            f"a multiple of --save-interval {config.save_interval}"
        )
    elif config.save_best is not None and config.eval_function_path is None and config.save_best not in metrics(config):
        yield (
            f"--save-best {config.save_best} is no metric of these evaluations; there are {', '.join(metrics(config))}"
        )


def refused_engine(config: Any) -> Iterator[str]:
    """The same of who evaluates; all others pass."""
    if not getattr(config, "eval_shared_engines", False):
        due = getattr(config, "eval_interval", None) is not None and config.eval_function_path is None
        if due and config.engine == "sglang" and config.eval_engine_url is None:
            yield (
                "evaluations need engines: --engine-url names the generators', and loading a version to evaluate there "
                "would disturb them; give others with --eval-engine-url, or let them take turns: --eval-shared-engines"
            )
    elif config.eval_engine_url is not None:
        yield "--eval-engine-url names engines for evaluations alone, and --eval-shared-engines the others; use one"
    elif config.engine != "sglang":
        yield (
            f"--eval-shared-engines needs --engine sglang: one of --engine {config.engine} lives in its generator, and "
            "nobody else can use it; leave the flag out, and the worker has an engine of its own"
        )
