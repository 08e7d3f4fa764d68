"""A difference between record and outside becomes a case for a human: one flow, once, however often the two are compared.

Nothing else changes: no order, no money, no count of any agent. A human settles the difference outside and closes the case.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from sds.kernel.canonical import canonical, digest, flow_id
from sds.kernel.contract.schema import Contract
from sds.kernel.errors import NOT_AS_WRITTEN
from sds.kernel.executor.statement import Difference
from sds.kernel.flow.decision_record import SEALED, seal
from sds.kernel.flow.intake import Event, begin
from sds.kernel.flow.states import move_on, transition
from sds.kernel.storage import ledger
from sds.kernel.storage.store import Reader, Store

CODE = "STATEMENT_DIFFERS"
CASES_MAX = 1_000  # cases that one comparison opens; the next comparison goes on


_OPEN = "SELECT dfid, trigger_event FROM decision_flows WHERE gate = ? AND event_id = ? AND state = 'ESCALATED'"


def case_of(gate: str, difference: Difference) -> str:
    """Return the id of the flow that a difference has, or would have."""
    return flow_id(gate, f"statement/{difference.key}", digest(difference.as_data()), 0)


def open_cases_of(store: Reader, gate: str, difference: Difference) -> list[str]:
    """Return the flows of the open cases that a difference belongs to: its own, or one that was opened about the order while
    the outside had not ended it. An older version of this program opened both.
    """
    rows = store.rows(_OPEN, (gate, f"statement/{difference.key}"))
    dfid = case_of(gate, difference)
    return [found for found, trigger in rows if found == dfid or _is_of_pending(trigger)]


def _is_of_pending(trigger: str) -> bool:
    """Tell whether a case is about an order that the outside had not ended."""
    with suppress(*NOT_AS_WRITTEN):
        said = difference_in(json.loads(trigger)) or {}
        pending = said["code"] == "ORDER_UNKNOWN" and said["outside"].startswith("pending")
        return bool(pending or said["code"] == "PENDING_OUTSIDE")
    return False


def open_cases(store: Store, contract: Contract, differences: Iterable[Difference], *, now_ms: int) -> tuple[str, ...]:
    """Open a case for every difference that never had one, and has none that stands for it; return their flows."""
    opened: list[str] = []
    for difference in differences:
        dfid = case_of(contract.gate, difference)
        with store.transaction():
            known = store.value("SELECT 1 FROM decision_flows WHERE dfid = ?", (dfid,)) is not None
            if not known and not open_cases_of(store, contract.gate, difference):
                _write(store, contract, dfid, difference, now_ms)
                opened.append(dfid)
        if len(opened) == CASES_MAX:
            break
    return tuple(opened)


def _write(store: Store, contract: Contract, dfid: str, difference: Difference, now_ms: int) -> None:
    said = difference.as_data()
    trigger = canonical({"statement": said}).decode()
    event = Event(f"statement/{difference.key}", difference.resource_key, "", trigger)
    begin(store, contract, event, dfid, parent=None, restarts=0, now_ms=now_ms)
    state = transition("ACTIVE", "VALIDATING", "ESCALATED")
    move_on(store, "decision_flows", dfid, state, was=("ACTIVE",))
    body = {
        "outcome": state,
        "state": state,
        "tag": None,
        "reason_code": CODE,
        "statement": said,  # there is no `agent_id`: nobody has decided this
        "rows": seal(store, dfid, SEALED),
    }
    ledger.append(store, now_ms, "DECIDED", dfid, body)


def difference_in(trigger: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the difference that a flow is about; None for other flows: an event has texts, in two or more fields."""
    said = trigger.get("statement")
    return said if isinstance(said, dict) and len(trigger) == 1 else None
