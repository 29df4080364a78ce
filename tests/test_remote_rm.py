"""The judge elsewhere: what it is sent, what its answers mean, what becomes of a run while it is away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from pipeline.config import GenerateConfig
from pipeline.errors import RewardError, UsageError
from pipeline.flags import parse
from pipeline.types import COMPLETED
from producers.rewards import RewardInput, Scorer, opened

Answer = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]


def given(response: str = "text", index: int = 0) -> RewardInput:
    return RewardInput("q", 42, {"k": 1}, response, COMPLETED, index, 7)


class Judge:
    """A server that answers what it is told, in turn; the last for ever."""

    def __init__(self, *answers: tuple[int, str] | float) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        self.tokens.add(request.headers.get("Authorization"))
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        if isinstance(answer, float):  # seconds of silence
            await asyncio.sleep(answer)
            answer = (200, "1")
        return web.Response(status=answer[0], text=answer[1])


@asynccontextmanager
async def judged(judge: Judge, **fields: Any) -> AsyncIterator[Scorer]:
    app = web.Application()
    app.router.add_post("/score", judge.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/score"
    try:
        async with opened(GenerateConfig(rm_type="remote_rm", **{"rm_url": url, **fields}), False) as scorer:
            yield scorer
    finally:
        await runner.cleanup()


def rewards(judge: Judge, count: int = 1, **fields: Any) -> list[float | None]:
    async def main() -> list[float | None]:
        async with asyncio.timeout(30), judged(judge, **fields) as scorer:
            return await scorer.score_group([given(index=index) for index in range(count)])

    return asyncio.run(main())


def test_a_judge_is_sent_the_answer_with_its_prompt_and_label() -> None:
    judge = Judge((200, "0.5"))
    assert rewards(judge, 3) == [0.5] * 3
    assert sorted(judge.asked, key=lambda sent: sent["index"])[1] == {
        "prompt": "q",
        "response": "text",
        "label": 42,
        "metadata": {"k": 1},
        "status": "completed",
        "index": 1,
        "prompt_id": 7,
        "sample_metadata": {},
    }


def test_a_judge_is_shown_its_key() -> None:
    judge = Judge((200, "1"))
    assert rewards(judge, 2, rm_api_key="secret") == [1.0] * 2
    assert judge.tokens == {"Bearer secret"}


@pytest.mark.parametrize("url", ["judge:8000", "ftp://judge/x", "http://", "http://me:secret@judge/"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"--rm-url .* must be http://HOST:PORT/PATH"):
        parse(GenerateConfig, ["--rm-url", url], {}, "millpond generate")


@pytest.mark.parametrize(
    ("said", "fields", "reward"),
    [
        ("1", {}, 1.0),
        ("true", {}, 1.0),
        ("null", {}, None),
        ('{"score": 0.25}', {}, 0.25),
        ('{"score": 0, "mine": 2}', {"reward_key": "mine"}, 2.0),
        ('{"score": null}', {}, None),
    ],
)
def test_what_a_judge_may_say(said: str, fields: dict[str, Any], reward: float | None) -> None:
    assert rewards(Judge((200, said)), **fields) == [reward]


@pytest.mark.parametrize("said", ['"1"', "[1]", '{"reward": 1}', "1e999"])
def test_what_is_no_reward_is_an_error_and_not_a_score(said: str) -> None:
    with pytest.raises(RewardError, match="remote_rm: prompt 7, sample 0"):
        rewards(Judge((200, said)))


@pytest.mark.parametrize("trouble", [(500, "boom"), (503, ""), (429, "slow down"), (200, "<html>"), 60.0])
def test_an_outage_is_sat_out(trouble: tuple[int, str] | float) -> None:
    judge = Judge(trouble, (200, "1"))
    assert rewards(judge, rm_timeout=0.2) == [1.0]
    assert len(judge.asked) == 2


@pytest.mark.parametrize("trouble", [(500, "boom"), 60.0, (200, "x" * (2 << 20))])
def test_an_outage_without_end_gives_no_score_and_never_a_false_one(trouble: tuple[int, str] | float) -> None:
    assert rewards(Judge(trouble), 2, rm_timeout=0.2, rm_patience=0.5) == [None, None]


def test_a_judge_that_is_not_there_gives_no_score() -> None:
    assert rewards(Judge(), rm_url="http://127.0.0.1:9/score", rm_patience=0.3) == [None]


@pytest.mark.parametrize("status", [400, 413, 422])
def test_what_a_judge_refuses_is_unscored_at_once(status: int) -> None:
    judge = Judge((status, "too long"))
    assert rewards(judge) == [None]
    assert len(judge.asked) == 1


def test_a_wrong_address_is_said_at_once_and_a_judge_that_answered_before_is_waited_for() -> None:
    with pytest.raises(UsageError, match=r"--rm-url http://127.* HTTP 404: nobody; is this the judge's address\?"):
        rewards(Judge((404, "nobody")))

    async def main() -> None:
        async with judged(Judge((200, "1"), (404, "gateway"), (200, "0"))) as scorer:
            assert [await scorer.score_group([given()]) for _ in range(2)] == [[1.0], [0.0]]

    asyncio.run(main())


def test_a_stop_does_not_wait_for_a_judge_that_takes_its_time_nor_for_one_that_is_away() -> None:
    async def main(judge: Judge) -> float:
        async with judged(judge, rm_timeout=600.0) as scorer:
            scoring = asyncio.create_task(scorer.score_group([given(), given()]))
            while len(judge.asked) < 2:  # noqa: ASYNC110 (the judge is no part of the program)
                await asyncio.sleep(0.01)
            began = time.monotonic()
            scoring.cancel()
            with pytest.raises(asyncio.CancelledError):
                await scoring
            return time.monotonic() - began

    for judge in (Judge(600.0), Judge((500, ""))):
        assert asyncio.run(main(judge)) < 5


def test_requests_at_a_time_are_bounded() -> None:
    running = most = 0

    class Slow(Judge):
        async def answer(self, request: web.Request) -> web.Response:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.05)
            running -= 1
            return web.Response(text="1")

    assert rewards(Slow(), 200) == [1.0] * 200
    assert most <= 64


def test_an_answer_with_half_a_character_is_sent() -> None:
    judge = Judge((200, "1"))

    async def main() -> None:
        async with judged(judge) as scorer:
            assert await scorer.score_group([given("half \ud83d")]) == [1.0]

    asyncio.run(main())
    assert json.dumps(judge.asked[0]["response"]) == '"half \\ud83d"'
