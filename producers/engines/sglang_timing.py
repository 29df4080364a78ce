"""How long an SGLang server is waited for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds, and how often."""

    start: float = 1200.0
    "until one engine answers; large models take minutes to load"
    look: float = 5.0
    "between looks at an engine"
    reply: float = 30.0
    "for a control call; /health takes up to 20"
    first: float = 120.0
    "for the first token after a start, when kernels may still be compiled"
    update: float = 600.0
    "for a weight update, all its calls together"
    margin: float = 5.0
    "after the trainer's own end of an update over a process group, in which its closing is felt"
    flushes: int = 20
    "tries to flush a cache, while requests leave it"
    between: float = 0.5
    "between them"
    sure: float = 1.0
    "before a second look at an engine that the first found wanting"
    away: float = 10.0
    "that a request waits where no engine is in service"
    again: tuple[float, ...] = (0.2, 1.0)
    "before each further try of a request that failed in passing"
    grace: float = 5.0
    "for what is done for others' sake when something was broken off: aborts, ending a pause"
