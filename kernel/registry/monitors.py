"""Monitors (DIR 4.6) watch what no single verdict shows: many decisions. They run in the transaction of each decision.

A value beyond `stop` suspends the agent at once. The decision that crosses it was within its bounds: it is recorded and
carried out, and no further decision is made. Only an operator reactivates the agent; then the windows begin anew. A value
beyond `warn` is logged once, and again only after it has been back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from types import MappingProxyType
from typing import NamedTuple

from sds.kernel.contract.monitors import LAST_MIN, MICRO, MonitorSpec, micros
from sds.kernel.errors import NOT_AS_WRITTEN, StoreError, reading
from sds.kernel.registry import registry
from sds.kernel.registry.windows import Stream, Sums, Vector, Windows
from sds.kernel.storage.store import Reader, Row, Store

SHARE_MIN = 1e-4  # the least share in a population stability index, which takes logarithms
MEASURED_MIN = LAST_MIN  # a monitor is judged from this number of decisions that have what it measures

_MINOR = frozenset({"paid_mean_minor", "paid_sum_minor"})


class MonitoredDecision(NamedTuple):
    """What monitors read of one decision. None: not known, and not counted where it is measured.

    `paid_minor`: in the units that the contract spends in. `confidence`: 0..1. `readings`: name -> likeliest value.
    `right`: what a later label said.
    """

    executed: bool = False
    paid: bool = False
    paid_minor: int | None = None
    reason: str | None = None
    confidence: float | None = None
    readings: Mapping[str, str] = MappingProxyType({})
    right: bool | None = None


Ratio = Callable[[MonitorSpec, Vector], tuple[int, int] | None]
History = Callable[[tuple[int, int]], Iterable[tuple[int, MonitoredDecision]]]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A threshold that was crossed. `which`: `warn` or `stop`. `decision`: its number since the windows began."""

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
    """The outcome of counting one decision: why the agent was suspended, if it was, and the new warnings."""

    suspended: str | None = None
    warnings: tuple[Crossing, ...] = ()


@dataclass(frozen=True, slots=True)
class Counted:
    """One counted decision, with what it crossed. `digest`: of the sums, for its ledger entry; None without monitors."""

    digest: str | None = None
    stops: tuple[Crossing, ...] = ()
    warnings: tuple[Crossing, ...] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """One monitor as it stands. `value`: None while too little is measured to judge. `decisions`: those in its window."""

    name: str
    of: str
    window: str
    decisions: int
    value: str | None
    warn: str | None
    stop: str | None


@dataclass(frozen=True, slots=True)
class _Judge:
    """A monitor, ready to be asked about every decision. Thresholds are in millionths; `place`: its part of the vector."""

    monitor: MonitorSpec
    vector: Callable[[MonitorSpec, MonitoredDecision], Vector]
    ratio: Ratio
    least: int  # number of decisions in the window from which it is judged
    side: int  # 1: a value above a threshold is beyond it; -1: a value below
    thresholds: tuple[tuple[str, int], ...]  # `warn` and `stop`, as far as they are given
    place: slice

    def value(self, totals: Vector) -> tuple[int, int] | None:
        """Return what the window measures, as (numerator, denominator); None while it holds too little to judge."""
        total = totals[self.place]
        return self.ratio(self.monitor, total) if total[0] >= self.least else None

    def is_beyond(self, threshold: int, value: tuple[int, int]) -> bool:
        return self.side * (value[0] * MICRO - threshold * value[1]) > 0

    def crossing(self, which: str, value: tuple[int, int], decision: int) -> Crossing:
        return Crossing(self.monitor, which, shown(self.monitor, value), decision)


def _judge(monitor: MonitorSpec, place: slice) -> _Judge:
    """Return a monitor's judge. A sum is judged from the first decision on, because it can only grow."""
    least = 1 if monitor.of == "paid_sum_minor" else monitor.window.last or LAST_MIN
    side = -1 if monitor.is_minimum else 1
    given = (("warn", monitor.warn), ("stop", monitor.stop))
    thresholds = tuple((which, micros(text)) for which, text in given if text is not None)
    return _Judge(monitor, _VECTORS[monitor.of], _RATIOS[monitor.of], least, side, thresholds, place)


class Monitors:
    """The monitors of one agent over one stream: its decisions, or later labels of them.

    `units`: the decimals in which amounts are counted. When the monitors or the units change, the windows are filled anew.
    """

    def __init__(
        self, agent_id: str, stream: Stream, monitors: Sequence[MonitorSpec], *, units: int | None = None
    ) -> None:
        self.agent_id = agent_id
        self.monitors = sorted(monitors, key=lambda each: (each.window.last is None, each.window.last or 0))
        widths = [len(_VECTORS[each.of](each, MonitoredDecision())) for each in self.monitors]
        self._windows = Windows(agent_id, stream, self.monitors, widths, units=units)
        self._judges = [_judge(*both) for both in zip(self.monitors, self._windows.places, strict=True)]

    def count(
        self, store: Store, decided: MonitoredDecision, now_ms: int, history: History, *, kept: Row | None = None
    ) -> Counted:
        """Count one decision and judge every window, in the caller's transaction. `settle` does what follows from it.

        `kept`: the windows' row, if that transaction has read it already. `history`: given how many decisions and
        milliseconds the windows reach back, it returns (time, decision), oldest first. The windows are filled with these
        when the record has none, or those of other monitors.

        Raises StoreError when the windows in the record cannot be read.
        """
        if not self.monitors:
            return Counted()
        try:
            sums = self._windows.taken(kept or self._windows.row(store)) or self._filled(store, history)
            self._windows.add(store, sums, self._vector(decided), now_ms)
            stops, warnings = self._crossed(sums)
            return Counted(self._windows.write(store, sums), stops, warnings)
        except NOT_AS_WRITTEN as error:
            raise self._unreadable() from error

    def _filled(self, store: Store, history: History) -> Sums:
        sums = self._windows.begin(store)
        for at_ms, decided in history(self._windows.reach):
            self._windows.add(store, sums, self._vector(decided), at_ms)
        return sums

    def _vector(self, decided: MonitoredDecision) -> Vector:
        vector: Vector = []
        for judge in self._judges:
            vector += judge.vector(judge.monitor, decided)
        return vector

    def _crossed(self, sums: Sums) -> tuple[tuple[Crossing, ...], tuple[Crossing, ...]]:
        """Return what is beyond its stop, and what is newly beyond its warning. `sums` keeps the names of those beyond."""
        stops: list[Crossing] = []
        new: list[Crossing] = []
        warned: list[str] = []
        for judge in self._judges:
            value = judge.value(sums.totals)
            if value is None:
                continue
            for which, threshold in judge.thresholds:
                if not judge.is_beyond(threshold, value):
                    continue
                if which == "stop":
                    stops.append(judge.crossing(which, value, sums.n))
                    continue
                warned.append(judge.monitor.name)
                if judge.monitor.name not in sums.warned:
                    new.append(judge.crossing(which, value, sums.n))
        sums.warned = warned
        return tuple(stops), tuple(new)

    def settle(self, store: Store, counted: Counted, now_ms: int) -> Watched:
        """Suspend the agent for what is beyond its stop, in the same transaction, once the decision stands in the ledger.

        An agent that is not active is left alone: while it waits for a human, its next decision crosses again.
        """
        known = registry.lookup(store, self.agent_id) if counted.stops else None
        if known is None or not known.active:
            return Watched(None, counted.warnings)
        why = counted.stops[0].text
        registry.move(store, self.agent_id, "SUSPENDED", by="runtime", reason=why, now_ms=now_ms)
        return Watched(why, counted.warnings)

    def standing(self, store: Reader, now_ms: int) -> tuple[Standing, ...]:
        """Return every monitor as it stands now. Writes nothing. Before its windows are filled, a record has no values."""
        with reading(self._unreadable()):
            totals = self._windows.now(store, now_ms)
            return tuple(_standing(judge, totals) for judge in self._judges)

    def _unreadable(self) -> StoreError:
        what = f"the windows of the monitors of agent `{self.agent_id}` cannot be read"
        return StoreError(what, hint="sds ledger verify", retryable=False)


def _standing(judge: _Judge, totals: Vector) -> Standing:
    monitor, value = judge.monitor, judge.value(totals)
    text, decisions = None if value is None else shown(monitor, value), totals[judge.place.start]
    return Standing(monitor.name, monitor.of, monitor.window.text, decisions, text, monitor.warn, monitor.stop)


def shown(monitor: MonitorSpec, ratio: tuple[int, int]) -> str:
    """Return a value as text: whole minor units, or a number with at most four decimals."""
    number = ratio[0] / ratio[1]
    return str(round(number)) if monitor.of in _MINOR else f"{number:.4f}".rstrip("0").removesuffix(".")


def _measured(value: int | None) -> Vector:
    """Return (1, whether it was measured, the value). A decision without the value counts as a decision only."""
    return [1, 0, 0] if value is None else [1, 1, value]


def _labelled(_monitor: MonitorSpec, decided: MonitoredDecision) -> Vector:
    """Return (1, whether both are known, the confidence in millionths, whether the decision was right)."""
    if decided.confidence is None or decided.right is None:
        return [1, 0, 0, 0]
    return [1, 1, _micro(decided.confidence), int(decided.right)]


def _micro(share: float) -> int:
    return round(min(1.0, max(0.0, share)) * MICRO)


def _shift(monitor: MonitorSpec, decided: MonitoredDecision) -> Vector:
    """Return (1, whether it has the reading, 1 at its expected value, 1 for any other value)."""
    value = decided.readings.get(monitor.reading or "")
    if value is None:
        return [1, 0, *([0] * (len(monitor.expected) + 1))]
    other = value not in monitor.expected
    return [1, 1, *(int(value == known) for known in sorted(monitor.expected)), int(other)]


def _stability(monitor: MonitorSpec, total: Vector) -> tuple[int, int] | None:
    """Return the population stability index: the sum of (found - expected) * ln(found / expected) over the values."""
    if total[1] < MEASURED_MIN:
        return None
    shares = (*(micros(monitor.expected[value]) / MICRO for value in sorted(monitor.expected)), 0.0)
    found = ((count / total[1], share) for count, share in zip(total[2:], shares, strict=True))
    floored = ((max(a, SHARE_MIN), max(e, SHARE_MIN)) for a, e in found)
    return round(sum((a - e) * log(a / e) for a, e in floored) * MICRO), MICRO


def _calibration(_monitor: MonitorSpec, total: Vector) -> tuple[int, int] | None:
    """Return the difference between the mean confidence and the share of right decisions."""
    if total[1] < MEASURED_MIN:
        return None
    return abs(total[2] - total[3] * MICRO), total[1] * MICRO


def _confidence(_monitor: MonitorSpec, total: Vector) -> tuple[int, int] | None:
    return (total[2], total[1] * MICRO) if total[1] >= MEASURED_MIN else None


def _share(_monitor: MonitorSpec, total: Vector) -> tuple[int, int] | None:
    return total[1], total[0]


_VECTORS: Mapping[str, Callable[[MonitorSpec, MonitoredDecision], Vector]] = {
    "approval_rate": lambda _, decided: [1, int(decided.executed)],
    "paid_share": lambda _, decided: [1, int(decided.paid)],
    "paid_mean_minor": lambda _, decided: _measured(decided.paid_minor),
    "paid_sum_minor": lambda _, decided: [1, decided.paid_minor or 0],
    "reason_share": lambda monitor, decided: [1, int(decided.reason == monitor.reason)],
    "confidence_mean": lambda _, decided: _measured(None if decided.confidence is None else _micro(decided.confidence)),
    "reading_shift": _shift,
    "calibration": _labelled,
}
_RATIOS: Mapping[str, Ratio] = {
    "approval_rate": _share,
    "paid_share": _share,
    "paid_mean_minor": lambda _, total: (total[2], total[1]) if total[1] else None,
    "paid_sum_minor": lambda _, total: (total[1], 1),
    "reason_share": _share,
    "confidence_mean": _confidence,
    "reading_shift": _stability,
    "calibration": _calibration,
}
