"""The run's queues of jobs as people see them, and their end: read from RQ's keys without RQ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from redis.exceptions import NoPermissionError

from pipeline.broker import Broker
from pipeline.jobs import KINDS
from pipeline.keys import Keys
from pipeline.overview import JobQueue
from pipeline.show import text


def queues(broker: Broker) -> list[JobQueue]:
    """Of each queue that has ever held a job or has a worker; nothing where we may not look."""
    try:
        found = broker.patiently(lambda: list(_look(broker)))
    except NoPermissionError:
        return []
    return [queue for queue in found if queue.waiting or queue.running or queue.failed or queue.workers]


def _look(broker: Broker) -> Iterator[JobQueue]:
    names = [(kind.queue, broker.keys.queue(kind.queue)) for kind in KINDS.values()]
    pipe: Any = broker.client.pipeline(transaction=True)
    for _, name in names:
        pipe.llen(f"rq:queue:{name}").zcard(f"rq:wip:{name}").zcard(f"rq:failed:{name}").smembers(f"rq:workers:{name}")
    answers = pipe.execute()
    for n, (queue, _) in enumerate(names):
        waiting, running, failed, workers = answers[4 * n : 4 * n + 4]
        alive = sum(broker.client.exists(key) for key in workers)  # a worker's hash goes 20 s after its last sign
        yield JobQueue(queue, waiting, running, failed, alive)


def rq_keys(broker: Broker) -> set[bytes]:
    """All keys of RQ's that are this run's alone. Names hold no pattern."""
    patterns = (f"rq:*{broker.keys.prefix}*", f"rq:*:{broker.keys.job_tag}*")
    return {key for pattern in patterns for key in broker.client.scan_iter(match=pattern, count=1000)}


def leave_sets(broker: Broker) -> None:
    """Takes the run out of what RQ keeps of all queues and workers."""
    for shared in ("rq:queues", "rq:workers"):
        members: Any = broker.client.smembers(shared)
        if mine := [name for name in members if _is_of(text(name), broker.keys)]:
            broker.client.srem(shared, *mine)


def _is_of(name: str, keys: Keys) -> bool:
    return name.partition(":")[2].partition(":")[2].startswith(keys.prefix)
