"""Servers for evaluations alone, claimed by the one worker that uses them: two would load each other's weights away.

A claim is per URL, fenced by the worker's name, and lapses with a worker that died.
"""

from __future__ import annotations

import contextlib
import time

from redis.exceptions import RedisError

from pipeline.broker import Broker
from pipeline.config import EvalWork

LASTS = 20.0
"Seconds without a renewal after which others may have them."
EVERY = 3.0
"Seconds between renewals."


def servers(config: EvalWork) -> tuple[str, ...]:
    """URLs of those that an evaluation of `config` loads with its weights."""
    if config.eval_function_path is not None or config.eval_shared_engines:
        return ()
    urls = config.eval_engine_url or (config.engine_url if config.engine == "sglang" else None)
    return tuple(urls.split(",")) if urls else ()


class Claim:
    """Of one worker's hand. Without any URL it always holds."""

    def __init__(self, broker: Broker, who: str, urls: tuple[str, ...]) -> None:
        self.broker, self.who, self.urls = broker, who, urls
        self.renewed = 0.0
        "monotonic time"

    def other(self) -> str:
        """Who has one of them; empty where all are ours now, for a while."""
        who = self._say(LASTS)
        self.renewed = time.monotonic()
        return who

    def kept(self) -> bool:
        """Renewed now and then; False where they are another's by now. In an outage nobody can take them."""
        if time.monotonic() - self.renewed < EVERY:
            return True
        try:
            return not self.other()
        except RedisError:
            return True

    def let_go(self) -> None:
        with contextlib.suppress(RedisError):  # else it lapses
            self._say(0.0)

    def _say(self, seconds: float) -> str:
        answer = self.broker.script("claim", self.who, int(seconds * 1000), *self.urls) if self.urls else b""
        return bytes(answer).decode()
