"""The trainer's resolved options, in the run's folder; what a resume may change of them, and what it may not.

What was trained is in weights and checkpoint, so whatever decides how the next step is made may change, and is told.
What decides what a checkpoint or a group that waits is, may not.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pipeline.changes import Change, readable
from pipeline.config import Rollout, TrainConfig
from pipeline.errors import UsageError
from pipeline.flags import dump
from pipeline.lora import Lora
from pipeline.modes import CODE, idle
from pipeline.options import flag
from trainer.workshop import Workshop

log = logging.getLogger(__name__)

FILE = "trainer.toml"

LORA = "a checkpoint holds adapters of that shape and strength"
REFUSED = {
    "train_backend": "a checkpoint holds what its own backend trains on",
    "debug_rollout_only": "a run that trains nothing has no training state to go on from, and its groups count as used",
    **dict.fromkeys(Lora.model_fields, LORA),
}
"Never on a resume from a checkpoint, and why."

BASE = {"hf_checkpoint": "the adapters in a checkpoint were trained upon that model"}
"Nor this, where adapters are trained; another path to the same folder is no change."

BOUNDS = {"max_prompt_attempts", "rollout_group_timeout", "rollout_batch_size"}
MADE = ({*Rollout.model_fields} - BOUNDS) | {*CODE, "group_rm"}
"What decides how groups are made and scored."


def changed(config: TrainConfig, folder: Path) -> list[Change]:
    """Since the trainer before this one."""
    found, why = readable(folder / FILE, config)
    if why:
        log.warning("the options of the trainer before cannot be compared with these: %s", why)
    return found


def refuse(changes: list[Change], loaded: bool, adapters: bool) -> None:
    """UsageError naming what may not change; `loaded`: a checkpoint is gone on from, `adapters`: which holds those."""
    rules = REFUSED | (BASE if adapters else {})
    found = [change for change in changes if change.name in rules and not _same_folder(change)]
    said = [f"--resume with {change}: {rules[change.name]}" for change in found]
    if said and loaded:
        names = ", ".join(flag(change.name) for change in found)
        raise UsageError("\n".join([*said, f"give the same {names} again, or begin another run with --load"]))


def _same_folder(change: Change) -> bool:
    paths = [path.resolve() for path in (change.before, change.now) if isinstance(path, Path)]
    return len(paths) == 2 and paths[0] == paths[1]


def tell(changes: list[Change]) -> None:
    made = [str(change) for change in changes if change.name in MADE]
    rest = [str(change) for change in changes if change.name not in MADE]
    if made:
        log.warning(
            "changed since the last start: %s; groups that wait were made with the old, others are made with the new",
            ", ".join(made),
        )
    if rest:
        log.info("changed since the last start: %s", ", ".join(rest))


def keep(config: TrainConfig, shop: Workshop) -> None:
    """Puts them in place; secrets are left out."""
    path = shop.folder / FILE
    path.touch(mode=0o600)
    path.write_text(dump(config, idle(config)), encoding="utf-8")
    path.replace(shop.root / FILE)
