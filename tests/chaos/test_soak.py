"""`pytest -m soak --soak-minutes 30`: episode after episode until the time is over, then what was survived.

Each has a seed of its own; `--chaos-seed N` plays one again. The folder of one that fails is kept.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import troupe
from cast import Cast
from episode import Record, play
from faults import CUTS, DEATHS, LINKS, REDIS
from plan import Setting, any_setting, some
from report import rows, text, totals
from troupe import WITNESSED, Troupe

from pipeline.server import EmbeddedServer

SECONDS = 45.0
"Of faults in an episode; healing comes after."
LEARNING = Setting(rows=None, pace=0.2)
LEARNS = (*WITNESSED, "--num-rollout", "40", "--save-interval", "3")


def episode(seed: int, folder: Path, record: Record) -> None:
    """Half of them as separate processes; a quarter with one fault at a time, which shows how long recovery takes."""
    dice = random.Random(seed)
    setting, staged, alone = any_setting(dice), dice.random() < 0.5, dice.random() < 0.25
    if alone:
        setting = replace(setting, alone=True, staleness=2, save_interval=3, rows=1500)
    longest = 0.0 if alone else 30.0
    if staged:
        groups = [DEATHS, REDIS] if alone else [DEATHS, REDIS, LINKS, CUTS]
        plan = some(dice, [list(group) for group in groups], SECONDS, longest)
        with EmbeddedServer(folder / "redis", setting.durability) as server, Cast(folder, server, setting) as cast:
            play(cast, plan, record)
        return
    plan = some(dice, [list(troupe.KINDS)], SECONDS, longest)
    learns = not alone and dice.random() < 0.25
    with Troupe(folder, LEARNING, *LEARNS) if learns else Troupe(folder, setting) as scene:
        play(scene, plan, record)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_faults_are_survived_for_as_long_as_told(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    one, minutes = request.config.getoption("--chaos-seed"), request.config.getoption("--soak-minutes")
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    records: dict[int, Record] = {}
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and not (one is not None and records):
        seed = random.SystemRandom().getrandbits(32) if one is None else one
        record, folder = records.setdefault(seed, Record()), root / str(seed)
        folder.mkdir()
        said = f"seed {seed}: survived"
        try:
            episode(seed, folder, record)
        except Exception:  # noqa: BLE001 whatever it is, the others go on
            again = f"pytest tests/chaos -m soak --chaos-seed {seed}"
            said = f"seed {seed}: FAILED, again with: {again}; its folder is {folder}\n{traceback.format_exc()}"
            (folder / "failure.txt").write_text(said)
        else:
            shutil.rmtree(folder)
        with capsys.disabled():
            print(f"\n{said} ({len(record.faults)} faults)", flush=True)
    told = list(records.values())
    seeds = {seed: record.survived for seed, record in records.items()}
    (root / "report.json").write_text(
        json.dumps({"totals": totals(told), "kinds": rows(told), "seeds": seeds}, indent=1)
    )
    with capsys.disabled():
        print(f"\n{text(told)}\n{root / 'report.json'}")
    assert [seed for seed, survived in seeds.items() if not survived] == []
