"""Adapters on a server: each version is one, beside the model, which stays as it is.

Nothing pauses, nothing is flushed: a request is sampled to its end with the adapter that it names, and new ones name
the newest (the server's prefix cache is kept apart by adapter). One that no request names any more is taken down, and
not before: the server would wait for them, and load nothing meanwhile. One that was taken down is never named again:
the server would load it anew from its folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import EngineDown, UsageError, WeightsError
from pipeline.types import PEFT, Policy
from producers.engines import sglang_wire as wire
from producers.engines.sglang_flight import Flight
from producers.engines.sglang_guest import Guest
from producers.engines.sglang_http import Link, Reply
from producers.engines.sglang_member import Member
from producers.engines.sglang_reply import as_version
from producers.engines.sglang_timing import Timing

log = logging.getLogger(__name__)

MOST = 16
"Adapters on a server at once; the requests of the oldest make room, which only long answers without a bound need."
FRESH = "default"
"SGLang's label of the weights that it was started with."

Changed = Callable[[Member], None]


@dataclass(frozen=True)
class Adapters:
    """What a run publishes alone."""

    rank: int
    model: Path
    "folder of the model that they are added to, absolute"


class Beside(Member):
    """A server on which the model has adapters beside it."""

    pauses = False

    def __init__(self, link: Link, mode: str, timing: Timing, changed: Changed, adapters: Adapters) -> None:
        super().__init__(link, mode, timing, changed)
        self._adapters = adapters
        self._most = MOST

    async def greet(self, window: int | None) -> None:
        await super().greet(window)
        self.greeted = False
        self._most = min(MOST, await self._room())
        self.greeted = True

    async def _room(self) -> int:
        """How many adapters it can hold. UsageError where it was started without room for them."""
        reply = await self.link.get("/server_info", self._timing.reply)
        self._expect(reply)
        how, most = reply.fields, reply.fields.get("max_loaded_loras")
        rank = self._adapters.rank
        flags = f"start it with --enable-lora --max-lora-rank {rank} --lora-target-modules all"
        what = f"{self.url}: the run publishes adapters of rank {rank} alone (--lora-publish adapter), and this server"
        if how.get("enable_lora") is not True:
            raise UsageError(f"{what} was started without --enable-lora: {flags}, or publish merged weights")
        if type(how.get("max_lora_rank")) is int and how["max_lora_rank"] < rank:
            raise UsageError(f"{what} was started with --max-lora-rank {how['max_lora_rank']}: {flags}")
        if how.get("dp_size", 1) != 1:
            raise UsageError(f"{what} has --dp-size {how['dp_size']}, with which SGLang loads none: start several")
        if type(most) is int and most < 2:
            raise UsageError(f"{what} has --max-loaded-loras {most}: a version comes before the last one goes")
        return most if type(most) is int else MOST

    async def _named(self) -> set[str]:
        """Names of the adapters there."""
        reply = await self.link.get("/v1/models", self._timing.reply)
        self._expect(reply)
        models = [model for model in reply.fields.get("data", ()) if isinstance(model, dict)]
        return {str(model.get("id")) for model in models if model.get("parent") is not None}

    async def _strange(self, info: Reply) -> str:
        label, target = info.fields.get("weight_version"), self.target
        if label != self.label:
            return f"its model was replaced: it serves {label!r} where it served {self.label!r}"
        if target and target.version == self.version and wire.adapter(target) not in await self._named():
            return f"it has no adapter of version {self.version}: it was restarted, or is shared"
        return ""


class Adapted(Beside):
    """This worker's own."""

    def __init__(self, link: Link, mode: str, timing: Timing, changed: Changed, adapters: Adapters) -> None:
        super().__init__(link, mode, timing, changed, adapters)
        self._names: dict[int, str] = {}
        "those that requests may name, by version"
        self._users: defaultdict[int, set[Flight]] = defaultdict(set)
        self._leaving: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        await super().close()
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=self._timing.grace)

    # -- weights

    async def _update(self, policy: Policy, stay_paused: bool) -> None:
        """Entering service there is no adapter of ours but this one, and the model is the run's."""
        if policy.format != PEFT:
            raise EngineDown(f"{self.url}: version {policy.version} is whole weights, and the run publishes adapters")
        if not self.serving:
            self._names.clear()
            await self._swept()
            await self._model_again()
            if stay_paused:
                await self.pause()
        await self._make_room()
        await self._put(policy)
        if not self.serving:
            self.known.clear()
            log.info("engine %s is in service with version %d", self.url, policy.version)
        self.known.add(policy.version)
        self.version, self.why, self.dirty = policy.version, "", False
        self._tidy()

    async def _swept(self) -> None:
        """What another left, or we before it failed."""
        for name in await self._named():
            if name.startswith(wire.ADAPTER):
                self._expect(await self.link.post("/unload_lora_adapter", wire.unload(name), self._timing.reply))

    async def _model_again(self) -> None:
        """Where weights that a run had published took its place."""
        info = await self.link.get("/model_info", self._timing.reply)
        self._expect(info)
        if as_version(info.fields.get("weight_version")) is not None:
            reply = await self.link.post("/update_weights_from_disk", wire.restore(self._adapters.model, FRESH), None)
            if not (reply.ok and reply.fields.get("success") is True):
                raise WeightsError(
                    f"{self.url}: it has the weights of a run in the place of its model, and {self._adapters.model} "
                    f"(--hf-checkpoint) could not be loaded there: {reply.text}; start it anew"
                )
            info = await self.link.get("/model_info", self._timing.reply)
            self._expect(info)
        self.label, there = str(info.fields.get("weight_version")), info.fields.get("model_path")
        if there != str(self._adapters.model):
            log.warning(
                "engine %s serves %s, and the run's adapters are of %s: of another model they would give tokens whose "
                "probabilities the trainer does not find (train/train_rollout_logprob_abs_diff)",
                *(self.url, there, self._adapters.model),
            )

    async def _make_room(self) -> None:
        while len(self._names) >= self._most:
            oldest = min(self._names)
            using = [*self._users[oldest]]
            log.warning("engine %s: %d requests end, their version %d makes room", self.url, len(using), oldest)
            for flight in using:
                flight.lose(f"{self.url}: it holds {self._most} adapters, and the oldest, {oldest}, made room")
            await asyncio.gather(*(flight.over.wait() for flight in using))
            self._tidy()
            await asyncio.wait(self._leaving)

    async def _put(self, policy: Policy) -> None:
        name = wire.adapter(policy)
        reply = await self.link.post("/load_lora_adapter", wire.load(policy), None)
        if reply.ok and reply.fields.get("success") is True:
            self._names[policy.version] = name
            return
        await self.link.post("/unload_lora_adapter", wire.unload(name), self._timing.grace)  # may be half there
        what = f"{self.url}: the adapters of version {policy.version} could not be loaded: {reply.text}"
        raise WeightsError(what) if reply.status == 400 or reply.ok else EngineDown(what)

    # -- requests

    @contextmanager
    def lend(self, version: int | None, flight: Flight) -> Iterator[str | None]:
        if version is None or version not in self._names:
            raise EngineDown(f"{self.url}: no adapter is loaded")
        self._users[version].add(flight)
        try:
            yield self._names[version]
        finally:
            self._users[version].discard(flight)
            self._tidy()

    def _tidy(self) -> None:
        """Takes down what no request names any more."""
        if not self.serving:
            return
        for version in [v for v in self._names if v != self.version and not self._users[v]]:
            del self._users[version]
            task = asyncio.create_task(self._take_down(self._names.pop(version)))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _take_down(self, name: str) -> None:
        reply = await self.link.post("/unload_lora_adapter", wire.unload(name), self._timing.reply)
        if not reply.ok:
            log.warning("engine %s still holds adapter %s: %s", self.url, name, reply.text)


class AdaptedGuest(Beside, Guest):
    """Another worker's: in service while it has the target's adapter."""

    async def _serves(self) -> int | None:
        info = await self.link.get("/model_info", self._timing.reply)
        self._expect(info)
        self.label = str(info.fields.get("weight_version"))
        there = await self._named()
        return self.target.version if self.target and wire.adapter(self.target) in there else None

    @contextmanager
    def lend(self, version: int | None, flight: Flight) -> Iterator[str | None]:
        if self.target is None or version != self.target.version:
            raise EngineDown(f"{self.url}: it has gone on from version {version}")
        yield wire.adapter(self.target)
