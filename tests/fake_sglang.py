"""A small server that speaks SGLang's HTTP contract (0.5.23) over a model of chance, and misbehaves on order.

    async with FakeSGLang() as fake:
        fake.order("/generate", "drop")                    # the next such request loses its connection
        fake.order("/generate", null_logprobs, times=2)    # the next two replies are spoilt so

Every body it gets is held against the excerpt of SGLang's own OpenAPI in `data/`; a violation is answered 400 and
fails the test at the end. `python tests/fake_sglang.py PORT` serves until it is stopped.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import jsonschema
import numpy as np
from aiohttp import ClientSession, web

SPEC: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "sglang-openapi-0.5.23.json").read_text())
APPLIED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
RESERVE = 6
"Tokens of its window that a server does not give to a prompt."
OPEN_PATHS = ("/health", "/ready", "/metrics")

Reply = dict[str, Any]
Spoil = Callable[[Reply], Reply]


def violation(path: str, method: str, body: Any) -> str:
    """What in a request is not as the OpenAPI has it; empty where all is."""
    if path not in SPEC["paths"] or method.lower() not in SPEC["paths"][path]:
        return f"{method} {path} is not in the excerpt"
    wanted = SPEC["paths"][path][method.lower()].get("requestBody")
    if wanted is None:
        return "" if body is None else f"{method} {path} takes no body"
    schema = wanted["content"]["application/json"]["schema"]
    errors = jsonschema.Draft202012Validator({**schema, "components": SPEC["components"]}).iter_errors(body)
    return "; ".join(f"{path} {'/'.join(map(str, e.path))}: {e.message}" for e in errors)


@dataclass(eq=False)
class Adapter:
    """Loaded, under an id of its own each time."""

    folder: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    users: int = 0


@dataclass(eq=False)
class Flight:
    """A request in the engine."""

    rid: str
    prompt: list[int]
    sampling: dict[str, Any]
    extra_key: str | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    "weight version that sampled each token"
    running: bool = False
    aborted: bool = False
    retractions: int = 0
    adapter: Adapter | None = None

    @property
    def key(self) -> tuple[str | None, tuple[int, ...]]:
        """Under which its prompt is found in the prefix cache."""
        return f"{self.extra_key}{self.adapter.id if self.adapter else ''}", tuple(self.prompt)


class FakeSGLang:
    """One server, in the running event loop."""

    def __init__(self, *, context: int = 64, vocab: int = 48, key: str | None = None, label: str = "default") -> None:
        self.context, self.vocab, self.key, self.first_label = context, vocab, key, label
        self.heard: list[tuple[str, Any]] = []
        "(path, body) of all requests"
        self.violations: list[str] = []
        self.orders: dict[str, deque[str | Spoil]] = defaultdict(deque)
        self.poison: Counter[int] = Counter()
        "sampling seed -> so often more its request is answered 500"
        self.hold_at: int | None = None
        "no request gets more tokens than this until it is raised (`release`)"
        self.places = 1 << 30
        "requests that run at once; others are queued"
        self.pace = 0.0
        "seconds a token takes"
        self.flush_refusals = 0
        "so often more /flush_cache answers 400, as if something was queued"
        self.weighs: set[str] = set()
        "names that can be loaded like folders with weights in them"
        self.says: str | None = None
        "what /model_info says instead of the label"
        self.has_ready = True
        "servers before 0.5.20 have no /ready"
        self.blocks = 0.05
        "seconds /health hangs while paused; 20 in the real one"
        self.has_sessions = True
        "servers before 0.5.23 know no begin_weight_update"
        self.deterministic = False
        self.lora = {"enable_lora": None, "max_lora_rank": None, "max_loaded_loras": None, "dp_size": 1}
        "options of adapters that it was started with"
        self.tp_size = 1
        self.held = self.holding = False
        "while held, no tensor is received; whether somebody waits for that"
        self.received: dict[str, Any] = {}
        "tensors by name, of all updates over a process group"
        self.disconnects = 0
        self.stale_hits = 0
        "requests that began on a prompt's cache of other weights"
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._fresh()

    def _fresh(self) -> None:
        """What a process knows at its start."""
        self.label = self.first_label
        "what /model_info says"
        self.stamp = self.first_label
        "what samples; another one while a flush is pending"
        self.weights = "as started"
        self.path = "as started"
        self.mode: str | None = None
        self.unwell = False
        self.flights: dict[str, Flight] = {}
        self.updating = False
        self.session = False
        "between begin_weight_update and end_weight_update"
        self.groups: dict[str, Any] = {}
        self.cache: dict[tuple[str | None, tuple[int, ...]], str] = {}
        "prompts, and the weights that their cache was computed with"
        self.moved = asyncio.Condition()
        self.adapters: dict[str, Adapter] = {}
        "by name, those that can be named"
        self.ever: dict[str, str] = {}
        "name -> folder of all that were ever loaded: one that was taken down is loaded again for who names it"
        self.adapting = asyncio.Lock()

    # -- for tests

    def order(self, path: str, what: str | Spoil, times: int = 1) -> None:
        """`400` `401` `500` `503`, `drop`, `stall`, `crash`, or for /generate what spoils the reply; in this order."""
        self.orders[path].extend([what] * times)

    def bodies(self, path: str) -> list[Any]:
        return [body for heard, body in self.heard if heard == path]

    @property
    def calls(self) -> list[str]:
        """Paths of what was asked of it, probes left out."""
        return [path for path, _ in self.heard if path not in ("/model_info", "/ready", "/health", "/v1/models")]

    async def release(self) -> None:
        self.hold_at = None
        await self.move()

    async def until(self, condition: Callable[[], object]) -> None:
        """Returns when it holds; fails after 10 seconds."""
        async with asyncio.timeout(10), self.moved:
            await self.moved.wait_for(condition)

    async def tokens_out(self, each: int, requests: int) -> None:
        """So many requests have so many tokens."""
        await self.until(lambda: sum(len(f.tokens) >= each for f in self.flights.values()) >= requests)

    # -- life

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> Self:
        """On a free port; after a `stop`, on the one it had."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """As a kill does: connections are cut, and all that it knew is gone."""
        runner, self._runner = self._runner, None
        for group in self.groups.values():
            group.close()
        if runner:
            await runner.cleanup()
        self._fresh()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        assert self.violations == []

    # -- requests

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.heard.append((request.path, body))
        key = request.headers.get("Authorization") == f"Bearer {self.key}" or request.path.startswith(OPEN_PATHS)
        if self.key and not key:
            return web.json_response({"error": "Unauthorized"}, status=401)
        if wrong := violation(request.path, request.method, body):
            self.violations.append(wrong)
            return web.json_response({"object": "error", "message": wrong, "code": 400}, status=400)
        orders = self.orders[request.path]
        if orders and isinstance(orders[0], str):
            return await self._misbehave(request, str(orders.popleft()))
        return await getattr(self, request.path.strip("/").replace("/", "_"))(body)

    async def _misbehave(self, request: web.Request, what: str) -> web.Response:
        if what == "crash":
            asyncio.get_running_loop().create_task(self.stop())
            await asyncio.Event().wait()
        if what == "stall":
            await asyncio.Event().wait()
        if what == "drop":
            assert request.transport
            request.transport.close()
            return web.Response()
        return web.json_response({"error": {"message": f"ordered {what}"}}, status=int(what))

    async def move(self) -> None:
        async with self.moved:
            self.moved.notify_all()

    # -- generation

    async def generate(self, body: Reply) -> web.Response:
        sampling, ids, rid = body["sampling_params"], body["input_ids"], body["rid"]
        if rid in self.flights:
            return _error(f"Duplicate request id {rid}")
        if len(ids) >= self.context:
            return _error(f"The input ({len(ids)} tokens) is longer than the model's context length ({self.context}).")
        if len(ids) + sampling["max_new_tokens"] > self.context:
            return _error("Requested token count exceeds the model's maximum context length")
        if len(ids) >= self.context - RESERVE:
            return _error(f"Input length ({len(ids)} tokens) exceeds the maximum allowed length")
        if not all(0 <= token < self.vocab for token in ids):
            return await self._misbehave(None, "crash")  # type: ignore[arg-type]  # as the real one does
        if self.poison[sampling["sampling_seed"]]:
            self.poison[sampling["sampling_seed"]] -= 1
            return web.json_response({"error": {"message": "poisoned"}}, status=500)
        try:
            adapter = await self._adapter(body["lora_path"]) if body.get("lora_path") else None
        except LookupError as error:
            return _error(str(error))
        flight = self.flights[rid] = Flight(rid, ids, sampling, body.get("extra_key"), adapter=adapter)
        try:
            finish = await self._sample(flight)
        except asyncio.CancelledError:
            self.disconnects += 1
            raise
        finally:
            self.flights.pop(rid, None)
            if adapter:
                adapter.users -= 1
            await self.move()
        reply = self._reply(flight, finish)
        orders = self.orders["/generate"]
        spoil = orders.popleft() if orders else None
        return web.json_response(spoil(reply) if callable(spoil) else reply)

    async def _sample(self, flight: Flight) -> Reply:
        rng, stops = np.random.default_rng(flight.sampling["sampling_seed"]), flight.sampling["stop_token_ids"]
        limit = min(flight.sampling["max_new_tokens"], self.context - 2 - len(flight.prompt))
        while len(flight.tokens) < limit:
            async with self.moved:
                await self.moved.wait_for(lambda: flight.aborted or self._may_run(flight))
            if flight.aborted:
                return {"type": "abort", "message": "Aborted" if flight.running else "Abort in waiting queue"}
            if not flight.tokens and self.cache.setdefault(flight.key, self.weights) != self.weights:
                self.stale_hits += 1
            flight.running = True
            flight.tokens.append(int(rng.integers(self.vocab)))
            flight.logprobs.append(-float(rng.exponential()))
            flight.labels.append(self.stamp)
            await self.move()
            if flight.tokens[-1] in stops:
                return {"type": "stop", "matched": flight.tokens[-1]}
            await asyncio.sleep(self.pace)
        return {"type": "length", "length": limit}

    def _may_run(self, flight: Flight) -> bool:
        if self.mode is not None or (self.updating and not flight.running):
            return False
        held = self.hold_at is not None and len(flight.tokens) >= self.hold_at
        return not held and (flight.running or sum(f.running for f in self.flights.values()) < self.places)

    def _reply(self, flight: Flight, finish: Reply) -> Reply:
        meta: Reply = {"id": flight.rid, "finish_reason": finish, "weight_version": self.stamp, "e2e_latency": 0.1}
        if finish.get("message") == "Abort in waiting queue":
            return {"text": "", "output_ids": [], "meta_info": {**meta, "completion_tokens": 0}}
        pairs = zip(flight.logprobs, flight.tokens, strict=True)
        meta |= {
            "prompt_tokens": len(flight.prompt),
            "completion_tokens": len(flight.tokens),
            "num_retractions": flight.retractions,
            "input_token_logprobs": [],
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            "weight_versions": spans(flight.labels),
        }
        return {"text": "...", "output_ids": flight.tokens, "meta_info": meta}

    async def abort_request(self, body: Reply) -> web.Response:
        rid = body.get("rid") or ""
        if rid in self.flights or body.get("abort_all"):
            for flight in list(self.flights.values()):
                flight.aborted |= body.get("abort_all", False) or flight.rid.startswith(rid)
        await self.move()
        return web.Response()

    # -- health and information

    async def model_info(self, _: None) -> web.Response:
        return web.json_response({"model_path": self.path, "weight_version": self.says or self.label})

    async def v1_models(self, _: None) -> web.Response:
        base = {"id": "m", "root": "m", "parent": None, "max_model_len": self.context}
        cards = [{"id": n, "root": a.folder, "parent": "m", "max_model_len": None} for n, a in self.adapters.items()]
        return web.json_response({"object": "list", "data": [base, *cards]})

    async def ready(self, _: None) -> web.Response:
        if not self.has_ready:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.Response(status=503 if self.mode is not None or self.unwell else 200)

    async def health(self, _: None) -> web.Response:
        self.unwell = self.mode is not None
        if self.unwell:
            await asyncio.sleep(self.blocks)
        return web.Response(status=503 if self.unwell else 200)

    # -- weights

    async def pause_generation(self, body: Reply) -> web.Response:
        self.mode = body.get("mode", "abort")
        for flight in self.flights.values():
            if self.mode == "abort":
                flight.aborted = True
            elif self.mode == "retract" and flight.running:
                flight.running, flight.retractions = False, flight.retractions + 1
        await self.move()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, _: Reply) -> web.Response:
        self.mode = None
        await self.move()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights_from_disk(self, body: Reply) -> web.Response:
        if body.get("abort_all_requests"):
            await self.abort_request({"abort_all": True})
        self.updating = True
        async with self.moved:
            await self.moved.wait_for(lambda: self.mode or not any(f.running for f in self.flights.values()))
        self.updating = False
        await self.move()
        if not (body["model_path"] in self.weighs or _weights_in(body["model_path"])):
            return _failed(f"Failed to get weights iterator: {body['model_path']} has no weights.")
        self.weights = body["model_path"]
        self.stamp = body.get("weight_version") or self.stamp
        if body.get("flush_cache", True) and not self._flushed():
            return _failed(APPLIED)
        self.path, self.label = self.weights, self.stamp
        return web.json_response({"success": True, "message": "Succeeded to update.", "num_paused_requests": 0})

    async def update_weight_version(self, body: Reply) -> web.Response:
        if body.get("abort_all_requests", True):
            await self.abort_request({"abort_all": True})
        self.label = self.stamp = body["new_version"]
        return web.json_response({"success": True, "message": "", "new_version": self.label})

    # -- weights over a process group

    async def server_info(self, _: None) -> web.Response:
        told = {"tp_size": self.tp_size, "pp_size": 1, "device": "cpu", **self.lora}
        return web.json_response({**told, "enable_deterministic_inference": self.deterministic})

    async def begin_weight_update(self, _: Reply) -> web.Response:
        return self._turn(not self.session, "a weight-update session is already open")

    async def end_weight_update(self, _: Reply) -> web.Response:
        return self._turn(self.session, "no weight-update session is open")

    def _turn(self, allowed: bool, message: str) -> web.Response:
        if not self.has_sessions:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.session ^= allowed
        return web.json_response({"success": allowed, "message": message}, status=200 if allowed else 400)

    async def init_weights_update_group(self, body: Reply) -> web.Response:
        from fake_group import Joined

        try:
            self.groups[body["group_name"]] = await asyncio.to_thread(Joined, body)
        except RuntimeError as error:
            return _failed(f"Failed to initialize custom process group: {error}.")
        return web.json_response({"success": True, "message": "Succeeded to initialize custom process group."})

    async def destroy_weights_update_group(self, body: Reply) -> web.Response:
        group = self.groups.pop(body["group_name"], None)
        if group is None:
            return _failed("The group to be destroyed does not exist.")
        group.close()
        return web.json_response({"success": True, "message": "Succeeded to destroy custom process group."})

    async def update_weights_from_distributed(self, body: Reply) -> web.Response:
        if self.has_sessions and not self.session:
            return _failed("update_weights_from_distributed must run between begin_weight_update() and end_...")
        if self.mode is None:
            self.violations.append("weights were sent to a server that is not paused")
        self.weights = "half an update"
        self.holding = self.held
        async with self.moved:
            await self.moved.wait_for(lambda: not self.held)
        try:
            self.received |= await asyncio.to_thread(self.groups[body["group_name"]].receive, body)
        except RuntimeError as error:
            return _failed(f"Failed to receive weights: {error}")
        if body["weight_version"] is not None:
            self.weights, self.stamp = f"received {body['weight_version']}", body["weight_version"]
        if body.get("flush_cache", True) and not self._flushed():
            return _failed(APPLIED)
        self.label = self.stamp
        return web.json_response({"success": True, "message": "Succeeded to update parameter online."})

    # -- adapters

    async def load_lora_adapter(self, body: Reply) -> web.Response:
        if self.lora["enable_lora"] is not True:
            return self._adapted("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        async with self.adapting:
            return await self._load_adapter(body["lora_name"], body["lora_path"])

    async def _load_adapter(self, name: str, folder: str) -> web.Response:
        if name in self.adapters:
            return self._adapted(f"Failed to load LoRA adapter {name} because it is already loaded")
        if not (folder in self.weighs or (Path(folder) / "adapter_config.json").is_file()):
            return self._adapted(f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{folder}'.")
        self.adapters[name] = Adapter(folder)
        self.ever[name] = folder
        while len(self.adapters) > (self.lora["max_loaded_loras"] or 1 << 30):
            await self._unload_adapter(next(iter(self.adapters)))
        return self._adapted()

    async def unload_lora_adapter(self, body: Reply) -> web.Response:
        async with self.adapting:
            if body["lora_name"] not in self.adapters:
                return self._adapted(f"LoRA with name {body['lora_name']} does not exist.")
            await self._unload_adapter(body["lora_name"])
            return self._adapted()

    async def _unload_adapter(self, name: str) -> None:
        """Nothing else is loaded while it waits for who uses it."""
        adapter = self.adapters.pop(name)
        async with self.moved:
            await self.moved.wait_for(lambda: adapter.users == 0)

    async def _adapter(self, name: str) -> Adapter:
        """Which counts one user more. LookupError says what the answer does."""
        if self.lora["enable_lora"] is not True:
            raise LookupError(f"LoRA adapter '{name}' was requested, but LoRA is not enabled.")
        if name not in self.adapters and name not in self.ever:
            raise LookupError(f"Got LoRA adapter that has never been loaded: {name}")
        if name not in self.adapters:
            async with self.adapting:
                await self._load_adapter(name, self.ever[name])
            self.violations.append(f"{name} was named, and had been taken down")
        self.adapters[name] = self.adapters.pop(name)  # the latest used is the last
        self.adapters[name].users += 1
        return self.adapters[name]

    def _adapted(self, problem: str = "") -> web.Response:
        there = {name: adapter.folder for name, adapter in self.adapters.items()}
        told = {"success": not problem, "error_message": problem, "loaded_adapters": there}
        return web.json_response(told, status=400 if problem else 200)

    async def flush_cache(self, _: None) -> web.Response:
        done = self._flushed()
        return web.Response(text="Cache flushed." if done else "Flush cache failed.", status=200 if done else 400)

    def _flushed(self) -> bool:
        if self.flush_refusals:
            self.flush_refusals -= 1
            return False
        if any(f.running or self.mode is None for f in self.flights.values()):
            return False
        self.cache.clear()
        return True


def _weights_in(folder: str) -> bool:
    return any(Path(folder).glob("*.safetensors"))


def spans(labels: list[str]) -> list[Reply]:
    found: list[Reply] = []
    for i, label in enumerate(labels):
        if not found or found[-1]["version"] != label:
            found.append({"version": label, "start": i, "end": i})
        found[-1]["end"] = i + 1
    return found


def _error(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)


def _failed(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message, "num_paused_requests": 0}, status=400)


# -- a router before them


class FakeRouter:
    """Sends /generate to its servers in turn, and knows nothing else; like sglang-router it passes the key on."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = deque(urls)
        self.heard: list[str] = []

    async def __aenter__(self) -> Self:
        self.session = ClientSession()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._forward)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()
        await self.session.close()

    async def _forward(self, request: web.Request) -> web.Response:
        self.heard.append(request.path)
        if request.path != "/generate":
            return web.json_response({"detail": "Not Found"}, status=404)
        self.urls.rotate()
        headers = {k: v for k, v in request.headers.items() if k == "Authorization"}
        async with self.session.post(self.urls[0] + "/generate", json=await request.json(), headers=headers) as reply:
            return web.Response(status=reply.status, body=await reply.read(), content_type="application/json")


# -- for processes


@contextmanager
def in_a_thread(fake: FakeSGLang) -> Iterator[asyncio.AbstractEventLoop]:
    """Serves whoever is in another process; its loop, to give orders through."""
    begun, over = threading.Event(), threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        async with fake:
            loops.append(asyncio.get_running_loop())
            begun.set()
            await asyncio.to_thread(over.wait)

    with ThreadPoolExecutor(1) as threads:
        serving = threads.submit(asyncio.run, serve())
        try:
            assert begun.wait(10)
            yield loops[0]
        finally:
            over.set()
            serving.result()


async def main(port: int) -> None:
    fake = FakeSGLang()
    fake.port = port
    async with fake:
        sys.stdout.write(fake.url + "\n")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
