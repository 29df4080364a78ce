"""Training backends, by the name --train-backend gives them; alone, or one process of several under torchrun."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline import torchrun
from pipeline.config import TrainConfig
from pipeline.errors import UsageError
from pipeline.parallel import refuse_world
from trainer.backends.base import Backend

if TYPE_CHECKING:
    from trainer.ranks import Ranks


def _torch(config: TrainConfig, tis: bool) -> tuple[Backend, Ranks | None]:
    from trainer.backends.torch import TorchBackend, device_of
    from trainer.ranks import meet

    ranks = meet(config.distributed_timeout_minutes, device_of(config))
    with ranks.gathering():
        return TorchBackend(config, tis, ranks), ranks


def _megatron(config: TrainConfig, tis: bool) -> tuple[Backend, Ranks | None]:
    from trainer.backends.torch import device_of
    from trainer.ranks import meet

    refuse_world(config, torchrun.world())
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it tells all of its settings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that are not installed; none is used
        from trainer.backends.megatron import MegatronBackend
        from trainer.backends.megatron_mesh import mesh
    device = device_of(config)
    ranks = meet(config.distributed_timeout_minutes, device)
    with ranks.gathering():
        place = mesh(config, ranks, device)
        try:
            return MegatronBackend(config, tis, place), ranks
        except UsageError:
            place.close()
            raise


def _echo(config: TrainConfig, tis: bool) -> tuple[Backend, Ranks | None]:
    from trainer.backends.echo import EchoBackend

    if torchrun.world() > 1:
        raise UsageError("--train-backend echo is one process: start it without torchrun")
    return EchoBackend(config.echo_train_seconds), None


BUILDERS: dict[str, Callable[[TrainConfig, bool], tuple[Backend, Ranks | None]]] = {
    "torch": _torch,
    "megatron": _megatron,
    "echo": _echo,
}


def _builder(config: TrainConfig) -> Callable[[TrainConfig, bool], tuple[Backend, Ranks | None]]:
    return BUILDERS["echo" if config.debug_rollout_only else config.train_backend]


def build(config: TrainConfig, tis: bool) -> Backend:
    """For the one process, or rank 0 of several. `tis` is config.use_tis decided: by now it may not be None. All but
    echo need config.hf_checkpoint."""
    own, ranks = _builder(config)(config, tis)
    if ranks is None or ranks.world == 1:
        return own
    from trainer.lead import Leader

    return Leader(own, ranks)


def follow(config: TrainConfig, tis: bool, met: Callable[[], None] = lambda: None) -> None:
    """What every rank but 0 does: as rank 0 tells it, to the end. `met` is called once it is there to be told."""
    from trainer import lead

    own, ranks = _builder(config)(config, tis)
    met()
    if ranks is not None:  # a backend of one process has refused by now
        lead.follow(own, ranks)
