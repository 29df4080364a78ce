"""One SGLang server that is this worker's own: greeted, given weights, watched, and taken out when it fails.

In service means: it serves the version that was loaded last, and has said so. A server that leaves service comes back
by a greeting and a full load, whatever its label says: an engine that was restarted, or half updated, may have any
weights behind any label.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pipeline.errors import EngineDown, EngineError, UsageError, WeightsError
from pipeline.types import Policy
from producers.engines import sglang_wire as wire
from producers.engines.sglang_http import Link, Reply
from producers.engines.sglang_receive import NotReceived, Receiving
from producers.engines.sglang_reply import KEY_REFUSED, as_version, window_of
from producers.engines.sglang_timing import Timing
from producers.engines.sglang_try import try_out
from producers.party import Party

if TYPE_CHECKING:
    from producers.engines.sglang_flight import Flight

log = logging.getLogger(__name__)


class Member:
    """`changed` is called when it enters or leaves service, or begins or ends a load."""

    pauses = True  # requests wait while it loads
    label: str | None = None
    "of the model, where versions are adapters beside it"

    def __init__(self, link: Link, mode: str, timing: Timing, changed: Callable[[Member], None]) -> None:
        self.link = link
        self.target: Policy | None = None
        "what it is to serve"
        self.version: int | None = None
        "what it serves; None when out of service"
        self.known: set[int] = set()
        "versions loaded since it entered service"
        self.context_length: int | None = None
        self.why = "it has not answered yet"
        "it is not in service; empty when it is"
        self.greeted = False
        self.party: Party | None = None
        "for `target`, once"
        self.dirty = False
        "an update failed: nobody knows what it serves"
        self.updating = False
        self.poke = asyncio.Event()
        "look at it now"
        self.lock = asyncio.Lock()
        "one load at a time"
        self._mode, self._timing, self._changed = mode, timing, changed
        self._freed: asyncio.Task[Reply] | None = None

    @property
    def url(self) -> str:
        return self.link.url

    @property
    def serving(self) -> bool:
        return not self.why

    def take_out(self, why: str) -> None:
        why = why.removeprefix(f"{self.url}: ")
        if self.serving or self.why != why:
            log.warning("engine %s is out of service: %s", self.url, why)
        self.why = why
        self.version = None
        self._changed(self)

    # -- the first words

    async def greet(self, window: int | None) -> None:
        """It is there, takes our key, and answers a request as we send them. `window`: tokens that it must have room
        for. UsageError where waiting will not help, EngineDown where it may."""
        self.greeted = False
        info = await self.link.get("/model_info", self._timing.reply)
        self._admitted(info)
        if info.status == 404 or (info.ok and "weight_version" not in info.fields):
            raise UsageError(f"{self.url}: no /model_info with a weight_version; SGLang 0.5.6 or later is needed")
        self._expect(info)
        self.context_length = window_of(await self.link.get("/v1/models", self._timing.reply))
        if window is not None and self.context_length is not None and self.context_length < window:
            raise UsageError(f"{self.url}: a context of {self.context_length} tokens, where the others have {window}")
        going_on = await self.link.post("/continue_generation", wire.resume(), self._timing.reply)
        self._admitted(going_on)  # a server may want another key for this
        self._expect(going_on)
        await try_out(self.link, self._timing.first)
        self.greeted = True

    def _admitted(self, reply: Reply) -> None:
        if reply.status in KEY_REFUSED:
            raise UsageError(f"{self.url}: the key is refused (--engine-api-key): {reply.text}")

    def _expect(self, reply: Reply) -> None:
        if not reply.ok:
            raise EngineDown(f"{self.url}: {reply.text}")

    # -- weights

    async def load(self, stay_paused: bool) -> None:
        """In service with `target` afterwards. WeightsError where it cannot load them, EngineDown where it is away;
        either way it is then out of service."""
        async with self.lock:
            await self.freed()
            policy = self.target
            if policy is None or self.version == policy.version:
                return
            self.updating = self.pauses
            self._changed(self)
            try:
                async with asyncio.timeout(self._timing.update):
                    await self._update(policy, stay_paused)
            except TimeoutError:
                self._failed(f"the update to version {policy.version} took over {self._timing.update:.0f} s")
                raise EngineDown(f"{self.url}: {self.why}") from None
            except EngineError as error:
                self._failed(str(error))
                raise
            except WeightsError as error:
                self._failed(str(error), away=False)
                raise
            except asyncio.CancelledError:
                self._failed(f"the update to version {policy.version} was broken off")
                raise
            finally:
                self.updating = False
                if not (self.serving or stay_paused):
                    go_on = self.link.post("/continue_generation", wire.resume(), self._timing.grace)
                    self._freed = asyncio.create_task(go_on)
                self._changed(self)

    def _failed(self, why: str, away: bool = True) -> None:
        self.dirty = True
        self.greeted = self.greeted and not away
        self.take_out(why)

    async def freed(self) -> None:
        """Returns when an engine that an update failed on has been told to go on, or cannot be told: it must not stand
        still for whoever uses it next."""
        if self._freed:
            await asyncio.wait([self._freed])

    async def close(self) -> None:
        await self.freed()

    async def _update(self, policy: Policy, stay_paused: bool) -> None:
        """Pause, load, flush, name, verify, go on: in this order a flush meets nothing that runs. Entering service it
        leaves nothing in the cache, whatever the mode: an earlier run's version of this number may be in there."""
        mode = self._mode if self.serving else "retract"
        await self.pause(mode)
        named = policy.path != "" and await self._load(policy, mode == "retract")
        if not named:  # the flush is pending, or the trainer has no weights: what the engine has stays
            if policy.path or not self.serving:
                await self._flush()
            await self._name(policy.version)
        await self._verify(policy.version)
        if not self.serving:
            self.known.clear()
        self.known.add(policy.version)  # before the first token that carries it
        if not stay_paused:
            await self.resume()
        if not self.serving:
            log.info("engine %s is in service with version %d", self.url, policy.version)
        self.version, self.why, self.dirty = policy.version, "", False

    async def _load(self, policy: Policy, flush: bool) -> bool:
        """Whether all is done; if not, the weights are in, and the flush and the name are to be done."""
        party, self.party = self.party, None
        if party and party.seat(self.url) is not None:
            with contextlib.suppress(NotReceived):  # which it has told; the folder is complete
                return await Receiving(self.link, party, self._timing).take(policy.version, flush)
        reply = await self.link.post("/update_weights_from_disk", wire.update(policy, flush), None)
        if reply.ok and reply.fields.get("success") is True:
            return True
        if reply.status == 400 and wire.APPLIED in reply.text:
            return False
        what = f"{self.url}: version {policy.version} could not be loaded: {reply.text}"
        raise WeightsError(what) if reply.status == 400 or reply.ok else EngineDown(what)

    async def _flush(self) -> None:
        for _ in range(self._timing.flushes):
            reply = await self.link.post("/flush_cache", None, self._timing.reply)
            if reply.ok:
                return
            await asyncio.sleep(self._timing.between)
        raise EngineDown(f"{self.url}: the cache could not be flushed: {reply.text}")

    async def _name(self, version: int) -> None:
        self._expect(await self.link.post("/update_weight_version", wire.set_version(version), self._timing.reply))

    async def _verify(self, version: int) -> None:
        reply = await self.link.get("/model_info", self._timing.reply)
        self._expect(reply)
        label = reply.fields.get("weight_version")
        if as_version(label) != version:
            raise EngineDown(f"{self.url}: it reports version {label!r} after version {version} was loaded")

    async def pause(self, mode: str = "") -> None:
        """`mode`: its own, if none is given."""
        self._expect(await self.link.post("/pause_generation", wire.pause(mode or self._mode), self._timing.reply))

    async def resume(self) -> None:
        self._expect(await self.link.post("/continue_generation", wire.resume(), self._timing.reply))

    async def excuse(self) -> None:
        """The others need not wait for it, where it came to no update."""
        party, self.party = self.party, None
        if party and party.seat(self.url) is not None:
            await party.over(self.url, self.why or "it has these weights")

    # -- health

    async def trouble(self, paused: bool) -> str:
        """What keeps it from serving; empty where nothing does. Not to be asked during a load.

        /ready answers at once, but says no also after a /health that failed during a pause, and servers before 0.5.20
        do not know it; then /health decides, which generates a token. It is never asked of a paused engine: there it
        blocks, fails, and lets /ready fail from then on.
        """
        info = await self.link.get("/model_info", self._timing.reply)
        if not info.ok:
            return info.text
        if strange := await self._strange(info):
            return strange
        if paused or (await self.link.get("/ready", self._timing.reply)).ok:
            return ""
        health = await self.link.get("/health", self._timing.reply)
        return "" if health.ok else f"it is not healthy: {health.text}"

    async def _strange(self, info: Reply) -> str:
        """What is not as it was left; empty where all is."""
        label = info.fields.get("weight_version")
        known = as_version(label) == self.version
        return "" if known else f"it serves {label!r} where {self.version} was loaded: it was restarted, or is shared"

    # -- requests

    @contextlib.contextmanager
    def lend(self, version: int | None, flight: Flight) -> Iterator[str | None]:
        """While a request of that version runs: the adapter that it names."""
        yield None
