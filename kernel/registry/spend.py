"""Spend limits: the window that a moment belongs to, and what is used of it.

A calendar window, an hour or a day of UTC or of another time zone, has one counter. A sliding window has one counter for
each minute: whole minutes are added up, and the oldest minute is counted order by order. So it is exact to the millisecond
and costs the same however much was spent.

No window begins anew because a clock was set back. Nobody knows which reading of the clock was right, so an order counts in
each window that it may belong to: the one of the time it was reserved at; the one in which the clock was found to be behind
that time; and, if it was reserved after the clock was set back, the one it would have been in without that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo

from sds.kernel.canonical import digest
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import SpendLimit
from sds.kernel.envelope.state import Fields
from sds.kernel.errors import StoreError
from sds.kernel.storage.ledger import BACK_MS, LAST, Step, steps
from sds.kernel.storage.store import Reader, Row, Store

MINUTE_MS = 60_000
AHEAD_MS = BACK_MS + MINUTE_MS  # a later clock's, and what is carried over, which counts in the minute after its own
LENGTH_MS = {"hour": 3_600_000, "day": 86_400_000}
WINDOW_MS_MAX = 2 * LENGTH_MS["day"]  # more than the longest day of any zone
_MINUTE_CHARS = len("2013-12-02T16:05")
_NO_DATETIME = (ValueError, OverflowError, OSError)  # what `datetime` raises of a time that no calendar has

# An order that was certainly rejected, or that has been taken back, is not counted.
COUNTED = (
    "e.status <> 'FAILED' AND NOT EXISTS"
    " (SELECT 1 FROM saga_reversals r WHERE r.dfid = e.dfid AND r.status = 'REVERTED')"
)
_TOTALS = "SELECT {columns} FROM (SELECT 1 AS one) o LEFT JOIN ledger l ON l.idx = (SELECT max(idx) FROM ledger)"
_TOTAL = "(SELECT used FROM spend_totals WHERE scope = ?), "
Totals = tuple[tuple[str, ...], Row]  # names of counters, and the row that a statement has read as their `columns`
_MINUTES = "SELECT COALESCE(SUM(used), 0) FROM spend_totals WHERE scope > ? AND scope <= ?"
_OLDEST_MINUTE = (
    "SELECT COALESCE(SUM(s.amount), 0) FROM spend s JOIN execution_log e ON e.dfid = s.dfid"
    f" WHERE s.scope = ? AND instr(s.scope, '/~/') > 0 AND e.reserved_at_ms > ? AND e.dfid <> ? AND {COUNTED}"
)
_OWN_MINUTES = "SELECT COALESCE(SUM(amount), 0) FROM spend WHERE dfid = ? AND scope > ? AND scope <= ?"
_ORDERS = (
    "SELECT s.dfid, s.amount, e.reserved_at_ms FROM execution_log e INDEXED BY orders_by_time"
    " CROSS JOIN spend s ON s.dfid = e.dfid CROSS JOIN ledger l ON l.dfid = e.dfid AND l.kind = 'RESERVED'"
    " WHERE s.scope > ? AND s.scope < ? AND substr(s.scope, length(s.scope) - ?) = ?"
    f" AND e.dfid <> ? AND {COUNTED}"
)
_BEFORE = f"{_ORDERS} AND e.reserved_at_ms > ? AND l.idx < ?"
_SINCE = f"{_ORDERS} AND e.reserved_at_ms >= ? AND e.reserved_at_ms < ? AND l.idx >= ?"


@dataclass(frozen=True, slots=True)
class Scopes:
    """The counter of every spend limit at one moment, in the contract's order, and what each counts for (hash, or `*`)."""

    at_ms: int
    names: tuple[str, ...]
    whom: tuple[str, ...]


def columns(names: tuple[str, ...]) -> str:
    """Return the columns for `Totals`, read beside the ledger's last entry `l`. The names are the statement's values."""
    return _TOTAL * len(names) + LAST


def scopes(contract: Contract, fields: Fields, at_ms: int) -> Scopes:
    """Name the counter of every spend limit: gate, limit, window, and a hash of the value of `per` (`*`: everything)."""
    if not contract.spend:
        return Scopes(at_ms, (), ())
    whom = [_whom(limit, fields) for limit in contract.spend]
    names = [_name(contract.gate, limit, who, at_ms) for limit, who in zip(contract.spend, whom, strict=True)]
    return Scopes(at_ms, tuple(names), tuple(whom))


def counters_for_anyone(contract: Contract, at_ms: int) -> tuple[str, ...]:
    """Return the names of the counters, where they do not depend on state: where no limit counts `per` a field. Else none."""
    return () if any(limit.per for limit in contract.spend) else scopes(contract, {}, at_ms).names


def counter(gate: str, limit: SpendLimit, fields: Fields | None, at_ms: int) -> str | None:
    """Name the counter of one limit at a moment. None: it counts `per` a field, and the state is not known."""
    if limit.per and fields is None:
        return None
    return _name(gate, limit, _whom(limit, fields or {}), at_ms)


def _whom(limit: SpendLimit, fields: Fields) -> str:
    """Return what a limit counts for: a hash of the value of `per`, or `*` for everything."""
    return digest(fields.get(limit.per, "?"))[:16] if limit.per else "*"


def _name(gate: str, limit: SpendLimit, who: str, at_ms: int) -> str:
    if limit.sliding:
        return f"{_minutes(gate, limit, who)}{_minute(at_ms)}"
    return f"{gate}/{limit.name}/{window(limit, at_ms)}/{who}"


def _minutes(gate: str, limit: SpendLimit, who: str) -> str:
    return f"{gate}/{limit.name}/~/{who}/"


def _no_calendar(at_ms: int) -> StoreError:
    """Return what is said of a time that no calendar has, which no clock has written then."""
    what = f"the record has a time that no calendar has: {at_ms} ms"
    return StoreError(what, hint="sds ledger verify", retryable=False)


def _minute(at_ms: int) -> str:
    """Return the minute of a time, as text. Raises StoreError: no calendar has it."""
    try:
        return _minute_text(at_ms // MINUTE_MS)
    except _NO_DATETIME as error:
        raise _no_calendar(at_ms) from error


@lru_cache(maxsize=256)
def _minute_text(minute: int) -> str:
    return datetime.fromtimestamp(minute * MINUTE_MS / 1000, UTC).isoformat()[:_MINUTE_CHARS]


def _local(at_ms: int, zone: tzinfo) -> datetime:
    """Return a time as a datetime of a zone. Raises StoreError: no calendar has it."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, zone)
    except _NO_DATETIME as error:
        raise _no_calendar(at_ms) from error


def window(limit: SpendLimit, at_ms: int) -> str:
    """Return the name of the calendar window of a moment. The offset tells apart the two hours that a zone's clocks show
    twice.
    """
    if limit.timezone is None:
        return _minute(at_ms)[: 13 if limit.window == "hour" else 10]
    local = _local(at_ms, ZoneInfo(limit.timezone))
    return f"{local:%Y-%m-%dT%H%z}@{limit.timezone}" if limit.window == "hour" else f"{local:%Y-%m-%d}@{limit.timezone}"


def counts(limit: SpendLimit, then_ms: int, at_ms: int) -> bool:
    """Tell whether what was spent at `then_ms` counts at `at_ms`: it lies in the same window, or within the sliding one."""
    if not limit.sliding:
        return window(limit, then_ms) == window(limit, at_ms)
    return at_ms - LENGTH_MS[limit.window] < then_ms < _end(at_ms)


def _end(at_ms: int) -> int:
    """Return the end of a sliding window, a little ahead: another process may have read a slightly later clock."""
    return ((at_ms + AHEAD_MS) // MINUTE_MS + 1) * MINUTE_MS


def left(
    store: Reader, contract: Contract, now: Scopes, known: Totals | None = None, *, without: str = ""
) -> int | None:
    """Return what is left under the tightest limit, in minor units; None when there is no limit.

    `known`: totals that were read already, perhaps of other counters. `without`: an order in flight that is not counted.
    """
    if not contract.spend:
        return None
    if known and known[0] == now.names:
        totals = known[1]
    else:
        totals = store.rows(_TOTALS.format(columns=columns(now.names)), now.names)[0]
    used = _used(store, contract, now, totals, without)
    return max(0, min(limit.max_minor - taken for limit, taken in zip(contract.spend, used, strict=True)))


def _used(store: Reader, contract: Contract, now: Scopes, totals: Row, without: str) -> list[int]:
    """Return what is used of every limit, in the contract's order."""
    own = of_order(store, without) if without else {}
    used = [(total or 0) - own.get(name, 0) for name, total in zip(now.names, totals, strict=False)]
    stepped = steps(store, totals[len(used) :], now.at_ms, WINDOW_MS_MAX)
    for index, (limit, who) in enumerate(zip(contract.spend, now.whom, strict=True)):
        if limit.sliding:
            used[index] = _used_sliding(store, limit, _minutes(contract.gate, limit, who), now.at_ms, without)
        if stepped:
            used[index] += _used_by_steps(store, contract.gate, limit, who, now.at_ms, without, stepped)
    return used


def of_order(store: Reader, dfid: str) -> dict[str, int]:
    """Return what one order has taken of each counter."""
    return dict(store.rows("SELECT scope, amount FROM spend WHERE dfid = ?", (dfid,)))


def _used_sliding(store: Reader, limit: SpendLimit, minutes: str, at_ms: int, without: str) -> int:
    """Return what was spent within a sliding window: whole minutes, and the young enough orders of the oldest one."""
    begin_ms = at_ms - LENGTH_MS[limit.window]
    oldest, newest = f"{minutes}{_minute(begin_ms)}", f"{minutes}{_minute(at_ms + AHEAD_MS)}"
    total: int = store.value(_MINUTES, (oldest, newest))
    total += store.value(_OLDEST_MINUTE, (oldest, begin_ms, without))
    return total - (store.value(_OWN_MINUTES, (without, oldest, newest)) if without else 0)


def _used_by_steps(
    store: Reader, gate: str, limit: SpendLimit, who: str, at_ms: int, without: str, stepped: Iterable[Step]
) -> int:
    """Return what counts at `at_ms` although its time is in another window, because the clock was set back."""
    of_limit = (*_all_windows(gate, limit, who), without)
    orders = {
        dfid: amount
        for step in stepped
        for dfid, amount, then_ms in _moved(store, limit, of_limit, at_ms, step)
        if not counts(limit, then_ms, at_ms)
    }
    return sum(orders.values())


def _all_windows(gate: str, limit: SpendLimit, who: str) -> tuple[str, str, int, str]:
    """Return the two bounds of the names of all windows of one limit, and their end, as values for `_ORDERS`."""
    end = "" if limit.sliding else f"/{who}"
    return (*between(_minutes(gate, limit, who) if limit.sliding else f"{gate}/{limit.name}/"), len(end) - 1, end)


def between(prefix: str) -> tuple[str, str]:
    """Return bounds that hold every longer name that begins with `prefix`: all that is above the first and below the second."""
    return prefix, f"{prefix[:-1]}{chr(ord(prefix[-1]) + 1)}"


def _moved(
    store: Reader, limit: SpendLimit, of_limit: tuple[str, str, int, str, str], at_ms: int, step: Step
) -> Iterator[tuple[str, int, int]]:
    """Yield the orders that a step of the clock may have moved here: (flow, amount, reserved at)."""
    if counts(limit, step.now_ms, at_ms):  # later times, reserved before the clock showed this one
        yield from store.rows(_BEFORE, (*of_limit, step.now_ms, step.idx))
    first_ms = max(step.now_ms, at_ms - step.by_ms - WINDOW_MS_MAX)
    last_ms = min(step.was_ms, at_ms - step.by_ms + WINDOW_MS_MAX)
    if first_ms < last_ms:  # until the clock is where it was, the right time may be its own plus the step
        rows = store.rows(_SINCE, (*of_limit, first_ms, last_ms, step.idx))
        yield from (row for row in rows if counts(limit, row[2] + step.by_ms, at_ms))


def taken(dfid: str, now: Scopes, amount: int) -> list[Row]:
    """Return what an order takes as rows of `spend`, in their order: (flow, counter, amount). An amount of 0 gives none."""
    return sorted((dfid, name, amount) for name in now.names) if amount else []


def add(store: Store, dfid: str, now: Scopes, amount: int) -> None:
    """Count an amount against every limit, in the caller's transaction."""
    if not (rows := taken(dfid, now, amount)):
        return
    store.write(
        f"INSERT INTO spend_totals VALUES {', '.join(['(?, ?)'] * len(rows))}"
        " ON CONFLICT (scope) DO UPDATE SET used = spend_totals.used + excluded.used",
        tuple(value for row in rows for value in row[1:]),
    )
    marks = ", ".join(["(?, ?, ?)"] * len(rows))
    store.write(f"INSERT INTO spend VALUES {marks}", tuple(value for row in rows for value in row))


def recount(store: Store, dfid: str, times: int) -> None:
    """Add what one order has taken of each counter, `times` 1 or -1, in the caller's transaction."""
    for scope, amount in of_order(store, dfid).items():
        store.run("UPDATE spend_totals SET used = used + ? WHERE scope = ?", (times * amount, scope))


def still_counted(store: Reader, contract: Contract, dfid: str, fields: Fields, at_ms: int) -> bool:
    """Tell whether an order in flight is counted where it would be counted if it were reserved now.

    Once its window is over it is not: to send it now would pay more than the present limits permit.
    """
    spent = of_order(store, dfid)
    if not spent:
        return True
    then_ms = store.value("SELECT reserved_at_ms FROM execution_log WHERE dfid = ?", (dfid,))
    if spent.keys() != set(scopes(contract, fields, then_ms).names):
        return False
    return all(counts(limit, then_ms, at_ms) for limit in contract.spend)


def anything_counted(store: Reader, contract: Contract, at_ms: int) -> bool:
    """Tell whether any counter of this moment is above 0, whoever it counts for."""
    return any(_holds(store, contract.gate, limit, at_ms) for limit in contract.spend)


def _holds(store: Reader, gate: str, limit: SpendLimit, at_ms: int) -> bool:
    """Tell whether any counter of a limit's present window is above 0."""
    if not limit.sliding:
        prefix, since = f"{gate}/{limit.name}/{window(limit, at_ms)}/", ""
    else:
        prefix, since = f"{gate}/{limit.name}/~/", _minute(at_ms - LENGTH_MS[limit.window])
    sql = (
        "SELECT 1 FROM spend_totals WHERE used > 0 AND scope > ? AND scope < ?"
        f" AND substr(scope, length(scope) - {_MINUTE_CHARS - 1}) >= ?"
    )
    return store.row(sql, (*between(prefix), since)) is not None
