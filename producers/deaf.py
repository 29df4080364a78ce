"""What is done only where it is a job of ours: a queue may hold anything that somebody could write into Redis."""

from __future__ import annotations

from typing import Any

from rq.exceptions import DeserializationError
from rq.job import Job

from pipeline.jobs import Kind


class Deaf(Job):  # type: ignore[misc]
    """A job that makes nobody import, call or post to what Redis names; RQ's own look up functions by their path."""

    func = success_callback = failure_callback = stopped_callback = None

    def send_webhooks(self, *_: Any, **__: Any) -> None:
        pass


def refusal(job: Deaf, kind: Kind) -> str:
    """Why this is no job of ours; empty where it is one."""
    try:
        named, instance, args, kwargs = job.func_name, job.instance, job.args, job.kwargs
    except (DeserializationError, ValueError, TypeError):
        return "its arguments are no JSON"
    if named != kind.function:
        return f"{str(named)[:100]!r} is no job of Millpond's in queue {kind.queue}"
    if instance is not None or args or not isinstance(kwargs, dict):
        return "its arguments are not those of a job of Millpond's"
    return "" if job.timeout and job.timeout > 0 else "it has no time-out"
