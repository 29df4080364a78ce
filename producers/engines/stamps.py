"""Which weights sampled which tokens of a sequence that is under way."""

from __future__ import annotations

from pipeline.types import Span


class Stamps:
    """Grows while a sequence does; `spans` closes it."""

    def __init__(self, version: int | None) -> None:
        self._marks: list[tuple[int | None, int]] = [(version, 0)]

    @property
    def version(self) -> int | None:
        """The newest."""
        return self._marks[-1][0]

    def mark(self, version: int | None, token: int) -> None:
        """Tokens from number `token` on are sampled with `version`; nothing is older than the mark before."""
        if self.version != version:
            self._marks.append((version, token))

    def spans(self, size: int) -> tuple[Span, ...]:
        """Over `size` tokens: in order, without gaps, none of them empty."""
        ends = [start for _, start in self._marks[1:]] + [size]
        pairs = zip(self._marks, ends, strict=True)
        return tuple(Span(version, start, min(end, size)) for (version, start), end in pairs if start < min(end, size))
