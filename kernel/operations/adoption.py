"""Takes over orders that the outside has and the record does not know, each in one transaction with one ADOPTED entry.

A human says so, by name and with a reason. An order that is taken over is never sent: the outside has said what became of
it. Money that moved is counted as drawn and spent, as far as the outside says what it was for.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sds.kernel.canonical import canonical, digest, flow_id, idempotency_key
from sds.kernel.contract.human_terms import human_contract
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import KindSpec
from sds.kernel.envelope.state import Fields
from sds.kernel.errors import UsageError
from sds.kernel.executor.protocol import ExecutionIntent
from sds.kernel.executor.statement import Difference, StatementLine, known_keys
from sds.kernel.flow import decision_record, intake, undecided
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import ADOPTED, UNDECIDED_TAGS, move_on
from sds.kernel.human import cases
from sds.kernel.human.decisions import ABORT_TAG, HumanDecision, write_human
from sds.kernel.human.parsing import said
from sds.kernel.human.statement_cases import open_cases_of
from sds.kernel.registry import reservations, spend
from sds.kernel.registry.reservations import Claim
from sds.kernel.storage import ledger
from sds.kernel.storage.store import Store

_FLOW = (
    "SELECT f.gate, f.state, e.dfid IS NULL AND s.dfid IS NULL FROM decision_flows f"
    " LEFT JOIN execution_log e ON e.dfid = f.dfid LEFT JOIN sagas s ON s.dfid = f.dfid WHERE f.dfid = ?"
)


_LAST = (
    "SELECT e.dfid FROM decision_flows f"
    " JOIN events e ON e.gate = f.gate AND e.event_id = f.event_id AND e.dfid <> f.dfid WHERE f.dfid = ?"
)
MEANWHILE = "meanwhile an order that the record did not know was adopted"


@dataclass(frozen=True, slots=True)
class _Order:
    """An unknown order, ready to be written: what it takes, its spend counters, whether what it drew stays subtracted. `at_ms`:
    the outside's time, or now where its clock is ahead: what moved counts in a window that has begun.
    """

    line: StatementLine
    at_ms: int
    settled: bool
    needs: Claim
    spending: spend.Scopes | None
    kept: bool

    @property
    def status(self) -> str:
        return "SUCCESS" if self.settled else "FAILED"

    @property
    def state(self) -> str:
        return "CLOSED" if self.settled else "ABORTED"


def adopt(
    kernel: Kernel, differences: tuple[Difference, ...], *, who: str, reason: str, now_ms: int
) -> tuple[str, ...]:
    """Take over every order among `differences` that the record does not know; return the flows that they have now.

    A flow that is known and has ordered nothing gets the order; any other order gets a new flow. The event of an order that
    was rejected or undone is free to be decided anew. An order that is pending is left until its end is known. Repeating this
    is safe. Raises UsageError without a name or a reason.
    """
    by = {"who": said("name", who), "reason": said("reason", reason)}
    unknown = [each for each in differences if each.code == "ORDER_UNKNOWN"]
    ended = [each for each in unknown if each.line is not None and each.line.outcome != "pending"]
    return tuple(dfid for each in ended if (dfid := _adopt(kernel, each, by, now_ms)))


def _adopt(kernel: Kernel, difference: Difference, by: Mapping[str, str], now_ms: int) -> str | None:
    """Take over one order; return its flow, or None when the record knows it by now."""
    line, store, contract = difference.line, kernel.store, kernel.contract
    if line is None:
        return None
    fields = kernel.observe(line.resource_key, now_ms).situation.fields if line.resource_key else {}
    order = _ready(contract, line, fields, min(line.at_ms, now_ms))
    with store.transaction():
        if known_keys(store, [line.key]):
            return None
        dfid = _flow(store, contract, line, now_ms)
        _write(kernel, dfid, order, by, now_ms)
        undecided.set_aside(store, contract.gate, MEANWHILE, now_ms=now_ms)
        if order.settled:
            _decide_event(store, contract, dfid, by, now_ms)
        for case in open_cases_of(store, contract.gate, difference):
            _close_case(store, contract, case, by, now_ms)
    kernel.log("order.adopted", {"dfid": dfid, "status": order.status})
    return dfid


def _ready(contract: Contract, line: StatementLine, fields: Fields, at_ms: int) -> _Order:
    """Return an order with what it takes: nothing, unless money moved."""
    settled = line.outcome == "settled"
    kept = settled and contract.draws_settle_in == "kernel"
    human = human_contract(contract)
    terms = contract if line.kind in contract.kinds else human
    needs = _taken(terms, line) if settled else Claim((), 0)
    spending = spend.scopes(contract, fields, at_ms) if needs != Claim((), 0) else None
    return _Order(line, at_ms, settled, needs, spending, kept)


def _taken(terms: Contract, line: StatementLine) -> Claim:
    """Return what a settled order took. Money that moved counts against the spend limits, also where the outside does not
    say what for: without that, a restored record would have its day's budget once more.
    """
    spec = terms.kinds.get(line.kind)
    numbers = _numbers(spec, line) if spec else None
    if numbers is not None and line.resource_key:
        return reservations.claim_of(terms, line.kind, numbers)
    moved = max(0, line.amount_minor or 0)
    return Claim((), moved if spec is None or spec.spends else 0)


def _numbers(spec: KindSpec, line: StatementLine) -> dict[str, int] | None:
    """Return the numbers that a kind takes, as the outside has them; None when one is missing or negative."""
    numbers = dict(line.params)
    if spec.spends and line.amount_minor is not None and not line.other_currency:  # what moved, not what was ordered
        numbers[spec.spends] = line.amount_minor
    wanted = {name for name in (*spec.draws.values(), spec.spends) if isinstance(name, str)}
    return numbers if all(numbers.get(name, -1) >= 0 for name in wanted) else None


def _flow(store: Store, contract: Contract, line: StatementLine, now_ms: int) -> str:
    """Return the flow to write an order to: the one that ordered it, if known and without another order; else a new one."""
    found = store.row(_FLOW, (line.dfid,)) if line.dfid else None
    if found is not None:
        gate, state, free = found
        if gate == contract.gate and free and state in ("ACTIVE", "ESCALATED", "ABORTED"):
            if state == "ACTIVE":  # its holder must not order any more, and will find it ended
                undecided.interrupt(store, line.dfid, restarts_max=contract.retry.restarts_max, now_ms=now_ms)
            return line.dfid
    taken = not line.dfid or found is not None
    dfid = flow_id(contract.gate, f"adopted/{line.key}", digest(line.key), 0) if taken else line.dfid
    trigger = canonical({"adopted": line.as_data()}).decode()
    event = intake.Event(f"adopted/{line.key}", line.resource_key, "", trigger)
    intake.begin(store, contract, event, dfid, parent=None, restarts=0, now_ms=now_ms)
    return dfid


def _write(kernel: Kernel, dfid: str, order: _Order, by: Mapping[str, str], now_ms: int) -> None:
    store, line = kernel.store, order.line
    intent = _signed(kernel, dfid, line)
    store.insert(
        "execution_log",
        dfid=dfid,
        idempotency_key=line.key,
        step_id=decision_record.STEP_ID,
        kind=line.kind,
        params=canonical(dict(line.params)).decode(),
        resource_key=line.resource_key,
        state_version="",
        signature=intent.signature,
        reserved_at_ms=order.at_ms,
        status=order.status,
        external_receipt=line.reference or None,
        executed_at_ms=line.at_ms,
    )
    if order.settled:
        reservations.count(
            store, kernel.contract, dfid, line.resource_key, order.needs, order.spending, kept=order.kept
        )
    # the table of `flow.states` does not apply: the outside has acted, whatever state the record had for the flow
    move_on(store, "decision_flows", dfid, order.state, was=("ACTIVE", "ESCALATED", "ABORTED"), tag=ADOPTED)
    body: dict[str, Any] = {
        "state": order.state,
        "tag": ADOPTED,
        "status": order.status,
        "reference": line.reference,
        "at_ms": line.at_ms,
        "kept": order.kept,
        "needs": (order.needs.draws, order.needs.spends),
        "line": line.as_data(),
        "by": dict(by),
        "rows": decision_record.seal(store, dfid, decision_record.ADOPTED_ROWS),
    }
    ledger.append(store, now_ms, ADOPTED, dfid, body)


def _signed(kernel: Kernel, dfid: str, line: StatementLine) -> ExecutionIntent:
    """Return the order, signed only if its key proves that a kernel of ours made it. Only a signed order can be undone."""
    intent = ExecutionIntent(dfid, line.key, line.kind, tuple(sorted(line.params.items())), line.resource_key, "")
    ours = idempotency_key(dfid, decision_record.STEP_ID, {"action": line.kind, **line.params}) == line.key
    return intent.signed_by(kernel.signer) if ours else intent


def _decide_event(store: Store, contract: Contract, dfid: str, by: Mapping[str, str], now_ms: int) -> None:
    """Let the event of an order that was carried out stand for its flow: whatever followed that here is not to be decided."""
    last = store.row(_LAST, (dfid,))
    if last is None:  # nobody has sent the event since, or it has no later flow
        return
    (later,) = last
    _close_case(store, contract, later, by, now_ms)
    tag = store.value("SELECT tag FROM decision_flows WHERE dfid = ? AND state = 'ABORTED'", (later,))
    if tag in UNDECIDED_TAGS or tag == ABORT_TAG:
        with suppress(UsageError):  # erased: nobody can send it again
            if (event := cases.event_of(store, later)) is not None:
                intake.point(store, contract.gate, event.id, digest(event.body), dfid)


def _close_case(store: Store, contract: Contract, dfid: str, by: Mapping[str, str], now_ms: int) -> None:
    """Close the case about an order that is taken over: taking it over has decided the case."""
    if store.value("SELECT state FROM decision_flows WHERE dfid = ?", (dfid,)) != "ESCALATED":
        return
    case = cases.read_case(store, contract, dfid)
    made = HumanDecision("ABORT", by["who"], f"adopted: {by['reason']}", "LOW", False, "", contract.hash, now_ms)
    write_human(store, case, made, state="ABORTED", now_ms=now_ms)
