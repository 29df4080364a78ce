"""What is sent to SGLang: the bodies of all requests. `tests/data` has the part of its OpenAPI that they must fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import UsageError
from pipeline.rendezvous import Piece, Rendezvous, Roster
from pipeline.types import Policy
from producers.engines.base import Request

APPLIED = "Weights were updated, but the cache was not flushed"
"In a 400: the new weights are in, and the flush is still to be done."

GREEDY = 1e-6
"Below this temperature SGLang takes the likeliest token, and says what it would have had at temperature 1."

ADAPTER = "millpond-v"
"What names of our adapters begin with."

Body = dict[str, Any]


def generate(request: Request, limit: int, rid: str, version: int | None, adapter: str | None = None) -> Body:
    """One sequence of up to `limit` tokens under the name `rid`, sent while `version` is served; that is `adapter`
    beside the model, if one is named.

    `extra_key` parts the prefix cache by version: an update in place keeps the cache, and a later request whose prompt
    is in it would be sampled from old and new weights mixed, under the new ones' name.

    All that could make the distribution another one than the trainer's is sent as neutral, whatever the server's own
    defaults are. Log-probabilities are then of the distribution that was sampled from: after temperature, and only an
    evaluation has top-p. The server heeds `sampling_seed` when started with --enable-deterministic-inference.
    UsageError for a temperature at which the server would not sample, but for 0, which asks for that.
    """
    sampling = request.sampling
    if 0 < sampling.temperature < GREEDY:
        raise UsageError(f"--rollout-temperature {sampling.temperature}: SGLang does not sample below {GREEDY}")
    return {
        "rid": rid,
        "extra_key": str(version),
        "input_ids": request.tokens.tolist(),
        "sampling_params": {
            "max_new_tokens": limit,
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_token_ids),
            "sampling_seed": request.seed,
            "top_p": sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "ignore_eos": False,
        },
        "return_logprob": True,
        "return_text_in_logprobs": False,
        "stream": False,
        **({"lora_path": adapter} if adapter else {}),
    }


def adapter(policy: Policy) -> str:
    """The name of its adapter: of no other weights, whichever run's or worker's."""
    return f"{ADAPTER}{policy.version}-{policy.digest[:16]}"


def load(policy: Policy) -> Body:
    """An adapter beside those that are there."""
    return {"lora_name": adapter(policy), "lora_path": policy.path}


def unload(name: str) -> Body:
    """The server waits for requests that name it, and loads nothing meanwhile."""
    return {"lora_name": name}


def restore(model: Path, label: str) -> Body:
    """The model that adapters are added to, in place of what a run had published."""
    weights = {"model_path": str(model), "weight_version": label}
    return {**weights, "abort_all_requests": False, "flush_cache": True}


def update(policy: Policy, flush: bool) -> Body:
    """The weights of a folder, under their version's name, with requests in flight kept."""
    return {
        "model_path": policy.path,
        "weight_version": str(policy.version),
        "abort_all_requests": False,
        "flush_cache": flush,
    }


def begin_update() -> Body:
    """Of all that it serves with: a draft model, too."""
    return {"selector": "all"}


def end_update() -> Body:
    return {}


def join(offer: Rendezvous, rank: int, roster: Roster) -> Body:
    """The server's processes are `rank` and those that follow; the trainer is 0."""
    return {
        "master_address": offer.host,
        "master_port": offer.port,
        "rank_offset": rank,
        "world_size": roster.world,
        "group_name": offer.group,
        "backend": offer.backend,
    }


def receive(bucket: tuple[Piece, ...], group: str, version: int | None, flush: bool) -> Body:
    """Tensors in the order in which the trainer sends them; the last of them bring the version's name."""
    return {
        "names": [piece.name for piece in bucket],
        "dtypes": [piece.dtype for piece in bucket],
        "shapes": [list(piece.shape) for piece in bucket],
        "group_name": group,
        "weight_version": None if version is None else str(version),
        "abort_all_requests": False,
        "flush_cache": flush,
    }


def leave(group: str) -> Body:
    return {"group_name": group}


def set_version(version: int) -> Body:
    """Left alone this one aborts all requests."""
    return {"new_version": str(version), "abort_all_requests": False}


def pause(mode: str) -> Body:
    return {"mode": mode}


def resume() -> Body:
    """SGLang wants a body, if an empty one."""
    return {}


def abort(rid: str) -> Body:
    """The scheduler matches by prefix: a rid must be no other's beginning, so all have one length."""
    return {"rid": rid}
