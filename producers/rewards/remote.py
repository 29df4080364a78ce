"""A judge elsewhere: `--rm-type remote_rm` posts each answer to --rm-url and takes what comes back for its reward.

Sent, as JSON: `prompt`, `response` and `label`, as slime does, and `metadata`, `status`, `index`, `prompt_id`,
`sample_metadata`. Expected with status 200: a number, a bool, null (unscored), or a map in which --reward-key (default
`score`) names one of them.

An outage (no answer in time, no connection, any other status) is sat out: asked again, ever less often, until
--rm-patience has passed; then the answer is unscored. What the judge refuses (400, 413, 422) is unscored at once. One
that has never answered and refuses to (any other 4xx) is the wrong address: UsageError. Cancelled, all ends at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.config import Rewards
from pipeline.errors import UsageError
from producers.rewards.base import RewardInput, score, together

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

AT_ONCE = 64
"Requests of a generator to its judge at a time."
LARGEST = 1 << 20
"Bytes of a reply that are read."
PAUSES = (0.5, 30.0)
"Seconds between tries: the first, the longest; doubled from one to the next."
REFUSED = (400, 413, 422)
"Statuses that say something about this one answer."
SENT = ("prompt", "response", "label", "metadata", "status", "index", "prompt_id", "sample_metadata")


class Outage(Exception):
    """Why there was no usable answer this time."""


class Remote:
    def __init__(self, url: str, config: Rewards) -> None:
        self.url = url
        self.seconds = config.rm_timeout
        "for one request"
        self.patience = config.rm_patience
        self.key = config.reward_key or "score"
        token = config.rm_api_key
        self._headers = {"Authorization": f"Bearer {token.get_secret_value()}"} if token else {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._session: aiohttp.ClientSession | None = None
        self._answered = False
        self._said = float("-inf")

    async def score_group(self, inputs: Sequence[RewardInput]) -> list[float | None]:
        return await together([self._score(given) for given in inputs])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _score(self, given: RewardInput) -> float | None:
        body = {name: value for name, value in asdict(given).items() if name in SENT}
        began, pause = time.monotonic(), PAUSES[0]
        while True:
            try:
                return score(await self._ask(body), "remote_rm", given, self.key)
            except Outage as outage:
                left = began + self.patience - time.monotonic()
                self._tell(outage, left)
                if left <= 0:
                    return None
            await asyncio.sleep(min(pause * random.uniform(0.75, 1.25), max(left, 0)))
            pause = min(2 * pause, PAUSES[1])

    async def _ask(self, body: dict[str, Any]) -> object:
        import aiohttp

        try:
            async with self._slots, self._open().post(self.url, json=body, allow_redirects=False) as reply:
                text = bytearray()
                async for piece in reply.content.iter_chunked(1 << 16):
                    text += piece
                    if len(text) > LARGEST:
                        raise Outage(f"a reply of more than {LARGEST} bytes")
                return self._value(reply.status, bytes(text))
        except TimeoutError as error:
            raise Outage(f"no answer in {self.seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Outage(str(error) or type(error).__name__) from error

    def _value(self, status: int, text: bytes) -> object:
        said = f"HTTP {status}: {text[:200].decode('utf-8', 'replace')}"
        if status in REFUSED:
            self._answered = True
            log.warning("--rm-url %s: an answer goes unscored: %s", self.url, said)
            return None
        if 400 <= status < 500 and status not in (408, 425, 429) and not self._answered:
            raise UsageError(f"--rm-url {self.url}: {said}; is this the judge's address?")
        if status != 200:
            raise Outage(said)
        try:
            value: object = json.loads(text)
        except ValueError as error:
            raise Outage(f"no JSON: {said}") from error
        self._answered = True
        return value

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            limits = aiohttp.ClientTimeout(total=self.seconds, sock_connect=min(10.0, self.seconds))
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=limits,
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _tell(self, outage: Outage, left: float) -> None:
        if time.monotonic() - self._said > PAUSES[1]:
            self._said = time.monotonic()
            log.warning("--rm-url %s: %s; asked again for %.0f s, then unscored", self.url, outage, max(left, 0))
