"""Random interleavings of all verbs with crashes, zombies and lost replies, on the real scripts and the real server.

Each step is checked against protocol_model: what Redis holds afterwards is exactly what it must hold. Beyond that, over
time: no prompt is ever in two places or in none (G1), none is trained twice along the history of a checkpoint (G2), the
caps hold (G3), versions grow (G4), a replaced trainer changes nothing (G5), whatever dies (G6); and at the end all can
be trained, dropped or buried, each once.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
from crash import crash, log_size
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from protocol_model import BOUND, CAP, IN_FLIGHT, STRIKES, Entry, State, observe
from rig import Rig, agreed, bits, message, ones, policy, prompt_of, records

from pipeline.errors import Fenced
from pipeline.fenced import TrainerBroker
from pipeline.leases import WorkerBroker
from pipeline.ledger import Ledger
from pipeline.replies import Lease
from pipeline.server import EmbeddedServer
from pipeline.types import Prompt

LIMIT = 3_600_000
"heartbeat limit in ms: only whom the test silences is silent"
CONFIG = agreed(
    bound=BOUND,
    in_flight=IN_FLIGHT,
    queue_capacity=CAP,
    max_prompt_attempts=STRIKES,
    heartbeat_limit_ms=LIMIT,
    queue_max_bytes=1 << 20,
).model_dump_json()

few = st.integers(1, 4)
pick = st.integers(0, 7)


@dataclass
class Hand:
    """A worker, and the leases it believes to hold."""

    broker: WorkerBroker
    held: list[Lease] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.broker.worker


class Protocol(RuleBasedStateMachine):
    """One run from its first feed to its last commit."""

    def __init__(self, server: EmbeddedServer) -> None:
        super().__init__()
        self.server = server
        self.rig = Rig(server.url)
        self.valkey = self.rig.raw.info("server").get("server_name") == "valkey"
        self.broken = True
        self.behind = False
        "Redis came back older, and the trainer has not spoken to it yet"
        self.torn = False
        "... perhaps in the middle of a restore"
        self.ever_behind = False
        self.zombies: list[TrainerBroker] = []
        self.ghosts: list[Hand] = []
        self.version = 0
        "the newest that was ever published"
        self.epoch = 0
        self.names = 0
        self.challenged = False
        "by a zombie since the last takeover"
        self.saved = self.saved_before = Ledger()
        "the newest checkpoint, and the one before it"
        self.fit: set[int] = set()
        "trained, in no publication yet"
        self.trained: set[int] = set()
        "along the history of the weights that are trained now"
        self.trainer = self.new_trainer()
        self.hands = [self.new_hand(), self.new_hand()]
        self.feeder = self.rig.feeder()
        self.state = observe(self.rig)
        self.marks = [log_size(server)]
        self.calm = 0
        "steps since the last disaster"
        self.broken = False

    def new_trainer(self) -> TrainerBroker:
        trainer = self.rig.new_trainer()
        trainer.takeover(f"trainer {len(self.zombies)}", force=True, above=self.epoch)
        assert trainer.epoch > self.epoch
        self.epoch = trainer.epoch
        trainer.configure(CONFIG)
        trainer.restore(deepcopy(self.saved))
        self.version += 1
        trainer.publish(policy(self.version), [])
        trainer.renew(status="running")
        return trainer

    def new_hand(self) -> Hand:
        self.names += 1
        return Hand(self.rig.worker(f"w{self.names}"))

    @initialize(saved=st.integers(0, 3), published=st.integers(0, 2), taken=st.integers(0, 2), queued=st.integers(0, 2))
    def a_run_is_under_way(self, saved: int, published: int, taken: int, queued: int) -> None:
        self.feed(2 + saved + published + taken + queued, False)
        for count in (saved, published):
            if count:
                self.a_worker_works(0, count)
                self.the_trainer_steps(count)
                if count is saved:
                    self.save(True, False)
        if taken + queued:
            self.a_worker_works(1, taken + queued)
            self.take(taken, False) if taken else None
        self.lease(1, 1, False)

    # -- after each step

    def expect(self, after: State) -> None:
        """Redis holds exactly this now."""
        self.state = observe(self.rig)
        assert self.state.plain() == after.plain()
        self.hold_true()
        self.marks.append(log_size(self.server))
        self.calm += 1
        self.broken = False

    def hold_true(self) -> None:
        state = self.state
        for id in range(state.feed):
            assert state.places(id) == 1 or (self.torn and state.places(id) == 0)
        assert len(state.queue) <= CAP
        assert state.pending <= IN_FLIGHT
        assert self.ever_behind or state.pending + len(state.unsettled) <= BOUND
        if not self.behind:
            assert state.version == self.version
            assert state.committed <= self.trained
            book = self.trainer.ledger
            assert state.committed == ones(book.committed)
            assert all(state.open[id][0] == p.attempt for id, p in book.published.items())

    def begin(self) -> State:
        """What Redis held before; a step that raises leaves the machine broken."""
        self.broken = True
        return self.state.copy()

    def synced(self) -> State:
        """As `begin`, for the trainer: if Redis is behind, it is told first."""
        before = self.begin()
        if self.behind:
            before.reconcile(self.trainer.ledger, self.version)
            self.trainer.renew()
            self.behind = self.torn = False
            self.expect(before)
            before = self.begin()
        return before

    # -- prompts are fed

    @precondition(lambda self: self.state.feed < 30)
    @rule(count=few, stale=st.booleans())
    def feed(self, count: int, stale: bool) -> None:
        after = self.begin()
        answer = self.feeder.feed(after.feed + stale, records(after.feed, count))
        if not stale:
            for id in range(after.feed, after.feed + count):
                after.streams["fresh"].append(Entry(id, 1, 0))
            after.feed += count
        assert answer == after.feed
        self.expect(after)

    @precondition(lambda self: self.state.refeed)
    @rule(count=few)
    def refeed(self, count: int) -> None:
        after = self.begin()
        ids = sorted(after.refeed)[:count]
        self.feeder.refeed({id: records(id, 1)[0] for id in ids})
        after.refeed -= set(ids)
        after.streams["retry"] += [Entry(id, 1, 0) for id in ids]
        self.expect(after)

    # -- workers

    @rule(which=pick, want=few)
    def a_worker_works(self, which: int, want: int) -> None:
        """A round as it should be."""
        self.lease(which, want, False)
        while self.hands[which % len(self.hands)].held and len(self.state.queue) < CAP:
            self.push(which, 0, False)

    @rule(which=pick, want=few, lost=st.booleans())
    def lease(self, which: int, want: int, lost: bool) -> None:
        hand = self.hands[which % len(self.hands)]
        if hand.broker.suspect:
            self.adopt(which)
        after = self.begin()
        alone = any(lease.alone for lease in hand.held)
        expected = after.lease(hand.name, want, alone)
        answer = self.rig.do(hand.broker.lease(want, 0, alone))
        if answer.why == "outage":  # the first that it hears of it
            return self.expect(self.begin())
        assert [(x.prompt.id, x.prompt.attempt, x.entry) for x in answer.leases] == [
            (e.id, e.attempt, e.name) for e in expected
        ]
        hand.broker.suspect |= lost or answer.why == "reaped"
        if not lost:
            hand.held += answer.leases
        return self.expect(after)

    @precondition(lambda self: any(hand.broker.suspect for hand in self.hands))
    @rule(which=pick)
    def adopt(self, which: int) -> None:
        hand = self.hands[which % len(self.hands)]
        after = self.begin()
        self.rig.do(hand.broker.register({}))
        mine = self.rig.do(hand.broker.mine())
        hand.broker.suspect = False
        assert [(x.stream, x.entry) for x in mine] == [(stream, e.name) for stream, e in after.of(hand.name)]
        hand.held = mine
        after.workers.add(hand.name)
        after.silent.discard(hand.name)
        after.grouped = True
        self.expect(after)

    @precondition(lambda self: any(hand.held for hand in self.hands))
    @rule(which=pick, what=pick, twice=st.booleans())
    def push(self, which: int, what: int, twice: bool) -> None:
        hand = self.hands[which % len(self.hands)]
        if hand.held:
            lease = hand.held[what % len(hand.held)]
            answer = self.pushed(hand, lease)
            if twice:
                assert self.pushed(hand, lease) == answer
            if answer != "full":
                hand.held.remove(lease)

    def pushed(self, hand: Hand, lease: Lease) -> str:
        after = self.begin()
        expected = after.push(lease, hand.name)
        assert self.rig.do(hand.broker.push(lease, message(lease.prompt))) == expected
        self.expect(after)
        return expected

    @precondition(lambda self: any(hand.held for hand in self.hands))
    @rule(which=pick, what=pick, fault=st.sampled_from(["none", "strike", "bury", "drop"]), twice=st.booleans())
    def hand_back(self, which: int, what: int, fault: str, twice: bool) -> None:
        hand = self.hands[which % len(self.hands)]
        if hand.held:
            lease = hand.held.pop(what % len(hand.held))
            for _ in range(1 + twice):
                after = self.begin()
                expected = after.hand_back(lease, hand.name, fault)
                assert self.rig.do(hand.broker.hand_back([lease], "reason", fault)) == expected
                self.expect(after)

    @precondition(lambda self: self.behind)
    @rule(which=pick, fault=st.sampled_from(["none", "strike", "bury", "drop"]))
    def a_worker_ends_what_redis_remembers_before_the_trainer_is_back(self, which: int, fault: str) -> None:
        self.adopt(which)
        while self.hands[which % len(self.hands)].held:
            self.hand_back(which, 0, fault, False)

    @precondition(lambda self: self.calm > 4 and any(hand.held for hand in self.hands))
    @rule(which=pick)
    def a_worker_dies_silently(self, which: int) -> None:
        hand = self.hands.pop(which % len(self.hands))
        self.ghosts.append(hand)
        self.begin()
        self.hands.append(self.new_hand())
        self.state = observe(self.rig)
        self.the_silent_are_reaped()

    def the_silent_are_reaped(self) -> None:
        """Also those who were reaped before, and whom Redis remembers again."""
        after = self.begin()
        for ghost in self.ghosts:
            if ghost.name in after.workers:
                self.rig.raw.zadd(self.rig.keys["workers"], {ghost.name: 0})
                after.silent.add(ghost.name)
        gone = after.reap()
        found = [name for _ in range(1 + len(gone) // 4) for name in self.rig.reap()]
        assert sorted(found) == gone
        self.expect(after)

    @precondition(lambda self: self.calm > 4)
    @rule(which=pick)
    def a_worker_leaves(self, which: int) -> None:
        hand = self.hands[which % len(self.hands)]
        after = self.begin()
        holds = bool(after.of(hand.name))
        assert self.rig.do(hand.broker.leave()) != holds
        if not holds:
            after.workers.discard(hand.name)
            after.silent.discard(hand.name)
            hand.broker.suspect = True
        self.expect(after)

    @precondition(lambda self: any(ghost.held for ghost in self.ghosts))
    @rule(which=pick)
    def a_dead_worker_comes_back_and_pushes_all_it_had(self, which: int) -> None:
        able = [ghost for ghost in self.ghosts if ghost.held]
        ghost = able[which % len(able)]
        for lease in ghost.held:
            self.pushed(ghost, lease)
        ghost.held.clear()

    # -- the trainer

    @rule(count=few)
    def the_trainer_steps(self, count: int) -> None:
        """A step as it should be."""
        self.take(count, False)
        self.train(count)
        self.publish(False)

    @precondition(lambda self: self.state.queue)
    @rule(count=few, block=st.booleans())
    def take(self, count: int, block: bool) -> None:
        after = self.synced()
        book = self.trainer.ledger
        messages, alarm = self.trainer.take(count, block and bool(after.queue))
        assert alarm is None
        assert [(p.id, p.attempt) for p in map(prompt_of, messages)] == after.queue[:count]
        del after.queue[:count]
        for prompt in map(prompt_of, messages):
            known = prompt.id in book.taken or prompt.id in book.published or prompt.id in ones(book.committed)
            assert self.trainer.hold(prompt) != known
        self.expect(after)

    @precondition(lambda self: self.state.queue)
    @rule(count=few)
    def a_pop_is_lost(self, count: int) -> None:
        after = self.begin()
        self.rig.raw.lpop(self.rig.keys["groups"], count)
        del after.queue[:count]
        self.expect(after)

    def check(self) -> None:
        after = self.synced()
        lost, foreign = after.check(self.trainer.ledger.taken)
        found = self.trainer.check()
        assert (sorted(found.lost), sorted(found.foreign)) == (sorted(lost), sorted(foreign))
        assert not set(foreign) & self.fit
        assert found.waiting == sum(map(len, after.streams.values()))
        assert (found.queued, found.refeed, found.feed) == (len(after.queue), len(after.refeed), after.feed)
        self.expect(after)

    def untrained(self) -> list[Prompt]:
        return [p for id, p in self.trainer.ledger.taken.items() if id not in self.fit]

    @precondition(lambda self: self.untrained())
    @rule(count=few, fault=st.sampled_from(["none", "strike", "drop"]), twice=st.booleans())
    def recycle(self, count: int, fault: str, twice: bool) -> None:
        after = self.synced()
        prompts = self.untrained()[:count]
        for _ in range(1 + twice):
            self.trainer.recycle(prompts, "stale", fault)
        for p in prompts:
            if after.open.get(p.id, (0, 0))[0] == p.attempt:
                after.settle(p.id, fault)
        self.expect(after)

    @precondition(lambda self: self.untrained())
    @rule(count=few)
    def train(self, count: int) -> None:
        """A check first, as the drain does; then no prompt may be new to the weights twice."""
        self.check()
        new = {p.id for p in self.untrained()[:count]}
        assert not new & self.trained
        self.fit |= new
        self.trained |= new

    @precondition(lambda self: self.fit)
    @rule(twice=st.booleans())
    def publish(self, twice: bool) -> None:
        after = self.synced()
        self.version += 1
        prompts = [self.trainer.ledger.taken[id] for id in sorted(self.fit)]
        for _ in range(1 + twice):
            self.trainer.publish(policy(self.version), prompts)
        after.version = self.version
        for id in self.fit:
            after.unsettled.pop(id, None)
        self.fit.clear()
        self.expect(after)

    @precondition(lambda self: self.fit or self.trainer.ledger.published)
    @rule(commit=st.booleans(), twice=st.booleans())
    def save(self, commit: bool, twice: bool) -> None:
        """A checkpoint; the trainer may die before it can commit."""
        self.check()
        self.publish(False)
        after = self.begin()
        book = self.trainer.ledger
        committed = bits(*ones(book.committed), *book.published)
        dropped, dead = bytes(bits(*after.dropped)), bytes(bits(*after.dead))
        self.saved_before = self.saved
        self.saved = Ledger(committed=committed, dropped=dropped, dead=dead, cursor=after.feed)
        prompts = list(book.published.values())
        if not commit:
            return self.expect(after)
        for _ in range(1 + twice):
            assert self.trainer.commit(prompts) == []
        book.dropped, book.dead, book.cursor = dropped, dead, after.feed
        for p in prompts:
            after.settle(p.id, None)
            after.committed.add(p.id)
        return self.expect(after)

    @precondition(lambda self: self.calm > 6)
    @rule(spoiled=st.booleans())
    def the_trainer_dies_and_another_takes_over(self, spoiled: bool) -> None:
        """From the newest checkpoint, or from the one before if that is spoiled."""
        after = self.begin()
        if spoiled:
            self.saved = self.saved_before
        self.zombies.append(self.trainer)
        self.trainer = self.new_trainer()
        after.reconcile(self.saved, self.version)
        self.challenged, self.calm = False, 0
        self.trained, self.fit = ones(self.saved.committed), set()
        self.behind = self.torn = False
        self.expect(after)

    @precondition(lambda self: self.zombies and not self.behind and not self.challenged)
    @rule(which=pick)
    def a_replaced_trainer_comes_back_and_tries_everything(self, which: int) -> None:
        after = self.begin()
        self.challenged = True
        zombie = self.zombies[which % len(self.zombies)]
        held = [*zombie.ledger.taken.values(), *zombie.ledger.published.values(), Prompt(0, 1, 0, "{}")]
        tries: list[Callable[[], Any]] = [
            lambda: zombie.take(2, block=False),
            lambda: zombie.take(2),
            lambda: zombie.check("lost", "strike"),
            lambda: zombie.recycle(held, "stale", "strike"),
            lambda: zombie.publish(policy(self.version + 100), held),
            lambda: zombie.commit(held),
            lambda: zombie.configure("{}"),
            lambda: zombie.renew(status="done"),
            lambda: zombie.restore(zombie.ledger),
        ]
        for attempt in tries:
            with pytest.raises(Fenced):
                attempt()
        self.expect(after)

    # -- Redis

    @precondition(lambda self: self.calm > 8)
    @rule(back=st.integers(0, 60), torn=st.sampled_from([0, 0, 1, 30]))
    def redis_is_killed_and_forgets(self, back: int, torn: int) -> None:
        """It comes back as it was some steps ago, perhaps with half a command at the end."""
        self.begin()
        if not self.valkey:  # Redis leaves a transaction without its EXEC in the log, and does it at the next start
            torn = 0
        at = max(0, len(self.marks) - 1 - back)
        crash(self.server, max(self.marks[at] - torn, self.marks[0]))
        del self.marks[at + 1 :]
        self.marks[at] = log_size(self.server)
        self.fell_behind(torn=True)

    @precondition(lambda self: self.calm > 12)
    @rule()
    def redis_is_flushed(self) -> None:
        self.begin()
        self.rig.raw.delete(*self.rig.keys.all())
        self.trainer.losses.clear()  # as if it were not the tenth time in a minute
        self.fell_behind(torn=False)

    def fell_behind(self, torn: bool) -> None:
        self.behind = self.ever_behind = True
        self.torn |= torn
        self.calm = 0
        self.expect(observe(self.rig))

    # -- the end

    def teardown(self) -> None:
        try:
            if not self.broken:
                self.finish()
        finally:
            self.rig.close()

    def finish(self) -> None:
        """All that was fed ends, each once."""
        for _ in range(10 * self.state.feed + 20):
            self.the_silent_are_reaped()
            self.refeed_all()
            for which in range(len(self.hands)):
                self.adopt(which)
                self.lease(which, 4, False)
                for _ in range(len(self.hands[which].held)):
                    self.push(which, 0, False)
            self.take(CAP, False)
            self.train(99)
            self.save(True, False)
            if len(self.state.done) == self.state.feed and not self.state.queue:
                break
        state = self.state
        assert sorted([*state.committed, *state.dropped, *state.dead]) == list(range(state.feed))
        assert state.committed == self.trained
        assert [state.open, state.unsettled, state.queue, state.refeed] == [{}, {}, [], set()]
        assert not any(state.streams.values())

    def refeed_all(self) -> None:
        if self.state.refeed:
            self.refeed(len(self.state.refeed))


def play(tmp: Any, examples: int, steps: int, derandomize: bool) -> None:
    rules = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    with EmbeddedServer(tmp / "redis", "process") as server:
        run_state_machine_as_test(lambda: Protocol(server), settings=rules)  # type: ignore[no-untyped-call]


def test_any_interleaving_keeps_every_prompt_in_one_place_and_trains_it_once(tmp_path: Any) -> None:
    play(tmp_path, 90, 40, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_long_interleavings_keep_every_prompt_in_one_place_and_train_it_once(tmp_path: Any) -> None:
    play(tmp_path, 400, 120, derandomize=False)
