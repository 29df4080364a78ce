"""The example of docs/agents.md: a guessing game over several turns, whose rules are right and which is learned."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from make import maker_of
from processes import Stage, audited, contiguous, own_code, steps
from rig import agreed, policy

from pipeline.code import load
from pipeline.types import COMPLETED, Prompt, Sample, Span
from producers.custom_generate import Play
from producers.engines.base import Completion, Request
from producers.engines.echo import EchoEngine
from producers.group import Progress
from producers.rewards.custom import Custom

ROOT = Path(__file__).parents[1]
GAME = ROOT / "examples" / "guessing_game.toml"


class Halver(EchoEngine):
    """Names the middle of what is left; with `stubborn`, always the same."""

    def __init__(self, stubborn: str = "") -> None:
        super().__init__("0", 1)
        self.stubborn = stubborn

    async def generate(self, request: Request) -> Completion:
        low, high = 0, 9
        said = bytes(request.tokens.tolist()).decode().removeprefix("N:")
        for guess, answer in zip(said[::2], said[1::2], strict=True):
            low, high = (int(guess) + 1, high) if answer == "+" else (low, int(guess) - 1)
        tokens = np.array([ord(self.stubborn or str((low + high) // 2))], np.int32)
        return Completion(tokens, np.full(1, -1, np.float32), "length", (Span(1, 0, 1),))


def game(engine: EchoEngine, hidden: int, monkeypatch: pytest.MonkeyPatch) -> Sample:
    monkeypatch.chdir(ROOT)
    play = Play("game", load("examples.guessing_game.play", "--x"))
    reward = Custom("reward", load("examples.guessing_game.reward", "--x"))
    prompt = Prompt(1, 1, 0, f'{{"prompt": "N:", "label": "{hidden}", "metadata": {{}}}}')

    async def go() -> Sample:
        await engine.start()
        await engine.load(policy(1))
        maker = maker_of(engine, agreed(n_samples_per_prompt=1), reward, play=play)
        return (await maker.make(prompt, Progress(), asyncio.Event())).samples[0]

    return asyncio.run(go())


def test_who_halves_what_is_left_finds_every_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    guesses = []
    for hidden in range(10):
        sample = game(Halver(), hidden, monkeypatch)
        (sequence,) = sample.sequences
        said = bytes(sequence.tokens.tolist()).decode()
        guesses.append(sample.metadata["guesses"])
        assert (sample.reward, sample.status, said[-1]) == (1.0, COMPLETED, str(hidden))
        assert sequence.loss_mask.tolist() == [1, 0] * (guesses[-1] - 1) + [1]
    assert sorted(guesses) == [1, 2, 2, 3, 3, 3, 3, 4, 4, 4]


@pytest.mark.parametrize(
    ("says", "hidden", "reward", "guesses"), [("0", 9, 0.05, 4), ("4", 9, 0.25, 4), ("x", 4, 0.0, 1)]
)
def test_who_does_not_gets_as_much_as_was_ruled_out(
    says: str, hidden: int, reward: float, guesses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = game(Halver(says), hidden, monkeypatch)
    assert (sample.reward, sample.metadata["guesses"]) == (pytest.approx(reward), guesses)


def learned(folder: Path, rounds: int, seed: int) -> list[float]:
    """The rewards by step of a run as a user starts it, from the example's folder."""
    env = own_code(folder, "") | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "examples.guessing_game", folder / "game", str(seed)], cwd=ROOT, check=True)
    data = ("--hf-checkpoint", folder / "game" / "model", "--prompt-data", folder / "game" / "prompts.jsonl")
    length: tuple[Any, ...] = ("--num-rollout", rounds, "--out", folder / "run", "--seed", seed)
    with Stage(folder) as stage:
        stage.millpond("run", "--config", GAME, *data, *length, **env).ends(0, seconds=280)
        assert audited(stage, folder / "run")["committed"] == 32 * rounds
    lines = steps(folder / "run")
    assert contiguous(lines) == rounds
    return [line["rollout/raw_reward"] for line in lines]


def test_the_game_is_learned_from_random_weights(tmp_path: Path) -> None:
    """As far as naming digits: about 0.15 at first, 0.55 after 15 steps."""
    rewards = learned(tmp_path, 15, 0)
    assert rewards[0] < 0.3
    assert fmean(rewards[-3:]) > 0.4


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_game_is_learned_to_the_use_of_its_answers(seed: int, tmp_path: Path) -> None:
    """Four digits at random among ten, none twice and no use of what was answered, give 0.66 at most."""
    assert fmean(learned(tmp_path, 200, seed)[-10:]) > 0.85
