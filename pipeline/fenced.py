"""The verbs of the one trainer; each is fenced by its epoch and token (pipeline.fence)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from redis.exceptions import OutOfMemoryError, RedisError

from pipeline.connect import BLOCK
from pipeline.errors import MillpondError
from pipeline.fence import Fence, Older
from pipeline.outage import passing
from pipeline.rendezvous import Roster, write
from pipeline.replies import Checked, Standing, fields_of, map_of, quarantined
from pipeline.scripts import Arg, load
from pipeline.types import Policy, Prompt


class TrainerBroker(Fence):
    """Takes, checks, recycles, publishes, commits."""

    def take(self, count: int, block: bool = True) -> tuple[list[bytes], bytes | None]:
        """Up to `count` messages, or an alarm; waits at most a second, for the first only. What is there already is
        popped behind the fence, so a replaced trainer can get no more than one group: that it was waiting for."""

        def pop() -> tuple[list[bytes], bytes | None]:
            messages = self._pop(count)
            if messages or not block:
                return messages, None
            found: Any = self.client.blpop([self.keys["alarm"], self.keys["groups"]], timeout=BLOCK)
            if found is None:
                return [], None
            alarm = found[0].decode() == self.keys["alarm"]
            return ([], found[1]) if alarm else ([found[1]], None)

        try:
            found = pop()
        except RedisError as error:
            if not passing(error):
                raise
            self.outage(error)
        except Older as loss:
            self.tell_again(loss)
        else:
            self.seen.well()
            return found
        return [], None

    def _pop(self, count: int) -> list[bytes]:
        opening, closing = load("take_open"), load("take_close")
        pipe = self.client.pipeline(transaction=True)
        pipe.execute_command("EVAL", opening.text, *opening.call(self.keys, self.epoch, self.token))
        pipe.lpop(self.keys["groups"], count)
        pipe.execute_command("EVAL", closing.text, *closing.call(self.keys))
        try:
            fence, messages, _ = pipe.execute()
        except OutOfMemoryError:
            return list(self.fenced("take_full", count)[0])
        return list(messages or []) if fence == b"alarm" or self.passes([fence]) else []

    def hold(self, prompt: Prompt) -> bool:
        """Takes a decoded group's prompt into the ledger; False where it was taken before: discard the message."""
        if self.ledger.knows(prompt.id):
            self.patiently(lambda: self.script("count", "discarded:double"))
            return False
        self.ledger.taken[prompt.id] = prompt
        return True

    def check(self, reason: str = "lost", fault: str = "none") -> Checked:
        """Sends round again what was popped and never reached us; says what we hold and should not. Finds out when
        Redis has lost something, and tells it again."""

        def run() -> Any:
            held: list[Arg] = [x for p in self.ledger.taken.values() for x in (p.id, p.attempt)]
            version = self.latest.version if self.latest else 0
            return self.fenced("check", reason, fault, len(self.ledger.published), version, *held)

        found = Checked.of(self.patiently(run))
        self.ledger.release(found.foreign)
        return found

    def recycle(self, prompts: Sequence[Prompt], reason: str, fault: str = "none") -> None:
        """Round again (fault 'none' or 'strike'), or dropped under the reason ('drop')."""
        flat: list[Arg] = [x for p in prompts for x in (p.id, p.attempt)]
        self.patiently(lambda: self.fenced("recycle", reason, fault, *flat))
        self.ledger.release(p.id for p in prompts)

    def quarantine(self, message: bytes, problem: str) -> None:
        """A message that would not decode; its prompt is found by the next check."""
        self.patiently(lambda: self.script("quarantine", *quarantined(message, problem)))

    # -- weights and checkpoints

    def publish(self, policy: Policy, trained: Iterable[Prompt]) -> None:
        """The new version for all; room opens for what it was trained on."""
        ids = [p.id for p in trained]
        fields = fields_of(policy)
        r = self.patiently(
            lambda: self.script("publish", self.epoch, self.token, policy.version, len(fields) // 2, *fields, *ids)
        )
        if r[0] == b"behind":
            raise MillpondError(f"version {policy.version} was to be published, but {int(r[1])} stands already")
        if r[0] == b"older":
            self.tell_again(Older(self.keys["state"]))
            return self.publish(policy, [self.ledger.taken[i] for i in ids if i in self.ledger.taken])
        self.passes(r)
        self.latest = replace(policy, rendezvous=None)  # who is told again finds nobody there
        self.ledger.publish(ids)
        return self.durable()

    def hold_engines(self, policy: Policy, seconds: float) -> None:
        """The engines that an evaluation shares get these weights and no newer ones, and nothing is leased, until it
        has ended. To be said before they are published."""
        fields = ["version", policy.version, *fields_of(policy)]
        self.patiently(lambda: self.fenced("hold", int(seconds * 1000), *fields))

    def let_go(self, version: int) -> None:
        """The evaluation of that version has ended."""
        self.patiently(lambda: self.script("keep_hold", version, 0))

    def held(self) -> bool:
        """An evaluation has the engines."""
        return bool(self.patiently(lambda: self.client.exists(self.keys["evals:hold"])))

    def commit(self, prompts: Sequence[Prompt]) -> list[int]:
        """A complete checkpoint contains these. Answers ids refused, which is an error of the history."""
        flat: list[Arg] = [x for p in prompts for x in (p.id, p.attempt)]
        refused = {int(id) for id in self.patiently(lambda: self.fenced("commit", *flat))[0]}
        if lost := [p.id for p in prompts if p.id in refused and self.ledger.published.get(p.id) == p]:
            self.tell_again(Older(f"{len(lost)} entries of {self.keys['open']}"))
            refused = {int(id) for id in self.patiently(lambda: self.fenced("commit", *flat))[0]}
        self.ledger.commit(p.id for p in prompts)
        self.durable()
        return sorted(refused)

    def able(self) -> set[str]:
        """Workers that are alive and take weights from the trainer where it offers them."""
        raw: Any = self.patiently(lambda: self.client.hgetall(self.keys["workers:info"]))
        told = {worker.decode(): map_of(info) for worker, info in raw.items()}
        return {worker for worker, info in told.items() if info.get("joins") and info.get("ready")}

    def invite(self) -> None:
        """What was answered to an earlier publication is of no use any more."""
        self.patiently(lambda: self.client.delete(self.keys["weights:joins"]))

    def answers(self) -> list[dict[str, Any]]:
        """What workers have said since."""
        said: Any = self.patiently(lambda: self.client.lpop(self.keys["weights:joins"], 100))
        return [map_of(word) for word in said or []]

    def seat(self, version: int, roster: Roster) -> None:
        """Who takes part in the update to `version`, for all to read."""
        self.patiently(lambda: self.fenced("roster", version, write(roster)))

    def standing(self) -> Standing:
        """Of a Redis that has lost nothing: a checkpoint is made of it."""
        self.check()
        return super().standing()
