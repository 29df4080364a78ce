"""What the trainer and all workers of a run agree on."""

from __future__ import annotations

from typing import Literal

from pipeline.config import Rollout
from pipeline.evaluation import Terms


class Agreed(Rollout):
    """What stands in the key `config`: every worker reads it and takes no prompts before it agrees."""

    group_rm: bool
    rm_place: Literal["generator", "worker"] = "generator"
    code: dict[str, str]
    "digest of each dotted path or reward type a worker must have as well, by field name"
    evals: Terms | None = None
    "what a worker must have to evaluate; None: nothing is evaluated"
    bound: int
    "groups leased or unsettled at once (pipeline.room)"
    slack: int = 0
    "so many fewer while twice as many are unsettled"
    in_flight: int
    "groups leased at once over all workers, in samples // n"
    max_weight_staleness: int | None
    queue_capacity: int
    queue_max_bytes: int
    max_group_bytes: int
    rollout_submission_granularity: Literal["sample", "group"]
    pause_generation_mode: Literal["retract", "in_place"]
    async_unused_samples_handler: Literal["retry", "drop"] = "retry"
    update_weight_transport: Literal["disk", "distributed"] = "disk"
    adapter_rank: int = 0
    "of the adapters that are published alone; 0: whole weights are"
    deterministic_mode: bool = False
    heartbeat_limit_ms: int = 20_000
    digest: str = ""  # of all others but `evals`: who works by another one is leased nothing
