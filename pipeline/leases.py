"""The broker's verbs for workers, asynchronous: lease, push, hand back, drop, and staying alive.

One outage is waited out by everyone who meets it; afterwards `suspect` is set, and the worker compares what Redis
says it holds with what it holds (`mine`): a lost reply to `lease` leaves entries that nobody works on.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from redis.exceptions import NoScriptError, RedisError, ResponseError

from pipeline.agreed import Agreed
from pipeline.connect import connect_async
from pipeline.errors import MessageError
from pipeline.keys import GROUP, Keys
from pipeline.outage import Outage, Seen, passing, told
from pipeline.rendezvous import Roster, roster_of
from pipeline.replies import Lease, Leased, Pulse, lease_of, pairs, policy_of, pulse_of, quarantined, version_of
from pipeline.scripts import Arg, load
from pipeline.types import Policy

log = logging.getLogger(__name__)
T = TypeVar("T")


def new_worker_id() -> str:
    """host-pid-uuid: new at each start of a process."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


class WorkerBroker:
    """One worker's verbs; all may be called concurrently."""

    def __init__(self, url: str, keys: Keys, worker: str, patience: float = 300.0) -> None:
        self.keys = keys
        self.worker = worker
        self.patience = patience
        self.stop = threading.Event()
        "set by the owner: an outage is not waited out any longer"
        self.seen = Seen()
        self.client = connect_async(url, f"millpond:{keys.run}:worker", self.seen)
        self.suspect = False
        "an outage has passed: compare `mine` with what is held"
        self.config = ""
        "digest of what `agreed` answered last"

    async def script(self, name: str, *args: Arg) -> Any:
        script = load(name)
        call = script.call(self.keys, *args)
        try:
            return await self.client.execute_command("EVALSHA", script.sha, *call)
        except NoScriptError:
            return await self.client.execute_command("EVAL", script.text, *call)

    async def patiently(self, verb: Callable[[], Awaitable[T]]) -> T:
        """The verb, sent again after each outage; for verbs that may be repeated."""
        with Outage(self.seen, self.patience, self.stop) as outage:
            while True:
                try:
                    return await verb()
                except RedisError as error:
                    if not passing(error):
                        raise told(error) from None
                    await self.heal(outage, error)

    async def outage(self, error: Exception) -> None:
        """For a verb that is not sent again."""
        with Outage(self.seen, self.patience, self.stop, again=False) as outage:
            await self.heal(outage, error)

    async def heal(self, outage: Outage, error: Exception) -> None:
        """Returns when Redis is back."""
        await outage.wait_async(self.client, error)
        self.seen.restarted = False
        self.suspect = True

    # -- being a worker

    async def register(self, info: dict[str, Any]) -> None:
        await self.patiently(lambda: self.script("register", self.worker, json.dumps(info)))

    async def heartbeat(self, info: dict[str, Any], spare: int) -> Pulse:
        """Alive; `info` is for people, `spare` counts finished samples of groups that are not finished."""
        return pulse_of(await self.patiently(lambda: self.script("heartbeat", self.worker, json.dumps(info), spare)))

    async def leave(self) -> bool:
        """Gone for good; False where entries are still held (the reaper will find them)."""
        return bool(await self.patiently(lambda: self.script("leave", self.worker)))

    async def reap(self) -> list[str]:
        return [w.decode() for w in await self.patiently(lambda: self.script("reap"))]

    async def fail(self, trace: str, what: str, alarm: bool = True) -> None:
        """This worker met a bug that will not heal: the trainer raises it before it takes another group. Without
        `alarm` it is only noted: others may go on."""
        epoch = await self.patiently(lambda: self.client.hget(self.keys["state"], "epoch"))
        told = json.dumps({"kind": "failed", "worker": self.worker, "what": what, "trace": trace[-20_000:]})
        entry: Any = {"worker": self.worker, "epoch": epoch or b"0", "what": what, "trace": trace[-20_000:]}

        async def send() -> None:
            pipe = self.client.pipeline(transaction=True)
            pipe.xadd(self.keys["errors"], entry, maxlen=1000)
            if alarm:
                pipe.rpush(self.keys["alarm"], told)
            await pipe.execute()

        await self.patiently(send)

    async def agreed(self) -> Agreed | None:
        """What all workers agree on; None before a trainer has written it."""
        text: Any = await self.patiently(lambda: self.client.get(self.keys["config"]))
        try:
            rules = Agreed.model_validate_json(text) if text else None
        except ValidationError as error:
            raise MessageError("config", f"the key holds no settings of a run: {error}") from None
        self.config = rules.digest if rules else ""
        return rules

    async def policy(self) -> Policy | None:
        """What is to be loaded: what is published, or an older version while an evaluation has the engines for it."""
        raw: Any = await self.patiently(lambda: self.client.hgetall(self.keys["weights"]))
        held: Any = await self.patiently(lambda: self.client.hgetall(self.keys["evals:hold"]))
        now, pinned = policy_of(raw), policy_of(held)
        return pinned if now and pinned and pinned.version < now.version else now

    async def join(self, group: str, **said: Any) -> None:
        """What the trainer of that process group is told: `engines` that can take part, or how one fared."""
        word = json.dumps({"group": group, "worker": self.worker, **said})
        key = self.keys["weights:joins"]
        await self.patiently(lambda: self.client.rpush(key, word))

    async def roster(self, group: str) -> Roster | None:
        """None until the trainer has written it."""
        text: Any = await self.patiently(lambda: self.client.get(self.keys["weights:roster"]))
        roster = roster_of((text or b"").decode())
        return roster if roster and roster.group == group else None

    # -- prompts

    async def lease(self, want: int, spare: int, alone: bool = False) -> Leased:
        """Up to `want` prompts, as far as there is room; `alone` where one is held already that goes alone. After an
        outage: none, and `suspect` is set."""
        try:
            r = await self.script("lease", self.worker, want, spare, int(alone), self.config)
        except RedisError as error:
            if not passing(error):
                raise
            await self.outage(error)
            return Leased([], None, 0, "outage")
        if not self.seen.away:
            self.seen.well()
        if r[0] != b"ok":
            why = r[-1].decode()
            if why == "no group":
                log.warning("Redis has lost a prompt stream or its consumer group: this worker makes it anew")
                self.suspect = True
            return Leased([], None, 0, why)
        leases = [await self._read(stream.decode(), entry, pairs(flat)) for stream, entry, flat in r[3]]
        return Leased([lease for lease in leases if lease], version_of(r[1]), int(r[2]), "")

    async def _read(self, stream: str, entry: bytes, raw: dict[bytes, bytes]) -> Lease | None:
        """A lease; what else somebody has put into a stream is taken out of it and told of."""
        try:
            return lease_of(stream, entry, raw)
        except MessageError as error:
            log.error("%s; it is taken out, and in quarantine", error)
            told = quarantined(repr(raw).encode(), str(error))
        key = self.keys["prompts" if stream == "fresh" else "prompts:retry"]
        await self.patiently(lambda: self.script("quarantine", *told))
        await self.patiently(lambda: self.client.xack(key, GROUP, entry))
        await self.patiently(lambda: self.client.xdel(key, entry))
        return None

    async def mine(self) -> list[Lease]:
        """All that Redis says this worker holds."""
        found: list[Lease] = []
        for stream, name in (("retry", "prompts:retry"), ("fresh", "prompts")):
            key = self.keys[name]
            try:
                reply: Any = await self.patiently(
                    lambda key=key: self.client.xreadgroup(GROUP, self.worker, {key: "0"})  # type: ignore[misc]
                )
            except ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                await self.register({})
                continue
            entries = next(iter(reply.values()))[0] if isinstance(reply, dict) and reply else reply and reply[0][1]
            for entry, fields in entries or []:
                if fields and (lease := await self._read(stream, entry, fields)):
                    found.append(lease)
                elif not fields:
                    await self.client.xack(key, GROUP, entry)
        return found

    async def push(self, lease: Lease, message: bytes) -> str:
        """'pushed', 'full' (try again later) or 'lost' (the prompt belongs to another round now)."""
        script = load("push")
        call = script.call(
            self.keys, lease.stream, lease.entry, self.worker, lease.prompt.id, lease.prompt.attempt, len(message)
        )

        async def send() -> str:
            pipe = self.client.pipeline(transaction=True)
            pipe.rpush(self.keys["groups"], message)
            pipe.execute_command("EVAL", script.text, *call)
            answer: bytes = (await pipe.execute())[1]
            return answer.decode()

        return await self.patiently(send)

    async def hand_back(self, leases: Sequence[Lease], reason: str, fault: str = "none") -> int:
        """Round again; `fault` as in scripts/_again.lua: none, strike, bury (dead-lettered) or drop (reason)."""
        if not leases:
            return 0
        flat: list[Arg] = [x for lease in leases for x in (lease.stream, lease.entry)]
        return int(await self.patiently(lambda: self.script("hand_back", self.worker, reason, fault, *flat)))

    async def drop(self, lease: Lease, reason: str) -> int:
        """Ended under a reason (a filter's): never recycled; its place is free at once."""
        return await self.hand_back([lease], reason, "drop")

    async def wakes(self) -> AsyncIterator[str]:
        """What is announced on `wake`, for ever; a broken subscription is made anew. Each begins with `subscribed`:
        what was announced before was missed."""
        while True:
            async with self.client.pubsub() as channel:
                try:
                    await channel.subscribe(self.keys["wake"])
                    async for message in channel.listen():
                        yield message["data"].decode() if message["type"] == "message" else "subscribed"
                except RedisError as error:
                    if not passing(error):
                        raise
                    await self.outage(error)

    async def close(self) -> None:
        await self.client.aclose()
