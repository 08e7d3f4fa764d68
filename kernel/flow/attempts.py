"""The attempts of one flow: what was proposed, what the gates said of it, and the feedback for the model's next attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from sds.kernel.canonical import canonical
from sds.kernel.contract.schema import Contract
from sds.kernel.decision import phrases
from sds.kernel.decision.dim import Verdict
from sds.kernel.decision.jit import JitReport
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.envelope.envelope import MAGNITUDE_MAX
from sds.kernel.errors import ModelError, StoreError, UsageError
from sds.kernel.executor.breaker import Breaker
from sds.kernel.registry import authority, reservations, spend
from sds.kernel.registry.authority import Authority
from sds.kernel.registry.reservations import Usage
from sds.kernel.registry.spend import Totals
from sds.kernel.storage.ledger import GENESIS, Head
from sds.kernel.storage.store import Reader, Row, Store
from sds.kernel.storage.vault import ATTEMPT, Texts, key_of_case

# The columns of a flow that never change.
FLOW = (
    "dfid, agent_id, trigger_event, parent_dfid, gate, event_id, contract_hash, restarts, created_at_ms, lease_until_ms"
)
_OPEN = f"""
SELECT {", ".join(f"b.{column}" for column in FLOW.split(", "))},
       b.gate, b.event_id, k.wrapped, x.erased_at_ms, x.reason, {authority.COLUMNS}, o.failures, o.opened_at_ms, o.probe_at_ms,
       w.monitors, w.body, l.idx, l.entry_hash, (SELECT count(*) FROM attempts t WHERE t.dfid = b.dfid), d.deadline_ms,
       a.rejections, EXISTS (SELECT 1 FROM execution_log e WHERE e.idempotency_key = ?), {reservations.COLUMNS}, {{totals}}
FROM decision_flows b {authority.JOINS}
LEFT JOIN agents a ON a.agent_id = ?
LEFT JOIN flow_deadlines d ON d.dfid = b.dfid
LEFT JOIN case_keys k ON k.gate = b.gate AND k.event_id = b.event_id
LEFT JOIN erasures x ON x.gate = b.gate AND x.event_id = b.event_id
LEFT JOIN executor_breakers o ON o.gate = b.gate
LEFT JOIN monitor_windows w ON w.agent_id = a.agent_id AND w.stream = 'decisions'
LEFT JOIN ledger l ON l.idx = (SELECT max(idx) FROM ledger)
LEFT JOIN resources u ON {reservations.OF_KEY}
WHERE b.dfid = ? AND b.state = 'ACTIVE'
"""
_PARTS = tuple(pairwise(accumulate((10, 5, 4, 3, 2, 2, 4), initial=0)))  # the columns of `_OPEN` up to `ordered`
_RESOURCE, _TOTALS = slice(30, 34), slice(34, None)
_REJECTED_SO_FAR = """
SELECT a.proposal, a.reasons FROM decision_flows f JOIN attempts a ON a.dfid = f.dfid
WHERE f.dfid = ? AND f.state = 'ACTIVE' ORDER BY a.attempt_number
"""


@dataclass(frozen=True, slots=True)
class OpenFlow:
    """An open flow and everything that its end depends on, as the transaction that ends it has read them.

    `row`: the columns `FLOW`. `case`: what `vault.key_of_case` takes. `windows`: those of its agent's monitors, as stored.
    `key`: the idempotency key that was asked for. `ordered`: 1 if the record has an order under it, else 0.
    """

    row: Row
    case: Row
    authority: Authority
    breaker: Breaker
    windows: Row
    head: Head
    usage: Usage
    totals: Totals
    key: str
    attempts: int
    deadline_ms: int | None
    rejections: int | None
    ordered: int

    @property
    def parent(self) -> str | None:
        parent: str | None = self.row[3]
        return parent

    @property
    def created_at_ms(self) -> int:
        return int(self.row[8])


def asking_for_open(
    dfid: str, agent_id: str, key: str, bounds: tuple[str, str], counters: tuple[str, ...]
) -> tuple[str, Row]:
    """Return the statement that reads an open flow, and its values. `key`: the idempotency key its order would have;
    `bounds`: of the resources it could draw on (`reservations.bounds`); `counters`: its spend counters (`spend.scopes`).
    """
    sql = _OPEN.format(totals=spend.columns(counters))
    return sql, (key, *counters, agent_id, *bounds, dfid)


def open_flow(rows: list[Row], key: str, resources: Mapping[str, str], counters: tuple[str, ...]) -> OpenFlow | None:
    """Return what `asking_for_open` has read. None: there is no such flow, or it has ended."""
    if not rows:
        return None
    row, case, standing, broken, windows, last, more = (rows[0][first:end] for first, end in _PARTS)
    breaker = Breaker(*broken) if broken[0] is not None else Breaker()
    head = Head(*last) if last[0] else Head(0, GENESIS)
    usage = reservations.usage_in(resources, [each[_RESOURCE] for each in rows])
    totals = (counters, rows[0][_TOTALS])
    return OpenFlow(row, case, authority.authority_in(standing), breaker, windows, head, usage, totals, key, *more)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One proposal for one packet, and what was found about it. `report` is None unless the proposal was accepted.

    `flow`: its open flow, inside the transaction that ends the attempt. None outside of it, and when a human decides.
    """

    packet: DecisionPacket
    data: bytes
    decoding: Decoding
    verdict: Verdict
    report: JitReport | None = None
    number: int = 1
    now_ms: int = 0
    flow: OpenFlow | None = None

    @property
    def open_flow(self) -> OpenFlow:
        """Return the attempt's flow. Raises UsageError outside the transaction that ends it."""
        if self.flow is None:
            raise UsageError("an attempt must end in a transaction that has read its flow", dfid=self.packet.dfid)
        return self.flow


def refuse_unkeepable(data: object, decoding: object) -> None:
    """Raise ModelError unless the record can keep what an engine returned: its proposal and its measurements.

    An engine is foreign code. If writing the record were the first to object, the flow would be left without an end.
    """
    if not isinstance(data, bytes) or not isinstance(decoding, Decoding):
        raise ModelError("the engine did not return a proposal in bytes and its measurements")
    confidence = 0.0 if decoding.confidence is None else decoding.confidence
    counted = _number(decoding.tokens, int) and _number(decoding.passes, int)
    if not counted or not _number(confidence, float) or not _number(decoding.duration_ms, float):
        raise ModelError("the engine returned a measurement that is not a number or too large for the record")
    try:
        if b"\0" in str.encode(decoding.model):  # PostgreSQL keeps no such text
            raise ValueError("U+0000")
        canonical((decoding.alternatives, decoding.facts))
    except Exception as error:
        raise ModelError(f"the record cannot store the engine's measurements: {type(error).__name__}") from error


def _number(value: object, kind: type[int | float]) -> bool:
    """Tell whether `value` is of this kind, or an integer, and within the limits. NaN is not."""
    return isinstance(value, (int, kind)) and -MAGNITUDE_MAX <= value <= MAGNITUDE_MAX


def write_attempt(store: Store, attempt: Attempt) -> None:
    """Keep a rejected attempt while the flow goes on."""
    store.insert(
        "attempts",
        dfid=attempt.packet.dfid,
        attempt_number=attempt.number,
        proposal=key_of_case(store, attempt.open_flow.case)[0].seal(ATTEMPT, attempt.data),
        reasons=reasons_text(attempt.verdict),
        tokens=attempt.decoding.tokens,
        evaluated_at_ms=attempt.now_ms,
    )


def reasons_text(verdict: Verdict) -> str:
    """Return a verdict's reasons as the record keeps them: canonical JSON of [gate, code, message]."""
    return canonical([[r.gate, r.code, r.message] for r in verdict.reasons]).decode()


def feedback(store: Reader, contract: Contract, dfid: str) -> str:
    """Return what an open flow has had rejected so far, as the model reads it; "" for none. Raises StoreError."""
    try:
        texts = Texts(store, dfid)
        attempts = [
            f"{phrases.claimed(contract, texts.data(ATTEMPT, sealed))} ({phrases.reason_codes(why)})"
            for sealed, why in store.rows(_REJECTED_SO_FAR, (dfid,))
        ]
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError("the attempts of this flow cannot be read", dfid=dfid) from error
    return f"Rejected before: {'; '.join(attempts)}" if attempts else ""


def rejected(store: Reader, dfid: str) -> tuple[frozenset[bytes], int]:
    """Return the proposals a flow has had rejected, and the tokens they took."""
    rows, texts = store.rows("SELECT proposal, tokens FROM attempts WHERE dfid = ?", (dfid,)), Texts(store, dfid)
    return frozenset(texts.data(ATTEMPT, row[0]) for row in rows), sum(row[1] for row in rows)
