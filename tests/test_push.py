"""Weights from the trainer over a process group: real gloo between a trainer and servers that speak the contract."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import local_models
import pytest
import torch
from fake_sglang import FakeSGLang
from make import at_work, feed, train_config
from rig import Rig
from safetensors.torch import load_file, save_file
from test_engine_sglang import QUICK

from pipeline.audit import audit
from pipeline.codec import decode
from pipeline.config import RunConfig
from pipeline.errors import Fenced, UsageError
from pipeline.fenced import TrainerBroker
from pipeline.leases import WorkerBroker
from pipeline.modes import check
from pipeline.rendezvous import Piece, Rendezvous, Roster, packed, rendezvous_of, roster_of, seated, write
from pipeline.types import Group, Policy
from producers.engines.sglang import SGLangEngine
from producers.engines.sglang_pool import Servers
from producers.generator import Generator
from trainer.backends.echo import EchoBackend
from trainer.backends.hf import CausalModel
from trainer.outline import saved
from trainer.push import Push

PATIENT, HASTY = 30.0, 1.5
"seconds an update may take: where it is to succeed, and where it cannot"


UNHURRIED = replace(QUICK, start=30, reply=30, first=30, update=60, grace=5, margin=1)


async def until(condition: Callable[[], object]) -> None:
    """Returns when it holds; fails after a minute."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (a condition on anything)
            await asyncio.sleep(0.005)


class Tensors(EchoBackend):
    """Weights that are one number, in several tensors."""

    def __init__(self, size: int = 4096) -> None:
        super().__init__(0.0)
        self.value = 0.0
        self.taken = 0
        self.before: Callable[[int], object] = lambda n: None
        "called before the n-th tensor is taken"
        self.made = {"a": (size,), "b": (2, 3), "c": (size, 2), "d": ()}

    def all(self) -> dict[str, torch.Tensor]:
        return {name: torch.full(shape, self.value) for name, shape in self.made.items()}

    def save_weights(self, folder: Path, form: str = "hf") -> None:
        folder.mkdir(parents=True)
        save_file(self.all(), folder / "model.safetensors")

    def outline(self) -> list[Piece]:
        return [Piece(n, "float32", tuple(t.shape), t.nbytes) for n, t in self.all().items()]

    def pieces(self) -> Iterator[torch.Tensor]:
        for n, tensor in enumerate(self.all().values()):
            self.before(n)
            self.taken += 1
            yield tensor


class Stage:
    """A trainer with tensors, and workers with a server each, version 1 loaded from its folder."""

    def __init__(self, rig: Rig, folder: Path, seconds: float = PATIENT, servers: int = 1, **how: Any) -> None:
        self.rig, self.folder = rig, folder
        self.trainer = rig.trainer(rollout_max_response_len=6, queue_max_bytes=10**6, **DISTRIBUTED)
        self.backend = Tensors(how.pop("size", 4096))
        self.workers: list[Generator] = []
        self.mode: str = how.pop("mode", "retract")
        self.fakes = [FakeSGLang(vocab=256, context=200) for _ in range(servers)]
        self.push = self.pushing(self.trainer, update_weight_timeout=seconds, **how)
        (folder / "config.json").write_text('{"vocab_size": 256}')
        self.trainer.publish(self.saved(2), [])

    def pushing(self, broker: TrainerBroker, **how: Any) -> Push:
        config = train_config(**how).model_copy(update=DISTRIBUTED)
        return Push(config, broker, self.backend, "cpu")

    def saved(self, version: int) -> Policy:
        """The folder of a version whose tensors are its number."""
        self.backend.value = float(version)
        path = self.folder / "weights" / f"{version:08d}"
        if not path.exists():
            self.backend.save_weights(path)
        return Policy(version, str(path), "hf", "digest", version, 0.0)

    async def publish(self, version: int) -> None:
        """Returns when the workers at work have it, too: the trainer waits for less."""
        await asyncio.to_thread(self.push, self.saved(version), [])
        await until(lambda: all(worker.engine.version == version for worker in self.workers))

    def run(self, go: Callable[..., Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with AsyncExitStack() as stack:
                for n, fake in enumerate(self.fakes):
                    await stack.enter_async_context(fake)
                    self.workers.append(await stack.enter_async_context(self.worker(f"w{n}", fake)))
                await go(*self.workers)

        self.rig.do(main())

    @asynccontextmanager
    async def worker(self, name: str, fake: FakeSGLang) -> AsyncIterator[Generator]:
        engine = SGLangEngine(self.folder, Servers((fake.url,)), self.mode, 20.0, UNHURRIED)
        async with at_work(self.rig, engine, name=name, concurrency=16) as generator:
            await until(lambda: engine.version == self.trainer.version())
            await generator.broker.heartbeat(generator.info(), 0)
            yield generator

    async def all_queued(self, prompts: int) -> None:
        await until(lambda: len(self.rig.groups()) == prompts)

    @property
    def queued(self) -> list[Group]:
        return [decode(message) for message in self.rig.groups()]


DISTRIBUTED = {"update_weight_transport": "distributed"}


def values(fake: FakeSGLang) -> set[float]:
    """What stands in the tensors that were received."""
    return {x for tensor in fake.received.values() for x in tensor.unique().tolist()}


def by_folder(fake: FakeSGLang) -> list[str]:
    return [body["weight_version"] for body in fake.bodies("/update_weights_from_disk")]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_engines_have_new_weights_from_the_trainer_and_requests_in_flight_carry_both_versions(
    real: Rig, tmp_path: Path, mode: str
) -> None:
    stage = Stage(real, tmp_path, servers=2, mode=mode, update_weight_buffer_size=20_000)
    feed(real, 4)
    for fake in stage.fakes:
        fake.hold_at = 2

    async def go(*_: Generator) -> None:
        await until(lambda: sum(len(f.tokens) >= 2 for fake in stage.fakes for f in fake.flights.values()) == 8)
        await stage.publish(3)
        assert [fake.label for fake in stage.fakes] == ["3", "3"]
        for fake in stage.fakes:
            await fake.release()
        await stage.all_queued(4)

    stage.run(go)
    assert {version for group in stage.queued for version in group.versions} == {2, 3}
    assert [group.prompt.attempt for group in stage.queued] == [1] * 4
    for fake in stage.fakes:
        assert (values(fake), set(fake.received), by_folder(fake)) == ({3.0}, set("abcd"), ["2"])
        assert [body["names"] for body in fake.bodies("/update_weights_from_distributed")] == [["a", "b"], ["c"], ["d"]]
        assert "/abort_request" not in fake.calls
        assert (fake.session, fake.groups, fake.mode) == (False, {}, None)
    assert audit(real.feeder()).holds


def test_each_update_has_a_group_of_its_own(real: Rig, tmp_path: Path) -> None:
    stage = Stage(real, tmp_path)

    async def go(_: Generator) -> None:
        for version in (3, 4, 7):
            await stage.publish(version)
            assert (stage.fakes[0].label, values(stage.fakes[0])) == (str(version), {float(version)})

    stage.run(go)
    names = [body["group_name"] for body in stage.fakes[0].bodies("/init_weights_update_group")]
    assert len(set(names)) == 3
    assert [name.rpartition("-")[0] for name in names] == [f"{stage.trainer.epoch}-{v}" for v in (3, 4, 7)]


def test_an_engine_of_several_processes_has_as_many_ranks() -> None:
    answers = {"w2": {"http://b": 1}, "w1": {"http://c": 4, "http://a": 2}, "w3": {}}
    assert seated(answers) == ({"w1 http://a": 1, "w1 http://c": 3, "w2 http://b": 7}, 8)


def test_buckets_are_bounded_and_a_larger_tensor_has_its_own() -> None:
    pieces = [Piece(str(n), "float32", (n,), size) for n, size in enumerate((10, 20, 5, 100, 1, 30, 30))]
    assert [[piece.size for piece in bucket] for bucket in packed(pieces, 35)] == [[10, 20, 5], [100], [1, 30], [30]]


def test_what_stands_in_redis_is_read_as_it_was_written() -> None:
    offer = Rendezvous("1-2-abc", "10.0.0.5", 4000, "nccl", 60.0)
    roster = Roster("1-2-abc", 3, {"w http://a": 1}, ((Piece("a", "bfloat16", (2, 3), 12),),))
    assert (rendezvous_of(write(offer)), roster_of(write(roster))) == (offer, roster)
    assert (rendezvous_of(""), roster_of("")) == (None, None)


def test_who_comes_late_loads_the_folder(real: Rig, tmp_path: Path) -> None:
    """The publication that it finds still names the trainer's place."""
    stage = Stage(real, tmp_path)
    late = FakeSGLang(vocab=256, context=200)

    async def go(_: Generator) -> None:
        await stage.publish(3)
        published = stage.trainer.policy()
        assert published
        assert published.rendezvous
        feed(real, 8)
        async with late, stage.worker("late", late):
            await stage.all_queued(8)

    stage.run(go)
    assert by_folder(late) == ["3"]
    assert "/init_weights_update_group" not in late.calls


def test_where_nobody_can_take_part_the_folder_is_published_at_once(real: Rig, tmp_path: Path) -> None:
    stage = Stage(real, tmp_path)
    stage.push(stage.saved(3), [])
    published = stage.trainer.policy()
    assert published
    assert (published.version, published.rendezvous) == (3, None)


def test_an_older_server_knows_no_beginning(real: Rig, tmp_path: Path) -> None:
    stage = Stage(real, tmp_path)
    stage.fakes[0].has_sessions = False

    async def go(_: Generator) -> None:
        await stage.publish(3)

    stage.run(go)
    assert (values(stage.fakes[0]), by_folder(stage.fakes[0])) == ({3.0}, ["2"])


def test_an_update_that_somebody_left_open_is_closed_first(real: Rig, tmp_path: Path) -> None:
    stage = Stage(real, tmp_path)

    async def go(_: Generator) -> None:
        stage.fakes[0].session = True
        await stage.publish(3)

    stage.run(go)
    assert (values(stage.fakes[0]), by_folder(stage.fakes[0])) == ({3.0}, ["2"])


def test_a_flush_that_is_pending_is_done_before_anything_is_sampled(real: Rig, tmp_path: Path) -> None:
    stage = Stage(real, tmp_path)

    async def go(_: Generator) -> None:
        stage.fakes[0].flush_refusals = 2
        await stage.publish(3)
        await until(lambda: stage.fakes[0].label == "3")

    stage.run(go)
    assert by_folder(stage.fakes[0]) == ["2"]
    assert stage.fakes[0].cache == {}


# -- what goes wrong


async def goes_by_folder(stage: Stage, publish: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """An update that fails: version 3 is served all the same, and the next one goes by a group again."""
    await publish()
    for fake in stage.fakes:
        await until(lambda fake=fake: (fake.label, fake.mode) == ("3", None))  # type: ignore[misc]
        assert by_folder(fake)[-1] == "3"
        assert fake.weights.endswith("00000003")
        assert not fake.session


@pytest.mark.parametrize("what", ["400", "500", "drop"])
@pytest.mark.parametrize(
    "path", ["/begin_weight_update", "/init_weights_update_group", "/update_weights_from_distributed"]
)
def test_where_a_member_fails_all_load_the_folder_and_the_next_update_is_whole(
    real: Rig, tmp_path: Path, path: str, what: str
) -> None:
    stage = Stage(real, tmp_path, servers=2, seconds=20.0, size=1 << 20)

    async def go(*workers: Generator) -> None:
        stage.fakes[0].order(path, what, times=2 if (path, what) == ("/begin_weight_update", "400") else 1)
        await goes_by_folder(stage, lambda: stage.publish(3))
        for worker in workers:
            await worker.broker.heartbeat(worker.info(), 0)
        stage.push = stage.pushing(stage.trainer, update_weight_timeout=PATIENT)
        await stage.publish(4)
        assert [values(fake) for fake in stage.fakes] == [{4.0}, {4.0}]

    stage.run(go)


def test_a_member_that_stalls_is_waited_for_no_longer_than_said_and_the_others_load_the_folder(
    real: Rig, tmp_path: Path
) -> None:
    """Its worker gives it up in the end; while it answers nothing it is out of service, and then it comes back."""
    stage = Stage(real, tmp_path, servers=2, seconds=HASTY, size=1 << 20)

    async def go(*_: Generator) -> None:
        stage.fakes[0].order("/update_weights_from_distributed", "stall")
        await stage.publish(3)
        await until(lambda: stage.fakes[1].label == "3")
        await until(lambda: by_folder(stage.fakes[0])[-1] == "3")

    stage.run(go)
    assert by_folder(stage.fakes[1]) == ["2", "3"]


def test_a_server_that_dies_half_way_ends_the_update_for_all_at_once(real: Rig, tmp_path: Path) -> None:
    stage = Stage(real, tmp_path, servers=2, size=1 << 20, update_weight_buffer_size=1 << 20)
    dying, other = stage.fakes

    async def go(*_: Generator) -> None:
        loop = asyncio.get_running_loop()

        def die(n: int) -> None:
            if n == 2:
                asyncio.run_coroutine_threadsafe(dying.stop(), loop).result()

        stage.backend.before = die
        await stage.publish(3)
        assert stage.backend.taken == 4  # other ranks of the trainer have gathered all
        await until(lambda: (other.label, other.mode) == ("3", None))
        await dying.start()
        await until(lambda: dying.label == "3")

    stage.run(go)
    assert by_folder(dying)[-1] == "3"
    assert by_folder(other)[-1] == "3" or values(other) == {3.0}  # it had all before the death was known


def test_a_worker_that_dies_in_between_is_waited_for_no_longer_than_said(real: Rig, tmp_path: Path) -> None:
    """It has answered and does not come; the server of the other one is in the group by then."""
    stage = Stage(real, tmp_path, seconds=HASTY)

    async def go(_: Generator) -> None:
        ghost = WorkerBroker(real.url, real.keys, "ghost", patience=20)
        await ghost.register({"joins": True, "ready": True})
        publishing = asyncio.create_task(stage.publish(3))
        await until(lambda: (stage.trainer.policy() or stage.saved(2)).version == 3)
        found = await ghost.policy()
        assert found
        assert found.rendezvous
        await ghost.join(found.rendezvous.group, engines={"http://127.0.0.1:9": 1})
        await publishing
        await until(lambda: (stage.fakes[0].label, stage.fakes[0].mode) == ("3", None))
        await ghost.close()

    stage.run(go)
    assert by_folder(stage.fakes[0]) == ["2", "3"]


def test_a_worker_that_gives_no_answer_is_left_out(real: Rig, tmp_path: Path) -> None:
    stage = Stage(real, tmp_path)

    async def go(_: Generator) -> None:
        ghost = WorkerBroker(real.url, real.keys, "ghost", patience=20)
        await ghost.register({"joins": True, "ready": True})
        await stage.publish(3)
        await ghost.close()

    stage.run(go)
    assert (values(stage.fakes[0]), by_folder(stage.fakes[0])) == ({3.0}, ["2"])


class Died(BaseException):
    """In the trainer's place."""


def test_a_trainer_that_dies_while_it_sends_takes_no_version_with_it(real: Rig, tmp_path: Path) -> None:
    stage = Stage(real, tmp_path, servers=2, size=1 << 20, update_weight_buffer_size=1 << 20)
    feed(real, 4)

    def die(n: int) -> None:
        if n == 2:
            raise Died

    async def go(*_: Generator) -> None:
        stage.backend.before = die
        with pytest.raises(Died):
            await stage.publish(3)
        for fake in stage.fakes:
            await until(lambda fake=fake: (fake.label, fake.mode) == ("3", None))  # type: ignore[misc]
            assert fake.weights == stage.saved(3).path
        await stage.all_queued(4)

    stage.run(go)
    assert [by_folder(fake) for fake in stage.fakes] == [["2", "3"]] * 2
    assert audit(real.feeder()).holds


def test_a_trainer_that_was_replaced_finds_no_engine(real: Rig, tmp_path: Path) -> None:
    """Whether it is replaced before it publishes, or before it says who takes part."""
    stage = Stage(real, tmp_path)

    async def go(_: Generator) -> None:
        old, offered = stage.trainer, old_offer(stage.trainer)
        new = await asyncio.to_thread(real.trainer, None, True, **DISTRIBUTED)
        with pytest.raises(Fenced):
            await stage.publish(9)
        with pytest.raises(Fenced):
            await asyncio.to_thread(old.seat, new.version(), Roster(offered.group, 2, {"w0 x": 1}, ()))
        assert real.raw.get(real.keys["weights:roster"]) is None

    stage.run(go)
    assert "/init_weights_update_group" not in stage.fakes[0].calls


def old_offer(trainer: TrainerBroker) -> Rendezvous:
    return Rendezvous(f"{trainer.epoch}-2-abc", "127.0.0.1", 4000, "gloo", 60.0)


def test_an_offer_that_cannot_be_reached_is_told_of_and_declined(
    real: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(real, tmp_path)

    async def go(_: Generator) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        offer = Rendezvous("1-3-abc", "127.0.0.1", port, "gloo", 60.0)
        stage.trainer.invite()
        await asyncio.to_thread(stage.trainer.publish, replace(stage.saved(3), rendezvous=offer), [])
        await until(lambda: stage.fakes[0].label == "3")
        assert stage.trainer.answers() == [{"group": "1-3-abc", "worker": "w0", "engines": {}}]

    stage.run(go)
    assert by_folder(stage.fakes[0])[-1] == "3"
    assert "--update-weight-host" in caplog.text


# -- what is refused


def test_a_host_that_is_not_ours_is_refused(real: Rig, tmp_path: Path) -> None:
    stage = Stage(real, tmp_path, update_weight_host="192.0.2.7")

    async def go(_: Generator) -> None:
        with pytest.raises(UsageError, match=r"--update-weight-host 192\.0\.2\.7"):
            await stage.publish(3)

    stage.run(go)


def test_a_model_whose_tensors_are_not_those_of_its_folder_is_refused(real: Rig, tmp_path: Path) -> None:
    stage = Stage(real, tmp_path)
    policy = stage.saved(3)
    stage.backend.made["e"] = (2,)
    with pytest.raises(UsageError, match="use --update-weight-transport disk"):
        stage.push(policy, [])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"train_backend": "echo"}, "has no weights to send"),
        ({"train_backend": "torch", "update_weight_host": "0.0.0.0"}, "no address that engines could connect to"),
        ({"train_backend": "torch", "update_weight_host": "::"}, "no address that engines could connect to"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        check(train_config(rm_type="exact", **{**DISTRIBUTED, **fields}))


@pytest.mark.parametrize("engine", ["local", "echo"])
def test_engines_that_know_only_folders_are_refused(engine: str) -> None:
    config = RunConfig.model_validate({"engine": engine, "rm_type": "exact", "num_rollout": 1, **DISTRIBUTED})
    with pytest.raises(UsageError, match=f"--engine {engine} loads weights from their folder"):
        check(config)


def test_without_distributed_its_options_do_nothing() -> None:
    with pytest.raises(UsageError, match="--update-weight-timeout does nothing here"):
        check(train_config(rm_type="exact", update_weight_timeout=3))


def test_what_a_model_sends_is_what_it_saves(tmp_path: Path) -> None:
    """Tied weights once, in the checkpoint's dtype."""
    folder = local_models.save("tied", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    model = CausalModel(folder, torch.device("cpu"))
    (tmp_path / "saved").mkdir()
    model.save(tmp_path / "saved")
    written = load_file(tmp_path / "saved" / "model.safetensors")
    sent = dict(zip((piece.name for piece in model.outline()), model.pieces(), strict=True))
    assert sorted(model.outline()) == sorted(saved(tmp_path / "saved"))
    assert sent.keys() == written.keys()
    assert {t.dtype for t in sent.values()} == {torch.bfloat16}
    assert all(torch.equal(sent[name], written[name]) for name in written)
