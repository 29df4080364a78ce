"""The unmodified SGLang server on CPUs: what the contract's tests imagine is held against it. At most two starts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from make import train_config
from processes import PATIENT, Stage, Started, audited, contiguous, eventually, family, own_code, steps
from rig import Rig
from test_deploy import ENV, SMALL, Deployed, redis_service
from test_sglang_wire import BODIES
from trainer_groups import random_groups

from pipeline.errors import UsageError
from pipeline.types import PEFT, Policy, Span
from producers.catch_up import CatchUp
from producers.engines import sglang_wire as wire
from producers.engines.base import Completion, Request, Sampling
from producers.engines.sglang import SGLangEngine
from producers.engines.sglang_adapters import Adapters
from producers.engines.sglang_pool import Servers
from producers.sglang_cpu.serve import ServeConfig, complete, environment
from trainer import demo_model
from trainer.backends.echo import EchoBackend
from trainer.backends.hf import CausalModel
from trainer.backends.torch import TorchBackend
from trainer.push import Push
from trainer.weights import digest

T = TypeVar("T")
KEY = "sk-heron"
VENV = Path(os.environ.get("MILLPOND_SGLANG_VENV", ServeConfig().sglang_venv)).expanduser()
RANK = 4
"of adapters that the server has room for"
READY = 240.0
"seconds a start may take"

pytestmark = pytest.mark.timeout(600)


class Server:
    """One real server with an API key, and the folders it was and can be loaded from."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self.stage, self.folder = stage, folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.models = [folder / f"model-{n}" for n in range(4)]
        for seed, model in enumerate(self.models):
            demo_model.make(model, seed)
            edited(model / "config.json", eos_token_id=None, max_position_embeddings=512)
            edited(model / "generation_config.json", eos_token_id=None)
            edited(model / "tokenizer_config.json", eos_token=None)
        self.task = folder / "task"
        demo_model.make(self.task, 0)
        self.process = self.start()

    def start(self) -> Started:
        started = self.stage.millpond(
            *("sglang", "--hf-checkpoint", self.models[0], "--port", self.port, "--lora-rank", RANK),
            MILLPOND_ENGINE_API_KEY=KEY,
            MILLPOND_SGLANG_VENV=str(VENV),
        )
        eventually(lambda: started.process.poll() is not None or answers(f"{self.url}/health"), "a server", READY)
        assert started.process.poll() is None, started.said()[-5000:]
        return started

    def kill(self) -> None:
        """With its children; a server is a family of processes."""
        for pid in family(self.process.process.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.process.wait()

    def engine(self, key: str = KEY, mode: str = "retract", **more: Any) -> SGLangEngine:
        """`more` as Servers has it."""
        return SGLangEngine(self.models[0], Servers((self.url,), key=key, **more), mode, 60.0)

    def policy(self, version: int) -> Policy:
        return Policy(version, str(self.models[version % 4]), "hf", "digest", 0, time.time())


def edited(path: Path, **changes: Any) -> None:
    """What ends an answer is each request's to say, and some answers here are long."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def said_by(url: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {KEY}"})) as reply:
        return str(reply.read().decode())


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def installed() -> None:
    if not complete(VENV):
        why = f"there is no SGLang in {VENV}: `millpond sglang --install` makes it"
        (pytest.fail if "MILLPOND_CI" in os.environ else pytest.skip)(why)


@pytest.fixture(scope="module")
def server(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sglang")
    with Stage(folder) as stage:
        found = Server(stage, folder)
        yield found
        found.process.kill(15)
        found.process.wait(60)


def request(n: int, limit: int, temperature: float = 1.0) -> Request:
    tokens = np.array([13 + n % 3, 3 + n % 7, 4, 5, 9], dtype=np.int32)
    return Request(f"{n:032x}", tokens, Sampling(limit, temperature, ()), n)


async def opened(engine: SGLangEngine, policy: Policy) -> SGLangEngine:
    await engine.start()
    await engine.load(policy)
    return engine


def do(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def by_transformers(model: Path, asked: Request, done: Completion) -> np.ndarray[Any, Any]:
    """The log-probability of each sampled token."""
    from transformers import AutoModelForCausalLM

    ids = torch.from_numpy(np.concatenate((asked.tokens, done.tokens))).long()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()(input_ids=ids[None]).logits[0]
    logs = (logits / asked.sampling.temperature).log_softmax(-1)[len(asked.tokens) - 1 : -1]
    return logs.gather(1, ids[len(asked.tokens) :, None])[:, 0].numpy()


def test_what_a_wrong_key_is_told_names_the_option(server: Server) -> None:
    with pytest.raises(UsageError, match="--engine-api-key"):
        do(opened(server.engine(key="sk-magpie"), server.policy(1)))


def test_log_probabilities_are_those_of_transformers_under_the_weights_that_were_loaded(server: Server) -> None:
    asked = [request(n, 12, temperature) for n, temperature in enumerate((1.0, 0.7, 1.3))]

    async def go() -> list[Completion]:
        engine = await opened(server.engine(), server.policy(1))
        try:
            return [*await asyncio.gather(*map(engine.generate, asked))]
        finally:
            await engine.close()

    for one, done in zip(asked, do(go()), strict=True):
        assert len(done.tokens) == 12
        assert {span.version for span in done.versions} == {1}
        assert np.abs(by_transformers(server.models[1], one, done) - done.logprobs).max() < 1e-4


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_in_flight_survive_an_update_and_carry_both_versions(server: Server, mode: str) -> None:
    async def go() -> list[Completion]:
        engine = await opened(server.engine(mode=mode), server.policy(4))
        try:
            running = [asyncio.create_task(engine.generate(request(n, 200))) for n in range(16)]
            await asyncio.sleep(0.3)
            await engine.load(server.policy(5))
            return [*await asyncio.gather(*running)]
        finally:
            await engine.close()

    done = do(go())
    assert [len(one.tokens) for one in done] == [200] * 16
    spans = [[span.version for span in one.versions] for one in done]
    assert sum(found == [4, 5] for found in spans) >= 1
    assert all(found in ([4], [5], [4, 5]) for found in spans)


class Sent(EchoBackend):
    """A model's tensors, as the training backend gives them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0.0)
        model = CausalModel(folder, torch.device("cpu"))
        self.outline, self.pieces = model.outline, model.pieces  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_weights_come_from_the_trainer_over_a_process_group(
    server: Server, real: Rig, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With requests in flight, which carry both versions; nothing is left open, so that it can be done again."""
    caplog.set_level(logging.INFO, "trainer.push")
    trainer, worker = real.trainer(), real.worker()
    real.do(worker.register({"joins": True, "ready": True}))
    push = Push(train_config(update_weight_buffer_size=100_000), trainer, Sent(server.models[2]), "cpu")

    async def go() -> tuple[list[Completion], Completion]:
        engine = await opened(server.engine(mode=mode), server.policy(1))
        try:
            weights = CatchUp(worker, engine, lambda: asyncio.sleep(0))
            for version in (2, 6):
                running = [asyncio.create_task(engine.generate(request(n, 300))) for n in range(16)]
                publishing = asyncio.create_task(asyncio.to_thread(push, server.policy(version), []))
                while not publishing.done():
                    await weights()
                    await asyncio.sleep(0.02)
                await publishing
                across = [*await asyncio.gather(*running)]
            return across, await engine.generate(request(2, 12))
        finally:
            await engine.close()

    across, after = real.do(go())
    assert [len(one.tokens) for one in across] == [300] * 16
    assert [2, 6] in [[span.version for span in one.versions] for one in across]
    assert {span.version for span in after.versions} == {6}
    assert caplog.text.count("went to 1 engines") == 2
    assert np.abs(by_transformers(server.models[2], request(2, 12), after) - after.logprobs).max() < 1e-4


def test_an_abort_ends_a_request_with_what_it_has_and_no_other(server: Server) -> None:
    async def go() -> tuple[Completion, Completion]:
        engine = await opened(server.engine(), server.policy(6))
        try:
            first, other = (asyncio.create_task(engine.generate(request(n, 400))) for n in (1, 16))
            await asyncio.sleep(0.3)
            await engine.abort(request(1, 400).rid)
            return await first, await other
        finally:
            await engine.close()

    aborted, whole = do(go())
    assert aborted.finish == "abort"
    assert len(aborted.tokens) == len(aborted.logprobs) < 400
    assert len(whole.tokens) == 400


def test_who_comes_late_serves_nothing_before_it_has_the_current_weights(server: Server) -> None:
    """The server still has what others loaded before."""

    async def go() -> Completion:
        engine = server.engine()
        await engine.start()
        assert engine.version is None
        await engine.load(server.policy(7))
        done = await engine.generate(request(2, 8))
        await engine.close()
        return done

    done = do(go())
    assert {span.version for span in done.versions} == {7}
    assert np.abs(by_transformers(server.models[3], request(2, 8), done) - done.logprobs).max() < 1e-4


def test_adapters_come_and_go_beside_the_model_while_requests_run(server: Server, tmp_path: Path) -> None:
    """Published by the trainer's backend. Log-probabilities are the trainer's under each; what runs while the next one
    is loaded ends with its own; nothing of ours stays but the newest. Whole weights that a run had put there give way
    to the model, and later ones take its place again."""
    rules = {"hf_checkpoint": server.models[0], "device": "cpu", "lora_rank": RANK, "lr": 1e-2}
    trained = TorchBackend(train_config(train_backend="torch", **rules), True)
    adapters = Adapters(RANK, server.models[0])

    def published(version: int) -> Policy:
        folder = tmp_path / str(version)
        folder.mkdir()
        trained.save_weights(folder, PEFT)
        return Policy(version, str(folder), PEFT, digest(folder), version, 0.0)

    def agrees(asked: Request, done: Completion) -> bool:
        ids = torch.from_numpy(np.concatenate((asked.tokens, done.tokens))).long()
        with torch.no_grad():
            logits = trained._model.logits(ids[None], torch.arange(len(asked.tokens) - 1, len(ids) - 1))
        logs = logits.log_softmax(-1).gather(1, ids[len(asked.tokens) :, None])[:, 0].numpy()
        return bool(np.abs(logs - done.logprobs).max() < 1e-4)

    async def go() -> None:
        whole = await opened(server.engine(), server.policy(10))
        await whole.close()
        engine = server.engine(adapters=adapters)
        await engine.start()
        try:
            for version in (11, 13):
                await engine.load(published(version))
                running = [asyncio.create_task(engine.generate(request(n, 120))) for n in range(8)]
                await asyncio.sleep(0.2)
                short = await engine.generate(request(8, 12))
                assert [span.version for span in short.versions] == [version]
                assert agrees(request(8, 12), short)
                trained.train(random_groups(4, 4, seed=version), version)
                await engine.load(published(version + 1))
                across = await asyncio.gather(*running)
                assert {done.versions for done in across} == {(Span(version, 0, 120),)}
                after = await engine.generate(request(9, 12))
                assert agrees(request(9, 12), after)
                assert not agrees(request(8, 12), short)
        finally:
            await engine.close()
        there = json.loads(said_by(f"{server.url}/v1/models"))["data"]
        last = Policy(14, "", PEFT, digest(tmp_path / "14"), 0, 0.0)
        assert [card["id"] for card in there[1:]] == [wire.adapter(last)]
        again = await opened(server.engine(), server.policy(30))
        done = await again.generate(request(2, 12))
        await again.close()
        assert np.abs(by_transformers(server.models[2], request(2, 12), done) - done.logprobs).max() < 1e-4

    do(go())


@pytest.fixture
def router(server: Server) -> Iterator[str]:
    """SGLang's own, before the one server. It looks for a GPU first, hence the server's environment."""
    url, metrics = f"http://127.0.0.1:{free_port()}", free_port()
    where = ("--worker-urls", server.url, "--host", "127.0.0.1", "--port", url.rpartition(":")[2])
    process = subprocess.Popen(
        [VENV / "bin" / "sglang-router", "launch", *where, "--prometheus-port", str(metrics), "--api-key", KEY],
        env=environment(ServeConfig()),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: process.poll() is not None or answers(f"{url}/readiness"), "a router", READY)
        assert process.poll() is None
        yield url
    finally:
        process.kill()
        process.wait()


def test_requests_go_through_sglangs_router_and_weights_past_it(server: Server, router: str) -> None:
    """In flight through an update; a request that is aborted; log-probabilities as without the router."""
    asked = request(2, 12)

    async def go() -> tuple[list[Completion], Completion, Completion]:
        engine = await opened(server.engine(router=router), server.policy(8))
        try:
            running = [asyncio.create_task(engine.generate(request(n, 200))) for n in range(16)]
            await asyncio.sleep(0.3)
            await engine.load(server.policy(9))
            across = [*await asyncio.gather(*running)]
            long = asyncio.create_task(engine.generate(request(1, 400)))
            await asyncio.sleep(0.3)
            await engine.abort(request(1, 400).rid)
            return across, await long, await engine.generate(asked)
        finally:
            await engine.close()

    across, aborted, after = do(go())
    spans = [[span.version for span in one.versions] for one in across]
    assert [len(one.tokens) for one in across] == [200] * 16
    assert [8, 9] in spans
    assert all(found in ([8], [9], [8, 9]) for found in spans)
    assert aborted.finish == "abort"
    assert {span.version for span in after.versions} == {9}
    assert np.abs(by_transformers(server.models[1], asked, after) - after.logprobs).max() < 1e-4


def test_a_generator_is_measured_beside_the_bare_server_and_no_update_loses_a_request(server: Server) -> None:
    with Stage(server.folder) as stage:
        where = ("--engine-url", server.url, "--hf-checkpoint", server.models[0])
        bench = stage.millpond("bench", "sglang", "--quick", "--json", *where, MILLPOND_ENGINE_API_KEY=KEY)
        bench.ends(0, seconds=200)
        figures = json.loads(bench.said())["sglang"]
    assert figures["lost"]["value"] == 0
    assert figures["across"]["value"] > 0
    assert figures["millpond_over_bare"]["value"] > 0


def run_of(stage: Stage, server: Server, out: Path, *more: object) -> Started:
    return stage.millpond(
        *("run", "--out", out, "--engine", "sglang", "--engine-url", server.url),
        *("--hf-checkpoint", server.task, "--device", "cpu", *PATIENT, *more),
        MILLPOND_ENGINE_API_KEY=KEY,
    )


def trained(server: Server, folder: Path, rollouts: int, *more: object, seconds: float = 240) -> list[dict[str, float]]:
    """The lines of a run of the default task's prompts in FOLDER/run, which ends well with all groups committed."""
    from producers.demo import write_prompts

    data = write_prompts(folder / "demo.jsonl", 1)
    rules = ("--rm-type", "positions", "--rollout-max-response-len", "5", "--num-rollout", rollouts)
    with Stage(folder) as stage:
        run_of(stage, server, folder / "run", "--prompt-data", data, *rules, *more).ends(0, seconds=seconds)
        places = audited(stage, folder / "run")
    lines = steps(folder / "run")
    assert contiguous(lines) == rollouts
    assert places["committed"] == sum(line["rollout/groups"] for line in lines)
    assert max(line["train/train_rollout_logprob_abs_diff"] for line in lines) < 0.5
    return lines


def test_the_default_task_is_learned_from_a_real_server(server: Server, tmp_path: Path) -> None:
    rules = ("--rollout-shuffle", "--lr", "1e-3", "--lr-warmup-iters", "10", "--adam-beta2", "0.99")
    lines = trained(*(server, tmp_path, 90, *rules, "--entropy-coef", "0.02", "--eps-clip-high", "0.28"), seconds=540)
    assert {line["rollout/groups"] for line in lines} == {32}
    rewards = [line["rollout/raw_reward"] for line in lines]
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.2
    assert max(line["rollout/fully_async/max_staleness"] for line in lines) > 0


def test_a_run_whose_weights_come_over_a_process_group(server: Server, tmp_path: Path) -> None:
    lines = trained(server, tmp_path, 6, "--update-weight-transport", "distributed")
    assert {line["rollout/groups"] for line in lines} == {32}
    said = (tmp_path / "run" / "logs" / "trainer.log").read_text()
    assert len(re.findall("version \\d+ went to 1 engines", said)) >= 4, said


@pytest.mark.slow
def test_a_run_whose_adapters_are_beside_the_model(server: Server, tmp_path: Path) -> None:
    """With evaluations on the generator's server. The log-probabilities that the trainer finds are the server's; what
    is left at the end is a whole model, and the last adapter alone on the server."""
    out = tmp_path / "run"
    lines = trained(
        *(server, tmp_path, 6, "--lora-rank", RANK, "--lora-publish", "adapter", "--lr", "3e-3"),
        *("--eval-interval", "3", "--eval-prompt-data", "same", tmp_path / "demo.jsonl", "--eval-shared-engines"),
        *("--eval-overflow-policy", "backpressure"),
    )
    assert {line["rollout/groups"] for line in lines} == {32}
    assert max(line["rollout/fully_async/max_staleness"] for line in lines) > 0
    assert [json.loads(line)["step"] for line in (out / "evals.jsonl").read_text().splitlines()] == [0, 3, 6]
    assert (out / "merged-00000006" / "model.safetensors").is_file()
    there = json.loads(said_by(f"{server.url}/v1/models"))["data"]
    assert [card["id"].rpartition("-")[0] for card in there[1:]] == ["millpond-v7"]


def test_evaluations_share_a_real_server_with_the_generator(server: Server, tmp_path: Path) -> None:
    """Each of its own version, while nothing is sampled for training and nothing is aborted."""
    from producers.demo import write_prompts

    out, data = tmp_path / "run", write_prompts(tmp_path / "demo.jsonl", 1)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(data.read_text().splitlines(keepends=True)[:16]))
    with Stage(tmp_path) as stage:
        run = run_of(
            *(stage, server, out, "--prompt-data", data, "--num-rollout", "4", "--rm-type", "positions"),
            *("--rollout-max-response-len", "5", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
            *("--eval-interval", "2", "--eval-prompt-data", "held_out", held_out, "--eval-shared-engines"),
            *("--eval-overflow-policy", "backpressure"),
        )
        run.ends(0, seconds=240)
        places = audited(stage, out)
    assert contiguous(steps(out)) == 4
    assert places["committed"] == 4 * 8
    found = [json.loads(line) for line in (out / "evals.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [0, 2, 4]
    assert all(0 <= line["eval/held_out"] <= 1 for line in found), found


def test_several_turns_of_a_sample_go_to_a_real_server(server: Server, tmp_path: Path) -> None:
    """The example, with its prompts: a turn's prompt is what was sampled and observed before it, id by id, so that the
    trainer finds the log-probabilities that the server had."""
    root, out = Path(__file__).parents[1], tmp_path / "run"
    game = tmp_path / "game"
    subprocess.run([sys.executable, "-m", "examples.guessing_game", game, "0"], cwd=root, check=True)
    with Stage(tmp_path) as stage:
        run = stage.millpond(
            *("run", "--config", root / "examples" / "guessing_game.toml", "--out", out, "--engine", "sglang"),
            *("--engine-url", server.url, "--hf-checkpoint", game / "model", "--num-rollout", "3", "--device", "cpu"),
            *("--prompt-data", game / "prompts.jsonl", "--rollout-batch-size", "8", "--global-batch-size", "64"),
            *PATIENT,
            **own_code(tmp_path, "") | {"PYTHONPATH": str(root), "MILLPOND_ENGINE_API_KEY": KEY},
        )
        run.ends(0, seconds=240)
        places = audited(stage, out)
    lines = steps(out)
    assert contiguous(lines) == 3
    assert places["committed"] == 3 * 8
    assert max(line["rollout/response_len/max"] for line in lines) == 4
    assert max(line["train/train_rollout_logprob_abs_diff"] for line in lines) < 0.5


def test_a_run_outlives_its_server_and_goes_on_with_the_next(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "run"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"input": "A:{n:04d}=", "label": "{n:04d}"}}\n' for n in range(320)))
    with Stage(tmp_path) as stage:
        run = run_of(
            *(stage, server, out, "--prompt-data", rows, "--num-epoch", "1", "--rm-type", "positions"),
            *("--rollout-batch-size", "8", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "5"),
        )
        eventually(lambda: len(steps(out)) >= 3, "three steps")
        server.kill()
        server.process = server.start()
        run.ends(0, seconds=240)
        places = audited(stage, out)
    assert places == {**dict.fromkeys(places, 0), "committed": 320}
    assert contiguous(steps(out)) == 40


@pytest.mark.slow
def test_the_profile_with_a_server_without_a_gpu_runs(installed: None, tmp_path: Path) -> None:
    """`docker compose --profile sglang-cpu --profile demo up`, as plain processes."""
    env = {**ENV, **SMALL, "MILLPOND_NUM_ROLLOUT": "8", "MILLPOND_SGLANG_VENV": str(VENV)}
    with redis_service(tmp_path, env["REDIS_PASSWORD"]), Deployed(tmp_path, env, str(free_port())) as stage:
        stage.demo()
        engine = stage.service("engine-cpu")
        url = f"http://127.0.0.1:{stage.port}/model_info"
        eventually(lambda: engine.process.poll() is not None or answers(url), "a server", READY)
        run = [stage.service(name) for name in ("trainer", "feeder", "generator-sglang-cpu")]
        assert [process.wait(300) for process in run] == [0, 0, 0]
    assert contiguous(steps(tmp_path / "runs" / "demo")) == 8


def test_the_servers_own_classes_take_every_body(installed: None) -> None:
    """All but the flush, which has none."""
    ours = [(path, body) for path, body in BODIES if body is not None and path != "/flush_cache"]
    bodies = [*ours, ("/generate", {**BODIES[0][1], "sampling_params": {"temprature": 1}})]
    done = subprocess.run(
        [str(VENV / "bin" / "python"), str(Path(__file__).with_name("sglang_own_classes.py"))],
        env=environment(ServeConfig()),
        input=json.dumps(bodies),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (said,) = [line.removeprefix("SAID ") for line in done.stdout.splitlines() if line.startswith("SAID ")]
    *good, bad = json.loads(said)
    assert [(path, unknown, error) for path, unknown, error in good if unknown or error] == []
    assert len(good) == len(ours) > 5
    assert "temprature" in bad[2]
