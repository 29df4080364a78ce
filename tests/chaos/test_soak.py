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
from pathlib import Path

import pytest
import troupe
from cast import Cast
from episode import Record, play
from faults import KINDS
from plan import Setting, any_setting, some
from report import rows, text, totals
from troupe import WITNESSED, Troupe

from pipeline.server import EmbeddedServer

SECONDS = 45.0
"Of faults in an episode; healing comes after."
LEARNS = (*WITNESSED, "--num-rollout", "40", "--save-interval", "3")


def episode(seed: int, folder: Path, record: Record) -> None:
    dice = random.Random(seed)
    setting, which = any_setting(dice), dice.random()
    if which < 0.6:
        with EmbeddedServer(folder / "redis", setting.durability) as server, Cast(folder, server, setting) as cast:
            play(cast, some(dice, list(KINDS), SECONDS), record)
    elif which < 0.9:
        with Troupe(folder, setting) as scene:
            play(scene, some(dice, list(troupe.KINDS), SECONDS), record)
    else:
        with Troupe(folder, Setting(rows=None, pace=0.2), *LEARNS) as scene:
            play(scene, some(dice, list(troupe.KINDS), SECONDS), record)


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
