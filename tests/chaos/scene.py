"""What an episode needs of the run that it is played with; tests/chaos/cast.py and troupe.py have one each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from plan import Fault, Setting
from processes import SMALL
from troubles import Troubles

from pipeline.audit import Audit
from pipeline.replies import Standing

OWN = ("--custom-rm-path", "witness.score", "--dynamic-sampling-filter-path", "witness.made")
"What all who score must be told."


def trainer_of(setting: Setting) -> tuple[str, ...]:
    """The trainer's options."""
    bound = "none" if setting.staleness is None else str(setting.staleness)
    return (
        *("--train-backend", "echo", "--rollout-sample-filter-path", "witness.handed", *SMALL, "--num-epoch", "1"),
        *("--fully-async", "--max-weight-staleness", bound),
        *("--save-interval", str(setting.save_interval), "--save-keep", "100000"),
    )


class Scene(Protocol):
    setting: Setting
    troubles: Troubles
    seen: Path
    "folder of the witnesses' files"
    out: Path

    def begin(self) -> None:
        """All processes are started; returns when something is committed."""

    def held(self, fault: Fault) -> list[int]:
        """Prompts that a worker holds which is about to be killed; none where Redis cannot be asked."""
        ...

    def inflict(self, fault: Fault) -> None: ...

    def ready(self, fault: Fault) -> bool:
        """Whether its victim is not in trouble already."""
        ...

    def going(self) -> bool:
        """False once the run is done; raises when a process ended that nobody ended."""
        ...

    def heal(self) -> None: ...

    def audit(self) -> Audit | None:
        """None where Redis is away just now."""
        ...

    def finish(self) -> tuple[Audit, Standing]:
        """Once the run is done: all processes have ended well; where each prompt stands."""
        ...

    def words(self) -> str:
        """What the processes said last."""
        ...


def witnessed(folder: Path) -> tuple[Path, dict[str, str]]:
    """The folder of the witnesses' files, and the environment of the processes they look into: the code is that beside
    these tests."""
    seen = folder / "witness"
    seen.mkdir()
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return seen, {"WITNESS": str(seen), "PYTHONPATH": path}
