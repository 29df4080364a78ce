"""One server takes a version from the trainer: it opens an update, joins the group, receives bucket by bucket, closes.

It is paused meanwhile. A server that fails half-way has old and new tensors mixed: nothing may be sampled from it
before it has loaded the folder.

A call that waits for the trainer returns when the trainer closes the group, at the latest; only then will the server
listen to anything else.
"""

from __future__ import annotations

import asyncio
import logging

from pipeline.errors import EngineDown
from pipeline.rendezvous import Piece
from producers.engines import sglang_wire as wire
from producers.engines.sglang_http import NONE, Link, Reply
from producers.engines.sglang_timing import Timing
from producers.party import Party

log = logging.getLogger(__name__)


class NotReceived(Exception):
    """The folder is to be loaded; why."""


async def ranks(link: Link, backend: str, timing: Timing) -> int:
    """Processes with which a server can join a group of that kind; 0 where it cannot."""
    reply = await link.get("/server_info", timing.reply)
    sizes = [reply.fields.get(name, 1) for name in ("tp_size", "pp_size", "dp_size")]
    if not reply.ok or any(type(size) is not int for size in sizes):
        return 0
    fits = sizes[1] == sizes[2] == 1 and (backend != "nccl" or reply.fields.get("device") == "cuda")
    return int(sizes[0]) if fits else 0


class Receiving:
    """`link`'s part in `party`."""

    def __init__(self, link: Link, party: Party, timing: Timing) -> None:
        self._link, self._party, self._timing = link, party, timing
        self._group = party.offer.group

    async def take(self, version: int, flush: bool) -> bool:
        """Whether the flush is done, too. NotReceived where the folder is to be loaded instead, EngineDown where the
        server says nothing any more. The trainer hears of either."""
        limit = self._party.offer.seconds + self._timing.margin
        try:
            async with asyncio.timeout(limit):
                flushed = await self._all(version, flush)
        except (NotReceived, TimeoutError) as error:
            why = str(error) or f"not done in {limit:.0f} s"
            log.warning("engine %s could not have version %d from the trainer: %s", self._link.url, version, why)
            await self._party.over(self._link.url, why)
            await self._clear()
            raise NotReceived(why) from None
        except asyncio.CancelledError:
            await asyncio.shield(self._party.over(self._link.url, "its worker broke off"))
            raise
        await self._party.over(self._link.url)
        await self._close()
        return flushed

    async def _all(self, version: int, flush: bool) -> bool:
        await self._begin()
        if not await self._party.stands():
            raise NotReceived("the trainer has given the update up")
        seat, roster = self._party.seat(self._link.url), self._party.roster
        self._expect(await self._post("/init_weights_update_group", wire.join(self._party.offer, seat or 0, roster)))
        for bucket in roster.buckets[:-1]:
            self._expect(await self._receive(bucket, None, flush=False))
        last = await self._receive(roster.buckets[-1], version, flush)
        applied = last.status == 400 and wire.APPLIED in last.text
        if not applied:
            self._expect(last)
        reply = await self._post("/end_weight_update", wire.end_update())
        if reply.status != 404:  # nor was it begun
            self._expect(reply)
        return not applied

    async def _begin(self) -> None:
        """Servers before 0.5.23 know no beginning. One that was left open is closed: by whom it was begun is gone."""
        reply = await self._post("/begin_weight_update", wire.begin_update())
        if reply.status == 400:
            await self._post("/end_weight_update", wire.end_update())
            reply = await self._post("/begin_weight_update", wire.begin_update())
        if reply.status != 404:
            self._expect(reply)

    async def _receive(self, bucket: tuple[Piece, ...], version: int | None, flush: bool) -> Reply:
        body = wire.receive(bucket, self._group, version, flush)
        return await self._post("/update_weights_from_distributed", body)

    async def _post(self, path: str, body: wire.Body) -> Reply:
        return await self._link.post(path, body, None)

    def _expect(self, reply: Reply) -> None:
        if not reply.ok or reply.fields.get("success") is False:
            raise NotReceived(reply.text)

    async def _clear(self) -> None:
        """So that the folder can be loaded, and the next update begun."""
        reply = await self._link.post("/end_weight_update", wire.end_update(), self._timing.grace)
        if reply.status == NONE:
            raise EngineDown(f"{self._link.url}: it does not answer since an update over a process group failed")
        await self._close()

    async def _close(self) -> None:
        await self._link.post("/destroy_weights_update_group", wire.leave(self._group), self._timing.grace)
