"""Flows whose orders were adopted: the outside had them and the record did not (`kernel.operations.adoption`).

A restored record may know the event of such an order by another flow, or not at all. The id of the order's flow is made of the
event, so the event can be matched to it.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from sds.kernel.flow import undecided
from sds.kernel.flow.states import ADOPTED
from sds.kernel.storage.store import Reader

_NAMED = f"SELECT dfid, state FROM decision_flows WHERE gate = ? AND tag = '{ADOPTED}' AND dfid IN ({{marks}})"


class AdoptedFlow(NamedTuple):
    """`restarts`: how often its event had been started anew by then; `settled`: whether its order was carried out."""

    settled: bool
    restarts: int
    dfid: str


def any_in(store: Reader, gate: str) -> bool:
    """Tell whether any order was adopted at a gate."""
    return (
        store.value(f"SELECT 1 FROM decision_flows WHERE gate = ? AND tag = '{ADOPTED}' LIMIT 1", (gate,)) is not None
    )


def flow_of_event(store: Reader, gate: str, event_id: str, body_hash: str) -> AdoptedFlow | None:
    """Return the adopted flow of an event; None when it has none.

    Of several, a flow that was carried out comes first, then the one with most restarts.
    """
    restarts = dict(undecided.names_of_flows(gate, event_id, body_hash))
    rows = store.rows(_NAMED.format(marks=", ".join("?" * len(restarts))), (gate, *restarts))
    return max((AdoptedFlow(state == "CLOSED", restarts[dfid], dfid) for dfid, state in rows), default=None)


def is_adopted(trigger: str) -> bool:
    """Tell whether a trigger is that of an adopted flow: its one field is an object, and an event has an id and a key in texts."""
    said = json.loads(trigger)
    return [*said] == ["adopted"] and isinstance(said["adopted"], dict)
