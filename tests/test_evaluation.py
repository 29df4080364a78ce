"""Evaluation without a trainer: the options, pass@k, answers and scores of a set, `millpond eval`."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documented import undocumented
from local_models import generate_all, load, request, running, save
from make import maker_of
from processes import Stage, own_code
from rig import agreed, policy
from safetensors.torch import load_file

from pipeline import evaluation, flags
from pipeline.config import RunConfig, TrainConfig, WorkerConfig
from pipeline.errors import EngineDown, EngineError, MillpondError, UsageError
from pipeline.evals import Ask, agree, ask_of
from pipeline.modes import agreed as told
from pipeline.modes import check, idle
from pipeline.plan import others_of
from pipeline.types import Policy, Span
from producers.dataset import Dataset
from producers.engines.base import Completion, Request, Sampling
from producers.engines.echo import EchoEngine
from producers.engines.local_sampling import pick
from producers.eval_cli import main
from producers.eval_function import EvalInput
from producers.eval_metrics import Answers, values
from producers.evaluate import Crew, evaluate, try_out
from producers.pass_at_k import pass_at_k, rates
from producers.rewards.base import RewardInput
from trainer.backends import state
from trainer.demo_model import make
from trainer.evaluate import ENDS

ON: dict[str, Any] = {"eval_interval": 20, "eval_prompt_data": "a a.jsonl"}


# -- options


def train(*argv: str) -> TrainConfig:
    return flags.parse(TrainConfig, ["--num-rollout", "3", *argv], {}, "millpond train")


def refusal(config: Any) -> str:
    with pytest.raises(UsageError) as caught:
        check(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sets_are_pairs_of_words_on_a_command_line_and_in_files(tmp_path: Path) -> None:
    word = str(tmp_path / "my file.jsonl")
    config = train("--eval-interval", "5", "--eval-prompt-data", "aime", word, "gpqa", "b.jsonl", "--seed", "3")
    assert (evaluation.names(config), config.seed) == (["aime", "gpqa"], 3)
    file = tmp_path / "job.toml"
    file.write_text(flags.dump(config, idle(config)))
    assert train("--config", str(file)) == config
    file.write_text(f"eval_interval = 5\neval_prompt_data = {json.dumps(['aime', word])}")
    assert evaluation.names(train("--config", str(file))) == ["aime"]
    with pytest.raises(UsageError, match=r"--eval-prompt-data aime .*my file\.jsonl: there is no such file"):
        evaluation.sets(config.eval_prompt_data or "")
    (tmp_path / "my file.jsonl").touch()
    (tmp_path / "b.jsonl").touch()
    both = train("--eval-prompt-data", "aime", word, "b", str(tmp_path / "b.jsonl"))
    assert list(evaluation.sets(both.eval_prompt_data or "").values()) == [Path(word), tmp_path / "b.jsonl"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["aime"], "must be pairs, NAME PATH NAME PATH, and has 1 words"),
        (["a/b", "x"], "'a/b' is no name"),
        (["a", "x", "a", "y"], "must have each name once"),
        (["a", "x", "failed", "y"], "other names than failed"),
        ([], "--eval-prompt-data needs a value"),
    ],
)
def test_sets_that_are_none_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        train("--eval-prompt-data", *words)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"eval_interval": 5}, "nothing to evaluate: give --eval-prompt-data NAME PATH, or --eval-function-path"),
        ({"eval_prompt_data": "a x"}, "does nothing here: without --eval-interval nothing is evaluated"),
        ({"n_samples_per_eval_prompt": 4}, "without --eval-interval"),
        ({**ON, "eval_interval": 5, "update_weights_interval": 2, "save_interval": 10}, "give a multiple of that"),
        ({**ON, "eval_interval": 30, "save_best": "eval/a"}, "must be a multiple of --save-interval 20"),
        ({**ON, "save_best": "eval/a", "save_interval": 0}, "must be a multiple of --save-interval 0"),
        ({**ON, "save_best": "eval/b"}, "no metric of these evaluations; there are eval/a, eval/a-pass@1"),
        ({**ON, "rollout_function_path": "my.loop"}, "name what evaluates with --eval-function-path"),
        ({**ON, "eval_function_path": "my.f", "eval_rm_type": "f1"}, "--eval-function-path takes its place"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(fields: dict[str, Any], said: str) -> None:
    assert said in refusal(TrainConfig(**{"num_rollout": 3, **fields}))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"eval_shared_engines": True}, "--eval-shared-engines needs --engine sglang"),
        (
            {
                "eval_shared_engines": True, "engine": "sglang", "engine_url": "http://a:1",
                "eval_engine_url": "http://b:1",
            },
            "use one",
        ),
        ({"eval_function_path": "my.f", "eval_engine_url": "http://b:1"}, "brings its own engine"),
    ],
)  # fmt: skip
def test_who_evaluates_is_said_once(fields: dict[str, Any], said: str) -> None:
    assert said in refusal(RunConfig(num_rollout=3, rm_type="exact", **{**ON, **fields}))
    worker = {name: value for name, value in {**ON, **fields}.items() if name != "eval_interval"}
    assert said in refusal(WorkerConfig(rm_type="exact", **worker))


def test_a_run_never_evaluates_on_the_generators_servers_by_accident() -> None:
    sglang = {"num_rollout": 3, "rm_type": "exact", "engine": "sglang", "engine_url": "http://a:1", **ON}
    assert "give others with --eval-engine-url" in refusal(RunConfig(**sglang))
    for fine in ({"eval_engine_url": "http://b:1"}, {"eval_shared_engines": True}):
        assert check(RunConfig(**sglang, **fine)) == []
    assert check(RunConfig(**{**sglang, "eval_prompt_data": None}, eval_function_path="my.f")) == []


def test_servers_for_evaluations_alone_may_want_a_key() -> None:
    key = {"engine_api_key": "secret", "engine_timeout": 5.0}
    assert check(RunConfig(num_rollout=3, rm_type="exact", **ON, **key, eval_engine_url="http://b:1")) == []
    with pytest.raises(UsageError, match="--engine-api-key does nothing here: it belongs to --engine sglang"):
        check(RunConfig(num_rollout=3, rm_type="exact", **ON, **key))


def test_a_run_has_a_worker_where_there_is_something_to_evaluate() -> None:
    run = RunConfig(num_rollout=3, rm_type="exact", **ON)
    assert [name for name, _ in others_of(run)] == ["feeder", "generator-0", "worker"]
    assert "worker" not in dict(others_of(RunConfig(num_rollout=3, rm_type="exact")))


def test_a_job_says_how_to_sample_and_that_follows_from_the_rollouts_where_it_is_not_given() -> None:
    policy = Policy(7, "/weights/7", "hf", "d", 6, 0.0)
    ask = ask_of(TrainConfig(**ON, rollout_temperature=0.8, rollout_max_response_len=99), policy)
    assert (ask.temperature, ask.top_p, ask.max_response_len, ask.samples, ask.sets) == (0.8, 1.0, 99, 1, ("a",))
    own = {"eval_temperature": 0, "eval_max_response_len": 5, "eval_top_p": 0.9, "n_samples_per_eval_prompt": 4}
    ask = ask_of(TrainConfig(**ON, **own), policy)
    assert (ask.temperature, ask.top_p, ask.max_response_len, ask.samples) == (0, 0.9, 5, 4)
    assert Ask(**json.loads(ask.model_dump_json())) == ask
    assert (ask.policy.version, ask.policy.path, ask.policy.step) == (7, "/weights/7", 6)


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        ({"eval_prompt_data": "b b.jsonl"}, "this worker has the sets b, and the trainer asks for a"),
        ({"eval_prompt_data": None}, "this worker has the sets none"),
        ({"rm_type": "f1"}, "--rm-type: the trainer has another value"),
        ({"eval_rm_type": "f1"}, "--eval-rm-type, --rm-type: the trainer has another value"),
        ({"eval_function_path": "my.f"}, "--eval-function-path, --rm-type: the trainer has another value"),
        ({"eval_shared_engines": True}, "--eval-shared-engines: the trainer has another value"),
        ({"eval_label_key": "other"}, "--eval-label-key: the trainer has another value"),
    ],
)
def test_a_worker_with_other_sets_or_code_evaluates_nothing(mine: dict[str, Any], said: str) -> None:
    ask = ask_of(TrainConfig(**ON, rm_type="exact"), Policy(7, "", "hf", "", 6, 0.0))
    worker = {"rm_type": "exact", "eval_prompt_data": ON["eval_prompt_data"]}
    agree(ask, WorkerConfig(**worker))
    with pytest.raises(UsageError, match=said):
        agree(ask, WorkerConfig(**{**worker, **mine}))


def test_workers_are_told_what_evaluations_are_and_whose_code_is_not_there_does_not_start(tmp_path: Path) -> None:
    config = TrainConfig(**{**ON, "eval_prompt_data": "b b.jsonl a a.jsonl"}, rm_type="exact", num_rollout=3)
    terms = told(config).evals
    assert terms is not None
    assert (terms.sets, terms.shared, set(terms.code)) == (("a", "b"), False, {"rm_type"})
    none = told(TrainConfig(rm_type="exact", num_rollout=3))
    assert (none.evals, none.digest) == (None, told(config).digest)  # generators have nothing to do with them
    data = f"a {prompts(tmp_path, 'x')}"
    for wrong in ("custom_rm_path", "custom_generate_function_path"):
        with pytest.raises(UsageError, match=f"--{wrong.replace('_', '-')} 'nowhere_at_all.f'"):
            try_out(WorkerConfig(**{wrong: "nowhere_at_all.f", "eval_prompt_data": data}))


# -- pass@k


def test_pass_at_k_by_hand() -> None:
    """Of 4 answers 1 is right: two of them hold it in 3 of 6 pairs. Of 5, 2 right: 1 - C(3,3)/C(5,3) = 1 - 1/10."""
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)
    assert [pass_at_k(3, right, 2) for right in range(4)] == pytest.approx([0, 2 / 3, 1, 1])


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_answer() -> None:
    for n in range(1, 8):
        for right in range(n + 1):
            answers = [True] * right + [False] * (n - right)
            for k in range(1, n + 1):
                held = sum(any(some) for some in itertools.combinations(answers, k))
                assert pass_at_k(n, right, k) == pytest.approx(held / comb(n, k))


def test_pass_at_k_of_many_answers_is_exact_and_of_too_few_is_an_error() -> None:
    assert pass_at_k(10_000, 1, 5_000) == 0.5
    for n, right, k in ((3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)):
        with pytest.raises(ValueError, match=f"pass@{k} of {right} right answers out of {n}"):
            pass_at_k(n, right, k)


def test_rates_go_by_powers_of_two_and_over_prompts_that_have_so_many_answers() -> None:
    assert dict(rates([(4, 1), (4, 4)])) == {1: 0.625, 2: 0.75, 4: 1.0}
    assert dict(rates([(5, 1), (1, 0), (0, 0)])) == {1: pytest.approx(0.1), 2: pytest.approx(0.4), 4: 0.8}
    assert dict(rates([])) == {}


def test_what_is_unscored_counts_nowhere_and_is_counted() -> None:
    answers = [Answers((1.0, None), (3, 5), 1), Answers((0.5, 0.0), (2, 2), 0), Answers((None, None), (1, 1), 0)]
    assert values("a", answers, 2) == {
        "eval/a": 0.5,
        "eval/a-pass@1": 0.5,
        "eval/a-pass@2": 0.0,
        "eval/a-truncated_ratio": pytest.approx(1 / 6),
        "eval/a/response_len/mean": pytest.approx(14 / 6),
        "eval/a/response_len/min": 1,
        "eval/a/response_len/max": 5,
        "eval/a/response_len/median": 2.0,
        "eval/a/samples": 6,
        "eval/a/unscored": 3,
        "eval/a/refused_prompts": 2,
    }
    assert undocumented([*values("a", answers, 2), *(f"eval/{end}" for end in ENDS)]) == []
    assert values("a", [], 1) == {"eval/a/samples": 0, "eval/a/unscored": 0, "eval/a/refused_prompts": 1}


# -- answers


class Shaky(EchoEngine):
    """The first request of each prompt fares as `how` says; `always` it does."""

    def __init__(self, how: str, always: bool = False) -> None:
        super().__init__("0.001", 4)
        self.how, self.always = how, always
        self.seen: set[bytes] = set()

    async def generate(self, request: Request) -> Completion:
        first = self.always or request.tokens.tobytes() not in self.seen
        self.seen.add(request.tokens.tobytes())
        if not first:
            return await super().generate(request)
        if self.how == "down":
            raise EngineDown("gone")
        done = await super().generate(request)
        if self.how == "abort":
            return Completion(done.tokens[:1], done.logprobs[:1], "abort", (Span(7, 0, 1),))
        return Completion(done.tokens[:2], done.logprobs[:2], "stop", (Span(7, 0, 1), Span(8, 1, 2)))


def prompts(folder: Path, *texts: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"input": text, "label": "x"}) + "\n" for text in texts))
    return path


async def answered(engine: EchoEngine, path: Path, samples: int = 2, waves: bool = False) -> list[Answers]:
    """Of version 7."""
    await engine.start()
    await engine.load(policy(7))
    maker = maker_of(engine, agreed(n_samples_per_prompt=samples))
    try:
        return await Crew(maker, 7, 2, (0.0, 0.0), waves).all(Dataset.open(path))
    finally:
        await engine.close()


@pytest.mark.parametrize("how", ["abort", "down", "versions"])
def test_what_was_aborted_or_sampled_by_other_weights_is_sampled_again_and_never_scored(
    tmp_path: Path, how: str
) -> None:
    path = prompts(tmp_path, "a", "b", "c", "d", "e")
    sound = asyncio.run(answered(EchoEngine("0.001", 4), path))
    assert asyncio.run(answered(Shaky(how), path)) == sound
    assert [len(answers.rewards) for answers in sound] == [2] * 5


@pytest.mark.parametrize(
    ("how", "said"),
    [("abort", "the engine aborted it"), ("versions", "with the versions ..7., .8.."), ("down", "gone")],
)
def test_an_evaluation_that_never_gets_one_version_fails_with_the_reason(tmp_path: Path, how: str, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        asyncio.run(answered(Shaky(how, always=True), prompts(tmp_path, "a", "b", "c", "d")))


def test_a_prompt_without_room_is_left_out(tmp_path: Path) -> None:
    class Small(EchoEngine):
        context_length = 5

    found = asyncio.run(answered(Small("0", 2), prompts(tmp_path, "a", "much too long", "b")))
    assert [answers.lengths for answers in found] == [(2, 2)] * 2


class Gate(EchoEngine):
    """Notes how many requests there are, and how many of them run, when it is let go."""

    def __init__(self) -> None:
        super().__init__("0.001", 4)
        self.seen: list[tuple[int, int]] = []

    async def resume(self) -> None:
        self.seen.append((len(self._flights), sum(flight.timer is not None for flight in self._flights.values())))
        await super().resume()


def test_in_a_deterministic_run_an_evaluation_is_made_in_waves_that_begin_whole(tmp_path: Path) -> None:
    path, engine = prompts(tmp_path, "a", "b", "c", "much too long for it", "e"), Gate()
    engine.context_length = 12
    assert asyncio.run(answered(engine, path, waves=True)) == asyncio.run(answered(engine, path))
    assert engine.seen == [(4, 0), (2, 0), (2, 0)]


def test_what_a_deterministic_evaluation_cannot_go_with_fails_it_with_a_remedy(tmp_path: Path) -> None:
    path, rules = prompts(tmp_path, "a"), agreed(deterministic_mode=True)
    config = WorkerConfig(rm_type="length", engine="echo", eval_prompt_data=f"a {path}", server_concurrency=3)
    assert asyncio.run(evaluate(asked(samples=3), config, rules))["eval/a/samples"] == 3
    with pytest.raises(UsageError, match="the 4 samples of a group could not begin together"):
        asyncio.run(evaluate(asked(samples=4), config, rules))
    run = {"deterministic_mode": True, "fully_async": False, "server_concurrency": 8, "n_samples_per_eval_prompt": 9}
    assert "the 9 samples" in refusal(RunConfig(num_rollout=3, rm_type="exact", **run, **ON))


def asked(**changes: Any) -> Ask:
    how = {"samples": 1, "temperature": 0.0, "top_p": 1.0, "max_response_len": 5, "seconds": 60.0, "shared": False}
    where = {"step": 6, "version": 7, "path": "", "digest": "", "sets": ("a",), "code": {}}
    return Ask(**{**how, **where, **changes})


def test_the_answers_are_those_of_the_weights_that_are_asked_for(tmp_path: Path) -> None:
    """Greedy answers of one model's weights, put into another one of its kind, are its own."""
    for seed in (1, 2):
        make(tmp_path / str(seed), seed)
    path = prompts(tmp_path, *(f"A:{n}=" for n in range(1000, 1040)))
    found = {}
    for model, weights in ((1, 1), (1, 2), (2, 2)):
        config = WorkerConfig(
            rm_type="length", eval_prompt_data=f"a {path}", hf_checkpoint=tmp_path / str(model), device="cpu"
        )
        values = asyncio.run(evaluate(asked(path=str(tmp_path / str(weights))), config, agreed()))
        assert values.pop("eval/seconds") > 0
        found[model, weights] = values
    assert found[1, 2] == found[2, 2]
    assert found[1, 1]["eval/a"] != found[2, 2]["eval/a"]
    assert found[1, 2]["eval/weight_version"] == 7


def test_an_evaluation_that_takes_too_long_says_so(tmp_path: Path) -> None:
    config = WorkerConfig(
        rm_type="length", engine="echo", echo_latency="100", eval_prompt_data=f"a {prompts(tmp_path, 'a')}"
    )
    with pytest.raises(MillpondError, match="not done in 0 s"):
        asyncio.run(evaluate(asked(seconds=0.2), config, agreed()))


def test_rewards_of_evaluations_may_be_others(tmp_path: Path) -> None:
    row = {"input": "a", "metadata": {"rm_type": "length"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    config = {"rm_type": "exact", "engine": "echo", "eval_prompt_data": f"a {tmp_path / 'rows.jsonl'}"}
    found = asyncio.run(evaluate(asked(), WorkerConfig(**config, eval_rm_type="row"), agreed()))
    assert found["eval/a"] == 5


def together(given: list[RewardInput]) -> list[float]:
    return [len(given)] * len(given)


def test_a_reward_of_whole_groups_is_one_because_the_run_says_so(tmp_path: Path) -> None:
    """As for generators; a worker's own command line need not."""
    sets = f"a {prompts(tmp_path, 'x')}"
    config = WorkerConfig(custom_rm_path=f"{__name__}.together", engine="echo", eval_prompt_data=sets)
    assert asyncio.run(evaluate(asked(samples=3), config, agreed(group_rm=True)))["eval/a"] == 3


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"eval_prompt_data": "a BAD"}, "--eval-prompt-data a: 1 bad row"),
        ({"eval_prompt_data": "a ROWS", "eval_rm_type": "foo"}, "--eval-rm-type: 'foo'"),
        ({"eval_function_path": f"{__name__}.nothing"}, "--eval-function-path"),
        ({"eval_prompt_data": "a nowhere.jsonl"}, "there is no such file"),
    ],
)
def test_a_worker_says_at_its_start_what_would_let_each_evaluation_fail(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    (tmp_path / "bad.jsonl").write_text("no JSON\n")
    files = {"a BAD": f"a {tmp_path / 'bad.jsonl'}", "a ROWS": f"a {prompts(tmp_path, 'x')}"}
    config = WorkerConfig(rm_type="random", **{name: files.get(value, value) for name, value in fields.items()})
    with pytest.raises(UsageError, match=said):
        try_out(config)


def plain(x: EvalInput) -> dict[str, Any]:
    return {"score": x.step, "eval/samples": x.samples, "sets": len(x.sets)}


async def other(x: EvalInput) -> dict[str, Any]:
    return {"score": np.float32(x.version)}


def wrong(x: EvalInput) -> Any:
    return [3, {"score": "high"}, {"eval/failed": 1}][x.step]


@pytest.mark.parametrize(
    ("name", "values"),
    [("plain", {"eval/score": 6, "eval/samples": 1, "eval/sets": 0}), ("other", {"eval/score": 7})],
)
def test_a_function_evaluates_in_our_place(name: str, values: dict[str, float]) -> None:
    config = WorkerConfig(rm_type="exact", eval_function_path=f"{__name__}.{name}")
    found = asyncio.run(evaluate(asked(), config, agreed()))
    assert values.items() <= found.items()


@pytest.mark.parametrize(
    ("step", "said"),
    [(0, "gave a int; expected are numbers"), (1, "'score' is a str"), (2, "give 'failed' another name")],
)
def test_what_a_function_gives_must_be_numbers(step: int, said: str) -> None:
    config = WorkerConfig(rm_type="exact", eval_function_path=f"{__name__}.wrong")
    with pytest.raises(MillpondError, match=said):
        asyncio.run(evaluate(asked(step=step), config, agreed()))


def stops(x: EvalInput) -> Any:
    return next(iter(()))


def test_a_function_that_runs_out_of_something_fails_and_never_hangs() -> None:
    """No future can carry a StopIteration."""
    config = WorkerConfig(rm_type="exact", eval_function_path=f"{__name__}.stops")
    with pytest.raises(RuntimeError, match="stops raised StopIteration"):
        asyncio.run(evaluate(asked(), config, agreed()))


# -- sampling


def test_greedy_takes_the_likeliest_and_top_p_the_likeliest_few() -> None:
    share = torch.tensor([0.1, 0.5, 0.25, 0.15])
    uniforms = torch.linspace(0, 0.9999, 500)[:, None]

    def picked(top_p: float, temperature: float = 1.0) -> dict[int, float]:
        rows = share.log().expand(500, -1)
        tokens, logprobs = pick(rows, torch.full((500, 1), temperature), uniforms, torch.full((500, 1), top_p))
        torch.testing.assert_close(logprobs, torch.log_softmax(rows / temperature, -1).gather(1, tokens))
        return {int(t): round(float((tokens == t).float().mean()), 2) for t in tokens.unique()}

    assert picked(0.0) == {1: 1.0}
    assert picked(0.5) == {1: 1.0}
    assert picked(0.6) == {1: 0.67, 2: 0.33}
    assert picked(1.0) == {0: 0.1, 1: 0.5, 2: 0.25, 3: 0.15}


def test_one_batch_may_hold_greedy_and_sampled_requests(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "llama")
    warm = [request(n, 5, 8, 1.0) for n in range(4)]
    cold = [replace(r, rid=f"cold{n:04d}", sampling=Sampling(8, 0.0, ())) for n, r in enumerate(warm)]
    again = [replace(r, rid=f"more{n:04d}", seed=r.seed + 1) for n, r in enumerate(cold)]

    async def go(*requests: Request) -> list[list[int]]:
        async with running(folder, max_batch=16) as engine:
            return [done.tokens.tolist() for done in await generate_all(engine, list(requests))]

    alone, mixed = asyncio.run(go(*warm)), asyncio.run(go(*warm, *cold, *again))
    assert mixed[:4] == alone
    assert mixed[4:8] == mixed[8:]
    net = load(folder)
    for sent, tokens in zip(cold, mixed[4:8], strict=True):
        ids = torch.from_numpy(np.concatenate([sent.tokens, tokens])).long()[None]
        best = net(ids).logits[0, len(sent.tokens) - 1 : -1].argmax(-1)
        assert best.tolist() == tokens


# -- by hand


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_model_and_a_checkpoint_are_evaluated_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint's weights are used, not those of the model that the run began with."""
    for seed in (1, 2):
        make(tmp_path / f"model{seed}", seed)
    path = prompts(tmp_path, *(f"A:{n}=" for n in range(1000, 1040)))
    how = ("--eval-temperature", 0, "--eval-max-response-len", 5, "--device", "cpu")
    run, point = tmp_path / "run", tmp_path / "run/checkpoints/00000020"
    (point / "model").mkdir(parents=True)
    (point / "state.json").write_text("{}")
    config = RunConfig(
        hf_checkpoint=tmp_path / "model1", rm_type="length", engine="sglang", engine_url="http://127.0.0.1:1",
        eval_interval=5, eval_prompt_data=f"a {path}", num_rollout=3,
    )  # fmt: skip
    (run / "config.toml").write_text(flags.dump(config, idle(config)))
    tensors = load_file(tmp_path / "model2/model.safetensors")
    state.write(point / "model", ((f"model.{name}", tensor) for name, tensor in tensors.items()), {}, 100_000)
    of_model = shown(
        capsys, "--hf-checkpoint", tmp_path / "model2", "--rm-type", "length", "--eval-prompt-data", "a", path, *how
    )
    first = shown(capsys, tmp_path / "model1", "--rm-type", "length", "--eval-prompt-data", "a", path, *how)
    of_run, of_point = shown(capsys, run, *how), shown(capsys, point, *how)
    for found in (of_model, first, of_run, of_point):
        del found["eval/seconds"]
    assert of_run == of_point == of_model != first
    (run / "config.toml").rename(tmp_path / "config.toml")  # and a run whose parts were started by hand
    fields = {name: getattr(config, name) for name in TrainConfig.model_fields if name in RunConfig.model_fields}
    (run / "trainer.toml").write_text(flags.dump(TrainConfig(**fields)))
    again = shown(capsys, point, *how)
    assert {**again, "eval/seconds": 0} == {**of_run, "eval/seconds": 0}
    (run / "trainer.toml").rename(tmp_path / "trainer.toml")
    with pytest.raises(UsageError, match=r"a checkpoint is evaluated where its run is, and .*run is none"):
        main([str(point), *map(str, how)])
    (tmp_path / "config.toml").rename(run / "config.toml")
    state.write(point / "model", [("model.a", torch.ones(1))], {"lora": {"rank": 8}})
    for broken in ("only adapters", "No such file"):
        with pytest.raises(
            UsageError, match=rf"whole weights of the torch backend \(.*{broken}.*folder under weights/"
        ):
            main([str(point), *map(str, how)])
        (point / "model/state.json").unlink(missing_ok=True)
    monkeypatch.setenv("MILLPOND_ENGINE_API_KEY", "of the run's engines")  # which are left alone
    (tmp_path / "model1").rename(tmp_path / "moved")
    with pytest.raises(UsageError, match=r"--hf-checkpoint .*model1: No such file.*give the folder"):
        main([str(point), *map(str, how)])
    monkeypatch.delenv("MILLPOND_ENGINE_API_KEY")
    assert shown(capsys, point, "--engine", "echo")["eval/a/samples"] == 40


@pytest.mark.parametrize("how", ["--custom-rm-path", "--eval-function-path"])
def test_what_hangs_is_not_waited_for_by_hand(tmp_path: Path, how: str) -> None:
    """Nor by the end of the process."""
    what = ["--eval-prompt-data", "a", prompts(tmp_path, "a"), "--engine", "echo", "--eval-timeout", 1, how, "mine.f"]
    with Stage(tmp_path) as stage:
        own = own_code(tmp_path, "import time\n\ndef f(x):\n    time.sleep(600)\n")
        assert "not done in 1 s (--eval-timeout)" in stage.millpond("eval", *what, **own).ends(1)


def test_the_table_has_a_row_a_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(prompts(tmp_path, "a", "b"))
    words = ["--engine", "echo", "--rm-type", "length", "--n-samples-per-eval-prompt", "2"]
    assert main([*words, "--eval-prompt-data", "one", path, "other", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["set", "reward", "pass@1", "pass@2", "response_len/mean", "truncated_ratio", "unscored"]
    assert [(line.split()[0], len(line.split())) for line in lines[1:3]] == [("one", 7), ("other", 7)]
    (tmp_path / "job.toml").write_text("rm_place = 'worker'\nrm_spares = 2\nrollout_sample_filter_path = 'm.f'")
    assert main([*words, "--eval-prompt-data", "one", path, "--config", str(tmp_path / "job.toml")]) == 0


SHARED = ["--engine", "sglang", "--engine-url", "http://127.0.0.1:1", "--eval-shared-engines"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to evaluate on: give --eval-prompt-data NAME PATH"),
        (["nowhere"], "neither a run, nor a checkpoint, nor a model's folder"),
        (["--eval-prompt-data", "a", "nowhere.jsonl", "--rm-type", "f1"], "a nowhere.jsonl: there is no such file"),
        (["--eval-prompt-data", "a", "ROWS", "--engine", "echo"], "no reward"),
        (["--eval-prompt-data", "a", "ROWS", "--rm-type", "f1"], "--hf-checkpoint"),
        (["--eval-prompt-data", "a", "BAD", "--rm-type", "f1"], "--eval-prompt-data a: 1 bad row"),
        ([*SHARED, "--eval-prompt-data", "a", "ROWS"], "--eval-shared-engines is a trainer's"),
        (["--rm-place", "worker"], "--rm-place is no option of millpond eval; it belongs to millpond run, generate"),
        (["--rm-spares", "3"], "--rm-spares is no option of millpond eval"),
        (["--dynamic-sampling-filter-path", "m.f"], "--dynamic-sampling-filter-path is no option of millpond eval"),
    ],
)
def test_first_mistakes_get_a_sentence(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "bad.jsonl").write_text("no JSON\n")
    files = {"ROWS": str(prompts(tmp_path, "a")), "BAD": str(tmp_path / "bad.jsonl")}
    with pytest.raises(UsageError, match=re.escape(said)):
        main([files.get(word, word) for word in words])
