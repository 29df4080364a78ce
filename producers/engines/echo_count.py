"""`millpond generate` with an echo engine that counts: `python -m producers.engines.echo_count FILE [options]`.

What a cancelled request has sampled is known to nobody but the engine, so the benchmark of waste counts here.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from pathlib import Path

from pipeline.config import Engines
from producers import cli, engines
from producers.engines.base import Completion, Request
from producers.engines.echo import EchoEngine
from producers.tokens import ByteTokenizer


class CountingEcho(EchoEngine):
    """Counts scripted seconds; at a constant speed they are tokens. Writes `file` when it is closed."""

    def __init__(self, file: Path, config: Engines) -> None:
        super().__init__(
            config.echo_latency, config.echo_response_len, config.echo_failure_rate, config.echo_abort_rate
        )
        self.file = file
        self.sampled = 0.0
        "seconds of all requests, those of cancelled ones until they were cancelled"
        self.cancelled = 0
        "requests"
        self.whole: dict[str, dict[int, float]] = defaultdict(dict)
        "prompt -> seed -> seconds of an answer that was finished, at whatever attempt"

    async def generate(self, request: Request) -> Completion:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        seconds = self._script.answer(request, request.sampling.max_new_tokens).seconds
        try:
            done = await super().generate(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            self.sampled += min(seconds, loop.time() - begin)
            raise
        self.sampled += seconds
        self.whole[bytes(request.tokens.tolist()).decode()][request.seed] = seconds
        return done

    async def close(self) -> None:
        await super().close()
        prompts = {prompt: sum(answers.values()) for prompt, answers in self.whole.items()}
        count = {"sampled": self.sampled, "cancelled": self.cancelled, "prompts": prompts}
        self.file.write_text(json.dumps(count), encoding="utf-8")


def main(argv: list[str]) -> int:
    file = Path(argv[0])
    engines.BUILDERS["echo"] = lambda config, *_: (CountingEcho(file, config), ByteTokenizer())
    return cli.generate(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
