"""What the trainer knows of prompts that Redis, should it come back older, may have forgotten."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.types import Prompt


def set_bit(bits: bytearray, n: int) -> None:
    """As SETBIT: bit n counts from the most significant bit of the first byte."""
    if n // 8 >= len(bits):
        bits.extend(b"\0" * (n // 8 + 1 - len(bits)))
    bits[n // 8] |= 0x80 >> n % 8


def get_bit(bits: bytes | bytearray, n: int) -> bool:
    return n // 8 < len(bits) and bool(bits[n // 8] & 0x80 >> n % 8)


@dataclass
class Ledger:
    """Memory is bounded by the checkpoint interval times the batch, and one bit a prompt."""

    taken: dict[int, Prompt] = field(default_factory=dict)
    "popped, and not yet published upon: in hand, or trained"
    trained: set[int] = field(default_factory=set)
    "those of them that the weights were trained on"
    published: dict[int, Prompt] = field(default_factory=dict)
    "a publication contains them, no checkpoint does yet"
    committed: bytearray = field(default_factory=bytearray)
    "bitmap as done:committed"
    dropped: bytes = b""
    "done:dropped as of the last checkpoint"
    dead: bytes = b""
    "done:dead as of the last checkpoint"
    cursor: int = 0
    "feed as of the last checkpoint"
    data: str = ""
    "what the run is fed from, as `state` has it; empty where nobody has said so"

    def knows(self, id: int) -> bool:
        """Whether a message of this prompt was taken before, or must not be taken any more."""
        return id in self.taken or id in self.published or get_bit(self.committed, id)

    def release(self, ids: Iterable[int]) -> None:
        for id in ids:
            self.taken.pop(id, None)
            self.trained.discard(id)

    def unused(self) -> list[Prompt]:
        """Taken, and not trained on."""
        return [p for id, p in self.taken.items() if id not in self.trained]

    def publish(self, ids: Iterable[int]) -> None:
        for id in ids:
            if id in self.taken:
                self.published[id] = self.taken.pop(id)
            self.trained.discard(id)

    def commit(self, ids: Iterable[int]) -> None:
        for id in ids:
            self.published.pop(id, None)
            self.release([id])
            set_bit(self.committed, id)
