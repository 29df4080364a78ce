"""One server over HTTP, by aiohttp: a call has one answer, or one reason why none came; nothing is sent twice.

Why aiohttp: its parser is C and its pool without a limit has no queue to walk, so hundreds of requests that each last
minutes cost no more than their sockets (httpx 0.28 walks its whole pool at each request); it is maintained, SGLang
itself stands on it, and it has the server that the tests misbehave with. It repeats an idempotent method once when a
kept connection turns out dead; all that changes anything here is a POST, which it never repeats.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any

import aiohttp

CONNECT = 10.0
"Seconds to get a connection."
KEEP = 3.0
"Seconds an idle connection is kept: less than the 5 after which SGLang's server closes it, maybe just as we send."
PROBE = 30
"Seconds of silence after which the kernel asks whether the other side is still there."
SAYS = ("message", "detail", "error_message")
"Fields of a reply that say what is wrong, one of them."
NONE = 0
"Status of a reply that did not come."


@dataclass(frozen=True)
class Reply:
    """What a call came to."""

    status: int
    "of HTTP; NONE where the connection failed, broke or took too long"
    body: bytes
    "or why there is none"

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def fields(self) -> dict[str, Any]:
        """The body's JSON object; empty where it is none."""
        try:
            value = json.loads(self.body)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def text(self) -> str:
        """What the server says, out of the shapes it says it in, with the status before it."""
        found = self.fields
        found = found.get("error", found)
        said = next((found[k] for k in SAYS if k in found), None) if isinstance(found, dict) else found
        text = str(said) if said else self.body.decode("utf-8", "replace").strip()
        return text[:500] if self.status == NONE else f"HTTP {self.status}: {text[:500]}"


def open_session(key: str | None) -> aiohttp.ClientSession:
    """For all servers of a pool. No proxies, cookies or redirects: a reply is the server's own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP, socket_factory=_socket),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Probed while idle: what stands between may drop a connection on which nothing is said for minutes."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE)
    return made


class Link:
    """The way to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session

    async def get(self, path: str, seconds: float) -> Reply:
        return await self._call("GET", path, None, seconds)

    async def post(self, path: str, body: dict[str, Any] | None, seconds: float | None) -> Reply:
        """`seconds` None: until the caller has had enough."""
        return await self._call("POST", path, body, seconds)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, seconds: float | None) -> Reply:
        limits = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT)
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=limits, allow_redirects=False
            ) as response:
                return Reply(response.status, await response.read())
        except TimeoutError:
            return Reply(NONE, f"{method} {path} had no answer in time".encode())
        except (aiohttp.ClientError, OSError) as error:
            return Reply(NONE, f"{method} {path}: {error or type(error).__name__}".encode())
