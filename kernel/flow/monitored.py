"""What monitors count of a decision: from the attempt that is being committed, and from the decisions in the ledger.

Every decision of an agent counts, a saga's step too. A flow that only waited (`states.WAITING_TAGS`) is no decision: an
overload would push the payments out of a window. Nor is what was interrupted, handed over or decided by a human.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from sds.kernel.contract.schema import Contract
from sds.kernel.flow.decision_record import Attempt
from sds.kernel.flow.dispatch import Log
from sds.kernel.flow.states import WAITING_TAGS
from sds.kernel.registry import counter_scale, windows
from sds.kernel.registry.monitors import Counted, MonitoredDecision, Monitors, Watched
from sds.kernel.storage.ledger import ABOUT, BACK_MS
from sds.kernel.storage.store import Reader, Row, Store

HISTORY_MAX = 100_000  # past decisions that a window of minutes is filled with, at most
ENTRIES_MAX = 4 * HISTORY_MAX  # newest ledger entries that are searched for them: other agents may share the ledger
READ_AT_ONCE = 1_000
IDX_MAX = 1 << 62  # beyond every index of an entry

# The windows begin anew where an operator has reactivated the agent: the operator has looked at what it did before.
REACTIVATED = (
    f"SELECT MAX(idx) FROM ledger WHERE dfid = '' AND kind = 'AGENT' AND {ABOUT} = ?"
    " AND json_extract(body, '$.status') = 'ACTIVE' AND COALESCE(json_extract(body, '$.was'), 'SUSPENDED') = 'SUSPENDED'"
)
_DECIDED = (
    "SELECT l.idx, l.at_ms, l.body, p.confidence, p.justification FROM ledger l"
    " LEFT JOIN policy_proposals p ON p.dfid = l.dfid"
    " WHERE l.kind = 'DECIDED' AND l.idx > ? AND l.idx > (SELECT MAX(idx) FROM ledger) - ?"
    " AND l.dfid <> ? AND json_extract(l.body, '$.agent_id') = ?"
    f" AND COALESCE(json_extract(l.body, '$.tag'), '') NOT IN ({', '.join(map(repr, sorted(WAITING_TAGS)))})"
    " AND l.idx < ? ORDER BY l.idx DESC LIMIT ?"
)
_NEWEST_MS = "SELECT at_ms FROM ledger ORDER BY idx DESC LIMIT 1"
_WAS_LATER = "SELECT 1 FROM clock_steps WHERE idx <= ? AND was_ms >= ? LIMIT 1"


def count(
    contract: Contract, monitors: Monitors, store: Store, attempt: Attempt, state: str, tag: str | None
) -> Counted:
    """Count an attempt that ends its flow in `state`, in the transaction that records it."""
    if not monitors.monitors or tag in WAITING_TAGS:
        return Counted()
    history = partial(_history, contract, store, attempt.packet.dfid)
    found = decided(contract, attempt, state)
    return monitors.count(store, found, attempt.now_ms, history, kept=attempt.open_flow.windows)


def decision_monitors(contract: Contract) -> Monitors:
    """Return the monitors of a contract that watch decisions: all but those of later labels."""
    watched = [monitor for monitor in contract.monitors if monitor.of != "calibration"]
    return Monitors(contract.agent_id, "decisions", watched, units=spends_at(contract))


def label_monitors(contract: Contract) -> Monitors:
    """Return the monitors of a contract that watch later labels."""
    watched = [monitor for monitor in contract.monitors if monitor.of == "calibration"]
    return Monitors(contract.agent_id, "labels", watched)


def tell(log: Log, dfid: str, agent_id: str, watched: Watched) -> None:
    """Log what the monitors found, once it is on the record."""
    for warning in watched.warnings:
        facts = {"monitor": warning.monitor.name, "value": warning.value, "warn": warning.monitor.warn}
        log("monitor.warn", {"dfid": dfid, "agent_id": agent_id, **facts, "decision": warning.decision})
    if watched.suspended:
        log("agent.suspended", {"dfid": dfid, "agent_id": agent_id, "reason": watched.suspended})


def spends_at(contract: Contract) -> int | None:
    """Return the number of decimals of what a contract spends. None: it spends nothing."""
    return next((kind.scale(kind.spends) for kind in contract.kinds.values() if kind.spends), None)


def decided(contract: Contract, attempt: Attempt, state: str) -> MonitoredDecision:
    """Return what is counted of an attempt that ends its flow in `state`."""
    proposal, executed = attempt.verdict.proposal, state == "EXECUTING"
    spec = contract.kinds.get(proposal.action) if proposal and executed else None
    spends = spec.spends if spec else None
    return MonitoredDecision(
        executed=executed,
        paid=spends is not None,
        paid_minor=None if spends is None else dict(attempt.verdict.amounts_minor).get(spends, 0),
        reason=proposal.reason_code if proposal else None,
        confidence=attempt.decoding.confidence,
        readings=_likeliest(attempt.decoding.facts.get("readings")),
    )


def _likeliest(readings: object) -> Mapping[str, str]:
    """Return the likeliest value of each reading, of equally likely ones the first by name. Other data is left out."""
    found: dict[str, str] = {}
    for name, values in readings.items() if isinstance(readings, Mapping) else ():
        shares = values.items() if isinstance(values, Mapping) else ()
        likely = [(share, value) for value, share in shares if isinstance(share, (int, float)) and share >= 0]
        if likely:
            most = max(share for share, _ in likely)
            found[str(name)] = min(str(value) for share, value in likely if share == most)
    return found


def _history(
    contract: Contract, store: Reader, dfid: str, reach: tuple[int, int]
) -> Iterator[tuple[int, MonitoredDecision]]:
    """Yield (time, decision) of the agent's decisions since its last reactivation, oldest first: as many as the windows
    reach back, from the newest ENTRIES_MAX entries. The record holds no readings in clear, so their windows begin empty.
    """
    since = store.value(REACTIVATED, (contract.agent_id,)) or 0
    rows = newest_entries(store, _DECIDED, (since, ENTRIES_MAX, dfid, contract.agent_id), reach)
    bodies = store.rows("SELECT hash, body -> '$.kinds' FROM contracts WHERE agent_id = ?", (contract.agent_id,))
    kinds = {name: json.loads(text) for name, text in bodies if text}
    units = spends_at(contract)
    for _, at_ms, text, confidence, justification in reversed(rows):
        body = json.loads(text)
        spec = kinds.get(body["contract_hash"], {}).get(body["action"])
        yield at_ms, _recorded(body, spec, units, confidence, justification)


def newest_entries(store: Reader, sql: str, values: Row, reach: tuple[int, int]) -> list[Row]:
    """Return (index, time, ...) of ledger entries, the newest first, as far back as windows reach: in entries and in
    milliseconds, but at most HISTORY_MAX of these. `sql` finds them below an index, as many as a limit, its last values.
    """
    longest, within_ms = reach
    most, begin_ms = longest, 0
    if within_ms:  # a window holds its running sixtieth, too
        most, begin_ms = HISTORY_MAX, store.value(_NEWEST_MS) - within_ms * (windows.BUCKETS + 1) // windows.BUCKETS
    found, before = list[Row](), IDX_MAX
    while len(found) < most:
        rows = store.rows(sql, (*values, before, min(READ_AT_ONCE, most - len(found))))
        found += rows
        if not rows or (len(found) >= longest and _are_before(store, rows, begin_ms)):
            break
        before = rows[-1][0]
    return found


def _are_before(store: Reader, rows: list[Row], at_ms: int) -> bool:
    """Tell whether entries, the newest first, and all before them are older: no clock showed that time before them."""
    return all(row[1] < at_ms - BACK_MS for row in rows) and store.value(_WAS_LATER, (rows[-1][0], at_ms)) is None


def _recorded(
    body: Mapping[str, Any],
    spec: Mapping[str, Any] | None,
    units: int | None,
    confidence: float | None,
    justification: str | None,
) -> MonitoredDecision:
    """Return what is counted of a recorded decision of the kind `spec`. `units`: the decimals the contract spends in."""
    scale = counter_scale.spends_at(spec) if spec else None
    executed = body["state"] == "EXECUTING"
    paid = executed and scale is not None
    return MonitoredDecision(
        executed=executed,
        paid=paid,
        paid_minor=int(body["params"].get(spec["spends"], 0)) if paid and spec and scale == units else None,
        reason=justification.partition(":")[0] if justification else None,
        confidence=confidence,
    )
