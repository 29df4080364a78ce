"""Training backends, by the name --train-backend gives them."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.config import TrainConfig
from trainer.backends.base import Backend


def _torch(config: TrainConfig, tis: bool) -> Backend:
    from trainer.backends.torch import TorchBackend

    return TorchBackend(config, tis)


def _echo(config: TrainConfig, tis: bool) -> Backend:
    from trainer.backends.echo import EchoBackend

    return EchoBackend(config.echo_train_seconds)


BUILDERS: dict[str, Callable[[TrainConfig, bool], Backend]] = {"torch": _torch, "echo": _echo}


def build(config: TrainConfig, tis: bool) -> Backend:
    """`tis` is config.use_tis decided: by now it may not be None. The torch backend needs config.hf_checkpoint."""
    return BUILDERS[config.train_backend](config, tis)
