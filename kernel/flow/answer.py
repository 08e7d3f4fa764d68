"""What the kernel answers about a flow: read from the record, never remembered beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from sds.kernel.errors import NOT_AS_WRITTEN, SdsError, unreadable
from sds.kernel.flow.states import FINAL, UNDECIDED_TAGS
from sds.kernel.storage.store import Reader
from sds.kernel.storage.vault import Texts


@dataclass(frozen=True, slots=True)
class Answer:
    """The decision as it stands. `params` in minor units; `execution` is None when nothing is to be executed.

    `justification` is the agent's own reason code (and rationale; one written after the decision, once it is recorded);
    `reason_code` and `reasons` are the kernel's.
    Once a human has resolved an escalation, `resolution` says how, and action, params and justification are theirs.
    """

    dfid: str
    gate: str
    event_id: str
    state: str
    outcome: str | None = None
    action: str | None = None
    params: Mapping[str, int] = field(default_factory=dict)
    justification: str | None = None
    reason_code: str | None = None
    reasons: tuple[str, ...] = ()
    tag: str | None = None
    execution: str | None = None
    reference: str | None = None
    confidence: float | None = None
    parent_dfid: str | None = None
    resolution: str | None = None
    resolved_by: str | None = None

    @property
    def pending(self) -> bool:
        """Whether someone is still working on it: no final state, and no outcome that only recovery can settle."""
        return self.state not in FINAL and self.execution != "UNKNOWN"

    @property
    def retryable(self) -> bool:
        """Whether nobody has decided it and the event may be sent again: `tag` says what it waits for."""
        return self.state == "ABORTED" and self.tag in UNDECIDED_TAGS

    def as_data(self) -> dict[str, object]:
        """Return it as JSON data."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return {**columns, "params": dict(self.params), "pending": self.pending, "retryable": self.retryable}


_SQL = """
SELECT f.dfid, f.gate, f.event_id, f.state, v.outcome, COALESCE(h.policy_kind, p.policy_kind, NULLIF(e.kind, '')),
       COALESCE(h.params, p.params, e.params), COALESCE(h.justification, p.justification), v.reason_code, v.reasons,
       f.tag, e.status, e.external_receipt, p.confidence, f.parent_dfid, h.decision, h.who,
       CASE WHEN h.justification IS NULL THEN substr(p.proposal, 1, 6) END,
       CASE WHEN h.justification IS NULL THEN r.body END
FROM decision_flows f
LEFT JOIN policy_proposals p ON f.dfid = p.dfid
LEFT JOIN dim_validations v ON f.dfid = v.dfid
LEFT JOIN execution_log e ON f.dfid = e.dfid
LEFT JOIN human_decisions h ON f.dfid = h.dfid
LEFT JOIN ledger r ON f.dfid = r.dfid AND r.kind = 'RATIONALE'
WHERE f.dfid = ?
"""
_COLUMNS = tuple(Answer.__dataclass_fields__)


def answer(store: Reader, dfid: str) -> Answer | None:
    """Return the answer of a flow, or None when there is no such flow. Raises StoreError when it cannot be read."""
    row = store.row(_SQL, (dfid,))
    if row is None:
        return None
    *columns, proposal, rationale = row
    found = dict(zip(_COLUMNS, columns, strict=True))
    try:
        found["justification"] = _justified(Texts(store, dfid, shown=True), found["justification"], proposal, rationale)
        found["params"] = numbers_of(found["params"])
        found["reasons"] = tuple(
            f"gate {gate}: {code}: {line}" for gate, code, line in json.loads(found["reasons"] or "[]")
        )
    except NOT_AS_WRITTEN as error:
        raise unreadable(dfid) from error
    return Answer(**found)


def _justified(texts: Texts, code: str | None, proposal: bytes | None, entry: str | None) -> str | None:
    """Return a reason code with the rationale that was given with it, or after the decision: in a ledger entry."""
    if code is None:
        return None
    justification = texts.justification(code, proposal or b"")
    return f"{justification}: {texts.rationale(json.loads(entry))}" if entry else justification


def known_answer(store: Reader, dfid: str) -> Answer:
    """Return the answer of a flow that is in the record. Raises SdsError when it is not, StoreError: unreadable."""
    found = answer(store, dfid)
    if found is None:
        raise SdsError(f"flow `{dfid}` is not in the record", dfid=dfid)
    return found


def numbers_of(text: str | None) -> dict[str, int]:
    """Return the numbers of a decision as they stand in the record. Raises ValueError or TypeError: they are none."""
    found = json.loads(text or "{}")
    if not isinstance(found, dict) or not all(type(number) is int for number in found.values()):
        raise TypeError("not an object of numbers")
    return found
