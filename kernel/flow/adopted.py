"""Flows that were taken over from the outside's own list, because the record did not know their orders (`adoption`).

Their trigger has a form that no event has, and no event stands for them. When the event itself comes again it is known
by its name: the id of the flow that ordered follows from the event.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from sds.kernel.canonical import flow_id
from sds.kernel.flow.states import ADOPTED
from sds.kernel.storage.store import Reader

RESTARTS_LOOKED_AT = 256  # a flow that was started anew more often than this is not recognised
HAND_OVERS_LOOKED_AT = 3  # in a row: the flow that a human was handed, and what followed when that was declined, too

_ANY = f"SELECT 1 FROM decision_flows WHERE gate = ? AND tag = '{ADOPTED}' LIMIT 1"
_NAMED = f"SELECT dfid, state FROM decision_flows WHERE gate = ? AND tag = '{ADOPTED}' AND dfid IN ({{marks}})"


def adopted_flow(store: Reader, gate: str, event_id: str, body_hash: str) -> tuple[str, int] | None:
    """Return the adopted flow of an event and how often it had been started anew by then; None for an event of none.

    One cheap query where nothing was ever adopted. Of several, one that was carried out counts, else the last.
    """
    if store.value(_ANY, (gate,)) is None:
        return None
    restarts = dict(_names(gate, event_id, body_hash))
    sql = _NAMED.format(marks=", ".join("?" * len(restarts)))
    found = [(state == "CLOSED", restarts[dfid], dfid) for dfid, state in store.rows(sql, (gate, *restarts))]
    if not found:
        return None
    _, number, dfid = max(found)
    return dfid, number


def is_named(dfid: str, gate: str, event_id: str, body_hash: str) -> bool:
    """Tell whether a flow's id is one that an event gives it."""
    return any(dfid == name for name, _ in _names(gate, event_id, body_hash))


def _names(gate: str, event_id: str, body_hash: str) -> Iterator[tuple[str, int]]:
    """Yield every id that a flow of an event may have, and its restarts: `undecided.hand_over` names by the flow before."""
    for restarts in range(RESTARTS_LOOKED_AT):
        name = flow_id(gate, event_id, body_hash, restarts)
        yield name, restarts
        for successor in range(1, HAND_OVERS_LOOKED_AT + 1):
            name = flow_id(gate, event_id, name, restarts + successor)
            yield name, restarts + successor


def is_adopted(trigger: str) -> bool:
    """Tell whether a trigger is that of an adopted flow: an event's fields are text."""
    return isinstance(json.loads(trigger).get("adopted"), dict)
