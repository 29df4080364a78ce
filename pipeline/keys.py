"""Every Redis key of a run, and what lives there. `docs/redis-cli.md` shows how to look at each."""

from __future__ import annotations

import hashlib
import re

from pipeline.errors import UsageError

GROUP = "generators"
"The consumer group on both prompt streams."

NAMES: dict[str, str] = {
    "feed": "integer: prompts fed so far; the next prompt's id",
    "prompts": "stream: fresh prompts: id, attempt, strikes, prompt (JSON record)",
    "prompts:retry": "stream: prompts that go round again; leased before fresh ones; `alone`: at most one a worker",
    "refeed": "set of ids below `feed` that a restore found nowhere; the feeder sends them again",
    "groups": "list of finished groups (msgpack), oldest left; the only key that is not plain text",
    "groups:fenced": "exists inside one transaction only: the list, out of a fenced trainer's reach",
    "groups:sizes": "list parallel to groups: 'size running-total' in bytes",
    "open": "hash id -> JSON {attempt, strikes, push, prompt}: pushed, not yet committed, recycled, dropped or dead",
    "unsettled": "zset push number -> id: pushed, and not yet published upon, recycled, dropped or dead",
    "done:committed": "bitmap: trained, and in a checkpoint",
    "done:dropped": "bitmap: dropped under a reason (see counters)",
    "done:dead": "bitmap: dead-lettered under a reason (see dead)",
    "weights:version": "integer: the current weight version",
    "weights": "hash: version, path, format, digest, step, time, lineage, restored_from, rendezvous",
    "weights:joins": "list of JSON: engines that can take this version from the trainer; then how each fared",
    "weights:roster": "JSON: who takes part in the update over a process group, and what is sent",
    "evals:hold": "hash that expires: weights an evaluation has the engines for; nothing is leased meanwhile",
    "evals:engines": "hash that expires: URL of a server for evaluations -> worker that uses it, and until when (ms)",
    "workers": "zset worker -> last heartbeat, server time in ms",
    "workers:info": "hash worker -> JSON: host, pid, engine, version loaded, loading, in flight, rates",
    "workers:spare": "hash worker -> finished samples of groups that are not finished yet",
    "alarm": "list of JSON, read before groups: fatal error, stop",
    "errors": "capped stream: tracebacks, with worker and trainer epoch",
    "dead": "capped stream: dead-lettered prompts with their reason",
    "quarantine": "capped stream: messages that would not decode: first 4 KB, length, sha256",
    "counters": "hash, for people, never for decisions",
    "config": "JSON: what all workers must agree on; written by the trainer",
    "state": "hash: status, why, evals; epoch, token, trainer, settings, pulse; pushed; feed_total, data; times",
    "wake": "pub/sub channel: room, prompts, version, pause, stop",
}

RQ_NAMES: dict[str, str] = {
    "rq:queues": "set of all queues, of all runs; as are `rq:workers` of workers",
    "rq:queue:QUEUE": "list of ids of jobs that wait; QUEUE is the run's prefix and `evals` or `rewards`",
    "rq:queue:QUEUE:intermediate": "list of ids that a worker has taken and not begun",
    "rq:wip:QUEUE": "zset 'id:execution' -> when who does it counts as dead",
    "rq:finished:QUEUE": "zset id -> when its result goes; as is `rq:failed:QUEUE` of jobs that failed",
    "rq:job:ID": "hash: a job: JSON arguments (zlib), status, time-out, retries left; ID begins with `Keys.job_tag`",
    "rq:results:ID": "stream: how it ended: JSON value, or why it failed",
    "rq:execution:ID:EXECUTION": "hash that expires with its worker; as does `rq:executions:ID`",
    "rq:workers:QUEUE": "set of workers",
    "rq:worker:WORKER": "hash that expires 20 s after a sign of life; WORKER begins with the run's prefix",
    "rq:tidy:QUEUE": "string that expires: one worker looks for what dead ones have left",
}
"Keys of RQ, under its own prefix: so `rq info` and its like find them. Text and JSON, nothing is pickled."

_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Keys:
    """The full names of one run's keys: `Keys("demo")["groups"] == "millpond:demo:groups"`."""

    def __init__(self, run: str) -> None:
        if not _RUN.fullmatch(run):
            raise UsageError(f"--run {run!r}: a run's name is 1 to 64 characters out of A-Z a-z 0-9 . _ -")
        self.run = run
        self.prefix = f"millpond:{run}:"

    def __getitem__(self, name: str) -> str:
        if name not in NAMES:
            raise KeyError(name)
        return self.prefix + name

    def queue(self, name: str) -> str:
        """A queue of RQ's, as its tools show it: `millpond:demo:evals`."""
        return self.prefix + name

    @property
    def job_tag(self) -> str:
        """What ids of this run's jobs begin with. RQ allows no dots in them, and runs `a.b` and `a_b` are two."""
        return f"{self.run.replace('.', '_')}-{hashlib.sha256(self.run.encode()).hexdigest()[:6]}-"

    def all(self) -> list[str]:
        return [self.prefix + name for name in NAMES]
