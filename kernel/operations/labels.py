"""Later labels: whether a decision turned out to be right. Somebody who knows it says so, once for a flow.

A label changes no decision. It is a ledger entry, LABEL, and the monitors of `calibration` count it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from sds.kernel.canonical import person
from sds.kernel.errors import StoreError, UsageError
from sds.kernel.flow import monitored
from sds.kernel.flow.dispatch import Log, no_log
from sds.kernel.flow.states import WAITING_TAGS
from sds.kernel.registry.contract_versions import registered_contract
from sds.kernel.registry.monitors import Counted, MonitoredDecision, Monitors
from sds.kernel.storage import ledger
from sds.kernel.storage.store import Reader, Store

WHO_CHARS_MAX = 200
LABEL = "LABEL"

_DECISION = (
    "SELECT l.body, p.confidence, f.gate FROM decision_flows f JOIN ledger l ON l.dfid = f.dfid AND l.kind = 'DECIDED'"
    " LEFT JOIN policy_proposals p ON p.dfid = f.dfid WHERE f.dfid = ?"
)
_LABELS = (
    "SELECT idx, at_ms, body FROM ledger WHERE kind = 'LABEL' AND idx > ? AND idx > (SELECT MAX(idx) FROM ledger) - ? AND dfid <> ?"
    " AND json_extract(body, '$.agent_id') = ? AND idx < ? ORDER BY idx DESC LIMIT ?"
)


@dataclass(frozen=True, slots=True)
class Labelled:
    """`changed`: False when the flow had this label already. `suspended`: why the agent was suspended, if it was."""

    changed: bool
    suspended: str | None = None


def record_label(store: Store, dfid: str, right: bool, *, by: str, now_ms: int, log: Log = no_log) -> Labelled:
    """Record once whether a decision was right. When this brings a monitor of `calibration` beyond its stop, the agent is
    suspended in the same transaction.

    Raises UsageError when the flow is no decision of an agent, or has the other label.
    """
    if not isinstance(right, bool):
        raise UsageError("`right` must be true or false", dfid=dfid)
    if not (who := person(by, WHO_CHARS_MAX)):
        raise UsageError("a label needs the name of the person who gives it", hint="who=NAME", dfid=dfid)
    with store.transaction():
        decision, confidence, gate = _decision(store, dfid)
        known = store.value(
            "SELECT CAST(body ->> '$.right' AS INTEGER) FROM ledger WHERE dfid = ? AND kind = 'LABEL'", (dfid,)
        )
        if known is not None:
            return _known(dfid, bool(known), right)
        body = {"agent_id": decision["agent_id"], "right": right, "confidence": confidence, "by": who}
        monitors, counted = _counted(store, gate, dfid, MonitoredDecision(confidence=confidence, right=right), now_ms)
        ledger.append(store, now_ms, LABEL, dfid, body | ({"monitors": counted.digest} if counted.digest else {}))
        watched = monitors.settle(store, counted, now_ms)
    monitored.tell(log, dfid, monitors.agent_id, watched)
    return Labelled(True, watched.suspended)


def _counted(store: Store, gate: str, dfid: str, found: MonitoredDecision, now_ms: int) -> tuple[Monitors, Counted]:
    contract = registered_contract(store, gate)
    if contract is None:
        raise StoreError(
            "the contract of this decision's agent is not in the record", hint="sds ledger verify", dfid=dfid
        )
    monitors = monitored.label_monitors(contract)
    return monitors, monitors.count(store, found, now_ms, partial(_history, store, contract.agent_id, dfid))


def _decision(store: Reader, dfid: str) -> tuple[dict[str, Any], float | None, str]:
    if store.value("SELECT 1 FROM decision_flows WHERE dfid = ?", (dfid,)) is None:
        raise UsageError(f"there is no flow `{dfid}` in the record", hint="`sds flows` lists them", dfid=dfid)
    row = store.row(_DECISION, (dfid,))
    if row is None:
        raise UsageError(f"flow `{dfid}` has no decision in the record", hint=f"sds audit {dfid}", dfid=dfid)
    body = json.loads(row[0])
    if "agent_id" not in body or body["tag"] in WAITING_TAGS:
        raise UsageError(f"flow `{dfid}` was not decided by an agent", hint="label agents' decisions only", dfid=dfid)
    return body, row[1], row[2]


def _known(dfid: str, known: bool, right: bool) -> Labelled:
    if known != right:
        said = "right" if known else "wrong"
        raise UsageError(f"flow `{dfid}` is labelled as {said} already", hint="a label cannot be changed", dfid=dfid)
    return Labelled(changed=False)


def _history(
    store: Reader, agent_id: str, dfid: str, reach: tuple[int, int]
) -> Iterator[tuple[int, MonitoredDecision]]:
    """Yield (time, label) since the agent was last reactivated, from the newest ENTRIES_MAX entries, oldest first."""
    since = store.value(monitored.REACTIVATED, (agent_id,)) or 0
    rows = monitored.newest_entries(store, _LABELS, (since, monitored.ENTRIES_MAX, dfid, agent_id), reach)
    for _, at_ms, text in reversed(rows):
        body = json.loads(text)
        yield at_ms, MonitoredDecision(confidence=body["confidence"], right=body["right"])
