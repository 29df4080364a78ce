"""A guessing game over several turns: the model names a digit, the game answers `+` (higher) or `M` (lower).

    python -m examples.guessing_game game           # a small model and the hidden digits, into the folder game/
    millpond run --config examples/guessing_game.toml --hf-checkpoint game/model --prompt-data game/prompts.jsonl

From random weights it learns to name digits, then never to name one twice, then to halve what is left: with ten digits
and four guesses every one can be found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pipeline.types import COMPLETED
from producers.episode import Episode
from producers.rewards import RewardInput
from producers.trace import Answer

DIGITS, GUESSES = 10, 4
HIGHER, LOWER = "+", "M"


async def play(episode: Episode) -> Answer:
    """One game: a trace of the prompt, each guess, and what was answered to it. Anything but a digit ends it."""
    hidden = int(episode.prompt.fields["label"])
    trace = episode.trace()
    low, high = 0, DIGITS - 1
    found = False
    for _ in range(GUESSES):
        turn = await episode.turn(trace, max_new_tokens=1)
        if not turn.text.isdigit():
            break
        guess = int(turn.text)
        if found := guess == hidden:
            break
        low, high = (max(low, guess + 1), high) if guess < hidden else (low, min(high, guess - 1))
        episode.observe(trace, HIGHER if guess < hidden else LOWER)
    game = {"found": found, "guesses": len(trace.turns), "left": high - low + 1}
    return Answer(trace, game, status=COMPLETED)  # a turn of one token is meant, not cut off


def reward(x: RewardInput) -> float:
    """1 for a digit that was found; else up to a half, by how many of the others were ruled out."""
    game = x.sample_metadata
    return 1.0 if game["found"] else 0.5 * (DIGITS - game["left"]) / DIGITS


def main(folder: Path, seed: int = 0) -> None:
    """The same for the same seed."""
    from trainer.demo_model import make

    make(folder / "model", seed)
    rows = (json.dumps({"input": "N:", "label": str(n % DIGITS)}) for n in range(100 * DIGITS))
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
