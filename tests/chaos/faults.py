"""The kinds of faults, each a function of the cast and of what was drawn for it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from link import COMMAND, REPLY
from plan import Fault

from pipeline.scripts import load

if TYPE_CHECKING:
    from cast import Cast

Act = Callable[["Cast", Fault], None]
Order = Callable[["Cast", Fault, str], None]
"what befalls the link of whom"
PARTS = ("trainer", "feeder", "generator")


def who(part: str, fault: Fault) -> str:
    """The process meant; of the generators either."""
    return f"generator-{int(fault.share * 100) % 2}" if part == "generator" else part


def killed(part: str) -> Act:
    def act(cast: Cast, fault: Fault) -> None:
        name = who(part, fault)
        cast.playing[name].kill()
        cast.troubles.during(name, min(fault.lasts, 3.0), lambda: cast.again(name))

    return act


def stopped(part: str) -> Act:
    """SIGSTOP: it holds what it holds, and goes on as if nothing had been."""

    def act(cast: Cast, fault: Fault) -> None:
        name = who(part, fault)
        one = cast.playing[name]
        one.kill(signal.SIGSTOP)
        cast.troubles.during(name, fault.lasts, lambda: one.kill(signal.SIGCONT))

    return act


def sent_away(part: str) -> Act:
    """SIGTERM: it ends in order, and another comes."""

    def act(cast: Cast, fault: Fault) -> None:
        name = who(part, fault)
        one = cast.playing[name]
        one.kill(signal.SIGTERM)

        def another() -> None:
            code = one.wait()
            if name == "trainer" and code == 0:  # the run was at its end
                return
            if code not in (130, -signal.SIGTERM):  # what cannot reach Redis says 130, what had just begun nothing
                one.ends(130 if name == "trainer" else 0)
            cast.troubles.during(name, min(fault.lasts, 3.0), lambda: cast.again(name))

        cast.troubles.until(name, lambda: one.process.poll() is not None, another)

    return act


def replaced(cast: Cast, fault: Fault) -> None:
    """The trainer is stopped, another takes over, the first wakes up. Whoever took over last goes on (the first may
    have been stopped before it had done so); the other is told so, and has changed nothing."""
    first = cast.playing["trainer"]
    first.kill(signal.SIGSTOP)
    second = cast.again("trainer")

    def told() -> None:
        loser, winner = (first, second) if first.process.poll() is not None else (second, first)
        assert "has been taken over by" in loser.ends(4)
        cast.playing["trainer"] = winner

    def either() -> bool:
        return first.process.poll() is not None or second.process.poll() is not None

    cast.troubles.until("trainer", either, told)
    cast.troubles.after(1.0 + fault.lasts, lambda: first.kill(signal.SIGCONT))


def clock_jumps(cast: Cast, fault: Fault) -> None:
    """The clock of a worker's machine, an hour forth or back, and later as it was."""
    one = cast.playing[who("generator", fault)]
    clock = cast.seen / f"clock-{one.process.pid}"
    clock.write_text("3600" if fault.share < 0.5 else "-3600")
    cast.troubles.after(fault.lasts, lambda: clock.unlink())


def linked(order: Order, part: str) -> Act:
    return lambda cast, fault: order(cast, fault, who(part, fault))


def slow(cast: Cast, fault: Fault, name: str) -> None:
    link = cast.links[name]
    link.slow(0.02 + 0.3 * fault.share)
    cast.troubles.after(fault.lasts, lambda: link.slow(0))


def hole(cast: Cast, fault: Fault, name: str) -> None:
    link = cast.links[name]
    link.hole()
    cast.troubles.during(f"link of {name}", fault.lasts, lambda: link.fill(late=fault.share < 0.5))


def refused(cast: Cast, fault: Fault, name: str) -> None:
    link = cast.links[name]
    link.refuse()
    cast.troubles.during(f"link of {name}", fault.lasts, link.heal)


ORDERS: dict[str, Order] = {
    "slow": slow,
    "swallows all": hole,
    "refuses": refused,
    "reset": lambda cast, fault, name: cast.links[name].reset(),
    "half closed by Redis": lambda cast, fault, name: cast.links[name].half_close(REPLY),
    "half closed by the process": lambda cast, fault, name: cast.links[name].half_close(COMMAND),
}
VERBS = {
    "trainer": {"take": "LPOP", **{verb: load(verb).sha for verb in ("check", "publish", "commit")}},
    "generator": {"push": "RPUSH", **{verb: load(verb).sha for verb in ("lease", "heartbeat")}},
    "feeder": {"feed": load("feed").sha},
}
"What a verb's command can be told by."


def cut(way: str, part: str, word: str, whole: bool = False) -> Act:
    def act(cast: Cast, fault: Fault) -> None:
        cast.links[who(part, fault)].cut(way, 0.0 if whole else fault.share, word.encode())

    return act


DEATHS: dict[str, Act] = {
    **{f"{part} killed": killed(part) for part in PARTS},
    **{f"{part} stopped": stopped(part) for part in PARTS},
    **{f"{part} sent away": sent_away(part) for part in ("trainer", "generator")},
    "trainer replaced while it was stopped": replaced,
    "generator's clock jumps": clock_jumps,
}
REDIS: dict[str, Act] = {
    "Redis killed": lambda cast, fault: cast.kill_redis(min(fault.lasts, 3.0), 0),
    "Redis killed, the end of its log lost": lambda cast, fault: cast.kill_redis(
        min(fault.lasts, 3.0), int(1 + 50_000 * fault.share**3)
    ),
    "Redis stopped": lambda cast, fault: cast.stop_redis(fault.lasts),
    "Redis's disk full": lambda cast, fault: cast.fill_disk(fault.lasts, int(3000 * fault.share)),
}
LINKS: dict[str, Act] = {f"link of {p} {word}": linked(order, p) for word, order in ORDERS.items() for p in PARTS}
CUTS: dict[str, Act] = {
    f"link of {part} {what} {verb}": cut(way, part, word, whole)
    for part, verbs in VERBS.items()
    for verb, word in verbs.items()
    for what, way, whole in (
        ("cut in the command", COMMAND, False),
        ("cut in the reply to", REPLY, False),
        ("loses the reply to", REPLY, True),
    )
}
KINDS = {**DEATHS, **REDIS, **LINKS, **CUTS}


def ready(cast: Cast, fault: Fault) -> bool:
    """Whether the victim is not in trouble already."""
    words = fault.kind.split()
    if words[0] == "link":
        name = who(words[2], fault)
        return f"link of {name}" not in cast.troubles.busy and not cast.links[name].ordered
    return ("redis" if fault.kind in REDIS else who(words[0].removesuffix("'s"), fault)) not in cast.troubles.busy
