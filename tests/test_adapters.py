"""Adapters published alone (--lora-publish adapter): what their folder holds, and the local engine that adds up."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import local_models
import pytest
import torch
from make import at_work, feed, loop_of, run, train_config
from processes import PATIENT, Stage, audited, contiguous, steps
from rig import Rig
from safetensors.torch import load_file, save_file
from test_lora import IDS, KINDS, backend, logits
from trainer_groups import random_groups

from consumers.drain import Batch, Drain
from consumers.staleness import Limit
from pipeline import flags
from pipeline.codec import encode
from pipeline.errors import UsageError, WeightsError
from pipeline.evals import Ask, ask_of
from pipeline.modes import idle
from pipeline.types import HF, PEFT, Policy
from producers.engines.echo import EchoEngine
from producers.engines.local_weights import read
from producers.eval_cli import main
from trainer.backends.lora import adapted
from trainer.backends.torch import TorchBackend
from trainer.weights import digest, versions


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local_models.save_all(KINDS, tmp_path_factory.mktemp("models"))


def alone(trained: TorchBackend, folder: Path) -> Path:
    folder.mkdir()
    trained.save_weights(folder, PEFT)
    return folder


def policy(version: int, folder: Path) -> Policy:
    return Policy(version, str(folder), PEFT, "", 0, 0.0)


def own(trained: TorchBackend) -> torch.Tensor:
    with torch.no_grad():
        return trained._model.logits(IDS, torch.arange(IDS.numel()))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["demo", "tied", "gpt2"])
def test_a_versions_folder_is_what_peft_loads_upon_the_model_that_it_names(
    models: Path, tmp_path: Path, kind: str
) -> None:
    from peft import PeftModel

    trained = backend(models / kind)
    for version in range(2):
        folder = alone(trained, tmp_path / f"{version}")
        assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(models / kind)
        loaded = PeftModel.from_pretrained(local_models.load(Path(config["base_model_name_or_path"])), folder)
        assert torch.allclose(logits(loaded, IDS).flatten(0, 1), own(trained), atol=1e-5)
        trained.train(random_groups(3, 4), version)
    first = load_file(tmp_path / "0" / "adapter_model.safetensors")
    assert all(not tensor.any() for name, tensor in first.items() if ".lora_B." in name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_local_engine_adds_each_version_to_the_model_and_never_to_the_one_before(
    models: Path, tmp_path: Path, kind: str
) -> None:
    """After five versions the first gives its very weights; log-probabilities are the trainer's."""
    trained = backend(models / kind)

    async def main() -> None:
        async with local_models.running(models / kind) as engine:
            assert engine._sampler
            original = {name: tensor.clone() for name, tensor in engine._sampler.state.items()}
            for version in range(1, 6):
                folder = alone(trained, tmp_path / f"{version}")
                await engine.load(policy(version, folder))
                asked = local_models.request(version, 6, 8)
                done = await engine.generate(asked)
                ids = local_models.sequence(asked, done)
                with torch.no_grad():
                    found = trained._model.logits(ids, torch.arange(5, ids.shape[1] - 1))
                expected = local_models.expected_logprobs(found, asked, done)
                assert abs(done.logprobs - expected).max() < 1e-4
                trained.train(random_groups(3, 4, seed=version), version)
            moved = [name for name, tensor in engine._sampler.state.items() if not torch.equal(tensor, original[name])]
            assert len(moved) == len(adapted(trained._model.module))
            await engine.load(policy(6, tmp_path / "1"))
            assert all(torch.equal(tensor, original[name]) for name, tensor in engine._sampler.state.items())

    asyncio.run(main())


def test_a_layer_that_has_no_adapter_any_more_is_the_models_own_again(models: Path, tmp_path: Path) -> None:
    every, few = backend(models / "demo"), backend(models / "demo", lora_target_modules="down_proj")
    for trained in (every, few):
        trained.train(random_groups(3, 4), 0)

    async def main() -> None:
        async with local_models.running(models / "demo") as engine:
            assert engine._sampler
            original = {name: tensor.clone() for name, tensor in engine._sampler.state.items()}
            await engine.load(policy(1, alone(every, tmp_path / "every")))
            await engine.load(policy(2, alone(few, tmp_path / "few")))
            moved = {name for name, tensor in engine._sampler.state.items() if not torch.equal(tensor, original[name])}
        assert moved == {f"{name}.weight" for name in adapted(few._model.module)}

    asyncio.run(main())


def test_adapters_are_not_added_to_weights_that_came_in_the_models_place(models: Path, tmp_path: Path) -> None:
    trained = backend(models / "demo")
    (tmp_path / "merged").mkdir()
    trained.save_weights(tmp_path / "merged")
    folder = alone(trained, tmp_path / "alone")

    async def main() -> None:
        async with local_models.running(models / "demo") as engine:
            await engine.load(local_models.policy(1, tmp_path / "merged"))
            with pytest.raises(WeightsError, match="the model they are of was replaced"):
                await engine.load(policy(2, folder))
            assert engine.version == 1

    asyncio.run(main())


def spoilt(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_does_not_fit_is_told_and_the_weights_stay(models: Path, tmp_path: Path) -> None:
    trained = backend(models / "demo")
    good = alone(trained, tmp_path / "good")
    dora, other, half = (alone(trained, tmp_path / name) for name in ("dora", "other", "half"))
    spoilt(dora, use_dora=True)
    (other / "adapter_model.safetensors").write_bytes(
        (alone(backend(models / "tied"), tmp_path / "tied") / "adapter_model.safetensors").read_bytes()
    )
    tensors = load_file(half / "adapter_model.safetensors")
    save_file(
        {n: t for n, t in tensors.items() if ".0.mlp.up_proj.lora_B" not in n}, half / "adapter_model.safetensors"
    )
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "adapter_config.json").touch()

    async def main() -> None:
        async with local_models.running(models / "demo") as engine:
            await engine.load(policy(1, good))
            for folder, said in (
                (dora, "no plain adapters .*'use_dora': True"),
                (other, r"is .64, 128., and its adapter .32, 64."),
                (half, "a lora_A and a lora_B a layer"),
                (tmp_path / "none", "no .*safetensors there"),
                (tmp_path / "gone", "no .*safetensors there"),
            ):
                with pytest.raises(WeightsError, match=said):
                    await engine.load(policy(2, folder))
            assert engine.version == 1

    asyncio.run(main())


def test_layers_that_engines_run_as_one_all_have_one(models: Path, tmp_path: Path) -> None:
    """SGLang takes adapters of k and v with q's alone, and those of up with gate's, and passes over others in silence;
    so their neighbours have ones that do nothing."""
    trained = backend(models / "demo", lora_target_modules="k_proj,up_proj")
    trained.train(random_groups(3, 4), 0)
    folder = alone(trained, tmp_path / "alone")
    tensors = load_file(folder / "adapter_model.safetensors")
    ends = {name.split(".")[-3] for name in tensors}
    assert ends == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert {name.split(".")[-3] for name, t in tensors.items() if t.any()} == {"k_proj", "up_proj"}
    named = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    assert {f"base_model.model.{name}.lora_{part}.weight" for name in named for part in "AB"} == tensors.keys()


# -- the trainer's loop


def test_a_run_publishes_adapters_alone_and_leaves_a_whole_model_at_its_end(
    real: Rig, models: Path, tmp_path: Path
) -> None:
    """From the version before the first step on; folders that nobody uses go as ever. What is merged at the end is what
    an engine has that adds up the last version."""
    rules = {"train_backend": "torch", "hf_checkpoint": models / "demo", "lora_rank": 4, "lora_publish": "adapter"}
    rules["max_weight_staleness"] = 9
    trained = backend(models / "demo")
    feed(real, 6, ends=True)
    worker = real.worker()
    for step in (1, 3):  # of a run that had ended, and was gone on with; of one that went back and trains step 3 again
        (tmp_path / f"merged-{step:08d}").mkdir()
        (tmp_path / f"merged-{step:08d}" / "model.safetensors").touch()
    loop = loop_of(real, tmp_path, trained, num_rollout=3, **rules)  # type: ignore[arg-type]
    told = real.do(worker.agreed())
    assert told
    assert told.adapter_rank == 4
    rollout, seen = loop.rollout, []

    def answered(drain: Drain, limit: Limit) -> Batch | None:
        policy = real.do(worker.policy())
        assert policy
        seen.append((policy.version, policy.format, policy.digest))
        for lease in real.lease(worker, 2):
            group = random_groups(1, 2, seed=lease.prompt.id)[0]
            assert real.do(worker.push(lease, encode(replace(group, prompt=lease.prompt)))) == "pushed"
        return rollout(drain, limit)

    loop.rollout = answered
    run(loop)
    assert [version for version, _, _ in seen] == [1, 2, 3]
    assert {form for _, form, _ in seen} == {PEFT}
    folders = versions(tmp_path / "weights")
    assert max(folders) == 4
    assert all((folder / "adapter_config.json").is_file() for folder in folders.values())
    assert digest(folders[4]) == real.do(worker.policy()).digest  # type: ignore[union-attr]
    kept = read(folders[4], load_file(models / "demo" / "model.safetensors"), {})
    assert [path.name for path in tmp_path.glob("merged-*")] == ["merged-00000003"]
    whole = load_file(tmp_path / "merged-00000003" / "model.safetensors")
    assert all(torch.allclose(whole[name], kept[name], atol=1e-6) for name in kept)
    assert local_models.load(tmp_path / "merged-00000003").config.vocab_size == 22


def test_an_evaluation_is_asked_for_with_what_the_folder_holds() -> None:
    """And one that stood in a run's folder before there was such a thing is of a whole model."""
    ask = ask_of(train_config(eval_interval=1, eval_prompt_data="a data.jsonl", rm_type="exact"), policy(3, Path("w3")))
    told = json.loads(ask.model_dump_json())
    assert Ask(**told).policy == policy(3, Path("w3"))
    del told["format"]
    assert Ask(**told).policy.format == HF


# -- evaluations by hand


def rewarded(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, float]:
    assert main([*map(str, words), "--json"]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)
    del found["eval/seconds"]
    return found


def test_adapters_are_evaluated_by_hand_as_the_model_with_them(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a run published, a checkpoint of it, and the run itself, with the model that the folder names or that the
    run began with."""
    trained = backend(models / "demo", lr=0.05)
    for step in range(6):
        trained.train(random_groups(4, 4, seed=step), step)
    out = tmp_path / "run"
    point, published = out / "checkpoints/00000006", out / "weights/00000007"
    for folder in (point / "model", published, tmp_path / "merged"):
        folder.mkdir(parents=True)
    trained.save(point / "model")
    (point / "state.json").write_text("{}")
    trained.save_weights(published, PEFT)
    trained.save_weights(tmp_path / "merged")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"input": "A:{n}=", "label": "{n}"}}\n' for n in range(1000, 1040)))
    how = (
        "--rm-type",
        "positions",
        "--eval-prompt-data",
        "a",
        prompts,
        "--eval-max-response-len",
        5,
        "--device",
        "cpu",
    )
    how = (*how, "--eval-temperature", 0)
    whole = rewarded(capsys, tmp_path / "merged", *how)
    assert rewarded(capsys, published, *how) == whole != rewarded(capsys, models / "demo", *how)
    config = train_config(train_backend="torch", hf_checkpoint=models / "demo", lora_rank=4)
    (out / "trainer.toml").write_text(flags.dump(config, idle(config)))
    assert rewarded(capsys, out, *how) == rewarded(capsys, point, *how) == rewarded(capsys, published, *how) == whole
    spoilt(published, base_model_name_or_path="somewhere/else")
    (out / "trainer.toml").unlink()
    with pytest.raises(UsageError, match="holds adapters to somewhere/else: give its folder with --hf-checkpoint"):
        main([str(published), *map(str, how)])


@pytest.mark.parametrize(("rank", "meant", "other"), [(0, HF, PEFT), (8, PEFT, HF)])
def test_a_generator_does_not_load_weights_of_another_form_than_its_rules_say(
    real: Rig, rank: int, meant: str, other: str
) -> None:
    """A trainer that was resumed with another --lora-publish announces its weights before this worker has read so.
    Taken for what they are not, they could not be loaded, and that would end the run."""
    trainer = real.trainer(digest="old", adapter_rank=rank)

    async def go() -> tuple[int | None, int | None]:
        engine = EchoEngine("0", 4)
        async with at_work(real, engine) as generator:
            trainer.publish(Policy(7, "weights/7", other, "digest", 7, 0.0), [])
            await generator.weights()
            before = engine.version
            trainer.publish(Policy(8, "weights/8", meant, "digest", 8, 0.0), [])
            await generator.weights()
            return before, engine.version

    assert real.do(go()) == (None, 8)


def test_a_whole_run_samples_with_the_probabilities_that_its_trainer_finds(models: Path, tmp_path: Path) -> None:
    """On-policy, so that they are of the same weights: what the engine adds up is what is trained."""
    from producers.demo import write_prompts

    out, data = tmp_path / "run", write_prompts(tmp_path / "demo.jsonl", 1, 256)
    with Stage(tmp_path) as stage:
        stage.millpond(
            *("run", "--out", out, "--hf-checkpoint", models / "demo", "--prompt-data", data, "--device", "cpu"),
            *("--rm-type", "positions", "--no-fully-async", "--num-rollout", "3", "--rollout-batch-size", "8"),
            *("--n-samples-per-prompt", "4", "--rollout-max-response-len", "5", "--lora-rank", "8", "--lr", "0.05"),
            *("--lora-publish", "adapter", *PATIENT),
        ).ends(0, seconds=240)
        places = audited(stage, out)
    lines = steps(out)
    assert contiguous(lines) == 3
    assert places["committed"] == 3 * 8
    assert max(line["train/train_rollout_logprob_abs_diff"] for line in lines) < 1e-4
    assert {path.name for path in (out / "weights" / "00000004").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    changed = load_file(out / "merged-00000003" / "model.safetensors")
    assert any(not torch.equal(t, changed[n]) for n, t in load_file(models / "demo/model.safetensors").items())
