"""A whole run whose weights go over a process group, and its trainer killed in the middle of one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest
from fake_sglang import FakeSGLang, in_a_thread
from processes import PATIENT, SMALL, Stage, audited, contiguous, eventually, steps

from producers.demo import write_prompts
from trainer import demo_model

pytestmark = pytest.mark.timeout(600)


def test_a_trainer_that_is_killed_while_it_sends_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    out, data = tmp_path / "run", write_prompts(tmp_path / "demo.jsonl", 1)
    demo_model.make(tmp_path / "model", 0)
    fake = FakeSGLang(context=64, vocab=22)
    with in_a_thread(fake) as loop, Stage(tmp_path) as stage:
        run = stage.millpond(
            *("run", "--out", out, "--engine", "sglang", "--engine-url", fake.url, "--device", "cpu", *SMALL, *PATIENT),
            *("--hf-checkpoint", tmp_path / "model", "--prompt-data", data, "--num-rollout", "16"),
            *("--rm-type", "positions", "--rollout-max-response-len", "5", "--save-interval", "1"),
            *("--update-weight-transport", "distributed"),
        )
        eventually(lambda: fake.received, "an update over a process group", 120)
        fake.held = True
        eventually(lambda: fake.holding, "another one", 120)
        os.kill(run.children()["train"], signal.SIGKILL)
        fake.held = False
        asyncio.run_coroutine_threadsafe(fake.move(), loop).result()
        said = run.ends(0, seconds=240)
        places = audited(stage, out)
    assert contiguous(steps(out)) == 16
    assert places["committed"] == 16 * 4
    loaded = [int(body["weight_version"]) for body in fake.bodies("/update_weights_from_disk")]
    groups = [body["group_name"].split("-")[:2] for body in fake.bodies("/init_weights_update_group")]
    assert loaded == sorted(loaded)
    assert len({epoch for epoch, _ in groups}) == 2, said
    versions = [int(version) for _, version in groups]
    assert versions == sorted(set(versions))
    text = "".join(path.read_text() for path in (out / "logs").glob("trainer*"))
    assert re.search(r"version \d+ went to 1 engines", text)
