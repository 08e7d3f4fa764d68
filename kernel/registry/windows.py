"""Windows over the last decisions of an agent, as running sums: a decision costs the same however many there were before.

A window of a number of decisions is exact: what each decision added is kept, in rows of CHUNK decisions, until it leaves
the window. A window of minutes keeps one sum for each sixtieth of its length: the running one and the sixty before it, so
that it reaches back by up to a sixtieth more. What is counted of a decision is one vector of whole numbers, in which every
monitor has its place. Adding and then subtracting a vector leaves no trace. `monitors` says what the numbers mean.

Most decisions read and write one row, the sums. The sums carry a mark of all other rows, and the ledger entry of each
decision a digest of the sums: `audit.verify` computes both again. Everything here runs in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate, pairwise
from operator import add, sub
from typing import Literal

import orjson

from sds.kernel.canonical import digest, sha256_hex
from sds.kernel.contract.monitors import MonitorSpec
from sds.kernel.errors import StoreError
from sds.kernel.storage.store import Reader, Row, Store

Stream = Literal["decisions", "labels"]
Vector = list[int]

CHUNK = 8  # less than the shortest window: what leaves a window has been written to a row by then
BUCKETS = 60
MINUTE_MS = 60_000
_MARKS = 1 << 256

_OF = "agent_id = ? AND stream = ?"
_READ = f"SELECT monitors, body FROM monitor_windows WHERE {_OF}"
_BEGIN = "INSERT INTO monitor_windows VALUES (?, ?, ?, ?)"
_WRITE = f"UPDATE monitor_windows SET body = ? WHERE {_OF}"
_KEEP_CHUNK = "INSERT INTO monitor_entries VALUES (?, ?, ?, ?)"
_CHUNK = f"SELECT body FROM monitor_entries WHERE {_OF} AND n = ?"
_OLD_CHUNKS = f"FROM monitor_entries WHERE {_OF} AND n < ?"
_KEEP_BUCKET = "INSERT INTO monitor_buckets VALUES (?, ?, ?, ?, ?)"
_OLD_BUCKETS = f"FROM monitor_buckets WHERE {_OF} AND monitor = ? AND bucket < ?"


@dataclass(slots=True)
class Sums:
    """The sums of one stream. `n`: how many decisions were counted since the windows began. `totals`: of all monitors.

    `chunk`: what the latest decisions added, until the chunk is full. `leaving`: for each length, the chunk whose decisions
    leave next. `running`: for each window of minutes, the number of the running sixtieth, and its sum. `warned`: names of
    monitors beyond their warning. `rows`: the sum of the marks of all other rows, hexadecimal.
    """

    n: int
    totals: Vector
    chunk: list[Vector] = field(default_factory=list)
    leaving: list[list[Vector]] = field(default_factory=list)
    running: list[tuple[int, Vector]] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    rows: str = "0"

    def mark(self, name: str, key: int, body: str, times: int) -> None:
        """Add the mark of a row that was written; with `times` -1, subtract that of a row that was removed."""
        self.rows = f"{(int(self.rows, 16) + times * _mark(name, key, body)) % _MARKS:x}"


class Windows:
    """The windows of one agent's monitors over one stream. They begin anew when the monitors change.

    `monitors`: first those of a number of decisions, by length, then those of minutes. `widths`: each one's share of a
    vector.
    """

    def __init__(
        self, agent_id: str, stream: Stream, monitors: Sequence[MonitorSpec], widths: Sequence[int], *, units: object
    ) -> None:
        self._of = agent_id, stream
        self._monitors = digest([[each.model_dump(mode="json") for each in monitors], units])[:16]
        ends = pairwise(accumulate(widths, initial=0))
        self.places = [slice(first, end) for first, end in ends]
        self._width = sum(widths)
        both = list(zip(monitors, self.places, strict=True))
        lengths: dict[int, slice] = {}
        for monitor, place in both:
            if last := monitor.window.last:
                lengths[last] = slice(lengths[last].start if last in lengths else place.start, place.stop)
        self._lengths = list(lengths.items())
        self._longest, counted = self._lengths[-1] if lengths else (0, slice(0, 0))
        self._counted = counted.stop
        self._timed = [(m.name, minutes * MINUTE_MS // BUCKETS, at) for m, at in both if (minutes := m.window.minutes)]
        self._written: tuple[str, Sums] | None = None  # the body that was written last, and its sums

    @property
    def reach(self) -> tuple[int, int]:
        """How far back the windows reach: in decisions, and in milliseconds."""
        return self._longest, BUCKETS * max((length_ms for _, length_ms, _ in self._timed), default=0)

    def taken(self, row: Row | None) -> Sums | None:
        """Return the sums in a row that the caller's transaction has read, to count on with; None when there are none, or
        those of other monitors. A row that this object wrote last need not be parsed.
        """
        written, self._written = self._written, None
        if row and written and (self._monitors, written[0]) == row[:2]:
            return written[1]
        return self._parsed(row)

    def _parsed(self, row: Row | None) -> Sums | None:
        return Sums(*orjson.loads(row[1])) if row and row[0] == self._monitors else None

    def row(self, store: Reader) -> Row | None:
        """Return the row of the sums: which monitors, and their sums as JSON."""
        return store.row(_READ, self._of)

    def begin(self, store: Store) -> Sums:
        """Forget what was counted, and begin with empty windows."""
        clear(store, self._of[0], self._of[1])
        store.run(_BEGIN, (*self._of, self._monitors, ""))
        running = [(0, [0] * (place.stop - place.start)) for *_, place in self._timed]
        return Sums(0, [0] * self._width, [], [[] for _ in self._lengths], running)

    def add(self, store: Store, sums: Sums, vector: Vector, at_ms: int) -> None:
        """Count one decision, and subtract what leaves the windows for it. `write` keeps the sums."""
        sums.n += 1
        sums.totals = list(map(add, sums.totals, vector))
        for index, (last, place) in enumerate(self._lengths):
            if sums.n > last:
                number, at = divmod(sums.n - last - 1, CHUNK)
                if at == 0:
                    sums.leaving[index] = orjson.loads(store.value(_CHUNK, (*self._of, number)))
                sums.totals[place] = map(sub, sums.totals[place], sums.leaving[index][at][place])
        if self._lengths:
            sums.chunk.append(vector[: self._counted])
            if len(sums.chunk) == CHUNK:
                self._keep_chunk(store, sums)
        for index, (_, length_ms, place) in enumerate(self._timed):
            if at_ms // length_ms > sums.running[index][0]:  # a clock that was set back begins no new sixtieth
                self._next_bucket(store, sums, index, at_ms // length_ms)
            bucket, running = sums.running[index]
            sums.running[index] = bucket, list(map(add, running, vector[place]))

    def write(self, store: Store, sums: Sums) -> str:
        """Write the sums; return their digest. Raises StoreError for a sum that no row can hold."""
        body = [sums.n, sums.totals, sums.chunk, sums.leaving, sums.running, sums.warned, sums.rows]
        try:
            kept = orjson.dumps(body).decode()
        except orjson.JSONEncodeError as error:
            message = f"a sum of the monitors of agent `{self._of[0]}` is beyond 64 bits"
            raise StoreError(message, hint="shorten the window of its monitor", retryable=False) from error
        store.write(_WRITE, (kept, *self._of))
        self._written = kept, sums
        return _digest(self._monitors, kept)

    def _keep_chunk(self, store: Store, sums: Sums) -> None:
        """Write a full chunk to a row, and remove the rows that have left all windows."""
        number, kept = sums.n // CHUNK - 1, orjson.dumps(sums.chunk).decode()
        store.write(_KEEP_CHUNK, (*self._of, number, kept))
        sums.mark("", number, kept, 1)
        sums.chunk = []
        first = (sums.n - self._longest) // CHUNK
        if first > 0:
            for key, body in store.rows(f"SELECT n, body {_OLD_CHUNKS}", (*self._of, first)):
                sums.mark("", key, body, -1)
            store.run(f"DELETE {_OLD_CHUNKS}", (*self._of, first))

    def _next_bucket(self, store: Store, sums: Sums, index: int, bucket: int) -> None:
        """Begin another sixtieth of a window of minutes: write the one that is over, subtract those that are too old."""
        name, _, place = self._timed[index]
        before, running = sums.running[index]
        if any(running):
            kept = orjson.dumps(running).decode()
            store.run(_KEEP_BUCKET, (*self._of, name, before, kept))
            sums.mark(name, before, kept, 1)
        for key, body in self._expired(store, name, bucket):
            sums.totals[place] = map(sub, sums.totals[place], orjson.loads(body))
            sums.mark(name, key, body, -1)
        store.run(f"DELETE {_OLD_BUCKETS}", (*self._of, name, bucket - BUCKETS))
        sums.running[index] = bucket, [0] * len(running)

    def _expired(self, store: Reader, name: str, bucket: int) -> list[tuple[int, str]]:
        """Return the number and body of the sixtieths that have left the window."""
        return list(store.rows(f"SELECT bucket, body {_OLD_BUCKETS}", (*self._of, name, bucket - BUCKETS)))

    def now(self, store: Reader, at_ms: int) -> Vector:
        """Return the totals at a moment, without what is over by then. Writes nothing."""
        if (sums := self._parsed(self.row(store))) is None:
            return [0] * self._width
        totals = list(sums.totals)
        for index, (name, length_ms, place) in enumerate(self._timed):
            bucket, (before, running) = at_ms // length_ms, sums.running[index]
            gone = [orjson.loads(body) for _, body in self._expired(store, name, bucket)] if bucket > before else []
            for vector in (*gone, *([running] if before < bucket - BUCKETS else [])):
                totals[place] = map(sub, totals[place], vector)
        return totals


def clear(store: Store, agent_id: str, *streams: Stream) -> None:
    """Forget what was counted of an agent, in the caller's transaction."""
    for table in ("monitor_windows", "monitor_entries", "monitor_buckets"):
        for stream in streams:
            store.run(f"DELETE FROM {table} WHERE {_OF}", (agent_id, stream))


def faults(store: Reader, digests: Mapping[tuple[str, str], str]) -> list[str]:
    """Return where the windows differ from the ledger. `digests`: the last one of each (agent, stream)."""
    kept = {row[:2]: row[2:] for row in store.rows("SELECT * FROM monitor_windows")}
    marks: dict[tuple[str, str], int] = {}
    behind = "SELECT agent_id, stream, '', n, body FROM monitor_entries UNION ALL SELECT * FROM monitor_buckets"
    for agent, stream, name, key, body in store.rows(behind):
        marks[agent, stream] = (marks.get((agent, stream), 0) + _mark(name, key, body)) % _MARKS
    found: list[str] = []
    for of in sorted({*kept, *marks, *digests}):
        if (_digest(*kept[of]) if of in kept else None) != digests.get(of):
            found.append(f"monitors of {'/'.join(of)}: the sums differ from the ledger's")
        elif f"{marks.get(of, 0):x}" != (orjson.loads(kept[of][1])[-1] if of in kept else "0"):
            found.append(f"monitors of {'/'.join(of)}: the windows differ from their sums")
    return found


def _mark(name: str, key: int, body: str) -> int:
    return int.from_bytes(sha256(f"{name}\n{key}\n{body}".encode("utf-8", "surrogatepass")).digest())


def _digest(monitors: str, body: str) -> str:
    return sha256_hex(f"{monitors}\n{body}".encode("utf-8", "surrogatepass"))
