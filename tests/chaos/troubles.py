"""Who is in trouble just now, and what is to be done about it when."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Troubles:
    busy: set[str] = field(default_factory=set)
    "names of who is down, stopped or cut off; nothing else befalls them meanwhile"
    later: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    "(monotonic time, what is to be done then)"
    awaited: list[tuple[Callable[[], bool], Callable[[], object]]] = field(default_factory=list)
    "(what must come true by itself, what is to be done then)"

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        self.later.append((time.monotonic() + seconds, act))

    def during(self, name: str, seconds: float, heal: Callable[[], object]) -> None:
        """`name` is in trouble for so long."""
        self.busy.add(name)
        self.after(seconds, lambda: (heal(), self.busy.discard(name)))

    def until(self, name: str, met: Callable[[], bool], then: Callable[[], object]) -> None:
        """`name` is in trouble until that is so."""
        self.busy.add(name)
        self.awaited.append((met, lambda: (self.busy.discard(name), then())))

    def turn(self) -> None:
        """Does what is due."""
        self._do([item for item in self.later if item[0] <= time.monotonic()])
        for item in self.awaited[:]:
            if item[0]():
                self.awaited.remove(item)
                item[1]()

    def heal(self) -> None:
        """All that was to be mended later is mended now, in the same order."""
        self._do(self.later)

    def _do(self, items: list[tuple[float, Callable[[], object]]]) -> None:
        for item in sorted(items, key=lambda item: item[0]):
            self.later.remove(item)
            item[1]()
