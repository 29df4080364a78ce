"""The weights of a checkpoint as a folder in the Hugging Face layout, by the backend that wrote it.

`python -m trainer.export BACKEND MODEL CHECKPOINT FOLDER`, in the model's own types, on the CPU of one process however
many have trained it. `millpond eval` starts it for what only the backend can read.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from pipeline.config import TrainConfig
from pipeline.errors import MillpondError, UsageError
from pipeline.modes import check
from trainer import backends


def export(backend: str, model: Path, checkpoint: Path, folder: Path) -> None:
    """UsageError, WeightsError where they cannot be read."""
    config = TrainConfig.model_validate(
        {"train_backend": backend, "hf_checkpoint": model, "device": "cpu", "num_rollout": 1}
    )
    check(config)
    with closing(backends.build(config, tis=False)) as trained:
        trained.load_weights(checkpoint / "model")
        trained.save_weights(folder)


def main(argv: list[str]) -> int:
    backend, *paths = argv
    try:
        export(backend, *map(Path, paths))
    except MillpondError as error:
        sys.stderr.write(f"{error}\n")
        return UsageError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
