"""Every Redis key of a run, and what lives there. `docs/redis-cli.md` shows how to look at each."""

from __future__ import annotations

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
    "workers": "zset worker -> last heartbeat, server time in ms",
    "workers:info": "hash worker -> JSON: host, pid, engine, version loaded, loading, in flight, rates",
    "workers:spare": "hash worker -> finished samples of groups that are not finished yet",
    "alarm": "list of JSON, read before groups: fatal error, stop",
    "errors": "capped stream: tracebacks, with worker and trainer epoch",
    "dead": "capped stream: dead-lettered prompts with their reason",
    "quarantine": "capped stream: messages that would not decode: first 4 KB, length, sha256",
    "counters": "hash, for people, never for decisions",
    "config": "JSON: what all workers must agree on; written by the trainer",
    "state": "hash: status, why; epoch, token, trainer and its signs of life; pushed; feed_total, data; times",
    "wake": "pub/sub channel: room, prompts, version, pause, stop",
}

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

    def all(self) -> list[str]:
        return [self.prefix + name for name in NAMES]
