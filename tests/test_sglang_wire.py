"""What is sent to SGLang against its own OpenAPI, and what is made of its answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_sglang import violation

from pipeline.errors import EngineDown, EngineError, RequestRefused, UsageError
from pipeline.rendezvous import Piece, Rendezvous, Roster
from pipeline.types import Policy, Span
from producers.engines import sglang_wire as wire
from producers.engines.base import Request, Sampling
from producers.engines.sglang_http import NONE, Reply
from producers.engines.sglang_reply import Asked, as_version, completion, passing, problem

OFFER = Rendezvous("g", "127.0.0.1", 4000, "gloo", 60.0)
BUCKET = (Piece("model.norm.weight", "bfloat16", (64,), 128), Piece("lm_head.weight", "float32", (22, 64), 5632))
FOLDER = Policy(7, "folder/00000007", "hf", "digest", 3, 0.0)
ADAPTERS = Policy(7, "folder/00000007", "peft", "f4d1" * 16, 3, 0.0)


def request(temperature: float = 0.7, seed: int = 2**63 - 1) -> Request:
    return Request("a" * 32, np.array([3, 1, 2], np.int32), Sampling(9, temperature, (1, 5)), seed)


BODIES = [
    ("/generate", wire.generate(request(), 9, "b" * 32, 7)),
    ("/generate", wire.generate(request(), 9, "b" * 32, 7, wire.adapter(ADAPTERS))),
    ("/load_lora_adapter", wire.load(ADAPTERS)),
    ("/unload_lora_adapter", wire.unload(wire.adapter(ADAPTERS))),
    ("/update_weights_from_disk", wire.restore(Path("model"), "default")),
    ("/abort_request", wire.abort("b" * 32)),
    ("/pause_generation", wire.pause("retract")),
    ("/pause_generation", wire.pause("in_place")),
    ("/continue_generation", wire.resume()),
    ("/update_weights_from_disk", wire.update(FOLDER, flush=True)),
    ("/update_weights_from_disk", wire.update(FOLDER, flush=False)),
    ("/update_weight_version", wire.set_version(7)),
    ("/begin_weight_update", wire.begin_update()),
    ("/end_weight_update", wire.end_update()),
    ("/init_weights_update_group", wire.join(OFFER, 1, Roster("g", 3, {}, ()))),
    ("/update_weights_from_distributed", wire.receive(BUCKET, "g", None, flush=False)),
    ("/update_weights_from_distributed", wire.receive(BUCKET, "g", 7, flush=True)),
    ("/destroy_weights_update_group", wire.leave("g")),
    ("/flush_cache", None),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_each_body_fits_the_servers_own_openapi(path: str, body: Any) -> None:
    assert violation(path, "POST", json.loads(json.dumps(body))) == ""


def test_an_adapters_name_is_that_of_its_version_and_weights() -> None:
    """So that one which an earlier run left there under the same number is never taken for this one."""
    assert wire.adapter(ADAPTERS) == "millpond-v7-f4d1f4d1f4d1f4d1"
    assert wire.load(ADAPTERS) == {"lora_name": wire.adapter(ADAPTERS), "lora_path": "folder/00000007"}
    assert "lora_path" not in wire.generate(request(), 9, "b" * 32, 7)


def test_a_body_that_does_not_fit_is_found() -> None:
    good = wire.generate(request(), 9, "b" * 32, 7)
    assert "temprature" in violation("/generate", "POST", {**good, "sampling_params": {"temprature": 1}})
    assert "return_logprobs" in violation("/generate", "POST", {**good, "return_logprobs": True})
    assert "model_path" in violation("/update_weights_from_disk", "POST", {"weight_version": "7"})
    assert "7" in violation("/update_weight_version", "POST", {"new_version": 7})
    assert "not in the excerpt" in violation("/get_weight_version", "GET", None)


def test_nothing_is_aborted_by_a_weight_update() -> None:
    assert wire.update(FOLDER, flush=True)["abort_all_requests"] is False
    assert wire.set_version(7)["abort_all_requests"] is False


def test_what_would_bend_the_distribution_is_sent_as_neutral() -> None:
    sampling = wire.generate(request(), 9, "b" * 32, 7)["sampling_params"]
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    assert sampling.items() >= {**neutral, "temperature": 0.7, "sampling_seed": 2**63 - 1}.items()
    assert sampling["stop_token_ids"] == [1, 5]


def test_a_temperature_at_which_the_server_would_not_sample_is_refused() -> None:
    with pytest.raises(UsageError, match="--rollout-temperature"):
        wire.generate(request(temperature=1e-7), 9, "b" * 32, 7)


# -- replies

GOOD: dict[str, Any] = {
    "text": "never read",
    "output_ids": [4, 9, 1],
    "meta_info": {
        "id": "b" * 32,
        "finish_reason": {"type": "stop", "matched": 1},
        "completion_tokens": 3,
        "weight_version": "7",
        "output_token_logprobs": [[-0.5, 4, None], [-2, 9, None], [-1e-9, 1, None]],
        "weight_versions": [{"version": "6", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 3}],
    },
}


def read(change: Callable[[dict[str, Any], dict[str, Any]], object] = lambda data, meta: None, **asked: Any) -> Any:
    data = json.loads(json.dumps(GOOD))
    change(data, data["meta_info"])
    how = {"limit": 9, "vocab_size": 48, "sent": 6, "known": {6, 7}, **asked}
    return completion(Reply(200, json.dumps(data).encode()), Asked(**how))


def test_a_reply_gives_ids_logprobs_finish_and_versions() -> None:
    done = read()
    assert (done.tokens.tolist(), done.tokens.dtype) == ([4, 9, 1], np.int32)
    assert (done.logprobs.tolist(), done.logprobs.dtype) == ([-0.5, -2.0, np.float32(-1e-9)], np.float32)
    assert (done.finish, done.versions) == ("stop", (Span(6, 0, 2), Span(7, 2, 3)))


def set_logprob(value: Any) -> Callable[[Any, Any], object]:
    return lambda data, meta: meta["output_token_logprobs"][1].__setitem__(0, value)


SPOILT: dict[str, Callable[[Any, Any], object]] = {
    "a null log-probability": set_logprob(None),
    "NaN as text": set_logprob("NaN"),
    "NaN": set_logprob(float("nan")),
    "minus infinity": set_logprob(float("-inf")),
    "a placeholder for minus infinity": set_logprob(-1e9),
    "a probability above 1": set_logprob(0.1),
    "true for a log-probability": set_logprob(True),
    "one log-probability too few": lambda data, meta: meta["output_token_logprobs"].pop(),
    "one log-probability too many": lambda data, meta: meta["output_token_logprobs"].append([-1.0, 4, None]),
    "the log-probability of another token": lambda data, meta: meta["output_token_logprobs"][0].__setitem__(1, 5),
    "no log-probabilities": lambda data, meta: meta.pop("output_token_logprobs"),
    "an entry that is no list": lambda data, meta: meta["output_token_logprobs"].__setitem__(0, -0.5),
    "an id outside the vocabulary": lambda data, meta: data["output_ids"].__setitem__(0, 48),
    "an id below 0": lambda data, meta: data["output_ids"].__setitem__(0, -1),
    "an id that is no whole number": lambda data, meta: data["output_ids"].__setitem__(0, 4.0),
    "no ids": lambda data, meta: data.pop("output_ids"),
    "another count of tokens": lambda data, meta: meta.update(completion_tokens=4),
    "no meta_info": lambda data, meta: data.pop("meta_info"),
    "no finish reason": lambda data, meta: meta.update(finish_reason=None),
    "an unknown finish reason": lambda data, meta: meta.update(finish_reason={"type": "tired"}),
    "versions with a gap": lambda data, meta: meta["weight_versions"][1].update(start=3),
    "versions of too few tokens": lambda data, meta: meta["weight_versions"].pop(),
    "versions without ends": lambda data, meta: meta["weight_versions"][0].pop("end"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_reply_is_refused_for(what: str) -> None:
    with pytest.raises(EngineError) as caught:
        read(SPOILT[what])
    assert type(caught.value) is EngineError


def test_more_tokens_than_asked_for_are_refused() -> None:
    with pytest.raises(EngineError, match="3 tokens where 2"):
        read(limit=2)


def test_no_tokens_are_refused_unless_aborted() -> None:
    def empty(finish: str) -> Callable[[Any, Any], object]:
        none = {"completion_tokens": 0, "output_token_logprobs": [], "weight_versions": []}
        return lambda data, meta: (data.update(output_ids=[]), meta.update(none, finish_reason={"type": finish}))

    with pytest.raises(EngineError, match="no tokens"):
        read(empty("stop"))
    assert read(empty("abort")).finish == "abort"


def test_a_reply_that_is_no_json_is_refused() -> None:
    for body in (b"", b"<html>", b"[1]", b'{"meta_info"'):
        with pytest.raises(EngineError, match="meta_info"):
            completion(Reply(200, body), Asked(9, 48, 6, {6}))


def test_an_abort_keeps_its_tokens_and_may_have_a_short_meta_info() -> None:
    assert read(lambda data, meta: meta.update(finish_reason={"type": "abort"})).tokens.tolist() == [4, 9, 1]
    short = {"output_ids": [], "meta_info": {"id": "b", "finish_reason": {"type": "abort"}, "weight_version": "7"}}
    done = completion(Reply(200, json.dumps(short).encode()), Asked(9, 48, 6, {6}))
    assert (done.finish, len(done.tokens), done.versions) == ("abort", 0, ())


@pytest.mark.parametrize(
    ("label", "version"),
    [
        ("7", 7),
        (7, 7),
        ("007", 7),
        ("default", None),
        ("", None),
        (None, None),
        ("-1", None),
        (True, None),
        ("٧", None),
    ],
)
def test_a_label_is_a_version_or_unknown(label: object, version: int | None) -> None:
    assert as_version(label) == version


@pytest.mark.parametrize("label", ["default", "", None, "5"])
def test_a_label_that_was_not_loaded_here_is_an_unknown_version(label: str | None) -> None:
    """5 was: by another run, on a server that was restarted since. Its tokens never count as fresh."""
    assert read(lambda data, meta: meta["weight_versions"][1].update(version=label)).versions[1] == Span(None, 2, 3)


def old(label: object) -> Callable[[Any, Any], object]:
    """As servers before 0.5.19 answer."""
    return lambda data, meta: (meta.pop("weight_versions"), meta.update(weight_version=label))


def test_without_spans_the_version_at_the_end_counts() -> None:
    for label in ("7", 7):
        assert read(old(label), sent=7).versions == (Span(7, 0, 3),)


def test_without_spans_a_reply_over_an_update_keeps_both_versions_the_older_for_all_it_may_have_sampled() -> None:
    assert read(old("7"), sent=6).versions == (Span(6, 0, 2), Span(7, 2, 3))


def test_without_spans_and_without_a_version_all_is_unknown() -> None:
    for label in ("default", "", None):
        assert read(old(label)).versions == (Span(None, 0, 3),)
    missing = read(lambda data, meta: (meta.pop("weight_versions"), meta.pop("weight_version")))
    assert missing.versions == (Span(None, 0, 3),)


# -- failures

OUTCOMES = {
    NONE: (EngineDown, True),
    302: (EngineDown, False),
    400: (RequestRefused, False),
    401: (EngineDown, False),
    403: (EngineDown, False),
    404: (EngineDown, False),
    413: (RequestRefused, False),
    422: (RequestRefused, False),
    429: (EngineDown, True),
    500: (EngineError, True),
    502: (EngineDown, True),
    503: (EngineDown, True),
}


@pytest.mark.parametrize("status", OUTCOMES)
def test_a_status_says_what_becomes_of_the_request(status: int) -> None:
    """Final, a fault of the prompt's, or the server's alone; and whether it is worth another try."""
    reply = Reply(status, b"")
    assert (type(problem(reply, "http://a")), passing(reply)) == OUTCOMES[status]


@pytest.mark.parametrize(
    "body",
    [
        '{"error": {"message": "why"}}',
        '{"error": "why"}',
        '{"message": "why", "code": 400}',
        '{"detail": "why"}',
        "why",
    ],
)
def test_the_servers_own_words_are_found_in_all_shapes(body: str) -> None:
    assert Reply(400, body.encode()).text == "HTTP 400: why"
