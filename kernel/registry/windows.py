"""Windows over the last decisions of an agent, as running sums: one decision costs the same however many there were.

A window of so many decisions is exact: what each decision added is kept until it leaves. One of so many minutes has a sum
for each sixtieth of its length: the running one and the sixty before, so that it reaches back by up to a sixtieth more. What
is counted are vectors of whole numbers, so that adding and taking away leaves nothing behind. Purely arithmetic: what the
numbers mean is said in `monitors`. Everything runs in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import orjson

from sds.kernel.canonical import digest
from sds.kernel.contract.monitors import MonitorSpec
from sds.kernel.storage.store import Reader, Store

Stream = Literal["decisions", "labels"]
Vector = list[int]

BUCKETS = 60
MINUTE_MS = 60_000
SWEEP_EVERY = 64  # decisions, after which what has left every window is removed

_READ = "SELECT body FROM monitor_windows WHERE agent_id = ? AND stream = ? AND monitors = ?"
_WRITE = "INSERT OR REPLACE INTO monitor_windows VALUES (?, ?, ?, ?)"
_ENTER = "INSERT INTO monitor_entries VALUES (?, ?, ?, ?)"
_SWEEP = "DELETE FROM monitor_entries WHERE agent_id = ? AND stream = ? AND n <= ?"
_KEEP = "INSERT OR REPLACE INTO monitor_buckets VALUES (?, ?, ?, ?, ?)"
_OVER = "FROM monitor_buckets WHERE agent_id = ? AND stream = ? AND monitor = ? AND bucket < ?"


@dataclass(slots=True)
class Sums:
    """What is known of one stream. `n`: how many were counted since the windows began. In the order of the monitors:
    `totals`, and of windows in minutes the number and the sum of the running sixtieth. `warned`: names of monitors.
    """

    n: int
    totals: list[Vector]
    running: list[tuple[int, Vector]]
    warned: list[str]


class Windows:
    """The windows of one agent's monitors over one stream. Their sums are begun anew where the monitors are others."""

    def __init__(self, agent_id: str, stream: Stream, monitors: Sequence[MonitorSpec], *, units: object = None) -> None:
        self._of = agent_id, stream
        self.monitors = tuple(monitors)
        self._monitors = digest([[each.model_dump(mode="json") for each in monitors], units])[:16]
        self._counted = [(index, last) for index, each in enumerate(monitors) if (last := each.window.last)]
        self._timed = [(index, minutes) for index, each in enumerate(monitors) if (minutes := each.window.minutes)]
        self._longest = max((last for _, last in self._counted), default=0)
        lengths = sorted({last for _, last in self._counted})
        marks = ", ".join("?" * len(lengths))
        self._lengths = lengths
        self._leaving = f"SELECT n, body FROM monitor_entries WHERE agent_id = ? AND stream = ? AND n IN ({marks})"

    @property
    def reach(self) -> tuple[int, int]:
        """How far back the windows reach: so many decisions, and so many milliseconds."""
        return self._longest, max((minutes for _, minutes in self._timed), default=0) * MINUTE_MS

    def read(self, store: Reader) -> Sums | None:
        """Return the sums as they stand; None where there are none, or those of other monitors."""
        body = store.value(_READ, (*self._of, self._monitors))
        return None if body is None else Sums(*orjson.loads(body))

    def begin(self, store: Store) -> Sums:
        """Forget what was counted, and begin with empty windows."""
        clear(store, self._of[0], self._of[1])
        return Sums(0, [[] for _ in self.monitors], [(0, []) for _ in self._timed], [])

    def add(self, store: Store, sums: Sums, vectors: Sequence[Vector], at_ms: int) -> None:
        """Count one decision: `vectors` are what it adds, in the order of the monitors. Keep the sums with `write`."""
        sums.n += 1
        for total, vector in zip(sums.totals, vectors, strict=True):
            _add(total, vector)
        if self._counted:
            self._leave(store, sums)
            kept = orjson.dumps([vectors[index] for index, _ in self._counted]).decode()
            store.run(_ENTER, (*self._of, sums.n, kept))
            if sums.n % SWEEP_EVERY == 0:
                store.run(_SWEEP, (*self._of, sums.n - self._longest))
        for place, (index, minutes) in enumerate(self._timed):
            self._turn(store, sums, place, at_ms // bucket_ms(minutes))
            _add(sums.running[place][1], vectors[index])

    def write(self, store: Store, sums: Sums) -> None:
        kept = orjson.dumps([sums.n, sums.totals, sums.running, sums.warned]).decode()
        store.run(_WRITE, (*self._of, self._monitors, kept))

    def _leave(self, store: Store, sums: Sums) -> None:
        """Take away what the decisions had added that are now one too many."""
        if sums.n <= self._lengths[0]:
            return
        gone = [sums.n - length for length in self._lengths]
        left = {n: orjson.loads(body) for n, body in store.rows(self._leaving, (*self._of, *gone))}
        for place, (index, last) in enumerate(self._counted):
            if sums.n > last:
                _take(sums.totals[index], left[sums.n - last][place])

    def _turn(self, store: Store, sums: Sums, place: int, bucket: int) -> None:
        """Go on to another sixtieth, if it is one. A clock that was set back begins none: no window opens anew for it."""
        running, vector = sums.running[place]
        if bucket <= running:
            return
        index = self._timed[place][0]
        name = self.monitors[index].name
        if any(vector):
            store.run(_KEEP, (*self._of, name, running, orjson.dumps(vector).decode()))
        for body in self._over(store, name, bucket):
            _take(sums.totals[index], body)
        store.run(f"DELETE {_OVER}", (*self._of, name, bucket - BUCKETS))
        sums.running[place] = bucket, []

    def _over(self, store: Reader, name: str, bucket: int) -> list[Vector]:
        """Return what the sixtieths held that have left the window."""
        return [
            orjson.loads(body) for (body,) in store.rows(f"SELECT body {_OVER}", (*self._of, name, bucket - BUCKETS))
        ]

    def now(self, store: Reader, sums: Sums, at_ms: int) -> list[Vector]:
        """Return the totals as they are at a moment, without what is over by then; nothing is written."""
        totals = [list(total) for total in sums.totals]
        for place, (index, minutes) in enumerate(self._timed):
            bucket, (running, vector) = at_ms // bucket_ms(minutes), sums.running[place]
            gone = self._over(store, self.monitors[index].name, bucket) if bucket > running else []
            for each in (*gone, *([vector] if running < bucket - BUCKETS else [])):
                _take(totals[index], each)
        return totals


def bucket_ms(minutes: int) -> int:
    """Return the length of a sixtieth of a window."""
    return minutes * MINUTE_MS // BUCKETS


def clear(store: Store, agent_id: str, *streams: Stream) -> None:
    """Forget what was counted of an agent, in the caller's transaction."""
    for table in ("monitor_windows", "monitor_entries", "monitor_buckets"):
        for stream in streams:
            store.run(f"DELETE FROM {table} WHERE agent_id = ? AND stream = ?", (agent_id, stream))


def _add(total: Vector, vector: Iterable[int]) -> None:
    values = list(vector)
    total.extend([0] * (len(values) - len(total)))
    for index, value in enumerate(values):
        total[index] += value


def _take(total: Vector, vector: Iterable[int]) -> None:
    _add(total, [-value for value in vector])
