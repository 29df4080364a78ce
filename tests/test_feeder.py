"""The feeder against a small broker in memory: what it feeds, in which order, when it waits and when it ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import FeedConfig
from pipeline.errors import UsageError
from producers import feeder
from producers.dataset import row_of


class Memory:
    """The feeder's view of a run: a cursor, a stream of (id, record), and a script of what happens at each look."""

    def __init__(self) -> None:
        self.fed: list[tuple[int, str]] = []
        self.again: dict[int, str | None] = {}
        self.waiting = 0
        self.status = "running"
        self.data: tuple[int, int | None, str] | None = None
        self.sizes: list[int] = []
        self.looks = 0
        self.rival: Callable[[Memory], None] = lambda memory: None
        "Called before each feed, as if by another feeder."
        self.meanwhile: Callable[[Memory], None] = lambda memory: None
        "Called at each look, as if by workers and trainer."

    def feed(self, cursor: int, records: list[str]) -> int:
        self.rival(self)
        if cursor == len(self.fed):
            self.sizes.append(len(records))
            self.put(records)
        return len(self.fed)

    def put(self, records: list[str]) -> None:
        self.fed += [(len(self.fed) + n, record) for n, record in enumerate(records)]
        self.waiting += len(records)

    def cursor(self) -> int:
        return len(self.fed)

    def backlog(self) -> int:
        return self.waiting

    def refeed_ids(self, limit: int) -> list[int]:
        return [id for id, record in self.again.items() if record is None][:limit]

    def refeed(self, records: dict[int, str]) -> None:
        self.again.update(records)

    def describe_data(self, rows: int, total: int | None, digest: str) -> None:
        if self.data is not None and self.data[2] != digest:
            raise UsageError("other data")
        self.data = (rows, total, digest)

    def stopping(self) -> bool:
        self.looks += 1
        self.meanwhile(self)
        return self.status == "done"


class Clock(threading.Event):
    """A stop signal on which waiting takes no time; remembers how long each wait would have been."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        return self.is_set()


def data(path: Path, rows: int) -> Path:
    path = path / "data.jsonl"
    path.write_text("".join(f'{{"input": "p{n}", "label": {n}}}\n' for n in range(rows)))
    return path


def config(path: Path, rows: int = 20, **fields: object) -> FeedConfig:
    return FeedConfig.model_validate({"prompt_data": data(path, rows), **fields})


def run(config: FeedConfig, memory: Memory) -> list[int]:
    """The rows fed, in order of id, once the run is over."""
    assert feeder.main(config, memory, Clock()) == 0
    assert [id for id, _ in memory.fed] == list(range(len(memory.fed)))
    return [json.loads(record)["label"] for _, record in memory.fed]


def consume(until: int) -> Callable[[Memory], None]:
    """Workers use up all that waits; the run is over at the first look after `until` prompts were fed."""

    def meanwhile(memory: Memory) -> None:
        memory.waiting = 0
        if len(memory.fed) >= until:
            memory.status = "done"

    return meanwhile


def finish_after(looks: int) -> Callable[[Memory], None]:
    def meanwhile(memory: Memory) -> None:
        if memory.looks > looks:
            memory.status = "done"

    return meanwhile


def test_the_data_ends_after_all_epochs_and_the_feeder_stays_until_the_run_is_over(tmp_path: Path) -> None:
    memory = Memory()
    memory.meanwhile = finish_after(50)
    assert run(config(tmp_path, 10, num_epoch=3), memory) == list(range(10)) * 3
    assert memory.looks == 51
    assert memory.data is not None
    assert memory.data[:2] == (10, 30)


def test_without_epochs_the_data_never_ends(tmp_path: Path) -> None:
    memory = Memory()
    memory.meanwhile = consume(95)
    rows = run(config(tmp_path, 10, feed_low_water=5), memory)
    assert rows == list(range(10)) * 10
    assert memory.data is not None
    assert memory.data[1] is None


def test_a_run_that_ends_by_its_steps_ends_the_feeder_before_the_data_does(tmp_path: Path) -> None:
    memory = Memory()
    memory.meanwhile = consume(8)
    assert len(run(config(tmp_path, 20, num_epoch=100, feed_low_water=4), memory)) == 8


def test_nothing_is_fed_while_enough_waits_and_then_up_to_twice_the_mark(tmp_path: Path) -> None:
    memory, seen = Memory(), []

    def meanwhile(memory: Memory) -> None:
        seen.append(memory.waiting)
        memory.waiting -= 1 if memory.waiting else 0
        memory.status = "done" if memory.looks == 12 else "running"

    memory.meanwhile = meanwhile
    run(config(tmp_path, feed_low_water=4), memory)
    assert seen == [0, 8, 7, 6, 5, 4, 8, 7, 6, 5, 4, 8]


def test_a_call_feeds_at_most_256_prompts(tmp_path: Path) -> None:
    memory = Memory()
    memory.meanwhile = finish_after(3)
    run(config(tmp_path, 1000, feed_low_water=300), memory)
    assert memory.sizes == [256, 256, 88]


def test_looks_become_rarer_while_there_is_nothing_to_do(tmp_path: Path) -> None:
    memory, clock = Memory(), Clock()
    memory.meanwhile = finish_after(7)
    feeder.main(config(tmp_path, 3, num_epoch=1), memory, clock)
    assert clock.pauses[0] == 0.2
    assert clock.pauses == sorted(clock.pauses)
    assert clock.pauses[-1] == 1.0


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_resumed_feeder_feeds_what_an_unbroken_one_would(tmp_path: Path, shuffle: bool) -> None:
    unbroken, broken = Memory(), Memory()
    settings = config(tmp_path, 20, num_epoch=3, rollout_shuffle=shuffle, rollout_seed=5, feed_low_water=3)
    unbroken.meanwhile = consume(60)
    rows = run(settings, unbroken)
    for stop_at in (6, 30, 36, 60):
        broken.meanwhile = consume(stop_at)
        run(settings, broken)
        assert len(broken.fed) == stop_at
        broken.status = "running"
    assert broken.fed == unbroken.fed
    assert rows == [row_of(id, 5, 20, shuffle) for id in range(60)]
    epochs = [rows[n : n + 20] for n in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == (3 if shuffle else 1)


def test_a_resume_at_the_very_end_feeds_nothing(tmp_path: Path) -> None:
    memory = Memory()
    for _ in range(2):
        memory.looks = 0
        memory.status = "running"
        memory.meanwhile = finish_after(3)
        run(config(tmp_path, 10, num_epoch=1), memory)
        assert len(memory.fed) == 10


def test_what_redis_lost_at_the_end_of_its_log_is_fed_once_more(tmp_path: Path) -> None:
    memory = Memory()

    def meanwhile(memory: Memory) -> None:
        if memory.looks == 3:
            assert len(memory.fed) == 10
            del memory.fed[7:]
            memory.waiting = 2
        memory.status = "done" if memory.looks == 5 else "running"

    memory.meanwhile = meanwhile
    assert run(config(tmp_path, 10, num_epoch=1, feed_low_water=20), memory) == list(range(10))
    assert memory.sizes == [10, 3]


def test_two_feeders_feed_each_prompt_once(tmp_path: Path) -> None:
    memory, other = Memory(), Memory()
    settings = config(tmp_path, 20, num_epoch=2, rollout_shuffle=True, feed_low_water=4)
    other.meanwhile = consume(40)
    rows = run(settings, other)

    def rival(memory: Memory) -> None:
        if len(memory.sizes) % 2 == 0 and len(memory.fed) < 37:
            memory.put([record for _, record in other.fed[len(memory.fed) :][:3]])

    memory.rival, memory.meanwhile = rival, consume(40)
    assert run(settings, memory) == rows


def test_ids_that_a_restore_missed_are_fed_again_before_fresh_ones_and_after_the_end(tmp_path: Path) -> None:
    memory = Memory()
    settings = config(tmp_path, 20, num_epoch=2, rollout_shuffle=True, feed_low_water=50)
    memory.again = dict.fromkeys((3, 21, 39))

    def meanwhile(memory: Memory) -> None:
        if memory.looks == 2:
            assert memory.again[21] is not None
            assert memory.fed == []
        if memory.looks == 5:
            assert len(memory.fed) == 40
            memory.again[38] = None
        memory.status = "done" if memory.looks == 8 else "running"

    memory.meanwhile = meanwhile
    run(settings, memory)
    assert memory.again == {id: memory.fed[id][1] for id in (3, 21, 39, 38)}


def test_a_stop_signal_ends_it_between_two_calls(tmp_path: Path) -> None:
    memory, clock = Memory(), Clock()
    memory.rival = lambda memory: clock.set()
    assert feeder.main(config(tmp_path, feed_low_water=1000), memory, clock) == 0
    assert memory.sizes == [256]


def test_bad_rows_are_refused_before_anything_is_fed(tmp_path: Path) -> None:
    memory, settings = Memory(), config(tmp_path, 300)
    assert settings.prompt_data is not None
    path = Path(settings.prompt_data)
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(UsageError, match=r"data.jsonl:301: no key 'input'"):
        feeder.main(settings, memory, Clock())
    with pytest.raises(UsageError, match="--prompt-data is missing"):
        feeder.main(FeedConfig(), memory, Clock())
    assert (memory.fed, memory.data) == ([], None)


def test_other_data_keys_or_order_is_refused_and_more_epochs_are_not(tmp_path: Path) -> None:
    memory = Memory()
    settings = config(tmp_path, rollout_shuffle=True, num_epoch=1)
    memory.meanwhile = finish_after(2)
    run(settings, memory)
    for change in ({"rollout_seed": 1}, {"rollout_shuffle": False}, {"metadata_key": "m"}):
        with pytest.raises(UsageError, match="other data"):
            run(settings.model_copy(update=change), memory)
    run(settings.model_copy(update={"num_epoch": 2}), memory)
    with pytest.raises(UsageError, match="other data"):
        run(config(tmp_path, 21, rollout_shuffle=True), memory)


def test_the_seed_means_nothing_without_shuffling(tmp_path: Path) -> None:
    memory = Memory()
    memory.meanwhile = finish_after(2)
    for seed in (1, 2):
        run(config(tmp_path, rollout_seed=seed), memory)
