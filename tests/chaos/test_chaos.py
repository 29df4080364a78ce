"""Everything dies, stops, is cut off or forgets, at random moments; then to the end, and what was seen is compared.

A failing test shows its faults and how to play them again.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import troupe
from cast import Cast
from episode import Record, play
from faults import CUTS, DEATHS, LINKS, REDIS
from plan import Fault, Setting, each
from report import text
from troupe import WITNESSED, Troupe

from pipeline.server import EmbeddedServer


@pytest.fixture
def dice(request: pytest.FixtureRequest) -> random.Random:
    seed = request.config.getoption("--chaos-seed")
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    print(f"again: pytest '{request.node.nodeid}' --chaos-seed {seed}")
    return random.Random(seed)


def begins_with(kind: str, plan: list[Fault]) -> list[Fault]:
    """What a killed generator held comes back after 20 s; the others go on meanwhile."""
    return sorted(plan, key=lambda fault: fault.kind != kind)


def all_survived(record: Record, plan: list[Fault]) -> None:
    print(text([record]))
    assert [kind for kind, _ in record.faults] == [fault.kind for fault in plan]


def staged(folder: Path, plan: list[Fault]) -> None:
    """Separate processes."""
    print(*plan, sep="\n")
    setting = Setting()
    with EmbeddedServer(folder / "redis") as server, Cast(folder, server, setting) as cast:
        all_survived(play(cast, plan), plan)


def test_any_process_may_be_killed_at_any_moment(dice: random.Random, tmp_path: Path) -> None:
    staged(tmp_path, begins_with("generator killed", each(dice, [*DEATHS, *REDIS], 1.0, 4.0)))


def test_any_connection_may_be_cut_anywhere(dice: random.Random, tmp_path: Path) -> None:
    staged(tmp_path, each(dice, [*LINKS, *CUTS], 0.5, 2.0))


def test_a_run_heals_what_is_killed(dice: random.Random, tmp_path: Path) -> None:
    plan = begins_with("generator killed under its supervisor", each(dice, list(troupe.KINDS), 1.0, 3.0))
    plan = [replace(f, after=f.after + 3) if f.kind == "supervisor killed" else f for f in plan]  # it tells before
    print(*plan, sep="\n")
    with Troupe(tmp_path, Setting(pace=0.4)) as scene:
        all_survived(play(scene, plan), plan)
        said = "".join(one.said() for one in scene.started)
    for name in ("generator-.", "trainer", "feeder", "the embedded Redis"):
        assert re.search(rf"millpond: {name} was killed; it is started again \(1\)", said)


def test_a_run_that_learns_heals_what_is_killed(dice: random.Random, tmp_path: Path) -> None:
    """A small model, sampled and trained with torch."""
    kinds = [f"{who} killed under its supervisor" for who in ("trainer", "generator", "Redis")]
    plan = each(dice, kinds, 3.0, 0.0)
    print(*plan, sep="\n")
    with Troupe(tmp_path, Setting(rows=None), *WITNESSED, "--num-rollout", "20", "--save-interval", "3") as scene:
        all_survived(play(scene, plan), plan)
