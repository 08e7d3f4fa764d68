"""Monitors (DIR 4.6): what single verdicts cannot see, watched over many decisions, in the transaction of each.

A value beyond `stop` suspends the agent there and then. The decision that crosses it was within its bounds: it is recorded
and carried out, and the next one is not made. Only an operator reactivates the agent, and the windows begin anew with that.
A value that goes beyond `warn` is told once, and again only after it was back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log

from sds.kernel.contract.monitors import LAST_MIN, MICRO, MonitorSpec, micros
from sds.kernel.registry import registry
from sds.kernel.registry.windows import Stream, Sums, Vector, Windows
from sds.kernel.storage.store import Reader, Store

SHARE_MIN = 1e-4  # what a share is taken to be at least, in a population stability index: no logarithm of nothing
MEASURED_MIN = LAST_MIN  # decisions with what a monitor measures, before it is judged

_MINOR = frozenset({"paid_mean_minor", "paid_sum_minor"})


@dataclass(frozen=True, slots=True)
class Decided:
    """What monitors read of one decision. None: not known, and not counted where it is measured.

    `paid_minor`: in the units that the contract spends in. `confidence`: 0..1. `readings`: name -> the likeliest value.
    `right`: what a later label said.
    """

    executed: bool = False
    paid: bool = False
    paid_minor: int | None = None
    reason: str | None = None
    confidence: float | None = None
    readings: Mapping[str, str] = field(default_factory=dict)
    right: bool | None = None


History = Callable[[tuple[int, int]], Iterable[tuple[int, Decided]]]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A threshold that was crossed: `which` is `warn` or `stop`, `decision` the number since the windows began."""

    monitor: MonitorSpec
    which: str
    value: str
    decision: int

    @property
    def text(self) -> str:
        side = "under" if self.monitor.is_minimum else "over"
        threshold = getattr(self.monitor, self.which)
        what = f"monitor {self.monitor.name}: {self.monitor.of} {self.value} is {side} {threshold}"
        return f"{what} in {self.monitor.window.text}, at decision {self.decision}"


@dataclass(frozen=True, slots=True)
class Watched:
    """What came of counting one decision: why the agent was suspended, if it was, and which warnings are new."""

    suspended: str | None = None
    warnings: tuple[Crossing, ...] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """One monitor as it stands. `value` None: not enough has been measured to judge it. `decisions`: in its window."""

    name: str
    of: str
    window: str
    decisions: int
    value: str | None
    warn: str | None
    stop: str | None


class Monitors:
    """The monitors of one agent over one stream: decisions, or what later labels say of them.

    `units`: what amounts are counted in. Where monitors or units are others, windows are filled anew.
    """

    def __init__(
        self, agent_id: str, stream: Stream, monitors: Sequence[MonitorSpec], *, units: int | None = None
    ) -> None:
        self.agent_id, self.monitors = agent_id, tuple(monitors)
        self.windows = Windows(agent_id, stream, monitors, units=units)

    def count(self, store: Store, decided: Decided, now_ms: int, history: History) -> Watched:
        """Count one decision and judge every window, in the caller's transaction.

        `history`, given how many decisions and milliseconds the windows reach back, returns (time, decision), oldest
        first: what they are filled with where the record has none, or those of other monitors.
        """
        if not self.monitors:
            return Watched()
        sums = self.windows.read(store) or self._filled(store, history)
        self.windows.add(store, sums, self._vectors(decided), now_ms)
        stops, warnings = self._crossed(sums)
        self.windows.write(store, sums)
        return Watched(self._suspend(store, stops, now_ms) if stops else None, warnings)

    def _filled(self, store: Store, history: History) -> Sums:
        sums = self.windows.begin(store)
        for at_ms, decided in history(self.windows.reach):
            self.windows.add(store, sums, self._vectors(decided), at_ms)
        return sums

    def _vectors(self, decided: Decided) -> list[Vector]:
        return [_VECTORS[monitor.of](monitor, decided) for monitor in self.monitors]

    def _crossed(self, sums: Sums) -> tuple[list[Crossing], tuple[Crossing, ...]]:
        """Return what is beyond its stop, and what is newly beyond its warning, which `sums` is told."""
        stops: list[Crossing] = []
        warned: list[Crossing] = []
        for monitor, total in zip(self.monitors, sums.totals, strict=True):
            ratio = measured(monitor, total)
            beyond = [which for which in ("warn", "stop") if _is_beyond(monitor, getattr(monitor, which), ratio)]
            for which, into in (("warn", warned), ("stop", stops)):
                if which in beyond and ratio is not None:
                    into.append(Crossing(monitor, which, shown(monitor, ratio), sums.n))
        known, sums.warned = set(sums.warned), [each.monitor.name for each in warned]
        return stops, tuple(each for each in warned if each.monitor.name not in known)

    def _suspend(self, store: Store, stops: list[Crossing], now_ms: int) -> str | None:
        """Suspend the agent, unless it is not active: while it waits for a human, the next decision finds the same."""
        known = registry.lookup(store, self.agent_id)
        if known is None or not known.active:
            return None
        why = stops[0].text
        registry.move(store, self.agent_id, "SUSPENDED", by="runtime", reason=why, now_ms=now_ms)
        return why

    def standing(self, store: Reader, now_ms: int) -> tuple[Standing, ...]:
        """Return every monitor as it stands now. Nothing is written; a record whose windows are not filled yet has none."""
        sums = self.windows.read(store)
        empty: list[Vector] = [[] for _ in self.monitors]
        totals = self.windows.now(store, sums, now_ms) if sums else empty
        return tuple(_standing(monitor, total) for monitor, total in zip(self.monitors, totals, strict=True))


def _standing(monitor: MonitorSpec, total: Vector) -> Standing:
    ratio = measured(monitor, total)
    value = None if ratio is None else shown(monitor, ratio)
    decisions = total[0] if total else 0
    return Standing(monitor.name, monitor.of, monitor.window.text, decisions, value, monitor.warn, monitor.stop)


def shown(monitor: MonitorSpec, ratio: tuple[int, int]) -> str:
    """Return a value in words: whole minor units, or four decimals at most."""
    number = ratio[0] / ratio[1]
    return str(round(number)) if monitor.of in _MINOR else f"{number:.4f}".rstrip("0").removesuffix(".")


def _is_beyond(monitor: MonitorSpec, threshold: str | None, ratio: tuple[int, int] | None) -> bool:
    if threshold is None or ratio is None:
        return False
    value, limit = ratio[0] * MICRO, micros(threshold) * ratio[1]
    return value < limit if monitor.is_minimum else value > limit


def measured(monitor: MonitorSpec, total: Vector) -> tuple[int, int] | None:
    """Return the value of a window as a fraction; None while there is too little in it to judge.

    That is: fewer decisions than a window of `last` takes, or than LAST_MIN in one of minutes; of what not every decision
    has, fewer than MEASURED_MIN. A sum is judged from the first: it can only grow.
    """
    if not total:
        return None
    if monitor.of != "paid_sum_minor" and total[0] < (monitor.window.last or LAST_MIN):
        return None
    return _RATIOS[monitor.of](monitor, total)


def _measured(one: int, *values: int | None) -> Vector:
    """Return a vector of (decisions, those measured, what was measured); of one without, only that it was one."""
    return [one, 0] if None in values else [one, 1, *(value for value in values if value is not None)]


def _micro(share: float | None) -> int | None:
    return None if share is None else round(min(1.0, max(0.0, share)) * MICRO)


def _shift(monitor: MonitorSpec, decided: Decided) -> Vector:
    """Return (decisions, those with the reading, how often each expected value, how often any other)."""
    value = decided.readings.get(monitor.reading or "")
    if value is None:
        return [1, 0]
    other = value not in monitor.expected
    return [1, 1, *(int(value == known) for known in sorted(monitor.expected)), int(other)]


def _stability(monitor: MonitorSpec, total: Vector) -> tuple[int, int] | None:
    """Return the population stability index: the sum of (found - expected) * ln(found / expected) over the values."""
    if len(total) < 2 or total[1] < MEASURED_MIN:
        return None
    shares = (*(micros(monitor.expected[value]) / MICRO for value in sorted(monitor.expected)), 0.0)
    found = ((count / total[1], share) for count, share in zip(total[2:], shares, strict=True))
    floored = ((max(a, SHARE_MIN), max(e, SHARE_MIN)) for a, e in found)
    return round(sum((a - e) * log(a / e) for a, e in floored) * MICRO), MICRO


def _calibration(_monitor: MonitorSpec, total: Vector) -> tuple[int, int] | None:
    """Return |mean confidence - share right|."""
    if total[1] < MEASURED_MIN:
        return None
    return abs(total[2] - total[3] * MICRO), total[1] * MICRO


def _confidence(_monitor: MonitorSpec, total: Vector) -> tuple[int, int] | None:
    return (total[2], total[1] * MICRO) if total[1] >= MEASURED_MIN else None


def _share(_monitor: MonitorSpec, total: Vector) -> tuple[int, int] | None:
    return total[1], total[0]


_VECTORS: Mapping[str, Callable[[MonitorSpec, Decided], Vector]] = {
    "approval_rate": lambda _, decided: [1, int(decided.executed)],
    "paid_share": lambda _, decided: [1, int(decided.paid)],
    "paid_mean_minor": lambda _, decided: _measured(1, decided.paid_minor),
    "paid_sum_minor": lambda _, decided: [1, decided.paid_minor or 0],
    "reason_share": lambda monitor, decided: [1, int(decided.reason == monitor.reason)],
    "confidence_mean": lambda _, decided: _measured(1, _micro(decided.confidence)),
    "reading_shift": _shift,
    "calibration": lambda _, decided: _measured(
        1, _micro(decided.confidence), None if decided.right is None else int(decided.right)
    ),
}
_RATIOS: Mapping[str, Callable[[MonitorSpec, Vector], tuple[int, int] | None]] = {
    "approval_rate": _share,
    "paid_share": _share,
    "paid_mean_minor": lambda _, total: (total[2], total[1]) if total[1] else None,
    "paid_sum_minor": lambda _, total: (total[1], 1),
    "reason_share": _share,
    "confidence_mean": _confidence,
    "reading_shift": _stability,
    "calibration": _calibration,
}
