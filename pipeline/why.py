"""`millpond why`: in one sentence, why a run stands still and what to do; or that it does not.

From Redis alone, by two looks a moment apart: what moved meanwhile moves. Exit code 0 where nobody has to act (it
moves, works on something, is done or was stopped in order), 1 where somebody has to: so a watchdog can ask, and a long
step is no alarm before --still-after. A run without a trainer is one, though its workers still fill the list.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pipeline import show
from pipeline.causes import Cause, causes
from pipeline.config import PositiveFloat, option
from pipeline.errors import RedisDown
from pipeline.find import Found, Look, found
from pipeline.flags import arguments
from pipeline.glance import look
from pipeline.overview import Overview


class WhyLook(Look):
    """Says in a sentence why a run stands still, and what to do: millpond why [FOLDER or NAME]."""

    json_: bool = option(False, "one JSON document instead of text")
    apart: PositiveFloat = option(2.0, "seconds between the two looks")
    still_after: PositiveFloat = option(
        600.0, "seconds that a step or a wait may take before it counts as standing still"
    )


@dataclass(frozen=True)
class Verdict:
    """What two looks say."""

    stands: bool
    "somebody has to act"
    sentence: str
    do: str
    name: str
    "of the root cause; `moves` where there is none"
    moved: list[str]
    others: list[Cause]


def main(argv: list[str]) -> int:
    options, words = arguments(WhyLook, argv, "millpond why")
    head: dict[str, Any] = {"run": options.run, "where": None}
    try:
        with found(options, words) as run:
            verdict, view = _look(run, options)
            head = {"run": run.run, "where": run.where}
    except RedisDown as error:
        cause = Cause("redis away", "fault", f"Redis does not answer ({show.clean(str(error))})", "start it again")
        verdict, view = _fault(cause, []), None
    if options.json_:
        show.document(document(head, verdict, view))
    else:
        show.line(f"{verdict.sentence}{f' To do: {verdict.do}.' if verdict.do else ''}")
        for cause in verdict.others:
            show.line(f"- {cause}")
    return int(verdict.stands)


def _look(run: Found, options: WhyLook) -> tuple[Verdict, Overview]:
    before = after = look(run.broker)
    if not run.stopped and before.status not in ("done", "failed"):
        time.sleep(options.apart)
        after = look(run.broker)
    return judge(before, after, run.stopped, options.still_after), after


def judge(before: Overview, after: Overview, stopped: bool, still_after: float) -> Verdict:
    """The root cause and the rest."""
    known, moved = causes(after, stopped), list(movement(before, after))
    faults, others = [c for c in known if c.kind == "fault"], [c for c in known if c.kind != "fault"]
    if known and known[0].kind == "end":
        return Verdict(False, f"{_upper(known[0].what)}.", known[0].do, known[0].name, moved, known[1:])
    if faults:
        return _fault(faults[0], [*faults[1:], *others], moved)
    quiet = after.policy_age
    if moved:
        if quiet is None or quiet <= still_after or any(c.name == "trainer busy" for c in known):
            return Verdict(False, f"It does not stand still: {_latest(after)}.", "", "moves", moved, others)
        return _fault(_circles(after), others, moved)
    if not others:
        return Verdict(
            False, f"Nothing moved between two looks, and nothing is wrong: {_latest(after)}.", "", "calm", [], []
        )
    root = others[0]
    since = quiet if root.since is None else root.since
    if since is not None and since > still_after:
        return _fault(root, others[1:])
    return Verdict(False, f"It waits: {root.what}.", root.do, root.name, [], others[1:])


def _fault(cause: Cause, others: list[Cause], moved: list[str] | None = None) -> Verdict:
    head = "It moves, but not for long" if moved else "It stands still"
    return Verdict(True, f"{head}: {cause.what}.", cause.do, cause.name, moved or [], others)


def _circles(view: Overview) -> Cause:
    """Groups are made and never trained on."""
    ends = {
        f"{kind} {name}": n
        for kind in ("recycled", "dropped", "dead")
        for name, n in view.prompts.reasons[kind].items()
    }
    told = f" ({show.counts(ends)})" if ends else ""
    what = f"groups come and go, and no weights were published for {show.ago(view.policy_age or 0)}{told}"
    return Cause("circles", "fault", what, "see `millpond status`, and the trainer's log")


def movement(before: Overview, after: Overview) -> Iterator[str]:
    """What has happened between two looks. Leases and hand-backs are none: without an engine they go on for ever."""
    for name, was, now in zip(_STEPS, _steps(before), _steps(after), strict=True):
        if was != now:
            yield name


_STEPS = ("fed", "pushed", "taken", "published", "committed", "dropped", "dead")


def _steps(view: Overview) -> tuple[int, ...]:
    p, version = view.prompts, view.policy.version if view.policy else 0
    return (p.fed, view.pushed, view.pushed - view.queues.queued, version, p.committed, p.dropped, p.dead)


def _latest(view: Overview) -> str:
    push = "no group came yet" if view.pushed_age is None else f"the last group came {show.ago(view.pushed_age)} ago"
    if view.policy_age is None:
        return f"{push}, no weights are published yet"
    return f"{push}, the last publication {show.ago(view.policy_age)} ago"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def document(head: dict[str, Any], verdict: Verdict, view: Overview | None) -> dict[str, Any]:
    """For programs."""
    return {
        **head,
        "stands_still": verdict.stands,
        "cause": verdict.name,
        "sentence": verdict.sentence,
        "do": verdict.do,
        "moved": verdict.moved,
        "seconds_since_push": view.pushed_age if view else None,
        "seconds_since_publication": view.policy_age if view else None,
        "others": [asdict(cause) for cause in verdict.others],
    }
