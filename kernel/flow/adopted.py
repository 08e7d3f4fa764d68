"""Flows whose orders the outside has and the record did not know (`kernel.operations.adoption`), and the events they are of.

A record that was put back knows an event by another flow, or not at all. The order's own flow, by its id, says whose it was.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from sds.kernel.flow import undecided
from sds.kernel.flow.states import ADOPTED
from sds.kernel.storage.store import Reader, Store

_NAMED = f"SELECT dfid, state FROM decision_flows WHERE gate = ? AND tag = '{ADOPTED}' AND dfid IN ({{marks}})"


class AdoptedFlow(NamedTuple):
    """`restarts`: how often its event had been started anew by then; `settled`: whether its order was carried out."""

    settled: bool
    restarts: int
    dfid: str


def flow_of_event(store: Reader, gate: str, event_id: str, body_hash: str) -> AdoptedFlow | None:
    """Return the adopted flow of an event; None for an event of none. Of several, one that was carried out counts, else the
    last.
    """
    restarts = dict(undecided.names_of_flows(gate, event_id, body_hash))
    rows = store.rows(_NAMED.format(marks=", ".join("?" * len(restarts))), (gate, *restarts))
    return max((AdoptedFlow(state == "CLOSED", restarts[dfid], dfid) for dfid, state in rows), default=None)


def stand_for(store: Store, dfid: str, gate: str, event_id: str, body_hash: str) -> None:
    """Let an event stand for an adopted flow: it is recognised by what its name is made of, the digest of its masked body."""
    sql = "UPDATE events SET dfid = ?, body_hash = ? WHERE gate = ? AND event_id = ?"
    store.write(sql, (dfid, body_hash, gate, event_id))


def is_adopted(trigger: str) -> bool:
    """Tell whether a trigger is that of an adopted flow: an event's fields are text."""
    return isinstance(json.loads(trigger).get("adopted"), dict)
