"""An SGLang server that a generator drives, seen by who only evaluates there: nothing is changed on it."""

from __future__ import annotations

import asyncio

from pipeline.errors import EngineDown, WeightsError
from producers.engines.sglang_member import Member
from producers.engines.sglang_reply import as_version, window_of


class Guest(Member):
    """In service while it says that it serves the target version, which its own generator loads."""

    async def greet(self, window: int | None) -> None:
        self.greeted = False
        self._admitted(await self.link.get("/model_info", self._timing.reply))
        await self._serves()
        self.context_length = window_of(await self.link.get("/v1/models", self._timing.reply))
        self.greeted = True

    async def load(self, stay_paused: bool) -> None:
        """Waits until it serves the target. WeightsError where it has gone on to a later version."""
        async with self.lock:
            policy = self.target
            if policy is None or self.version == policy.version:
                return
            try:
                async with asyncio.timeout(self._timing.update):
                    while (now := await self._serves()) != policy.version:
                        if now is not None and now > policy.version:
                            raise WeightsError(f"{self.url}: it has gone on to version {now}")
                        await asyncio.sleep(self._timing.sure)
            except TimeoutError:
                self.take_out(f"it has not come to version {policy.version} in {self._timing.update:.0f} s")
                raise EngineDown(f"{self.url}: {self.why}") from None
            self.known, self.version, self.why = {policy.version}, policy.version, ""
            self._changed(self)

    async def _serves(self) -> int | None:
        info = await self.link.get("/model_info", self._timing.reply)
        self._expect(info)
        return as_version(info.fields.get("weight_version"))

    async def pause(self, mode: str = "") -> None:
        """Not ours to do."""

    async def resume(self) -> None:
        """Nor this."""
