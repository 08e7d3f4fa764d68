"""A flow's trigger read back from the record: which of its fields mean what, and the event it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from sds.kernel.canonical import canonical
from sds.kernel.contract.schema import EventSpec
from sds.kernel.flow.intake import Event, masked
from sds.kernel.storage.store import Reader
from sds.kernel.storage.vault import TRIGGER, Texts, fingerprint_in


def event_fields(store: Reader, dfid: str) -> EventSpec | None:
    """Return which fields of a flow's trigger mean what, whatever contract is in force by now; None if nothing fits.

    It is the form of the contract the flow is under, unless a process that had not been replaced yet began it.
    """
    found = store.row("SELECT gate, event_id, trigger_event, contract_hash FROM decision_flows WHERE dfid = ?", (dfid,))
    if found is None:
        return None
    gate, event_id, trigger, contract_hash = found
    said = json.loads(trigger)
    forms = store.rows(
        "SELECT body -> '$.event' FROM contracts WHERE gate = ? ORDER BY hash = ? DESC, rowid DESC",
        (gate, contract_hash),
    )
    specs = (EventSpec.model_validate_json(form) for (form,) in forms)
    return next((spec for spec in specs if _is_form(spec, said, event_id)), None)


def _is_form(spec: EventSpec, said: Mapping[str, object], event_id: str) -> bool:
    named = {name for name in (spec.id, spec.key, spec.evidence) if name}
    return named == said.keys() - {"saga"} and said[spec.id] == event_id


def event_in(texts: Texts, spec: EventSpec, event_id: str, trigger: str) -> Event:
    """Return the event that a trigger was, by the form it has. One that stands in clear was not masked yet."""
    said, field, fingerprint = texts.fields(TRIGGER, json.loads(trigger)), spec.evidence or "", fingerprint_in(trigger)
    known = Event(event_id, said[spec.key], said.get(field, ""), canonical(said).decode(), field)
    return masked(known) if fingerprint is None else replace(known, fingerprint=fingerprint)
