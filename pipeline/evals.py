"""One evaluation as it crosses processes: what a trainer asks of a worker, as JSON. Names no code and no data file: a
worker has those from its own command line, and evaluates nothing where they are not the trainer's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.code import digest
from pipeline.errors import UsageError
from pipeline.evaluation import Terms, names
from pipeline.options import flag
from pipeline.sections import Fraction, Positive, PositiveFloat
from pipeline.types import HF, Policy

HOLD = 60.0
"Seconds after which shared engines are no longer held for an evaluation, unless its worker renews that."


class Ask(Terms):
    """An evaluation of one version"""

    step: int
    "steps done: what the result belongs to"
    version: int
    path: str
    "folder of the weights, kept until this has ended; empty where there are none (echo)"
    format: str = HF
    "what that folder holds"
    digest: str
    samples: Positive
    "to each prompt"
    temperature: float
    "0: greedy"
    top_p: Fraction
    max_response_len: Positive
    seconds: PositiveFloat
    "that it may take"

    @property
    def terms(self) -> Terms:
        return Terms(sets=self.sets, shared=self.shared, code=self.code)

    @property
    def policy(self) -> Policy:
        return Policy(self.version, self.path, self.format, self.digest, self.step, 0.0)


def ask_of(config: Any, policy: Policy) -> Ask:
    """What a trainer with `config` asks for."""
    warm, most = config.eval_temperature, config.eval_max_response_len
    return Ask(
        step=policy.step,
        version=policy.version,
        path=policy.path,
        format=policy.format,
        digest=policy.digest,
        samples=config.n_samples_per_eval_prompt,
        temperature=config.rollout_temperature if warm is None else warm,
        top_p=config.eval_top_p,
        max_response_len=config.rollout_max_response_len if most is None else most,
        seconds=config.eval_timeout,
        **dict(terms_of(config)),
    )


def terms_of(config: Any) -> Terms:
    return Terms(sets=tuple(sorted(names(config))), shared=config.eval_shared_engines, code=code_of(config))


def code_of(config: Any) -> dict[str, str]:
    """What decides how answers are made and scored."""
    if config.eval_function_path is not None:
        fields = ["eval_function_path"]
    else:
        reward = "custom_rm_path" if config.custom_rm_path is not None else "rm_type"
        fields = ["custom_generate_function_path", *(["eval_rm_type"] if config.eval_rm_type else [reward])]
        fields += ["reward_key", "eval_input_key", "eval_label_key"]
    values: Mapping[str, str | None] = {name: getattr(config, name) for name in fields}
    return {name: digest(value) for name, value in values.items() if value is not None}


def agree(terms: Terms, config: Any) -> None:
    """UsageError unless a worker with `config` would evaluate just that."""
    mine = code_of(config)
    other = sorted(name for name in {*mine, *terms.code} if mine.get(name) != terms.code.get(name))
    if set(terms.sets) != set(names(config)) and "eval_function_path" not in terms.code:
        have, want = (" ".join(sorted(some)) or "none" for some in (names(config), terms.sets))
        raise UsageError(f"--eval-prompt-data: this worker has the sets {have}, and the trainer asks for {want}")
    if other:
        raise UsageError(
            f"{', '.join(map(flag, other))}: the trainer has another value than this worker; give the same"
        )
    if terms.shared != config.eval_shared_engines:
        raise UsageError("--eval-shared-engines: the trainer has another value than this worker; give the same")
