"""What was spent before a limit was in force counts under it, too: no version of a contract opens a window anew.

A counter is named by its limit, so a limit that is new, or that has another name, window, time zone or `per`, has counters
without an entry. What the orders of its running window spent is written to them when the contract is put in force: as rows
of `spend` that name the contract in the place of a flow. The contract's ledger entry has their digest.

They are not taken back where one of these orders comes to nothing later: the limit is then too strict until its window ends.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import SpendLimit
from sds.kernel.envelope.state import Fields
from sds.kernel.registry import spend
from sds.kernel.storage import ledger
from sds.kernel.storage.store import Reader, Store

_ROWS = "SELECT dfid, scope, amount FROM spend WHERE dfid = ? ORDER BY 1, 2"
_ORDERS = (
    "SELECT e.dfid, e.reserved_at_ms, CAST(json_extract(l.body, '$.needs[1]') AS BIGINT), COALESCE(h.snapshot, s.body)"
    " FROM execution_log e INDEXED BY orders_by_time JOIN decision_flows f ON f.dfid = e.dfid"
    " JOIN ledger l ON l.dfid = e.dfid AND l.kind IN ('RESERVED', 'ADOPTED')"
    " LEFT JOIN context_snapshots s ON s.dfid = e.dfid LEFT JOIN human_decisions h ON h.dfid = e.dfid"
    f" WHERE e.reserved_at_ms > ? AND f.gate = ? AND {spend.COUNTED}"
)
_COUNTED_ALREADY = (
    "SELECT s.dfid, s.scope FROM execution_log e INDEXED BY orders_by_time"
    " CROSS JOIN spend s ON s.dfid = e.dfid WHERE e.reserved_at_ms > ?"
)
_CARRIED_BEFORE = "SELECT s.scope, s.amount FROM contracts c JOIN spend s ON s.dfid = c.hash WHERE c.gate = ?"


@dataclass(frozen=True, slots=True)
class _Order:
    """An order that counts against spend limits. `fields`: the state it was decided on; None: the record has none."""

    dfid: str
    at_ms: int
    amount: int
    fields: Fields | None


def uncounted_limits(before: Mapping[str, Any], contract: Contract) -> tuple[SpendLimit, ...]:
    """Return the limits that do not count what was counted under a registered contract (`before`, as JSON)."""
    counted = [_counted_as(each) for each in before["spend"]]
    return tuple(limit for limit in contract.spend if _counted_as(limit.model_dump()) not in counted)


def _counted_as(limit: Mapping[str, Any]) -> tuple[Any, ...]:
    zone, sliding = limit.get("timezone"), limit.get("sliding", False)
    return limit["name"], limit["window"], limit["per"], zone, sliding


def carry(store: Store, before: Mapping[str, Any], contract: Contract, now_ms: int) -> str:
    """Count what was spent in the running windows against the limits that have not counted it, in the caller's transaction.

    Return the digest of the rows that were written; "" where there was nothing to count.
    """
    limits = uncounted_limits(before, contract)
    if not limits or not (missing := _missing(store, contract, limits, now_ms)):
        return ""
    for scope, amount in sorted(missing.items()):
        spend.add(store, contract.hash, spend.Scopes(now_ms, (scope,), ("",)), amount)
    return rows_digest(store, contract.hash)


def rows_digest(store: Reader, contract_hash: str) -> str:
    """Return the digest of what a contract carried over; "" where it carried nothing."""
    rows = store.rows(_ROWS, (contract_hash,))
    return ledger.rows_digest(rows) if rows else ""


def anything_spent(store: Reader, contract: Contract, now_ms: int) -> bool:
    """Tell whether any order counts in the running window of any of a contract's limits, under whatever limits it was made."""
    orders = _orders(store, contract.gate, contract.spend, now_ms)
    return any(spend.counts(limit, order.at_ms, now_ms) for order in orders for limit in contract.spend)


def _missing(store: Reader, contract: Contract, limits: tuple[SpendLimit, ...], now_ms: int) -> Mapping[str, int]:
    """Return what the counters of these limits lack: by counter, in minor units."""
    counted = set(store.rows(_COUNTED_ALREADY, (_since_ms(limits, now_ms),)))
    lacking: Counter[str] = Counter()
    for order in _orders(store, contract.gate, limits, now_ms):
        for limit in limits:
            own = spend.counter(contract.gate, limit, order.fields, order.at_ms)
            if own is None or (order.dfid, own) in counted or not spend.counts(limit, order.at_ms, now_ms):
                continue
            lacking[spend.counter(contract.gate, limit, order.fields, _entered_ms(limit, order.at_ms)) or own] += (
                order.amount
            )
    for scope, amount in store.rows(_CARRIED_BEFORE, (contract.gate,)):
        if scope in lacking:
            lacking[scope] -= amount
    return +lacking


def _entered_ms(limit: SpendLimit, at_ms: int) -> int:
    """Return the time that an amount is counted at. What is carried over leaves a sliding window by whole minutes, so it is
    counted in the next one: it leaves up to two minutes late, and never early.
    """
    return at_ms + spend.MINUTE_MS if limit.sliding else at_ms


def _since_ms(limits: tuple[SpendLimit, ...], now_ms: int) -> int:
    """Return the time before which nothing is in a window of these limits."""
    lengths = [spend.WINDOW_MS_MAX if limit.window == "day" else 2 * spend.LENGTH_MS["hour"] for limit in limits]
    return now_ms - max(lengths, default=0)


def _orders(store: Reader, gate: str, limits: tuple[SpendLimit, ...], now_ms: int) -> Iterator[_Order]:
    """Yield the orders that may count in the running windows. One that the record has at a later time counts as made now:
    the clock was set back, and that opens no window anew.
    """
    if not limits:
        return
    for dfid, at_ms, amount, snapshot in store.rows(_ORDERS, (_since_ms(limits, now_ms), gate)):
        if amount:
            fields = json.loads(snapshot)["fields"] if snapshot else None
            yield _Order(dfid, min(at_ms, now_ms), amount, fields)
