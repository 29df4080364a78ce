"""Reads an Overview from Redis, in one transaction of cheap commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from pipeline.broker import Broker
from pipeline.errors import MessageError
from pipeline.fence import HEARTBEAT_LIMIT_MS
from pipeline.job_queues import queues
from pipeline.keys import GROUP
from pipeline.outage import passing
from pipeline.overview import Caps, Failure, Overview, Prompts, Queues, Trainer, Worker
from pipeline.replies import map_of, policy_of
from pipeline.room import ahead
from pipeline.show import text


def look(broker: Broker, save_interval: int | None = None) -> Overview:
    """`save_interval`: where the caller knows it; what the trainer wrote into `state` goes before it."""
    raw = broker.patiently(lambda: _ask(broker))
    now = raw["time"][0] + raw["time"][1] / 1e6
    state, config = _texts(raw["state"]), map_of(raw["config"])
    pushed = _number(state.get("pushed")) or 0
    queues = _queues(raw, pushed)
    policy = policy_of(raw["weights"])
    return Overview(
        status=state.get("status", "no trainer yet"),
        why=state.get("why", ""),
        paused=bool(state.get("paused")),
        alarms=raw["alarm"],
        alarm=_alarm(raw["first alarm"]),
        failure=_failure(raw["errors"], state.get("epoch", "0"), now),
        refuses=raw["refuses"],
        feeder=raw["feeder"],
        full=bool(state.get("full")),
        pushed=pushed,
        pushed_age=_age(state.get("pushed_at"), now),
        queues=queues,
        caps=_caps(
            queues, config, sum(_number(n) or 0 for n in raw["spare"]), state.get("save_interval", save_interval)
        ),
        policy=policy,
        policy_age=_age(state.get("published_at"), now) if policy else None,
        trainer=_trainer(state, now),
        workers=_workers(raw, now),
        prompts=Prompts(
            _number(raw["feed"]) or 0,
            _number(state.get("feed_total")),
            raw["committed"],
            raw["dropped"],
            raw["dead"],
            _reasons(raw["counters"]),
        ),
        jobs=raw["jobs"],
        held=bool(raw["held"]),
        evals=map_of(state.get("evals")),
    )


def _ask(broker: Broker) -> dict[str, Any]:
    return {**_counted(broker), "refuses": _refusal(broker), "feeder": _feeder(broker), "jobs": queues(broker)}


def _refusal(broker: Broker) -> str:
    """What Redis says to a write: this one changes nothing, and is refused when others are."""
    try:
        broker.client.zadd(broker.keys["workers"], {"": 0}, xx=True)
    except RedisError as error:
        if isinstance(error, NoPermissionError) or not isinstance(error, ResponseError):
            return ""
        if not passing(error):
            raise
        return str(error)
    return ""


def _counted(broker: Broker) -> dict[str, Any]:
    keys, pipe = broker.keys, broker.client.pipeline(transaction=True)
    asked = {
        "time": pipe.time(),
        **{name: pipe.hgetall(keys[name]) for name in ("state", "counters", "weights", "workers:info")},
        **{name: pipe.get(keys[name]) for name in ("feed", "config")},
        "spare": pipe.hvals(keys["workers:spare"]),
        "held": pipe.exists(keys["evals:hold"]),
        "fresh": pipe.xlen(keys["prompts"]),
        "retry": pipe.xlen(keys["prompts:retry"]),
        "fresh leased": pipe.xpending(keys["prompts"], GROUP),
        "retry leased": pipe.xpending(keys["prompts:retry"], GROUP),
        "groups": pipe.llen(keys["groups"]),
        "sizes": pipe.lrange(keys["groups:sizes"], 0, -1),
        "alarm": pipe.llen(keys["alarm"]),
        "first alarm": pipe.lindex(keys["alarm"], 0),
        "errors": pipe.xrevrange(keys["errors"], count=1),
        "open": pipe.hlen(keys["open"]),
        "unsettled": pipe.zrange(keys["unsettled"], 0, -1, withscores=True),
        "refeed": pipe.scard(keys["refeed"]),
        **{name: pipe.bitcount(keys[f"done:{name}"]) for name in ("committed", "dropped", "dead")},
        "workers": pipe.zrange(keys["workers"], 0, -1, withscores=True),
    }
    replies = dict(zip(asked, pipe.execute(raise_on_error=False), strict=True))
    for name, reply in replies.items():
        if isinstance(reply, ResponseError) and name in ("fresh leased", "retry leased"):
            replies[name] = {"pending": 0, "consumers": []}  # no consumer group yet
        elif isinstance(reply, ResponseError):
            raise MessageError(f"what Redis holds as {name}", str(reply))
        elif isinstance(reply, Exception):
            raise reply
    return replies


def _queues(raw: Mapping[str, Any], pushed: int) -> Queues:
    fresh, retry = raw["fresh leased"]["pending"], raw["retry leased"]["pending"]
    popped = pushed - raw["groups"]
    sizes = [int(entry.split()[0]) for entry in raw["sizes"]]
    return Queues(
        fresh=raw["fresh"] - fresh,
        retry=raw["retry"] - retry,
        in_flight=fresh + retry,
        refeed=raw["refeed"],
        queued=raw["groups"],
        queued_bytes=sum(sizes[len(sizes) - raw["groups"] :]) if raw["groups"] else 0,
        taken=sum(score <= popped for _, score in raw["unsettled"]),
        trained=raw["open"] - len(raw["unsettled"]),
        open=raw["open"],
    )


def _caps(queues: Queues, config: Mapping[str, Any], spare: int, save_interval: str | int | None) -> Caps:
    bound, unsettled = config.get("bound"), queues.open - queues.trained
    now = None if bound is None else ahead(bound, config.get("slack", 0), unsettled)
    return Caps(
        queue=config.get("queue_capacity"),
        queue_bytes=config.get("queue_max_bytes"),
        in_flight=config["in_flight"] + spare // config["n_samples_per_prompt"] if config else None,
        bound=now,
        room=None if now is None else now - queues.in_flight - unsettled,
        open=None
        if bound is None or save_interval is None
        else int(save_interval) * config["rollout_batch_size"] + bound,
        max_staleness=config.get("max_weight_staleness"),
    )


def _trainer(state: Mapping[str, str], now: float) -> Trainer:
    age = _age(state.get("trainer_seen"), now)
    return Trainer(
        name=state.get("trainer", ""),
        epoch=_number(state.get("epoch")) or 0,
        seen=age,
        alive=age is not None and age * 1000 < HEARTBEAT_LIMIT_MS,
        doing=state.get("doing", ""),
        doing_for=_age(state.get("doing_since"), now),
        settings=state.get("settings", ""),
    )


def _workers(raw: Mapping[str, Any], now: float) -> list[Worker]:
    leased: dict[bytes, int] = {}
    for name in ("fresh leased", "retry leased"):
        for consumer in raw[name]["consumers"]:
            leased[consumer["name"]] = leased.get(consumer["name"], 0) + consumer["pending"]
    return [
        Worker(
            text(name),
            now - score / 1000,
            now - score / 1000 < HEARTBEAT_LIMIT_MS / 1000,
            leased.get(name, 0),
            map_of(raw["workers:info"].get(name)),
        )
        for name, score in raw["workers"]
    ]


def _reasons(counters: Mapping[bytes, bytes]) -> dict[str, dict[str, int]]:
    """`dropped:zero_std` 3 -> {"dropped": {"zero_std": 3}}; without a reason: left out."""
    result: dict[str, dict[str, int]] = {"dropped": {}, "dead": {}, "recycled": {}, "strikes": {}}
    for name, count in counters.items():
        kind, colon, reason = text(name).partition(":")
        if colon:
            result.setdefault(kind, {})[reason] = _number(count) or 0
    return result


def _feeder(broker: Broker) -> bool | None:
    """Whether one is connected; it gives no other sign of life."""
    try:
        clients = broker.client.client_list()
    except NoPermissionError:
        return None
    return any(client["name"] == f"{broker.keys.prefix}feeder" for client in clients)


def _alarm(raw: bytes | None) -> str:
    told = map_of(raw)
    return f"worker {told.get('worker')}: {told.get('what')}" if "what" in told else text(raw or b"")[:200]


def _failure(entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]], epoch: str, now: float) -> Failure | None:
    for id, raw in entries:
        said = _texts(raw)
        if said.get("epoch") == epoch:
            return Failure(said.get("worker", "?"), said.get("what", "?"), now - int(id.split(b"-")[0]) / 1000)
    return None


def _age(stamp: str | None, now: float) -> float | None:
    """Seconds since `stamp`, in ms of the server's clock; None where there is none, or 0."""
    since = _number(stamp)
    return now - since / 1000 if since else None


def _number(value: str | bytes | None) -> int | None:
    """None where it is none."""
    try:
        return int(value or "")
    except ValueError:
        return None


def _texts(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    return {text(key): text(value) for key, value in raw.items()}
