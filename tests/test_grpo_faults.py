"""Faults of the field in GRPO's arithmetic, end to end: each with what is right, by its number. More of them stand with
the parts: BB-34 in test_batch, BB-35 in test_advantages, BB-40 in test_rewards, BB-41 in test_ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from make import at_work, drain_of, feed, until
from processes import SMALL, Stage, audited, own_code, prompts, steps
from rig import Rig
from trainer_groups import group, random_groups, sample, sequence

from consumers.staleness import Limit
from pipeline.config import TrainConfig
from pipeline.errors import Starved
from pipeline.types import Group
from producers import filters
from producers.engines.echo import EchoEngine
from producers.rewards import Custom
from trainer import backends, demo_model
from trainer.backends.base import Backend


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "demo"
    demo_model.make(folder, 0)
    return folder


@contextmanager
def backend(checkpoint: Path, **rules: Any) -> Iterator[Backend]:
    made, _ = backends.BUILDERS[rules.get("train_backend", "torch")](
        TrainConfig.model_validate({"hf_checkpoint": checkpoint, "device": "cpu", "lr": 1e-2, **rules}), True
    )
    try:
        yield made
    finally:
        made.close()


def weights(made: Backend) -> dict[str, torch.Tensor]:
    return {piece.name: tensor.clone() for piece, tensor in zip(made.outline(), made.pieces(), strict=True)}


def masked() -> dict[str, list[Group]]:
    """Batches without a token to train on."""
    q, cut = sequence([3, 4], [5, 6]), sequence([3, 4], [5, 6, 7, 8], mask=[0] * 4)
    return {
        "all responses are empty": [group(0, *(sample(i, float(i), sequence([3, 4], [])) for i in range(2)))],
        "all are truncated, and masked": [
            group(0, *(sample(i, float(i), cut, status="truncated") for i in range(2))),
            group(1, *(sample(i, float(i), q, metadata={"remove_sample": True}) for i in range(2))),
        ],
        "none is scored": [group(0, *(sample(i, None, q) for i in range(4)))],
        "there is none": [],
    }


LOSSES = {
    "clip": {"advantage_estimator": "grpo", "use_rs": True, "rs_lower_bound": 0.0, "rs_upper_bound": 1e9},
    "clip, KL": {"advantage_estimator": "rloo", "use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01},
    "gspo": {"advantage_estimator": "gspo"},
    "cispo": {"advantage_estimator": "cispo"},
    "whitened": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1},
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["torch", "megatron"])
def test_a_batch_without_a_token_to_train_on_moves_no_weight_by_a_bit(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, name: str, loss: str
) -> None:
    """BB-37: whatever the loss, and in both backends."""
    if name == "megatron" and find_spec("megatron") is None:
        pytest.skip("there is no megatron-core: pip install 'millpond[megatron]'")
    with backend(checkpoint, train_backend=name, weight_decay=0.1, **LOSSES[loss]) as made:
        assert made.train(random_groups(2, 4), 0)["train/grad_norm"] > 0  # from here on Adam has momentum
        before = weights(made)
        for batch in masked().values():
            figures = made.train(batch, 1)
            assert figures["train/loss"] == figures["train/grad_norm"] == figures["train/skipped"] == 0
            assert all(math.isfinite(value) for value in figures.values())
        after = weights(made)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert caplog.text.count("every token is masked") == 3
        assert made.train(random_groups(2, 4, seed=1), 2)["train/grad_norm"] > 0


def test_a_sample_without_a_score_leaves_its_siblings_step_alone(checkpoint: Path) -> None:
    """BB-35: [1, None, 0, 1] trains as [1, 0, 1] does, and [None] * 4 trains nothing; both are counted."""
    q = [sequence([3, 4], [5 + i, 6]) for i in range(4)]
    whole = [
        group(0, *(sample(i, reward, q[i]) for i, reward in enumerate((1.0, None, 0.0, 1.0)))),
        group(1, *(sample(i, None, q[i]) for i in range(4))),
    ]
    without = [group(0, sample(0, 1.0, q[0]), sample(2, 0.0, q[2]), sample(3, 1.0, q[3]))]
    found = []
    for batch in (whole, without):
        with backend(checkpoint) as made:
            found.append((made.train(batch, 0), weights(made)))
    (figures, one), (expected, other) = found
    assert figures == {**expected, "train/masked_samples": 5.0}
    assert all(torch.equal(one[name], other[name]) for name in one)


ENDS = {"zero": "12 dropped under zero_std_0.0", "one": "12 dropped under zero_std_1.0"}


@pytest.mark.parametrize("rewards", ENDS)
def test_a_run_whose_groups_are_all_dropped_ends_with_the_data_and_says_why(tmp_path: Path, rewards: str) -> None:
    """BB-39: no prompt is burned twice, and none is fed beyond the epoch."""
    out = tmp_path / "run"
    env = own_code(tmp_path, "def zero(x):\n    return 0.0\n\n\ndef one(x):\n    return 1.0\n")
    rules = ("--custom-rm-path", f"mine.{rewards}", "--dynamic-sampling-filter-path", "producers.filters.nonzero_std")
    data = ("--prompt-data", prompts(tmp_path, 12), "--num-epoch", "1", "--engine", "echo", "--train-backend", "echo")
    with Stage(tmp_path) as stage:
        said = stage.millpond("run", "--out", out, *SMALL, *data, *rules, **env).ends(0, seconds=120)
        assert ENDS[rewards] in said
        assert audited(stage, out) == {"dropped": 12} | {k: 0 for k in audited(stage, out) if k != "dropped"}
    assert steps(out) == []


def test_a_trainer_that_gets_nothing_says_how_many_groups_were_dropped_and_why(real: Rig) -> None:
    """BB-39, with data without an end."""
    trainer = real.trainer(bound=2, in_flight=2)
    feed(real, 10)

    async def go() -> None:
        keep = filters.load("producers.filters.nonzero_std")
        async with at_work(real, EchoEngine("0", 4), keep=keep, scorer=Custom("mine.zero", lambda given: 0.0)):
            await until(lambda: real.counter("dropped:zero_std_0.0") == 10)

    real.do(go())
    with pytest.raises(Starved, match=r"10 fed; 10 dropped:zero_std_0.0"):
        drain_of(trainer).batch(Limit(1, (), 2))
