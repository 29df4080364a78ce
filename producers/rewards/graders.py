"""The sandboxes of a generator, one a kind of grader, each started when it is first needed."""

from __future__ import annotations

from dataclasses import dataclass, field

from producers.rewards.base import Grading, Value
from producers.rewards.forked import Limits
from producers.rewards.sandbox import Sandbox


@dataclass(frozen=True)
class Graders:
    workers: int
    limits: Limits
    sandboxes: dict[str, Sandbox] = field(default_factory=dict)

    async def grade(self, grading: Grading) -> Value:
        """None where it did not end within its limits."""
        if grading.grader not in self.sandboxes:
            self.sandboxes[grading.grader] = Sandbox(grading.grader, self.workers, self.limits)
        return await self.sandboxes[grading.grader].grade(**grading.arguments)

    async def close(self) -> None:
        for sandbox in self.sandboxes.values():
            await sandbox.close()
