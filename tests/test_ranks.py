"""Two processes under torchrun train as one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks_script import main
from safetensors.torch import load_file
from trainer_groups import random_groups

from trainer import demo_model
from trainer.batch import share, shares, units

TESTS = Path(__file__).parent


def torchrun(*command: object, ranks: int = 2, **env: str) -> subprocess.CompletedProcess[str]:
    """Gone with all its processes after four minutes at the latest."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *map(str, command)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MILLPOND_")}
    return subprocess.run(
        [sys.executable, *words],
        env={**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


RULES: dict[str, dict[str, Any]] = {
    "GRPO by minibatches": {"global_batch_size": 5, "entropy_coef": 0.01},
    "REINFORCE++ with KL": {
        "advantage_estimator": "reinforce_plus_plus",
        "kl_coef": 0.1,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "max_tokens_per_gpu": 24,
    },
}


@pytest.mark.parametrize("name", RULES)
def test_two_ranks_make_the_steps_of_one_with_any_count_of_samples(tmp_path: Path, name: str) -> None:
    """Steps of 12, 3 and 9 samples; a large epsilon makes Adam's steps proportional to the gradient."""
    demo_model.make(tmp_path / "demo", 0)
    demo_model.make(tmp_path / "other", 1)
    rules = {"hf_checkpoint": str(tmp_path / "demo"), "lr": 0.1, "adam_eps": 1.0, **RULES[name]}
    if "kl_coef" in rules:
        rules["ref_load"] = str(tmp_path / "other")
    counts = json.dumps([4, 1, 3])
    done = torchrun(TESTS / "ranks_script.py", json.dumps(rules), tmp_path / "two", counts)
    assert done.returncode == 0, done.stderr[-5000:]
    main(json.dumps(rules), str(tmp_path / "one"), counts)
    one, two = (json.loads((tmp_path / which / "lines.json").read_text()) for which in ("one", "two"))
    for mine, theirs in zip(one, two, strict=True):
        assert theirs == pytest.approx(mine, rel=1e-4, abs=1e-6)
    assert one[0]["train/grad_norm"] > 1e-3
    assert two[-1] == pytest.approx(two[1], rel=1e-6)
    for step in range(3):
        for kind in ("save", "save_weights"):
            a, b = (weights(tmp_path / which / f"{kind}-{step}") for which in ("one", "two"))
            assert a.keys() == b.keys()
            assert all(torch.allclose(a[n].float(), b[n].float(), atol=1e-5) for n in a)


@pytest.mark.parametrize(("prompts", "ranks"), [(1, 4), (5, 4), (103, 4), (2, 1), (0, 3)])
def test_any_count_of_samples_on_any_number_of_ranks_loses_none_and_all_run_as_often(prompts: int, ranks: int) -> None:
    found = units(random_groups(prompts, 2))
    parts = [share(found, 40, rank, ranks) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    ids = sorted(id for part in parts for micro in part for id in micro.ids)
    assert ids == sorted((*unit.id, 0) for unit in found)
    tokens = [t for part in parts for micro in part for t in micro.targets.tolist()]
    assert len(tokens) == sum(unit.tokens for unit in found)


def test_ranks_have_about_as_many_tokens() -> None:
    found = units(random_groups(60, 8))
    loads = [sum(unit.cost for unit in part) for part in shares(found, 4)]
    assert max(loads) - min(loads) <= max(unit.cost for unit in found)
    assert np.sum(loads) == sum(unit.cost for unit in found)
