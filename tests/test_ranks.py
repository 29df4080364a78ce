"""Two processes under torchrun train as one does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import local_models
import numpy as np
import pytest
import torch
from processes import Parts, Stage, Started, contiguous, eventually, own_code, steps
from ranks_script import main
from safetensors.torch import load_file
from trainer_groups import random_groups

from pipeline import cli
from pipeline.errors import UsageError
from pipeline.keys import Keys
from pipeline.leases import WorkerBroker
from trainer import demo_model
from trainer.batch import Passes, share, shares, units
from trainer.ranks import meet

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
    "GRPO by minibatches": {"global_batch_size": 5, "entropy_coef": 0.01, "gradient_checkpointing": True},
    "REINFORCE++ with KL": {
        "advantage_estimator": "reinforce_plus_plus",
        "kl_coef": 0.1,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "max_tokens_per_gpu": 24,
    },
    "each has all": {
        "data_parallel_sharding_strategy": "no_shard",
        "balance_data": False,
        "use_dynamic_batch_size": False,
        "micro_batch_size": 2,
        "kl_coef": 0.1,
    },
    "adapters": {"lora_rank": 4, "use_kl_loss": True, "kl_loss_coef": 0.1},
    "adapters, each has all": {"lora_rank": 4, "data_parallel_sharding_strategy": "no_shard", "global_batch_size": 5},
    "bfloat16": {"bf16": True},
    "adapters, bfloat16": {"lora_rank": 4, "bf16": True},
}


@pytest.mark.parametrize("name", RULES)
def test_two_ranks_make_the_steps_of_one_with_any_count_of_samples(tmp_path: Path, name: str) -> None:
    """Steps of 12, 3, 9, 1 and 0 samples (BB-37, BB-41); a large epsilon makes Adam's steps proportional to the
    gradient. FSDP2 casts weights where one process casts what is multiplied: half a per cent of difference."""
    rel, near, moved = (0.02, 1e-3, 5e-4) if "bfloat16" in name else (1e-4, 1e-6, 1e-5)
    demo_model.make(tmp_path / "demo", 0)
    demo_model.make(tmp_path / "other", 1)
    if name == "adapters, bfloat16":  # frozen layers are in it, too
        local_models.load(tmp_path / "demo").to(torch.bfloat16).save_pretrained(tmp_path / "demo")
    rules = {"hf_checkpoint": str(tmp_path / "demo"), "lr": 0.1, "adam_eps": 1.0, **RULES[name]}
    if rules.get("use_kl_loss") and "lora_rank" not in rules:
        rules["ref_load"] = str(tmp_path / "other")
    counts = json.dumps([4, 1, 3])
    done = torchrun(TESTS / "ranks_script.py", json.dumps(rules), tmp_path / "two", counts)
    assert done.returncode == 0, done.stderr[-5000:]
    main(json.dumps(rules), str(tmp_path / "one"), counts)
    sent, written = load_file(tmp_path / "two" / "sent.safetensors"), weights(tmp_path / "two" / "save_weights-2")
    assert sent.keys() == written.keys()
    assert all(torch.equal(sent[name], written[name]) for name in written)
    one, two = (json.loads((tmp_path / which / "lines.json").read_text()) for which in ("one", "two"))
    for mine, theirs in zip(one, two, strict=True):
        assert theirs == pytest.approx(mine, rel=rel, abs=near)
    assert one[0]["train/grad_norm"] > 1e-3
    assert two[-1] == pytest.approx(two[1], rel=1e-6)
    for step in range(3):
        for kind in ("save", "save_weights", *(("adapter",) if "lora_rank" in rules else ())):
            a, b = (weights(tmp_path / which / f"{kind}-{step}") for which in ("one", "two"))
            assert a.keys() == b.keys()
            assert all(torch.allclose(a[n].float(), b[n].float(), atol=moved) for n in a)


@pytest.mark.parametrize(("prompts", "ranks"), [(1, 4), (5, 4), (103, 4), (2, 1), (0, 3)])
def test_any_count_of_samples_on_any_number_of_ranks_loses_none_and_all_run_as_often(prompts: int, ranks: int) -> None:
    """BB-41: 206 of them on 4 ranks, 2 on 4, none."""
    found = units(random_groups(prompts, 2))
    parts = [share(found, Passes(40), rank, ranks) for rank in range(ranks)]
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


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--")
RULES_OF_RUN = ("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "5")


def trainer(parts: Parts, model: Path, *more: object) -> Started:
    return parts.millpond(
        *("train", "--run", parts.run, "--out", parts.out, "--hf-checkpoint", model, "--device", "cpu"),
        *("--rm-type", "positions", *RULES_OF_RUN, "--fully-async", "--max-weight-staleness", "2", *more),
        under=TORCHRUN,
        MILLPOND_REDIS_URL=parts.url,
    )


def helpers(parts: Parts, model: Path, *reward: str, **env: str) -> tuple[Started, Started]:
    at = {"MILLPOND_REDIS_URL": parts.url, **env}
    reward = reward or ("--rm-type", "positions")
    where = ("--run", parts.run, "--out", parts.out)
    feeder = parts.millpond("feed", *where, "--prompt-data", parts.data, "--num-epoch", "1", **at)
    return feeder, parts.millpond("generate", *where, "--hf-checkpoint", model, "--device", "cpu", *reward, **at)


def rows(folder: Path, count: int) -> Path:
    """Prompts that the demo model can read."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"input": f"{n:04d}=", "label": f"{n:04d}"}) + "\n" for n in range(count)))
    return path


def test_a_run_goes_the_whole_way_round_on_two_ranks_after_a_wait_beyond_their_time_out(
    redis_url: str, tmp_path: Path
) -> None:
    demo_model.make(tmp_path / "demo", 0)
    with Parts(tmp_path, redis_url, rows(tmp_path, 24)) as parts:
        train = trainer(parts, tmp_path / "demo", "--num-epoch", "1", "--distributed-timeout-minutes", "0.05")
        eventually(lambda: parts.broker.state().get("status") == "running", "a trainer")
        time.sleep(4)
        feeder, generator = helpers(parts, tmp_path / "demo")
        for process in (train, feeder, generator):
            process.ends(0, seconds=120)
        assert parts.audit().places["committed"] == 24
        assert contiguous(steps(parts.out)) == 6
    assert sum(line["train/grad_norm"] > 0 for line in steps(parts.out)) >= 1


def test_an_error_of_rank_0_reaches_the_others_and_what_was_trained_is_saved(redis_url: str, tmp_path: Path) -> None:
    demo_model.make(tmp_path / "demo", 0)
    with Parts(tmp_path, redis_url, rows(tmp_path, 400)) as parts:
        train = trainer(parts, tmp_path / "demo", "--num-epoch", "1")
        helpers(parts, tmp_path / "demo")
        eventually(lambda: len(steps(parts.out)) >= 2, "two steps")
        asyncio.run(fail(parts))
        said = train.ends(1, seconds=30)
        assert "KeyError: 'x'" in said
        assert parts.audit().places["committed"] >= 8


FAILS = {
    "can't start new thread": ("--rollout-function-path", "import threading; threading.stack_size(1 << 46)"),
    "no model today": (
        "--custom-tis-function-path",
        "import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(6)\n    raise OSError('no model today')",
    ),
}
"What ends it -> the option that names the user's code, and that."


@pytest.mark.parametrize("said", FAILS)
def test_rank_0_failing_where_others_are_ready_to_be_told_ends_them_at_once(
    redis_url: str, tmp_path: Path, said: str
) -> None:
    """torchrun would wait ten minutes for them."""
    flag, source = FAILS[said]
    source += "\ndef function(*_):\n    raise NotImplementedError\n"
    demo_model.make(tmp_path / "demo", 0)
    env = {**own_code(tmp_path, source), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}
    with Parts(tmp_path, redis_url, tmp_path) as parts:
        alone = ("--data-parallel-sharding-strategy", "no_shard", "--num-rollout", "1", "--no-fully-async")
        train = parts.millpond(
            *("train", "--run", parts.run, "--out", parts.out, "--hf-checkpoint", tmp_path / "demo", "--device", "cpu"),
            *("--rm-type", "positions", *RULES_OF_RUN, *alone, "--use-tis", flag, "mine.function"),
            under=TORCHRUN,
            MILLPOND_REDIS_URL=parts.url,
            **env,
        )
        assert said in train.ends(1, seconds=120)


def test_a_rank_that_waits_for_one_which_never_comes_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """Rank 0 may have failed before they met; torchrun then waits half a minute for who does not listen."""
    with Stage(tmp_path) as stage, socket.create_server(("127.0.0.1", 0)) as store:
        env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.getsockname()[1])}
        rank = stage.millpond("train", "--run", "x", "--device", "cpu", "--num-rollout", "1", **env)
        store.settimeout(60)
        with store.accept()[0]:
            rank.kill(signal.SIGTERM)
            assert rank.wait(30) == -signal.SIGTERM


PLACE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"As torchrun sets it."


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"RANK": "", "MASTER_ADDR": "", "MASTER_PORT": ""},
            "=2 is set without RANK, MASTER_ADDR, MASTER_PORT; torchrun",
        ),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two is no number; torchrun"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: there is at least one process; torchrun"),
        ({"RANK": "2"}, "RANK=2: the ranks of WORLD_SIZE=2 are 0 to 1; torchrun"),
        ({"RANK": "1", "WORLD_SIZE": ""}, "RANK=1: the ranks of WORLD_SIZE=1 are 0 to 0; torchrun"),
        ({"RANK": "-1"}, "RANK=-1: "),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http is no number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no port"),
    ],
)
def test_an_environment_that_torchrun_would_not_have_set_is_refused_by_its_variables(
    changes: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**PLACE, **changes}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "--run", "x", "--num-rollout", "1"]) == 2
    assert said in capsys.readouterr().err


def test_a_rendezvous_that_cannot_be_is_told_with_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 cannot serve where another does."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for name, value in {**PLACE, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            UsageError, match=f"rank 0 of 2 has met no others at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}: "
        ):
            meet(1, torch.device("cpu"))


async def fail(parts: Parts) -> None:
    worker = WorkerBroker(parts.url, Keys(parts.run), "w7")
    await worker.fail("Traceback: in reward", "KeyError: 'x'")
    await worker.close()
