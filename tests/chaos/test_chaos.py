"""Everything dies, stops, is cut off or forgets, at random moments; then to the end, and what was seen is compared."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from episode import play, table
from faults import DEATHS, LINKS, REDIS
from plan import draw


@pytest.fixture
def dice(request: pytest.FixtureRequest) -> random.Random:
    seed = request.config.getoption("--chaos-seed")
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    print(f"replay with: pytest '{request.node.nodeid}' --chaos-seed {seed}")
    return random.Random(seed)


def test_any_process_may_be_killed_at_any_moment(dice: random.Random, tmp_path: Path) -> None:
    plan = draw(dice, list(DEATHS) + list(REDIS), 1.0, 4.0)
    plan.sort(key=lambda fault: fault.kind != "generator killed")  # first: its prompts come back after 20 s
    print(*plan, sep="\n")
    record = play(tmp_path, plan, 600, 0.3)
    print(record.steps, record.discarded, *table([record]), sep="\n")
    assert [kind for kind, _ in record.faults] == [fault.kind for fault in plan]


def test_any_connection_may_be_cut_anywhere(dice: random.Random, tmp_path: Path) -> None:
    plan = draw(dice, list(LINKS), 0.6, 2.0)
    print(*plan, sep="\n")
    record = play(tmp_path, plan, 500, 0.25)
    print(record.steps, record.discarded, *table([record]), sep="\n")
    assert [kind for kind, _ in record.faults] == [fault.kind for fault in plan]
