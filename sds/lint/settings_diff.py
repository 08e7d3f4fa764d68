"""Compares the settings of two contracts, and says of each difference whether the second is wider.

Each row of `_RULES` says how to read one setting. A change that affects what may happen, and whose direction is
unclear, counts as wider, so that a person looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel

from sds.kernel.contract.monitors import MonitorSpec, micros
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import DriftSpec, KindSpec, SpendLimit
from sds.kernel.envelope.envelope import MAGNITUDE_MAX

Direction = Literal["wider", "narrower", "different"]
_UNLIMITED = MAGNITUDE_MAX + 1


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One setting that differs, by its path in the contract. None: the setting is missing."""

    path: str
    direction: Direction
    before: str | None
    after: str | None


_Rule = Callable[[Any, Any], Direction]


def _more(a: int | None, b: int | None) -> Direction:
    """Compare a setting of which more is wider; None is no limit."""
    return "wider" if (_UNLIMITED if b is None else b) > (_UNLIMITED if a is None else a) else "narrower"


def _less(a: Any, b: Any) -> Direction:
    return "wider" if b < a else "narrower"


def _superset(a: tuple[str, ...], b: tuple[str, ...]) -> Direction:
    return "wider" if set(b) - set(a) else "narrower" if set(a) - set(b) else "different"


def _unclear(a: object, b: object) -> Direction:  # noqa: ARG001  it affects what may happen, in no clear direction
    return "wider"


def _neutral(a: object, b: object) -> Direction:  # noqa: ARG001
    return "different"


def _settles(a: str, b: str) -> Direction:  # noqa: ARG001
    return "wider" if b == "source" else "narrower"


def _bound(a: object, b: object) -> Direction:
    """With a first bound, a human decides more; between two bounds the direction is unclear."""
    return "narrower" if a is None else _unclear(a, b)


_RULES: tuple[tuple[str, _Rule], ...] = (
    ("gate", _unclear),
    ("agent_id", _unclear),
    ("owner", _neutral),
    ("effective_from", _less),
    ("proposal_schema", _neutral),
    ("mission", _neutral),
    ("source", _unclear),  # drawn amounts are counted by it: under another name they are forgotten
    ("authority", _superset),
    ("refusal", _unclear),
    ("event.id", _unclear),  # each has one flow: with another field an event is decided again
    ("event.key", _unclear),
    ("event.evidence", _neutral),
    ("event.evidence_chars_max", _neutral),
    ("show", _neutral),
    ("rationale", _neutral),  # the length of one before the decision is compared with the decisions
    ("policy", _neutral),  # it proposes within the envelope, which is compared with the decisions
    ("max_error", _bound),
    ("draws_settle_in", _settles),
    ("drift.age_ms_max", _more),
    ("escalation.confidence_min_pct", _less),
    ("escalation.always", lambda a, b: _superset(b, a)),
    ("escalation.per_hour", _more),
    ("escalation.impact_high_minor", _more),
    ("escalation.pauses_agent", _less),
    ("human.authority", _neutral),  # a human's envelope is compared with the decisions
    ("human.when", _neutral),
    ("memory", _neutral),
    ("artifacts", _neutral),
    ("retry.attempts_max", _more),
    ("retry.restarts_max", _more),
    ("retry.rejections_to_suspend", _more),
    ("budget.tokens_max", _more),
    ("budget.ttl_ms", _more),
    ("budget.dispatch_ms_max", _more),
)


def changed_settings(a: Contract, b: Contract) -> Iterator[SettingChange]:
    """Yield every setting that differs, except the rules of decisions and the version."""
    for path, rule in _RULES:
        before, after = _at(a, path), _at(b, path)
        if before != after:
            yield SettingChange(path, rule(before, after), _shown(before), _shown(after))
    drawn = {*_drawn_from(a), *_drawn_from(b)}
    for change in _entries("snapshot", a.snapshot, b.snapshot, _neutral, added="narrower"):
        # drawn amounts are stored without decimals: with a new scale, 200 euros would count as 200 cents
        recounted = change.direction == "different" and change.path.removeprefix("snapshot.") in drawn
        yield replace(change, direction="wider") if recounted else change
    yield from _entries("readings", a.readings, b.readings, _neutral, added="different")
    yield from _entries("levels", a.levels, b.levels, _neutral, added="different")
    yield from _entries("labels", a.labels, b.labels, _neutral, added="different")
    yield from _entries("drift.fields", _tolerances(a), _tolerances(b), _drift, added="wider")
    limits_a, limits_b = ({limit.name: limit for limit in each.spend} for each in (a, b))
    yield from _entries("spend", limits_a, limits_b, _spend, added="narrower")
    monitors_a, monitors_b = ({monitor.name: monitor for monitor in each.monitors} for each in (a, b))
    yield from _entries("aggregate_thresholds", monitors_a, monitors_b, _monitor, added="narrower")
    yield from _entries("sagas", a.sagas, b.sagas, _unclear, added="wider")
    for where, before, after in (("kinds", a.kinds, b.kinds), ("human.kinds", a.human.kinds, b.human.kinds)):
        for kind in sorted({*before} & {*after}):
            yield from _kind(f"{where}.{kind}", before[kind], after[kind])
    yield from _human_kinds(a.human.kinds, b.human.kinds)


def _drawn_from(contract: Contract) -> Iterator[str]:
    for kind in (*contract.kinds.values(), *contract.human.kinds.values()):
        yield from kind.draws


def _at(contract: Contract, path: str) -> Any:
    found: Any = contract
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _shown(value: object) -> str | None:
    if isinstance(value, tuple):
        return ", ".join(map(_written, value))
    return None if value is None else _written(value)


def _written(value: object) -> str:
    """Return a value in one line as YAML writes it, without empty parts."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True, by_alias=True)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{name}: {_written(each)}" for name, each in value.items() if each not in ((), {})) + "}"
        )
    return f"[{', '.join(map(_written, value))}]" if isinstance(value, tuple) else str(value)


def _entries(
    where: str, a: Mapping[str, Any], b: Mapping[str, Any], changed: _Rule, *, added: Direction
) -> Iterator[SettingChange]:
    """Compare two mappings entry by entry. Removing an entry is the opposite of adding one."""
    opposite: dict[Direction, Direction] = {"wider": "narrower", "narrower": "wider", "different": "different"}
    removed = opposite[added]
    for name in sorted({*a, *b}):
        before, after = a.get(name), b.get(name)
        if before != after:
            direction = added if before is None else removed if after is None else changed(before, after)
            yield SettingChange(f"{where}.{name}", direction, _shown(before), _shown(after))


def _tolerances(contract: Contract) -> dict[str, DriftSpec]:
    """Return the fields that may drift. A strict field equals one that is not named."""
    return {path: rule for path, rule in contract.drift.fields.items() if rule.moves}


def _drift(a: DriftSpec, b: DriftSpec) -> Direction:
    if (a.abs is None) != (b.abs is None):
        return "wider"  # a share and an amount cannot be compared
    return _more(a.abs, b.abs) if a.abs is not None else _more(a.pct, b.pct)


def _spend(a: SpendLimit, b: SpendLimit) -> Direction:
    """Across the end of a calendar window, twice the limit fits into the window's length; a sliding window does not
    permit that. An hour or a day of another time zone begins within one that was counted in the old zone.
    """
    wider = (
        b.max_minor > a.max_minor
        or (a.window, b.window) == ("day", "hour")
        or (b.per is not None and b.per != a.per)
        or (a.sliding and not b.sliding)
        or (not b.sliding and a.timezone != b.timezone)
    )
    return "wider" if wider else "narrower"


def _monitor(a: MonitorSpec, b: MonitorSpec) -> Direction:
    """A stop that is reached later, or never, is wider. Monitors with different measurements cannot be compared."""
    if a.model_copy(update={"warn": None, "stop": None}) != b.model_copy(update={"warn": None, "stop": None}):
        return "wider"
    if a.stop == b.stop:
        return "different"
    if a.stop is None or b.stop is None:
        return "narrower" if a.stop is None else "wider"
    higher = micros(b.stop) > micros(a.stop)
    return "narrower" if higher == a.is_minimum else "wider"


def _kind(where: str, a: KindSpec, b: KindSpec) -> Iterator[SettingChange]:
    yield from _entries(f"{where}.draws", a.draws, b.draws, _drawn, added="narrower")
    if a.spends != b.spends:
        direction: Direction = "narrower" if a.spends is None else "wider"
        yield SettingChange(f"{where}.spends", direction, a.spends, b.spends)
    if a.side_effect != b.side_effect:
        direction = "wider" if b.side_effect else "narrower"
        yield SettingChange(f"{where}.side_effect", direction, _shown(a.side_effect), _shown(b.side_effect))
    before, after = _impact(a), _impact(b)
    if before != after:
        yield SettingChange(f"{where}.impact", "wider" if after == "LOW" else "narrower", before, after)


def _human_kinds(a: Mapping[str, KindSpec], b: Mapping[str, KindSpec]) -> Iterator[SettingChange]:
    """Yield the other differences in a human's kinds. Whether they permit more is found by comparing decisions."""
    both = a.keys() & b.keys()
    gone, come = ({kind: spec for kind, spec in each.items() if kind not in both} for each in (a, b))
    yield from _entries("human.kinds", gone, come, _neutral, added="different")
    for kind in sorted(both):
        where, before, after = f"human.kinds.{kind}", a[kind], b[kind]
        for name in ("reasons", "when"):
            was, now = getattr(before, name), getattr(after, name)
            if was != now:
                yield SettingChange(f"{where}.{name}", "different", _shown(was), _shown(now))
        for name in ("params", "fills"):
            yield from _entries(
                f"{where}.{name}", getattr(before, name), getattr(after, name), _neutral, added="different"
            )


def _impact(kind: KindSpec) -> str:
    return kind.impact or ("HIGH" if kind.executes else "LOW")


def _drawn(a: str | int, b: str | int) -> Direction:
    return _less(a, b) if isinstance(a, int) and isinstance(b, int) else "wider"
