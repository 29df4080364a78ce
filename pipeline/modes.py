"""What goes together: which rollout a configuration selects, what is refused and why, what all workers must agree on.

There is one mechanism. Lock-step is staleness bound 0, `--fully-async --max-weight-staleness k` is bound k, and
`--fully-async` alone has no bound but the queue's cap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline import algorithms, evaluation, fitting, lora, parallel, recording, refused, scoring, tracking, transport
from pipeline.agreed import Agreed
from pipeline.code import digest
from pipeline.config import Engines, Rollout, RunConfig, Section, TrainConfig
from pipeline.errors import UsageError
from pipeline.evals import terms_of
from pipeline.options import flag
from pipeline.room import bound, slack

DRAIN = "consumers.drain.drain"
"What gives the trainer its groups where the user names nothing else; in both modes."

RECORD_BYTES = 4096
"What a prompt is taken to weigh in `open`, its record with it; the real size is known when prompts are read."

CODE = ("custom_generate_function_path", "custom_rm_path", "rm_type", "reward_key", "dynamic_sampling_filter_path")
"What decides how groups are made, scored and kept: the same for all workers, or they take no prompts."

Trained = TrainConfig | RunConfig

LEARNING = (*algorithms.Optimizing.model_fields, *algorithms.Algorithm.model_fields)


@dataclass(frozen=True)
class Selection:
    """What a configuration selects."""

    rollout: str
    "dotted path of the function that gives the trainer a step's groups"
    evaluation: str | None
    "dotted path of what evaluates in our place; None: producers.evaluate"
    max_staleness: int | None
    "publications; None is unbounded"
    tis: bool
    "importance weights correct for tokens that other weights sampled"


def resolve_rollout(config: Trained) -> Selection:
    """The one place that answers this. Evaluation is settled before fully-async takes the drain, so the drain never
    serves an evaluation. Importance sampling is on where the trainer's weights can differ from those that sampled,
    which they also do between the batches of one publication."""
    own_eval = config.rollout_function_path if config.eval_function_path is None else config.eval_function_path
    own = None if config.fully_async else config.rollout_function_path
    staleness = config.max_weight_staleness if config.fully_async else 0
    differs = staleness != 0 or config.update_weights_interval > 1
    tis = differs and not config.use_rollout_logprobs if config.use_tis is None else config.use_tis
    return Selection(DRAIN if own is None else own, own_eval, staleness, tis)


def check(config: Section) -> list[str]:
    """Warnings; raises UsageError with a sentence for each thing that cannot work."""
    refusals = [*_idle_flags(config), *tracking.missing(config), *scoring.refused(config)]
    if isinstance(config, TrainConfig | RunConfig):
        refusals += [*refused.refused(config), *_modes(config), *_training(config), *_going_on(config)]
    if isinstance(config, Engines):
        refusals += [*_engines(config), *evaluation.refused_engine(config)]
    refusals += recording.refused(config)
    if refusals:
        raise UsageError("\n".join(refusals))
    return [*_warnings(config)] if isinstance(config, TrainConfig | RunConfig) else []


def idle(config: Section) -> dict[str, str]:
    """Fields that do nothing in the mode of `config`, each with why. Setting one is an error."""
    themes = (tracking, transport, scoring, fitting, lora, parallel, evaluation, recording)
    rules = [rule for theme in themes for rule in theme.idle(config)]
    if isinstance(config, TrainConfig | RunConfig):
        rules += _idle_training(config)
    if isinstance(config, RunConfig):
        rules.append((config.redis_url is not None, "--redis-url names a server of your own", ("redis_durability",)))
    if isinstance(config, Engines):
        rules += _idle_engine(config)
    return {name: why for holds, why, names in rules if holds for name in names}


def _idle_engine(config: Engines) -> list[tuple[bool, str, tuple[str, ...]]]:
    echo = config.engine == "echo"
    own = getattr(config, "eval_engine_url", None) is not None
    torch = not isinstance(config, RunConfig) or config.train_backend != "echo" or config.debug_rollout_only
    scripted = "--engine echo has no model, and its answers follow from the seed alone"
    sampling = tuple(name for name in ("eval_temperature", "eval_top_p") if name in type(config).model_fields)
    by_echo = echo and not own and getattr(config, "eval_function_path", None) is None
    trained = ("hf_checkpoint", "device", "torch_threads", "rollout_temperature")
    return [
        (not echo, "it belongs to --engine echo", tuple(name for name in Engines.model_fields if name[:5] == "echo_")),
        (config.engine != "sglang", "it belongs to --engine sglang", ("engine_url", "engine_router_url")),
        (config.engine != "sglang" and not own, "it belongs to --engine sglang", ("engine_api_key", "engine_timeout")),
        (by_echo and not torch, f"{scripted}; nor has --train-backend echo", trained),
        (by_echo, scripted, sampling),
    ]


def _idle_training(config: Trained) -> list[tuple[bool, str, tuple[str, ...]]]:
    lock_step = "without --fully-async a run is lock-step and on-policy"
    return [
        (not config.fully_async, f"{lock_step}; add --fully-async or leave the bound out", ("max_weight_staleness",)),
        (not config.fully_async, f"{lock_step}: no request meets a weight update", ("pause_generation_mode",)),
        (config.queue_capacity is not None, "--queue-capacity overrides it", ("async_data_buffer_capacity_factor",)),
        *algorithms.idle(config, resolve_rollout(config).tis),
        algorithms.idle_decay(config),
        (config.train_backend == "echo", "--train-backend echo trains nothing", LEARNING),
        (config.save_interval == 0, "--save-interval 0 saves no checkpoints", ("save_keep",)),
        (config.train_backend == "echo" and not config.resume, "--train-backend echo has no weights", ("load",)),
        (not config.apply_chat_template, "--apply-chat-template is off", ("apply_chat_template_kwargs",)),
        (config.num_epoch is None, "without --num-epoch the data has no last batch", ("drop_last",)),
    ]


def _idle_flags(config: Section) -> Iterator[str]:
    for name, why in idle(config).items():
        value, default = getattr(config, name), type(config).model_fields[name].default
        if name in config.model_fields_set and value is not None and (value is not False or default is True):
            yield f"{flag(name)} does nothing here: {why}"


def _modes(config: Trained) -> Iterator[str]:
    if config.fully_async and config.rollout_function_path is not None:
        yield (
            f"--rollout-function-path {config.rollout_function_path} brings its own loop, and under --fully-async the "
            "workers generate all the time; use --no-fully-async, or leave the function out"
        )
    if config.fully_async and config.pause_generation_mode == "abort":
        yield (
            "--pause-generation-mode abort would throw away what is in flight at each weight update, which under "
            "--fully-async is most of the work; use retract or in_place"
        )
    for name, whole in (("rollout_top_p", 1), ("rollout_top_k", -1)):
        if getattr(config, name) != whole:
            yield (
                f"{flag(name)} {getattr(config, name)}: the trainer computes probabilities over the whole vocabulary, "
                f"so those of a cut-off distribution would be wrong; use {whole}, or lower --rollout-temperature"
            )
    try:
        _bound(config)
    except UsageError as error:
        yield str(error)


def _engines(config: Engines) -> Iterator[str]:
    if isinstance(config, RunConfig) and config.engine == "local" and _weightless(config):
        yield "--train-backend echo publishes no weights, and --engine local cannot sample without; use --engine echo"
    if config.engine == "sglang" and config.engine_url is None:
        yield "--engine sglang needs --engine-url: the servers it drives, such as http://localhost:30000"
    if config.engine == "sglang" and isinstance(config, RunConfig) and config.generators > 1:
        yield f"--generators {config.generators} would each load weights into the same engines; one drives them all"


def _weightless(config: RunConfig) -> bool:
    return config.train_backend == "echo" and not config.debug_rollout_only


def _training(config: Trained) -> Iterator[str]:
    samples = config.rollout_batch_size * config.n_samples_per_prompt
    if config.global_batch_size is not None and config.global_batch_size > samples:
        yield (
            f"--global-batch-size {config.global_batch_size} is more than the {samples} samples of a step "
            f"(--rollout-batch-size {config.rollout_batch_size} x --n-samples-per-prompt {config.n_samples_per_prompt})"
        )
    for theme in (algorithms, transport, fitting, lora, parallel, evaluation):
        yield from theme.refused(config)
    yield from algorithms.refused_decay(config)
    if config.num_rollout is None and config.num_epoch is None:
        yield "no end: give the training steps with --num-rollout, or passes over the prompts with --num-epoch"


def _going_on(config: Trained) -> Iterator[str]:
    goes_on = config.goes_on if isinstance(config, TrainConfig) else config.resume
    if goes_on and config.save_interval == 0:
        yield (
            f"{flag('resume' if config.resume else 'auto_resume')} needs checkpoints, and with --save-interval 0 there "
            "are none: groups count as trained when their weights are published. Start a new run, from the last "
            "weights if you like (--hf-checkpoint)"
        )
    if config.take_over and config.wait:
        yield "--take-over goes ahead at once and --wait waits for the other trainer; use one"


def _warnings(config: Trained) -> Iterator[str]:
    selection = resolve_rollout(config)
    if selection.max_staleness is None:
        yield (
            "staleness is unbounded: groups may be as old as the queue lets them get; "
            "--max-weight-staleness 2 bounds it at admission"
        )
    if selection.max_staleness != 0 and not selection.tis and not config.use_rollout_logprobs:
        yield "groups may be stale and nothing corrects for it; --use-tis does"
    yield from (*algorithms.warnings(config), *recording.warnings(config))
    size = open_prompts(config) * RECORD_BYTES
    if size > config.queue_max_bytes:
        yield (
            f"--save-interval {config.save_interval} x --rollout-batch-size {config.rollout_batch_size} keeps up to "
            f"{open_prompts(config)} prompts in Redis until a checkpoint has them, about {size >> 20} MiB, more than "
            f"--queue-max-bytes {config.queue_max_bytes}; save more often, or make sure that Redis has the memory"
        )


def _queue_capacity(config: Trained) -> int:
    by_factor = max(1, int(config.async_data_buffer_capacity_factor * config.rollout_batch_size))
    return by_factor if config.queue_capacity is None else config.queue_capacity


def _bound(config: Trained) -> int:
    staleness = resolve_rollout(config).max_staleness
    return bound(staleness, config.rollout_batch_size, config.update_weights_interval, _queue_capacity(config))


def open_prompts(config: Trained) -> int:
    """Prompts that `open` holds at most: pushed, and not yet in a checkpoint."""
    return config.save_interval * config.rollout_batch_size + _bound(config)


def agreed(config: Trained) -> Agreed:
    """What the trainer writes to the key `config`; `config` has passed `check`."""
    unused = idle(config)
    named = {name: getattr(config, name) for name in CODE}
    samples = config.async_max_concurrent_samples
    staleness = resolve_rollout(config).max_staleness
    rules = Agreed(
        **{name: getattr(config, name) for name in Rollout.model_fields},
        group_rm=config.group_rm,
        rm_place=config.rm_place,
        code={name: digest(path) for name, path in named.items() if path is not None and name not in unused},
        evals=None if config.eval_interval is None else terms_of(config),
        bound=_bound(config),
        slack=slack(staleness, config.rollout_batch_size, config.update_weights_interval),
        in_flight=config.rollout_batch_size if samples is None else max(1, samples // config.n_samples_per_prompt),
        max_weight_staleness=staleness,
        queue_capacity=_queue_capacity(config),
        queue_max_bytes=config.queue_max_bytes,
        max_group_bytes=config.max_group_bytes,
        rollout_submission_granularity=config.rollout_submission_granularity,
        async_unused_samples_handler=config.async_unused_samples_handler,
        update_weight_transport=config.update_weight_transport,
        adapter_rank=config.lora_rank if config.lora_publish == "adapter" else 0,
        deterministic_mode=config.deterministic_mode,
        pause_generation_mode="in_place" if config.pause_generation_mode == "in_place" else "retract",
    )
    return rules.model_copy(update={"digest": digest(rules.model_dump_json(exclude={"evals"}))})
