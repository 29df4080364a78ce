"""A request to a server that has just been greeted, before prompts depend on it."""

from __future__ import annotations

import uuid

import numpy as np

from pipeline.errors import EngineDown, EngineError, UsageError
from producers.engines import sglang_wire as wire
from producers.engines.base import Request, Sampling
from producers.engines.sglang_http import Link
from producers.engines.sglang_reply import Asked, completion, problem


async def try_out(link: Link, seconds: float) -> None:
    """One token: a request it refuses would otherwise be refused for each prompt, and all would be dropped."""
    request = Request(uuid.uuid4().hex, np.zeros(1, np.int32), Sampling(1, 1.0, ()), 0)
    reply = await link.post("/generate", wire.generate(request, 1, request.rid, None), seconds)
    try:
        if not reply.ok:
            raise problem(reply, link.url)
        completion(reply, Asked(1, 1 << 31, None, ()))
    except EngineDown:
        raise
    except EngineError as error:
        raise UsageError(f"{link.url}: a request is not answered as it should be: {error}") from error
