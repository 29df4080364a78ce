"""Checkpoints: complete or invisible, and the truth about what was trained.

checkpoints/00000020/   after 20 steps
    state.json          step, version, lineage, epoch, cursor
    committed.bits      one bit a prompt that the weights were trained on, and `dropped.bits`, `dead.bits`
    model/              what the backend saves
checkpoints/00000040.given-up/   of a branch that was given up by going back to an older one
checkpoints/best    a link to the one with the best evaluation (--save-best)
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.ledger import Ledger, set_bit
from pipeline.replies import Standing
from trainer.backends.base import Backend
from trainer.weights import clean, versions
from trainer.workshop import Workshop

BEST = "best"
BITS = ("committed", "dropped", "dead")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says, without the model."""

    folder: Path
    step: int
    "training steps done"
    version: int
    "weight version that these weights were published under"
    lineage: tuple[tuple[int, int], ...]
    epoch: int
    "of the trainer that wrote it"
    ledger: Ledger


def save(now: Checkpoint, backend: Backend, shop: Workshop) -> None:
    """Writes it to its folder; durable and complete when this returns."""
    with shop.making(now.folder.name) as folder:
        (folder / "model").mkdir()
        backend.save(folder / "model")
        for name in BITS:
            (folder / f"{name}.bits").write_bytes(bytes(getattr(now.ledger, name)))
        state = {
            "step": now.step,
            "version": now.version,
            "lineage": now.lineage,
            "epoch": now.epoch,
            "cursor": now.ledger.cursor,
            "data": now.ledger.data,
        }
        (folder / "state.json").write_text(json.dumps(state))


def ledger_of(standing: Standing, trained: Ledger) -> Ledger:
    """What the checkpoint must say: all bits in Redis, and every prompt trained since the last one."""
    committed = bytearray(trained.committed)
    for id in (*trained.trained, *trained.published):
        set_bit(committed, id)
    now = Ledger(committed=committed, dropped=standing.dropped, dead=standing.dead, cursor=standing.feed)
    return replace(now, data=trained.data)


def newest(root: Path) -> Path | None:
    """The newest complete checkpoint."""
    found = versions(root)
    return found[max(found)] if found else None


def read(folder: Path) -> Checkpoint:
    """UsageError where `folder` holds no checkpoint of ours."""
    try:
        state = json.loads((folder / "state.json").read_text())
        bits = {name: (folder / f"{name}.bits").read_bytes() for name in BITS}
        ledger = Ledger(
            committed=bytearray(bits["committed"]),
            dropped=bits["dropped"],
            dead=bits["dead"],
            cursor=state["cursor"],
            data=state.get("data", ""),
        )
        lineage = tuple((int(a), int(b)) for a, b in state["lineage"])
        return Checkpoint(folder, state["step"], state["version"], lineage, state["epoch"], ledger)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--load {folder}: not a Millpond checkpoint ({error})") from None


def give_up(shop: Workshop, step: int) -> list[str]:
    """Names of what is out of the way now: checkpoints after `step` belong to a branch that is given up, and would be
    taken for the newest. They are kept, for people, as NAME.given-up."""
    later = sorted((path.name for found, path in versions(shop.root).items() if found > step), reverse=True)
    for name in later:  # the newest first: dying half-way, this leaves the start of one branch
        shop.set_aside(shop.root / name, f"{name}.given-up")
    return later[::-1]


def best(root: Path) -> int | None:
    """The step that `best` points to; None where there is no such link, or nothing behind it."""
    name = os.readlink(root / BEST) if (root / BEST).is_symlink() and (root / BEST).exists() else ""
    return int(name) if name.isdigit() else None


def point(shop: Workshop, step: int | None) -> None:
    """Lets `best` be the checkpoint of `step`, in one step; None: of none, where what it points to is gone."""
    if step is None:
        if best(shop.root) is None and (shop.root / BEST).is_symlink():
            shop.take_away(shop.root / BEST)
    elif step != best(shop.root):
        aside = shop.folder / BEST
        aside.symlink_to(f"{step:08d}")
        aside.replace(shop.root / BEST)


def prune(shop: Workshop, keep: int, also: Collection[int] = ()) -> None:
    """Deletes all but the `keep` newest, those of the steps `also`, and the best."""
    clean(shop, {*sorted(versions(shop.root))[-keep:], *also, best(shop.root) or 0})
