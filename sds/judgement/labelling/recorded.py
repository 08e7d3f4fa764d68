"""Labels from a gate's record: text, state and decision of escalated cases that a human decided."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from sds.definitions.definition import LabelledCase
from sds.kernel.canonical import digest
from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.envelope import DecisionEnvelope
from sds.kernel.errors import reading, unreadable
from sds.kernel.flow.states import numbers_of
from sds.kernel.human.cases import read_case
from sds.kernel.storage.store import Reader
from sds.kernel.storage.vault import ERASED, LOCKED
from sds.policy.readers import as_read

# A case that a human ended without a decision says nothing about what is right.
_DECIDED = """
SELECT h.dfid, h.policy_kind, h.params, h.snapshot FROM human_decisions h CROSS JOIN decision_flows f ON f.dfid = h.dfid
WHERE f.gate = ? AND h.policy_kind IS NOT NULL ORDER BY h.decided_at_ms, h.dfid
"""
OTHER_FORM = "its fields or its kind do not fit this contract"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A decision that gives no label, and why."""

    dfid: str
    why: str


def recorded_labels(store: Reader, contract: Contract) -> Iterator[LabelledCase | LeftOut]:
    """Yield a label for each case's first human decision, or why there is none. Raises StoreError for unreadable rows."""
    rules, text_field = Rules(contract), contract.event.evidence
    seen = dict[str, str]()  # case -> the first flow that decided it
    for dfid, kind, params, snapshot in store.rows(_DECIDED, (contract.gate,)):
        text = str(read_case(store, contract, dfid).trigger.get(text_field, "")) if text_field else ""
        with reading(unreadable(dfid)):
            fields, numbers = json.loads(snapshot)["fields"], numbers_of(params)
        if text in (ERASED, LOCKED):
            yield LeftOut(
                dfid, "its text was erased" if text == ERASED else "its text is sealed, and the key is missing"
            )
        elif kind not in contract.kinds or fields.keys() - contract.snapshot.keys() or rules.faults(fields):
            yield LeftOut(dfid, OTHER_FORM)
        elif (first := seen.setdefault(digest([as_read(contract, text), fields]), dfid)) != dfid:
            yield LeftOut(dfid, f"the same case as {first}")
        else:
            spent = contract.kinds[kind].spends
            amount = numbers.get(spent, 0) if spent else _at_stake(contract, rules.envelope(fields))
            yield LabelledCase(text, fields, {}, decision=kind, amount_minor=amount)


def _at_stake(contract: Contract, envelope: DecisionEnvelope) -> int:
    """Return the largest payment that the envelope permitted: the cost of a wrong payment where nothing was paid."""
    most = 0
    for name, spec in contract.kinds.items():
        permitted = envelope.kind(name)
        if permitted is not None and spec.spends is not None:
            ends = {
                **{fill: value for fill, value, _ in permitted.fills},
                **{each: b.hi for each, b in permitted.params},
            }
            most = max(most, ends.get(spec.spends, 0))
    return most
