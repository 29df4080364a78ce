"""The URLs that a configuration may hold, as pydantic types. The messages go behind the flag's name."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_ENGINE = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/[\w./~-]*)?")


def _redis(value: str) -> str:
    if not value.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("it must start with redis://, rediss:// or unix://")
    return value


def _engine(value: str) -> str:
    url = value.strip().rstrip("/")
    if not _ENGINE.fullmatch(url):
        raise ValueError("it must be http://HOST:PORT or https://HOST:PORT, without a user, password or query in it")
    return url


def _engines(value: str) -> str:
    urls = [_engine(url) for url in value.split(",")]
    if len(set(urls)) < len(urls):
        raise ValueError("it must name each engine once")
    return ",".join(urls)


RedisUrl = Annotated[str, AfterValidator(_redis)]
EngineUrl = Annotated[str, AfterValidator(_engine)]
EngineUrls = Annotated[str, AfterValidator(_engines)]
"one or more, with commas between"
