"""Engines: what samples. One protocol (`base`), a builder for each kind, nothing imported before it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pipeline.config import Engines
from pipeline.errors import UsageError
from pipeline.evaluation import EvalSets
from pipeline.transport import ROUTER
from producers.engines.base import Engine
from producers.tokens import ByteTokenizer, HFTokenizer, Tokenizer

Mode = Literal["retract", "in_place"]


def build(config: Engines, mode: Mode, adapter_rank: int = 0) -> tuple[Engine, Tokenizer]:
    """The engine `config` names, not started, and its tokenizer. `mode`: what a weight update does to the cache;
    `adapter_rank`: of the adapters that a run publishes alone."""
    return BUILDERS[config.engine](config, mode, adapter_rank)


def _local(config: Engines, mode: Mode, _: int) -> tuple[Engine, Tokenizer]:
    if config.hf_checkpoint is None:
        raise UsageError("--engine local needs --hf-checkpoint: a model and tokenizer folder")
    tokenizer = HFTokenizer(config.hf_checkpoint)
    from producers.engines.local import LocalEngine

    engine = LocalEngine(
        config.hf_checkpoint, config.device, config.server_concurrency, mode, threads=config.torch_threads
    )
    return engine, tokenizer


def _echo(config: Engines, mode: Mode, _: int) -> tuple[Engine, Tokenizer]:
    """There is no cache: both modes are one."""
    from producers.engines.echo import EchoEngine

    engine = EchoEngine(config.echo_latency, config.echo_response_len, config.echo_failure_rate, config.echo_abort_rate)
    return engine, ByteTokenizer()


def _sglang(config: Engines, mode: Mode, adapter_rank: int) -> tuple[Engine, Tokenizer]:
    if config.hf_checkpoint is None:
        raise UsageError("--engine sglang needs --hf-checkpoint: the folder of the model that the engines serve")
    if adapter_rank and config.engine_router_url:
        raise UsageError(f"--engine-router-url with a run of --lora-publish adapter: {ROUTER}")
    if mode == "in_place" and config.engine_router_url:
        raise UsageError(
            "--engine-router-url: a router may drop what keeps old weights' cache from new requests, which "
            "--pause-generation-mode in_place depends on; use retract, or leave the router out"
        )
    tokenizer = HFTokenizer(config.hf_checkpoint)
    from producers.engines.sglang import SGLangEngine
    from producers.engines.sglang_adapters import Adapters
    from producers.engines.sglang_pool import Servers

    key = config.engine_api_key.get_secret_value() if config.engine_api_key else None
    guest = isinstance(config, EvalSets) and config.eval_shared_engines
    router = None if guest else config.engine_router_url
    adapters = Adapters(adapter_rank, config.hf_checkpoint.resolve()) if adapter_rank else None
    servers = Servers(_urls(config), router, key, config.server_concurrency, guest, adapters)
    return SGLangEngine(config.hf_checkpoint, servers, mode, config.engine_timeout), tokenizer


def _urls(config: Engines) -> tuple[str, ...]:
    """What --engine-url names."""
    return tuple(config.engine_url.split(",")) if config.engine_url else ()


def slots(config: Engines) -> int:
    """Samples that all engines of a worker may have at once."""
    return config.server_concurrency * (len(_urls(config)) if config.engine == "sglang" else 1)


BUILDERS: dict[str, Callable[[Engines, Mode, int], tuple[Engine, Tokenizer]]] = {
    "local": _local,
    "sglang": _sglang,
    "echo": _echo,
}
