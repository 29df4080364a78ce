"""A warning where the sampler is further away from the trainer than its age can explain."""

from __future__ import annotations

import logging

from trainer.backends.base import At
from trainer.objective import BY_AGE

log = logging.getLogger(__name__)

FAR = 0.1
"nats; bfloat16 in one of the two makes about a tenth of that"
AGAIN = 100
"steps between two warnings"


class Mismatch:
    """Tokens of age 0 were sampled with the weights that the step begins with: there is no staleness in them."""

    def __init__(self) -> None:
        self.quiet = 0

    def look(self, by_age: dict[str, float], at: At | None) -> None:
        """`by_age`: the mean distance in nats (trainer.objective.Objective.by_age)."""
        self.quiet -= 1
        distance = by_age.get(f"{BY_AGE}0", 0.0)
        if at is None or not at.exact or distance <= FAR or self.quiet > 0:
            return
        self.quiet = AGAIN
        log.warning(
            "tokens sampled with the very weights at hand differ from the trainer by %.2g nats on average, which is no "
            "staleness: look for another temperature, top-p or precision in the engine, other weights behind the "
            "version's name, or text that was tokenised again",
            distance,
        )
