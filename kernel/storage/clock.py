"""A clock that was set back: every ledger entry whose time is more than `BACK_MS` before that of the entry before it.

Less is usual: two writers read the clock and wait for each other, and time servers correct by seconds. The trigger
`clock_was_set_back` writes each such step; it is derived from the ledger alone, and verified against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from sds.kernel.storage.store import Reader, Row

BACK_MS = 60_000  # as the trigger has it
_SECOND_MS, _MINUTE_MS, _HOUR_MS = 1_000, 60_000, 3_600_000

# Of the last entry `l`, and whether there are steps at all: for statements that read more than that.
LAST = "l.idx, l.at_ms, EXISTS (SELECT 1 FROM clock_steps)"
_NEAR = "SELECT idx, was_ms, now_ms FROM clock_steps WHERE was_ms > ? AND now_ms < ?"


@dataclass(frozen=True, slots=True)
class Step:
    """The clock showed `was_ms` at the entry before `idx`, and `now_ms` at `idx`."""

    idx: int
    was_ms: int
    now_ms: int

    @property
    def by_ms(self) -> int:
        return self.was_ms - self.now_ms

    def __str__(self) -> str:
        was, now = (_time(ms) for ms in (self.was_ms, self.now_ms))
        return f"entry {self.idx}: the clock was set back by {_duration(self.by_ms)}, from {was} to {now}"


def steps(store: Reader, last: Row, at_ms: int, within_ms: int) -> list[Step]:
    """Return the steps that can bear on a window of up to `within_ms` around `at_ms`. `last`: what was read as `LAST`.

    What the ledger has not seen yet is one as well: the clock shows less now than at its last entry.
    """
    idx, last_ms, any_there = last if last[0] is not None else (0, at_ms, last[2])
    found = store.rows(_NEAR, (at_ms - within_ms, at_ms + within_ms)) if any_there else []
    if last_ms > at_ms + BACK_MS:
        found.append((idx + 1, last_ms, at_ms))
    return [Step(*row) for row in found]


def steps_of(entries: Iterable[Row]) -> Iterator[Step]:
    """Yield the steps of a whole ledger, given in its columns' order."""
    for (_, was_ms, *_), (idx, now_ms, *_) in pairwise(entries):
        if now_ms < was_ms - BACK_MS:
            yield Step(idx, was_ms, now_ms)


def faults(store: Reader, known: Iterable[Step]) -> list[str]:
    """Return where the recorded steps are not those of the ledger."""
    recorded = {Step(*row) for row in store.rows("SELECT idx, was_ms, now_ms FROM clock_steps")}
    return [
        f"clock step at entry {step.idx}: the table does not say what the ledger does"
        for step in sorted(recorded ^ set(known), key=lambda step: step.idx)
    ]


def _time(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms // _SECOND_MS, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{ms} ms"


def _duration(ms: int) -> str:
    hours, minutes = divmod(ms // _MINUTE_MS, _HOUR_MS // _MINUTE_MS)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
