"""The comparison finds what it is there to find: a sound story passes, and each way of spoiling it is told of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ledger import Ledger, compare
from rig import bits

Lines = dict[str, list[dict[str, Any]]]


def made(id: int, attempt: int = 1, version: int = 1, at: float = 1.0) -> dict[str, Any]:
    return {"what": "made", "at": at, "mark": [id, attempt, "w", f"{id}-{attempt}"], "versions": [version]}


def handed(epoch: int, step: int, *ids: int, at: float = 2.0, attempt: int = 1) -> dict[str, Any]:
    marks = [[id, attempt, "w", f"{id}-{attempt}"] for id in ids]
    facts = {"at": at, "epoch": epoch, "step": step, "version": step, "oldest": [1] * len(ids)}
    return {"what": "handed", "marks": marks, **facts}


def story() -> Lines:
    """Two batches are in checkpoint 2; a third is trained and lost with its trainer; its prompts go round again."""
    return {
        "0-generator": [*(made(id) for id in (0, 1, 2, 4)), made(4, attempt=2, at=5.0)],
        "1-trainer": [
            {"what": "placed", "at": 0.5, "kind": "weights", "number": 1},
            *(handed(1, 1, 0, 1), handed(1, 2, 2), handed(1, 3, 4)),
        ],
        "2-trainer": [handed(2, 3, 4, at=6.0, attempt=2)],
    }


CHECKPOINTS = {2: (1, [0, 1, 2]), 3: (2, [0, 1, 2, 4])}
ENDS = {"committed": {0, 1, 2, 4}, "dropped": {3}, "dead": {5}}


def told(folder: Path, lines: Lines, ends: dict[str, set[int]], checkpoints: dict[int, tuple[int, list[int]]]) -> None:
    for name, entries in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"torn')
    for step, (epoch, ids) in checkpoints.items():
        saved = folder / "checkpoints" / f"{step:08d}"
        saved.mkdir(parents=True)
        (saved / "state.json").write_text(json.dumps({"epoch": epoch}))
        (saved / "committed.bits").write_bytes(bytes(bits(*ids)))
    compare(Ledger.read(folder), folder / "checkpoints", ends, staleness=2)


def test_a_sound_story_passes(tmp_path: Path) -> None:
    told(tmp_path, story(), ENDS, CHECKPOINTS)


SPOILED: dict[str, tuple[Callable[[Lines], object], str]] = {
    "made by nobody": (lambda s: s["0-generator"].pop(0), "nobody made"),
    "made under another attempt": (
        lambda s: s["2-trainer"].__setitem__(0, handed(2, 3, 4, at=6.0, attempt=3)),
        "nobody",
    ),
    "trained twice": (lambda s: s["1-trainer"].__setitem__(2, handed(1, 2, 1)), "checkpoint 2 and the ledger differ"),
    "a step left out": (lambda s: s["1-trainer"].pop(1), "no such checkpoint"),
    "too old": (lambda s: s["1-trainer"][3].update(version=9), "too old"),
    "of weights to come": (lambda s: s["0-generator"][0].update(versions=[2]), "of version .* above 1"),
    "of weights that were never there": (lambda s: s["1-trainer"].pop(0), "versions that were not there"),
    "trained before it was made": (lambda s: s["0-generator"][0].update(at=3.0), "was made later"),
}


@pytest.mark.parametrize("way", SPOILED)
def test_a_spoiled_ledger_is_told_of(way: str, tmp_path: Path) -> None:
    lines = story()
    spoil, sentence = SPOILED[way]
    spoil(lines)
    with pytest.raises(AssertionError, match=sentence):
        told(tmp_path, lines, ENDS, CHECKPOINTS)


ENDED: dict[str, tuple[dict[str, set[int]], str]] = {
    "committed and not trained": ({"committed": {0, 1, 2, 4, 6}}, "differ from Redis"),
    "trained and not committed": ({"committed": {0, 1, 2}}, "differ from Redis"),
    "dropped and trained": ({"dropped": {3, 4}}, "dropped and trained"),
    "dead and trained": ({"dead": {4}}, "dead and trained"),
    "dropped for no reason": ({"dropped": {3, 6}}, "without a reason"),
}


@pytest.mark.parametrize("way", ENDED)
def test_a_redis_that_tells_another_story_is_told_of(way: str, tmp_path: Path) -> None:
    change, sentence = ENDED[way]
    with pytest.raises(AssertionError, match=sentence):
        told(tmp_path, story(), {**ENDS, **change}, CHECKPOINTS)


def test_a_checkpoint_that_lacks_a_prompt_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="checkpoint 2 and the ledger differ"):
        told(tmp_path, story(), ENDS, {**CHECKPOINTS, 2: (1, [0, 1])})
