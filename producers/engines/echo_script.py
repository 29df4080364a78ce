"""What an echo engine answers, out of a request's seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pipeline.errors import UsageError
from pipeline.types import Logprobs, Tokens
from producers.engines.base import Request


@dataclass(frozen=True)
class Latency:
    """Seconds a sample takes: log-normal around its median; a spread of 0 is a constant."""

    median: float
    sigma: float

    @classmethod
    def parse(cls, text: str) -> Latency:
        """`0.5`, or `lognormal:MEDIAN:SIGMA`."""
        parts = text.split(":")
        try:
            numbers = [float(part) for part in (parts[1:] if parts[0] == "lognormal" else parts)]
        except ValueError:
            numbers = []
        wanted = 2 if parts[0] == "lognormal" else 1
        if len(numbers) != wanted or not all(math.isfinite(x) and x >= 0 for x in numbers):
            raise UsageError(f"--echo-latency {text}: expected seconds, or lognormal:MEDIAN:SIGMA, none below 0")
        return cls(numbers[0], numbers[1] if wanted == 2 else 0.0)

    def draw(self, normal: float) -> float:
        return self.median * math.exp(self.sigma * normal)


@dataclass(frozen=True)
class Answer:
    """What a request gives."""

    seconds: float
    "for the whole answer"
    ends: float
    "share of it after which the request ends: 1, or where it fails or aborts"
    finish: str
    "stop | length | abort | fail"
    tokens: Tokens
    logprobs: Logprobs


@dataclass(frozen=True)
class Script:
    """Seeds to answers."""

    latency: Latency
    response_len: int
    failure_rate: float
    abort_rate: float

    def answer(self, request: Request, limit: int) -> Answer:
        """Printable bytes, then the first stop token if the answer is not cut off at `limit`."""
        rng, stops = np.random.Generator(np.random.Philox(key=request.seed)), request.sampling.stop_token_ids
        normal, (fails, aborts, ends) = rng.standard_normal(), rng.random(3)
        size = min(self.response_len, limit)
        letters = _letters(stops)
        tokens = letters[rng.integers(len(letters), size=size)]
        logprobs = -rng.exponential(size=size).astype(np.float32)
        finish = "length" if self.response_len > limit else "stop"
        if finish == "stop" and stops:
            tokens[-1] = stops[0]
        if fails < self.failure_rate or aborts < self.abort_rate:
            finish = "fail" if fails < self.failure_rate else "abort"
        else:
            ends = 1.0
        return Answer(self.latency.draw(float(normal)), float(ends), finish, tokens, logprobs)


@lru_cache
def _letters(stops: tuple[int, ...]) -> Tokens:
    """The printable bytes without `stops`."""
    return np.setdiff1d(np.arange(32, 127, dtype=np.int32), stops)
