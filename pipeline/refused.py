"""Options of other systems that are parsed, and refused with a sentence that says what to do instead."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.sections import Section, option


class Refused(Section):
    """Known elsewhere, refused here with a sentence"""

    colocate: bool = option(False, "trainer and engine on the same GPUs in turn")
    partial_rollout: bool = option(False, "continue half answers with new weights")
    recompute_logprobs_via_prefill: bool = option(False, "log-probabilities from the engine's prefill")
    rollout_all_samples_process_path: str | None = option(None, "function over all samples, dropped ones included")
    debug_train_only: bool = option(False, "train without generating")
    load_debug_rollout_data: str | None = option(None, "recorded rollouts to train on")
    save_debug_rollout_data: str | None = option(None, "where to record rollouts")
    lora_adapters: int = option(1, "LoRA adapters trained at once", ge=1)


REFUSED = {
    "colocate": "trainer and engine would take turns on the same GPUs, so generation could not go on while training "
    "runs; give each its own --device",
    "partial_rollout": "requests in flight live on through a weight update anyway (--pause-generation-mode), and a "
    "prompt that goes round again starts from its pristine record; leave the flag out",
    "recompute_logprobs_via_prefill": "the engine's weights may have changed since it sampled a token; the "
    "log-probabilities are those it sampled with, so leave the flag out",
    "rollout_all_samples_process_path": "the samples of a step are never all in one place, as dropped groups stay "
    "where they were made; use --dynamic-sampling-filter-path there, or --rollout-sample-filter-path on the batch",
    "debug_train_only": "`millpond replay ARCHIVE` trains on what a run has recorded, without generators and Redis",
    "load_debug_rollout_data": "`millpond replay ARCHIVE` trains on what a run has recorded with --archive",
    "save_debug_rollout_data": "--archive keeps what each step trains on, a file a step, for `millpond replay`",
    "lora_adapters": "a weight version is one set of weights; train each adapter in a run of its own",
}
"Refused in every mode, since nothing here does it."


def refused(config: Refused) -> Iterator[str]:
    for name, why in REFUSED.items():
        if getattr(config, name) != type(config).model_fields[name].default:
            yield f"--{name.replace('_', '-')} is refused: {why}"
