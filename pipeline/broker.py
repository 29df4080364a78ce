"""The broker's verbs, synchronous: what a feeder and people do. pipeline.fenced adds the trainer's, pipeline.leases has
the workers', which are asynchronous.

Two types rather than one behind threads: the trainer's calls must not share an event loop with anything that could
stall them, and a worker holds hundreds of prompts whose waits must cost nothing. Both send the same scripts.

Each verb may be repeated: done twice it is as good as done once. So an outage is waited out here, in one place, and the
verb is sent again; what a lost reply may have left behind is found by `check`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from redis.exceptions import NoScriptError, RedisError

from pipeline.connect import connect
from pipeline.errors import UsageError
from pipeline.keys import Keys
from pipeline.outage import Outage, Seen, passing, told
from pipeline.replies import Standing, map_of, policy_of
from pipeline.scripts import Arg, load
from pipeline.types import Policy

T = TypeVar("T")

SAME_DATA = "give the same --prompt-data or --task, keys, --rollout-shuffle and --rollout-seed"
"What to do where a run was fed from other data than it would be now."


class Broker:
    """Verbs that need no fence."""

    def __init__(self, url: str, keys: Keys, name: str, patience: float = 300.0) -> None:
        self.keys = keys
        self.patience = patience
        self.began = time.monotonic()
        self.stop = threading.Event()
        "set by the owner: an outage is not waited out any longer"
        self.data: dict[str, str] = {}
        "what is being fed, as fields of `state`"
        self.lived = False
        "the run has been seen neither done nor failed"
        self.seen = Seen()
        self.client = connect(url, f"millpond:{keys.run}:{name}", self.seen)

    # -- how verbs reach Redis

    def script(self, name: str, *args: Arg) -> Any:
        """One script, once."""
        script = load(name)
        call = script.call(self.keys, *args)
        try:
            return self.client.execute_command("EVALSHA", script.sha, *call)
        except NoScriptError:
            return self.client.execute_command("EVAL", script.text, *call)

    def patiently(self, verb: Callable[[], T]) -> T:
        """The verb, sent again after each outage."""
        with Outage(self.seen, self.patience, self.stop) as outage:
            while True:
                try:
                    return verb()
                except RedisError as error:
                    if not passing(error):
                        raise told(error) from None
                    self.heal(outage, error)

    def outage(self, error: Exception) -> None:
        """For a verb that is not sent again."""
        with Outage(self.seen, self.patience, self.stop, again=False) as outage:
            self.heal(outage, error)

    def clock(self) -> float:
        """Seconds that pass only while Redis is there."""
        return time.monotonic() - self.seen.lost

    def heal(self, outage: Outage, error: Exception) -> None:
        """Returns when Redis is back and agrees with us."""
        outage.wait(self.client, error)
        if self.seen.restarted:
            self.seen.restarted = False
            self.returned()

    def returned(self) -> None:
        """Called when Redis was restarted and may know less than before."""

    # -- feeding

    def cursor(self) -> int:
        return int(self.patiently(lambda: self.script("cursor")))

    def backlog(self) -> int:
        """Prompts in the streams that nobody has leased."""
        return int(self.patiently(lambda: self.script("waiting")))

    def feed(self, cursor: int, records: Sequence[str]) -> int:
        """Compare-and-set; the cursor as it is afterwards. A repeat after a lost reply feeds nothing twice."""
        return int(self.patiently(lambda: self.script("feed", cursor, *records)))

    def refeed_ids(self, limit: int) -> list[int]:
        """Ids that a restore found nowhere."""
        found = self.patiently(lambda: self.client.srandmember(self.keys["refeed"], limit))
        return sorted(int(i) for i in found)  # type: ignore[union-attr]

    def refeed(self, records: dict[int, str]) -> None:
        flat: list[Arg] = [x for pair in records.items() for x in pair]
        self.patiently(lambda: self.script("refeed", *flat))

    def describe_data(self, rows: int | None, total: int | None, digest: str) -> None:
        """What is being fed, None without end; UsageError if this run was fed from other data."""
        mine = f"{rows or 'endless'} rows, sha256 {digest}"
        self.data = {"data": mine, "feed_total": "" if total is None else str(total)}
        self._describe()

    def _describe(self) -> None:
        fields: Any = self.data
        if (before := self.claim_data(self.data["data"])) != self.data["data"]:
            raise UsageError(
                f"run {self.keys.run} was fed from other data ({before}) than it would be now ({self.data['data']}): "
                f"{SAME_DATA}, or another --run"
            )
        self.patiently(lambda: self.client.hset(self.keys["state"], mapping=fields))

    def claim_data(self, mine: str) -> str:
        """What the run is fed from: `mine`, unless somebody has said so before."""

        def claim() -> Any:
            self.client.hsetnx(self.keys["state"], "data", mine)
            return self.client.hget(self.keys["state"], "data") or mine.encode()

        return str(self.patiently(claim).decode())

    def disclaim_data(self) -> None:
        """Where nothing was fed yet, what was to be fed is forgotten."""
        if not self.patiently(lambda: self.client.exists(self.keys["feed"])):
            self.patiently(lambda: self.client.hdel(self.keys["state"], "data"))

    def stopping(self) -> bool:
        """The run has ended. One that had ended before we came may be about to be resumed: that is waited for."""
        state = self.state()
        if self.data and "data" not in state:  # Redis came back without it
            self._describe()
        ended = state.get("status") in ("done", "failed")
        self.lived = self.lived or not ended
        return ended and (self.lived or time.monotonic() - self.began > self.patience)

    # -- looking

    def state(self) -> dict[str, str]:
        raw: Any = self.patiently(lambda: self.client.hgetall(self.keys["state"]))
        return {k.decode(): v.decode() for k, v in raw.items()}

    def exists(self) -> bool:
        """Whether the run has keys in this Redis."""
        names = [self.keys[n] for n in ("state", "feed", "groups", "prompts")]
        return bool(self.patiently(lambda: self.client.exists(*names)))

    def standing(self) -> Standing:
        return Standing.of(self.patiently(lambda: self.script("snapshot")))

    def policy(self) -> Policy | None:
        raw: Any = self.patiently(lambda: self.client.hgetall(self.keys["weights"]))
        return policy_of(raw)

    def version(self) -> int:
        """The current weight version, 0 before the first."""
        return self.patiently(lambda: int(self.client.get(self.keys["weights:version"]) or 0))

    def committed(self) -> int:
        """Prompts that count as trained for good."""
        return self.patiently(lambda: int(self.client.bitcount(self.keys["done:committed"])))

    def counters(self) -> dict[str, int]:
        raw: Any = self.patiently(lambda: self.client.hgetall(self.keys["counters"]))
        return {k.decode(): int(v) for k, v in raw.items()}

    def worker_versions(self) -> set[int]:
        """Weight versions that workers have loaded or are loading."""
        found = (info.get(key) for info in self.worker_infos().values() for key in ("version", "loading"))
        return {version for version in found if isinstance(version, int)}

    def worker_infos(self) -> dict[str, dict[str, Any]]:
        """What workers say of themselves, by name."""
        told: dict[Any, Any] = self.patiently(lambda: self.client.hgetall(self.keys["workers:info"]))
        return {name.decode("utf-8", "backslashreplace"): map_of(info) for name, info in told.items()}

    def reap(self) -> list[str]:
        """Names of workers found dead; what they held goes round again."""
        return [w.decode() for w in self.patiently(lambda: self.script("reap"))]

    def note(self, worker: str, what: str, trace: str = "") -> None:
        """For people, among the errors of workers; ends nothing."""
        epoch: Any = self.patiently(lambda: self.client.hget(self.keys["state"], "epoch"))
        entry: Any = {"worker": worker, "epoch": epoch or b"0", "what": what, "trace": trace[-20_000:]}
        self.patiently(lambda: self.client.xadd(self.keys["errors"], entry, maxlen=1000))

    def close(self) -> None:
        self.client.close()
