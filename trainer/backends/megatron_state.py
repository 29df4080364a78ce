"""All that the next training step depends on, written by all ranks with dist_checkpointing: the same for any number.

FOLDER/state.json       which megatron-core wrote it, and the updates made
FOLDER/*.distcp ...     the tensors, each whole in name and shape, whoever held which part
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.core import __version__ as version
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as write

from pipeline.errors import WeightsError
from trainer.backends.megatron_model import PolicyModel
from trainer.backends.megatron_optimizer import Optimizer

FILE = "state.json"


class Writer(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's format, written here and now: its own way is by processes that it forks, and waits for without end."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        """Errors: of all ranks where one has failed."""
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        write(
            mcore_to_pyt_state_dict(flat, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(folder: Path, model: PolicyModel, optimizer: Optimizer, lead: bool) -> None:
    """Into an existing folder; complete on all ranks when it returns on one. Collective."""
    tensors = model.sharded_state_dict()
    everything = {"model": tensors, "optimizer": optimizer.sharded(tensors, loading=False)}
    dist_checkpointing.save(everything, folder, sharded_strategy=Writer("torch_dist", 1))
    if lead:
        (folder / FILE).write_text(json.dumps({"megatron": version, "updates": optimizer.updates}))


def load(folder: Path, model: PolicyModel, optimizer: Optimizer) -> None:
    """What `save` wrote, with any number of ranks. Collective. Errors: WeightsError."""
    updates, tensors = _updates(folder), model.sharded_state_dict()
    found = _read(folder, {"model": tensors, "optimizer": optimizer.sharded(tensors, loading=True)})
    model.load_state_dict(found["model"])
    optimizer.restore(found["optimizer"], updates)


def found_in(folder: Path) -> bool:
    """A training state, ours or Megatron-LM's."""
    return (folder / FILE).is_file() or (folder / ".metadata").is_file()


def load_model(folder: Path, model: PolicyModel) -> None:
    """The model alone of what `save` wrote, or Megatron-LM: its names are the same whatever layers it is made of, and
    its vocabulary may be filled up further. Collective. Errors: WeightsError."""
    if (folder / FILE).is_file():
        _updates(folder)
    model.load_state_dict(_read(folder, {"model": model.sharded_state_dict()})["model"])


def _updates(folder: Path) -> int:
    try:
        facts = json.loads((folder / FILE).read_text())
        updates = int(facts["updates"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{folder}: no training state: {error}") from error
    if "megatron" not in facts:
        raise WeightsError(f"{folder}: a training state of --train-backend torch; go on with that")
    return updates


def _read(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = dist_checkpointing.load(wanted, folder)
    except (CheckpointingException, CheckpointException, OSError, KeyError) as error:
        raise WeightsError(f"{folder}: a training state of another model, or damaged: {_short(error)}") from error
    return found


def _short(error: object) -> str:
    """Checkpointing errors hold the tracebacks of all ranks; what they end in says it."""
    return str(error).strip().rpartition("\n")[2]
