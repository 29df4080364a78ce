"""The local engine against plain forward passes: what it samples, in what company, and across weight updates."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from local_models import (
    CONTEXT,
    VOCABULARY,
    check,
    expected_logprobs,
    first_token,
    generate_all,
    load,
    plain_logits,
    policy,
    request,
    running,
    save,
    sequence,
)

from pipeline.errors import EngineDown, EngineError, RequestRefused, UsageError
from pipeline.types import Span
from producers.engines.base import Completion, Request, Sampling
from producers.engines.local import LocalEngine
from producers.engines.local_model import Model, load_net
from producers.engines.local_rows import PREFILL_TOKENS, Row, chunks
from producers.engines.local_sampler import Done, Sampler
from producers.engines.local_sampling import ONE, draws, pick
from producers.engines.local_weights import read
from producers.engines.stamps import Stamps

KINDS = ["qwen3", "llama", "tied", "mistral", "gemma3", "gemma2", "gpt2", "moe"]
LONG = CONTEXT - 10
FOREVER = 900_000
"tokens no test waits for"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def qwen3(models: Path) -> Path:
    return save("qwen3", models / "qwen3")


@pytest.fixture
def endless(models: Path) -> Path:
    return save("endless", models / "endless")


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_are_those_of_plain_forward_passes(kind: str, models: Path) -> None:
    """Different prompt lengths, temperatures and limits, more requests than rows, prompts wider than the batch."""
    folder = save(kind, models / kind)
    requests = [
        request(i, size=1 + i * 7 % 13, limit=1 + i * 11 % 29, temperature=(1.0, 0.6, 1.7)[i % 3]) for i in range(12)
    ]
    requests += [request(100, size=40, limit=9), request(101, size=3, limit=70)]

    async def main() -> list[Completion]:
        async with running(folder) as engine:
            return await generate_all(engine, requests)

    net = load(folder)
    for each, done in zip(requests, asyncio.run(main()), strict=True):
        assert (done.finish, len(done.tokens)) == ("length", each.sampling.max_new_tokens)
        check(plain_logits(net, each, done), each, done)


def test_a_batch_that_never_empties_stays_right(qwen3: Path) -> None:
    """Columns move to the left, to the right and grow many times; rows swap places."""
    requests = [request(i, size=1 + i * 17 % 90, limit=1 + i * 29 % 160) for i in range(60)]

    async def main() -> list[Completion]:
        async with running(qwen3, max_batch=5) as engine:
            return await generate_all(engine, requests)

    net = load(qwen3)
    for each, done in zip(requests, asyncio.run(main()), strict=True):
        check(plain_logits(net, each, done), each, done)


def test_a_request_gives_the_same_tokens_in_any_company(qwen3: Path) -> None:
    async def main(company: list[Request]) -> Completion:
        async with running(qwen3, max_batch=8) as engine:
            return (await generate_all(engine, [*company, request(7, size=5, limit=40)]))[-1]

    alone = asyncio.run(main([]))
    crowded = asyncio.run(main([request(i, size=2 * i, limit=9 * i) for i in range(10, 20)]))
    assert alone.tokens.tolist() == crowded.tokens.tolist()
    np.testing.assert_allclose(alone.logprobs, crowded.logprobs, atol=1e-5)


def test_equal_prompts_with_different_seeds_give_different_answers(qwen3: Path) -> None:
    tokens = request(0, size=9, limit=1).tokens
    requests = [Request(f"{seed:08d}", tokens, Sampling(20, 1.0, ()), seed) for seed in range(6)]

    async def main() -> list[Completion]:
        async with running(qwen3, max_batch=6) as engine:
            return await generate_all(engine, requests)

    completions = asyncio.run(main())
    net = load(qwen3)
    for each, done in zip(requests, completions, strict=True):
        check(plain_logits(net, each, done), each, done)
    assert len({tuple(done.tokens.tolist()) for done in completions}) == 6


def test_a_finished_row_is_replaced_while_its_siblings_run(qwen3: Path) -> None:
    order: list[str] = []

    async def note(engine: LocalEngine, name: str, each: Request) -> None:
        await engine.generate(each)
        order.append(name)

    async def main() -> None:
        async with running(qwen3, max_batch=2) as engine:
            sizes = {"long": LONG, "short": 3, "waiting": 4, "last": 5}
            each = (note(engine, name, request(i, 4, limit)) for i, (name, limit) in enumerate(sizes.items()))
            await asyncio.gather(*each)

    asyncio.run(main())
    assert order == ["short", "waiting", "last", "long"]


def test_a_sequence_ends_with_its_first_stop_token(qwen3: Path) -> None:
    free = request(3, size=4, limit=60)
    stops = (2, 3, 4, 5, 6)

    async def main() -> list[Completion]:
        async with running(qwen3) as engine:
            stopped = Request("stopped!", free.tokens, Sampling(60, 1.0, stops), free.seed)
            return await generate_all(engine, [free, stopped])

    whole, cut = asyncio.run(main())
    end = next(i for i, token in enumerate(whole.tokens) if token in stops)
    assert cut.tokens.tolist() == whole.tokens[: end + 1].tolist()
    assert (whole.finish, cut.finish) == ("length", "stop")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3"])
def test_weights_swapped_in_mid_sequence_decide_each_token_after_the_swap(kind: str, mode: str, models: Path) -> None:
    """Per token against forward passes with both versions: all anew for `retract`, the old cache for `in_place`."""
    old, new = save(kind, models / kind), save(kind, models / f"{kind}-new", seed=1)
    requests = [request(i, size=3 + 2 * i, limit=40 - i) for i in range(3)]
    before, after = load(old), load(new)
    for each, done in zip(requests, sample_with_a_swap(old, new, mode, requests), strict=True):
        assert done.versions == (Span(3, 0, 9), Span(5, 9, 40 - each.seed))
        anew = torch.cat([plain_logits(before, each, done)[:9], plain_logits(after, each, done)[9:]])
        kept = in_place_logits(before, after, each, done)
        apart = expected_logprobs(anew, each, done) - expected_logprobs(kept, each, done)
        assert np.abs(apart).max() > 1e-2, "the test could not tell the two modes apart"
        check(anew if mode == "retract" else kept, each, done)


def sample_with_a_swap(old: Path, new: Path, mode: str, requests: list[Request]) -> list[Completion]:
    """All enter together with version 3 of `old`; after nine tokens each goes on with version 5, of `new`."""
    done: dict[str, Completion] = {}
    bell = request(99, size=2, limit=9)

    def deliver(finished: Done) -> None:
        done.update(finished)
        if finished[0][0] == bell.rid:
            sampler.orders.put(lambda: sampler.load(read(new, sampler.state), 5))
        if len(done) > len(requests):
            sampler.orders.put(sampler.close)

    device = torch.device("cpu")
    sampler = Sampler(Model(load_net(old, device), device), 8, mode, deliver)
    sampler.load(read(old, sampler.state), 3)
    for each in [bell, *requests]:
        sampler.submit(each, each.sampling.max_new_tokens)
    sampler.run()
    return [done[each.rid] for each in requests]


@torch.no_grad()
def in_place_logits(before: torch.nn.Module, after: torch.nn.Module, each: Request, done: Completion) -> torch.Tensor:
    """[R, vocab]: at the swap the old model's cache holds all but the newest token; the new one goes on from there."""
    from transformers import DynamicCache

    tokens, swap = sequence(each, done), len(each.tokens) + done.versions[0].end - 1
    name = "cache" if "cache" in inspect.signature(before.forward).parameters else "past_key_values"
    cached = {name: DynamicCache(), "use_cache": True}
    logits = [before(input_ids=tokens[:, :swap], **cached).logits[0]]
    logits += [
        after(input_ids=tokens[:, i : i + 1], position_ids=torch.tensor([[i]]), **cached).logits[0]
        for i in range(swap, tokens.shape[1] - 1)
    ]
    return torch.cat(logits)[len(each.tokens) - 1 :]


def test_no_request_is_lost_over_many_updates_under_load(qwen3: Path, models: Path) -> None:
    other = save("qwen3", models / "qwen3-new", seed=1)
    requests = [request(i, size=1 + i % 9, limit=20 + i * 7 % 90) for i in range(40)]

    async def main() -> list[Completion]:
        async with running(qwen3, max_batch=6) as engine:
            tasks = [asyncio.create_task(engine.generate(each)) for each in requests]
            for version in range(1, 9):
                await asyncio.sleep(0.01)
                await engine.load(policy(version, other if version % 2 else qwen3))
            return await asyncio.gather(*tasks)

    nets = {1: load(other), 0: load(qwen3)}
    most = 0
    for each, done in zip(requests, asyncio.run(main()), strict=True):
        assert len(done.tokens) == each.sampling.max_new_tokens
        versions = [span.version or 0 for span in done.versions]
        assert versions == sorted(set(versions))
        assert [0, *(s.end for s in done.versions)] == [*(s.start for s in done.versions), len(done.tokens)]
        logits = {parity: plain_logits(net, each, done) for parity, net in nets.items()}
        check(torch.cat([logits[(s.version or 0) % 2][s.start : s.end] for s in done.versions]), each, done)
        most = max(most, len(versions))
    assert most > 1


@pytest.mark.parametrize(
    ("size", "tokens"),
    [(CONTEXT - 1, 1), (CONTEXT - 2, 2), (CONTEXT, None), (CONTEXT + 1, None), (0, None)],
)
def test_the_context_window_is_kept_to_the_token(size: int, tokens: int | None, qwen3: Path) -> None:
    each = request(1, size=size, limit=50)

    async def main() -> Completion:
        async with running(qwen3) as engine:
            return await engine.generate(each)

    if tokens is None:
        with pytest.raises(RequestRefused, match="no tokens" if size == 0 else "no room"):
            asyncio.run(main())
    else:
        done = asyncio.run(main())
        assert (done.finish, len(done.tokens)) == ("length", tokens)
        check(plain_logits(load(qwen3), each, done), each, done)


def test_ids_outside_the_vocabulary_are_refused_and_others_go_on(qwen3: Path) -> None:
    async def main() -> Completion:
        async with running(qwen3) as engine:
            for token in (-1, VOCABULARY):
                with pytest.raises(RequestRefused, match=f"token {token}, outside"):
                    await engine.generate(Request("bad-ids!", np.array([5, token], np.int32), Sampling(5, 1.0, ()), 0))
            return await engine.generate(request(1, size=3, limit=5))

    assert len(asyncio.run(main()).tokens) == 5


def test_an_aborted_request_keeps_what_it_has_and_frees_its_row(endless: Path) -> None:
    runs, sibling, waits, comes_next = (request(i, 4, limit) for i, limit in enumerate([FOREVER, FOREVER, FOREVER, 5]))

    async def main() -> list[Completion]:
        async with running(endless, max_batch=2) as engine:
            tasks = [asyncio.create_task(engine.generate(runs))]
            await asyncio.sleep(0)
            await first_token(engine)
            tasks += [asyncio.create_task(engine.generate(each)) for each in (sibling, waits, comes_next)]
            await asyncio.sleep(0)
            for rid in ("unknown!", waits.rid, runs.rid):
                await engine.abort(rid)
            await tasks[-1]
            await engine.abort(sibling.rid)
            return await asyncio.gather(*tasks)

    cut, late, never, whole = asyncio.run(main())
    assert [done.finish for done in (cut, late, never, whole)] == ["abort", "abort", "abort", "length"]
    assert len(never.tokens) == len(never.logprobs) == len(never.versions) == 0
    for each, done in ((runs, cut), (sibling, late)):
        assert 0 < len(done.tokens) == len(done.logprobs) == done.versions[-1].end
        check(plain_logits(load(endless), each, done), each, done)


def test_a_cancelled_request_frees_its_row(endless: Path) -> None:
    async def main() -> Completion:
        async with running(endless, max_batch=1) as engine:
            task = asyncio.create_task(engine.generate(request(1, 4, FOREVER)))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="in flight already"):
                await engine.generate(request(1, 4, 5))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await engine.generate(request(2, 4, 5))

    assert len(asyncio.run(main()).tokens) == 5


def test_nothing_is_sampled_while_paused(endless: Path) -> None:
    async def main() -> tuple[bool, Completion, Completion]:
        async with running(endless) as engine:
            started = asyncio.create_task(engine.generate(request(1, 4, FOREVER)))
            await asyncio.sleep(0)
            await first_token(engine)
            await engine.pause()
            late = asyncio.create_task(engine.generate(request(2, 4, 1)))
            await engine.load(policy(1, endless))
            await asyncio.sleep(0.05)
            await engine.load(policy(2, endless))
            early = late.done()
            await engine.resume()
            await late
            await engine.abort(request(1, 4, 1).rid)
            return early, await started, await late

    early, started, late = asyncio.run(main())
    assert not early
    assert [span.version for span in started.versions] == [None, 2]
    assert [span.version for span in late.versions] == [2]


@pytest.mark.parametrize("paused", [False, True])
def test_closing_fails_what_is_in_flight_and_what_comes_later(paused: bool, endless: Path) -> None:
    async def main() -> None:
        engine = LocalEngine(endless, "cpu", 4, "retract", threads=1)
        with pytest.raises(EngineDown, match="not been started"):
            await engine.generate(request(1, 4, 5))
        await engine.start()
        task = asyncio.create_task(engine.generate(request(1, 4, FOREVER)))
        await asyncio.sleep(0)
        if paused:
            await engine.pause()
        await engine.close()
        await engine.close()
        for call in (task, engine.generate(request(2, 4, 5)), engine.pause(), engine.load(policy(1, endless))):
            with pytest.raises(EngineDown, match="closed"):
                await call

    asyncio.run(main())


def test_a_bug_in_the_compute_thread_fails_every_call_with_that_very_error(endless: Path, models: Path) -> None:
    broken = load(endless)
    broken.model.norm.weight.data.fill_(float("nan"))
    broken.save_pretrained(models / "broken")

    async def main() -> None:
        async with running(endless) as engine:
            tasks = [asyncio.create_task(engine.generate(request(i, 4, FOREVER))) for i in range(9)]
            await asyncio.sleep(0)
            await engine.load(policy(1, models / "broken"))
            await asyncio.wait(tasks)
            errors = {id(task.exception()) for task in tasks}
            with pytest.raises(EngineError, match="weights of version") as later:
                await engine.generate(request(9, 4, 5))
            assert errors == {id(later.value)}

    asyncio.run(main())


def test_models_and_devices_that_cannot_serve_are_refused_with_a_sentence(models: Path, tmp_path: Path) -> None:
    async def start(folder: Path) -> None:
        async with running(folder):
            pass

    with pytest.raises(UsageError, match="keeps a state that the local engine cannot move"):
        asyncio.run(start(save("recurrent", models / "recurrent")))
    with pytest.raises(UsageError, match=r"no config\.json"):
        asyncio.run(start(tmp_path))
    config_only = tmp_path / "config-only"
    config_only.mkdir()
    (config_only / "config.json").write_text((save("qwen3", models / "qwen3") / "config.json").read_text())
    with pytest.raises(UsageError, match="config-only"):
        asyncio.run(start(config_only))
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="sees no GPU"):
            LocalEngine(models / "qwen3", "cuda", 4, "retract", threads=1)


def test_a_token_without_probability_is_never_picked_whatever_the_draw() -> None:
    logits = torch.full((5, 4), float("-inf"))
    logits[:, 1:3] = torch.tensor([0.0, 1.0])
    uniforms = torch.tensor([[0.0], [1e-7], [0.3], [0.9999], [float(ONE)]])
    tokens, logprobs = pick(logits, None, uniforms)
    assert set(tokens.view(-1).tolist()) == {1, 2}
    assert tokens[:2].tolist() == [[1], [1]]
    assert logprobs.isfinite().all()


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    count, share = 10_000, torch.tensor([0.5, 0.2, 0.0, 0.29, 0.01])
    uniforms = ((torch.arange(count) + 0.5) / count)[:, None]
    tokens, logprobs = pick(share.log().expand(count, -1), None, uniforms)
    assert (torch.bincount(tokens.view(-1), minlength=5) - share * count).abs().max() <= 1
    assert torch.allclose(logprobs.exp(), share[tokens], atol=1e-6)


def test_draws_are_the_same_on_every_machine_and_never_one() -> None:
    np.testing.assert_allclose(draws(42, 3), np.float32([0.302285, 0.820198, 0.362434]), atol=1e-5)
    assert draws(2**63 - 1, 1 << 16).max() < 1
    assert draws(5, 10).tolist() == draws(5, 20)[:10].tolist()


def test_prompts_are_computed_in_chunks_of_bounded_size() -> None:
    half = PREFILL_TOKENS // 2
    rows = [Row(request(i, size, 1), 1, Stamps(None)) for i, size in enumerate([1, 2, half, half, half + 1, 3 * half])]
    assert [[row.size for row in chunk] for chunk in chunks(rows)] == [[1, 2], [half, half], [half + 1], [3 * half]]
