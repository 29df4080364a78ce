from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.code import digest
from pipeline.config import GenerateConfig, RunConfig, Section, TrainConfig, WorkerConfig
from pipeline.errors import UsageError
from pipeline.modes import DRAIN, agreed, check, idle, open_prompts, resolve_rollout
from producers.eval_cli import EvalConfig

Build = Callable[..., TrainConfig]


def train(**values: object) -> TrainConfig:
    return TrainConfig(**{"num_rollout": 3, **values})


def run(**values: object) -> RunConfig:
    return RunConfig(**{"num_rollout": 3, "rm_type": "exact", **values})


def refusal(config: Section) -> str:
    with pytest.raises(UsageError) as caught:
        check(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


ASYNC = {"fully_async": True, "max_weight_staleness": 2}
ADAPTERS = {"lora_rank": 8, "lora_publish": "adapter"}
SGLANG = {"engine": "sglang", "engine_url": "http://a:1"}


def test_neither_flag_is_lock_step() -> None:
    config = train()
    assert check(config) == []
    assert resolve_rollout(config).max_staleness == 0
    assert agreed(config).bound == 32


@pytest.mark.parametrize(("staleness", "bound"), [(0, 32), (1, 64), (3, 128)])
def test_fully_async_with_a_bound_lets_that_many_batches_wait(staleness: int, bound: int) -> None:
    config = train(fully_async=True, max_weight_staleness=staleness)
    assert check(config) == []
    assert resolve_rollout(config).max_staleness == staleness
    assert (agreed(config).bound, agreed(config).max_weight_staleness) == (bound, staleness)


def test_fully_async_alone_is_unbounded_and_says_so() -> None:
    config = train(fully_async=True, queue_capacity=50)
    assert [text.partition(":")[0] for text in check(config)] == ["staleness is unbounded"]
    assert (agreed(config).bound, agreed(config).max_weight_staleness) == (50, None)


def test_run_is_fully_async_with_a_bound_of_two() -> None:
    assert check(run()) == []
    assert resolve_rollout(run()).max_staleness == 2


def test_run_without_fully_async_is_lock_step_though_its_bound_defaults_to_two() -> None:
    config = run(fully_async=False)
    assert check(config) == []
    assert resolve_rollout(config).max_staleness == 0
    assert (agreed(config).bound, agreed(config).max_weight_staleness) == (32, 0)


@pytest.mark.parametrize("config", [train(max_weight_staleness=0), run(fully_async=False, max_weight_staleness=2)])
def test_a_bound_without_fully_async_is_refused(config: Section) -> None:
    assert refusal(config) == (
        "--max-weight-staleness does nothing here: without --fully-async a run is lock-step and on-policy; "
        "add --fully-async or leave the bound out"
    )


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("colocate", True, "give each its own --device"),
        ("partial_rollout", True, "leave the flag out"),
        ("recompute_logprobs_via_prefill", True, "leave the flag out"),
        ("rollout_all_samples_process_path", "my.f", "--dynamic-sampling-filter-path"),
        ("lora_adapters", 2, "a run of its own"),
    ],
)
@pytest.mark.parametrize("mode", [{}, ASYNC])
def test_what_nothing_here_does_is_refused_in_every_mode(
    mode: dict[str, object], name: str, value: object, remedy: str
) -> None:
    said = refusal(train(**mode, **{name: value}))
    assert said.startswith(f"--{name.replace('_', '-')} is refused: ")
    assert remedy in said


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (train(**ASYNC, rollout_function_path="my.loop"), "use --no-fully-async, or leave the function out"),
        (train(**ASYNC, pause_generation_mode="abort"), "use retract or in_place"),
        (train(pause_generation_mode="abort"), "no request meets a weight update"),
        (train(rollout_top_p=0.9), "--rollout-top-p 0.9: "),
        (train(rollout_top_k=40), "--rollout-top-k 40: "),
        (train(fully_async=True, queue_capacity=31), "a queue of 31 groups can never fill"),
        (train(fully_async=True, update_weights_interval=3), "a queue of 64 groups can never fill"),
        (train(global_batch_size=257), "more than the 256 samples of a step"),
        (train(**ASYNC, use_tis=True, use_rollout_logprobs=True), "use one"),
        (train(**ASYNC, tis_clip_low=3.0), "--tis-clip-low 3.0 is above --tis-clip 2.0"),
        (train(**ASYNC, use_rs=True, use_rollout_logprobs=True), "--use-rs and --use-rollout-logprobs"),
        (train(use_rs=True, rs_lower_bound=1.1), "--rs-lower-bound 1.1 is above --rs-upper-bound 1.01"),
        (train(advantage_estimator="reinforce_plus_plus", normalize_advantages=False), "or use rloo"),
        (train(num_rollout=None, num_epoch=1, lr_decay_style="cosine"), "needs an end"),
        (train(lr_decay_style="cosine", lr_warmup_iters=3), "within the --lr-warmup-iters 3"),
        (train(lr=1e-3, lr_decay_style="linear", min_lr=1e-2), "--min-lr 0.01 is above --lr 0.001"),
        (train(num_rollout=None), "--num-rollout"),
        (run(num_rollout=None), "--num-epoch"),
        (train(resume=True, save_interval=0), "with --save-interval 0 there are none"),
        (train(auto_resume=True, save_interval=0), "--auto-resume needs checkpoints"),
        (train(take_over=True, wait=True), "use one"),
        (train(lora_rank=8, lora_dropout=0.1), "--lora-dropout 0.1: with dropout"),
        (train(**ADAPTERS, update_weight_transport="distributed"), "adapters are small and go by their folder"),
        (train(**ADAPTERS, debug_rollout_only=True), "leave --lora-publish out"),
        (run(**ADAPTERS, **SGLANG, engine_router_url="http://r:1"), "--engine-router-url with --lora-publish adapter"),
        (run(rm_type=None), "no reward"),
        (GenerateConfig(), "no reward"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(config: Section, said: str) -> None:
    assert said in refusal(config)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (train(tis_clip=2.0), "tis_clip"),
        (train(**ASYNC, use_tis=False, tis_clip_low=0.5), "tis_clip_low"),
        (train(**ASYNC, use_rollout_logprobs=True, tis_clip=3.0), "tis_clip"),
        (train(tis_level="sequence"), "tis_level"),
        (train(lr_decay_iters=10), "lr_decay_iters"),
        (train(min_lr=1e-7), "min_lr"),
        (train(micro_batch_size=4), "micro_batch_size"),
        (train(lora_alpha=32.0), "lora_alpha"),
        (train(lora_publish="adapter"), "lora_publish"),
        (train(lora_publish="merged"), "lora_publish"),
        (run(**ADAPTERS, **SGLANG, pause_generation_mode="in_place"), "pause_generation_mode"),
        (train(train_backend="echo", lora_rank=8), "lora_rank"),
        (train(use_dynamic_batch_size=False, max_tokens_per_gpu=9216), "max_tokens_per_gpu"),
        (train(train_backend="echo", gradient_checkpointing=True), "gradient_checkpointing"),
        (train(**ASYNC, custom_tis_function_path="my.weights", tis_mode="mask"), "tis_mode"),
        (train(rs_level="sequence"), "rs_level"),
        (train(kl_loss_coef=0.1), "kl_loss_coef"),
        (train(ref_load=Path("model")), "ref_load"),
        (train(advantage_estimator="rloo", disable_grpo_std_normalization=True), "disable_grpo_std_normalization"),
        (train(advantage_estimator="cispo", eps_clip_c=3.0), "eps_clip_c"),
        (train(echo_train_seconds=1.0), "echo_train_seconds"),
        (train(train_backend="echo", lr=0.1), "lr"),
        (train(train_backend="echo", global_batch_size=64), "global_batch_size"),
        (train(balance_data=True), "balance_data"),
        (train(balance_data=False), "balance_data"),
        (train(data_parallel_sharding_strategy="no_shard"), "data_parallel_sharding_strategy"),
        (run(distributed_timeout_minutes=5.0), "distributed_timeout_minutes"),
        (train(queue_capacity=64, async_data_buffer_capacity_factor=3.0), "async_data_buffer_capacity_factor"),
        (train(save_interval=0, save_keep=3), "save_keep"),
        (train(drop_last=True), "drop_last"),
        (run(echo_latency="1"), "echo_latency"),
        (GenerateConfig(rm_type="exact", echo_abort_rate=0.1), "echo_abort_rate"),
        (run(custom_rm_path="my.reward"), "rm_type"),
        (run(group_rm=True), "group_rm"),
        (run(redis_url="redis://host", redis_durability="always"), "redis_durability"),
        (run(engine="echo", train_backend="echo", device="cpu"), "device"),
        (run(engine="echo", train_backend="echo", hf_checkpoint=Path("model")), "hf_checkpoint"),
        (run(engine="echo", train_backend="echo", rollout_temperature=0.5), "rollout_temperature"),
        (run(engine="echo", eval_interval=20, eval_prompt_data="a x", eval_temperature=0.5), "eval_temperature"),
        (WorkerConfig(engine="echo", rm_type="exact", engine_url="http://a:1"), "engine_url"),
        (EvalConfig(engine="echo", rm_type="exact", eval_top_p=0.5), "eval_top_p"),
    ],
)
def test_an_option_that_does_nothing_is_refused(config: Section, name: str) -> None:
    assert refusal(config).startswith(f"--{name.replace('_', '-')} does nothing here: ")


@pytest.mark.parametrize(
    "config",
    [
        train(**ASYNC, tis_clip=3.0),
        train(use_tis=True, tis_clip=3.0),
        train(update_weights_interval=2, tis_clip=3.0),
        train(train_backend="echo", echo_train_seconds=1.0),
        train(num_epoch=1, drop_last=True),
        train(rollout_submission_granularity="group"),
        train(rollout_function_path="my.loop"),
        train(global_batch_size=256),
        run(engine="echo", echo_latency="1", redis_url="redis://host"),
        run(engine="echo", device="cpu", rollout_temperature=0.5),
        run(engine="echo", eval_interval=20, eval_prompt_data="a x", eval_top_p=0.5, eval_engine_url="http://a:1"),
        run(engine="echo", eval_interval=20, eval_function_path="my.f", eval_temperature=0.5),
        run(engine="echo", train_backend="echo", debug_rollout_only=True, hf_checkpoint=Path("model")),
        run(rm_type=None, custom_rm_path="my.reward", group_rm=True),
        run(**ASYNC, pause_generation_mode="in_place"),
        GenerateConfig(rm_type="exact"),
    ],
)
def test_what_works_is_let_through(config: Section) -> None:
    assert check(config) == []


def test_what_is_for_several_processes_is_let_through_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"data_parallel_sharding_strategy": "no_shard", "balance_data": False, "distributed_timeout_minutes": 5.0}
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert check(train(**shared)) == []


def test_a_run_is_refused_where_several_processes_are_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its trainer would be, once all else had been started."""
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "WORLD_SIZE=2: millpond run trains in one process; unset it" in refusal(run())
    assert check(train()) == []
    monkeypatch.setenv("RANK", "")
    assert "WORLD_SIZE=2 is set without RANK" in refusal(run())


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(UsageError, match=r"(?s)--colocate.*\n.*--rollout-top-k"):
        check(train(colocate=True, rollout_top_k=3))


def test_stale_groups_without_a_correction_are_a_warning() -> None:
    assert check(train(**ASYNC, use_tis=False)) == ["groups may be stale and nothing corrects for it; --use-tis does"]
    assert check(train(**ASYNC, use_rollout_logprobs=True)) == []


def test_settings_that_hardly_act_are_a_warning() -> None:
    (said,) = check(train(advantage_estimator="gspo"))
    assert "--eps-clip 3e-4" in said
    assert check(train(advantage_estimator="gspo", eps_clip=3e-4)) == []
    (said,) = check(train(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k1"))
    assert "k2 and low_var_kl" in said


def test_importance_sampling_is_on_where_the_weights_can_differ() -> None:
    assert not resolve_rollout(train()).tis
    assert not resolve_rollout(train(fully_async=True, max_weight_staleness=0)).tis
    assert resolve_rollout(train(update_weights_interval=2)).tis
    assert resolve_rollout(train(**ASYNC)).tis
    assert resolve_rollout(train(fully_async=True)).tis
    assert resolve_rollout(train(use_tis=True)).tis
    assert not resolve_rollout(train(**ASYNC, use_rollout_logprobs=True)).tis
    assert not resolve_rollout(train(**ASYNC, use_tis=False)).tis


def test_evaluation_is_settled_before_fully_async_takes_the_drain() -> None:
    chosen = resolve_rollout(train(**ASYNC, rollout_function_path="my.loop"))
    assert (chosen.rollout, chosen.evaluation) == (DRAIN, "my.loop")
    assert resolve_rollout(train(**ASYNC)).evaluation is None
    assert resolve_rollout(train(rollout_function_path="my.loop", eval_function_path="my.eval")).evaluation == "my.eval"
    assert resolve_rollout(train(rollout_function_path="my.loop")).rollout == "my.loop"
    assert resolve_rollout(train()).rollout == DRAIN


def test_a_default_that_the_user_spells_out_counts_as_chosen() -> None:
    assert resolve_rollout(train(rollout_function_path=DRAIN)).evaluation == DRAIN


def test_a_long_way_between_checkpoints_is_held_against_the_byte_cap() -> None:
    config = train(save_interval=1000, rollout_batch_size=512, queue_max_bytes=1 << 30)
    assert open_prompts(config) == 1000 * 512 + 512
    assert "about 2002 MiB" in check(config)[0]
    assert check(train(save_interval=100, rollout_batch_size=512)) == []


def test_workers_are_told_the_caps_in_groups() -> None:
    told = agreed(train(rollout_batch_size=10, n_samples_per_prompt=4, async_data_buffer_capacity_factor=1.5))
    assert (told.queue_capacity, told.in_flight, told.n_samples_per_prompt) == (15, 10, 4)
    assert agreed(train(async_data_buffer_capacity_factor=0.001)).queue_capacity == 1
    assert agreed(train(async_max_concurrent_samples=31)).in_flight == 3
    assert agreed(train(async_max_concurrent_samples=7)).in_flight == 1


def test_workers_are_told_which_code_they_must_have() -> None:
    told = agreed(train(rm_type="exact", dynamic_sampling_filter_path="my.keep")).code
    assert told == {"rm_type": digest("exact"), "dynamic_sampling_filter_path": digest("my.keep")}
    assert agreed(train(rm_type="exact", custom_rm_path="my.reward")).code == {"custom_rm_path": digest("my.reward")}
    assert agreed(train()).code == {}


def test_every_rule_names_fields_that_exist() -> None:
    for config in (train(), run(), GenerateConfig(), train(train_backend="echo", save_interval=0)):
        assert set(idle(config)) <= set(type(config).model_fields)


def test_the_local_engine_cannot_do_without_weights() -> None:
    assert "publishes no weights" in refusal(run(train_backend="echo"))
    assert check(run(train_backend="echo", engine="echo")) == []
