"""Sending an order and learning what became of it. Never twice, unless the executor has promised that this is safe.

The order is durable before it is sent. Only a definite answer settles it. Anything else is looked up once; then the order
stays UNKNOWN, with everything it reserved, until recovery or a human resolves it. An exception of an executor is no
definite answer, and nobody waits for one longer than `dispatch_ms_max`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

from sds.kernel.canonical import one_line
from sds.kernel.contract.schema import Contract
from sds.kernel.errors import StoreError, UsageError
from sds.kernel.executor import breaker
from sds.kernel.executor.deadline import LateError, NotStartedError, within
from sds.kernel.executor.key_retention import ACCEPTED_BEFORE, CLOCK_MARGIN_MS, FORGOTTEN, is_kept
from sds.kernel.executor.protocol import (
    DETAIL_CHARS_MAX,
    ExecutionIntent,
    Executor,
    Receipt,
    VerifyingExecutor,
    cleaned,
    raised,
)
from sds.kernel.executor.statement import STATEMENT_S_MAX, StatementLine, unreadable_statement
from sds.kernel.flow import in_flight, undecided
from sds.kernel.flow.in_flight import StandingOrder
from sds.kernel.flow.states import EXECUTION_FAILED, NOT_SENT, State, move_on, transition
from sds.kernel.registry import reservations
from sds.kernel.storage import ledger
from sds.kernel.storage.keyring import Signer
from sds.kernel.storage.store import Store

Log = Callable[[str, Mapping[str, object]], None]

OUR_OWN = "the kernel's signature"

_IN_FLIGHT = ("PENDING", "UNKNOWN")
_SENT_AGAIN = "INSERT INTO order_lookups (dfid, asked, due_at_ms) VALUES (?, 1, 0) ON CONFLICT (dfid) DO NOTHING"
_STATUS = {"settled": "SUCCESS", "rejected": "FAILED", "unsent": "FAILED"}  # any other: UNKNOWN
_DOUBTED = {FORGOTTEN: "executor.key_forgotten", ACCEPTED_BEFORE: "executor.accepted_order_absent"}
_ANSWERED = ("settled", "rejected", "absent", "pending")  # these prove that the executor answers
# What a human may not state (second) of an order of which the executor says otherwise (first).
_AT_ODDS = {
    ("absent", "settled"): "the executor is certain that nothing was done",
    ("pending", "rejected"): "the executor has accepted the order, and may still carry it out",
}


def no_log(event: str, facts: Mapping[str, object]) -> None:
    """Drop log events."""


class Dispatcher:
    """Carries out one gate's reserved orders through its executor."""

    def __init__(
        self,
        contract: Contract,
        store: Store,
        executor: Executor,
        signer: Signer,
        *,
        now_ms: Callable[[], int],
        log: Log,
    ) -> None:
        self._store, self._signer = store, signer
        self._gate, self._restarts_max = contract.gate, contract.retry.restarts_max
        self._contract_hash, self._draws_stay = contract.hash, contract.draws_settle_in != "source"
        self.executor = VerifyingExecutor(executor, signer)
        self._now_ms, self._log = now_ms, log
        self._deadline_s = contract.budget.dispatch_ms_max / 1000

    def carry_out(self, intent: ExecutionIntent, *, until_ms: int, deadline_ms: int | None = None) -> str:
        """Send an order that has just been reserved, and record what became of it. Times are milliseconds since 1970.

        After `until_ms` it is not sent: its lease may have ended, and recovery may be at work on it. After `deadline_ms`,
        its flow's, it is not sent either, now or later: it is recorded as not sent, and its event waits.
        """
        now_ms = self._now_ms()
        if now_ms > until_ms:
            return self.settle(intent, Receipt("unknown", detail="not sent: the time to send the order was over"))
        if deadline_ms is not None and now_ms > deadline_ms:
            late = Receipt("unsent", detail="not sent: the deadline of its flow had passed")
            return self.settle(intent, late, until_ms=until_ms)
        left_s = self._deadline_s if deadline_ms is None else min(self._deadline_s, (deadline_ms - now_ms) / 1000)
        receipt = self._send(intent, left_s)
        # settle before anything else may fail, so that what is known of the order is not lost
        status, failures = self._settle(intent, receipt, None, until_ms)
        answered = receipt.status in _ANSWERED
        # an answer ends a row of failures; an executor that was given less than its full time has not failed
        counts = failures > 0 if answered else left_s == self._deadline_s
        if counts:
            self._tell_breaker(answered=answered)
        return status

    def _tell_breaker(self, *, answered: bool) -> None:
        """Tell the circuit breaker whether the executor answered; log it when that opens or closes the breaker."""
        if answered and not breaker.read(self._store, self._gate).failures:
            return
        with self._store.transaction():
            if answered:
                changed = breaker.answered(self._store, self._gate)
            else:
                changed = breaker.unanswered(self._store, self._gate, self._now_ms())
        if changed:
            self._log("executor.up" if answered else "executor.down", {"gate": self._gate})

    def _send(self, intent: ExecutionIntent, send_s: float) -> Receipt:
        """Send an order once, with `send_s` seconds to carry it out, and look it up unless the executor has settled or accepted
        it, or was late. A refusal may be contradicted (`in_flight.refusal`).
        """

        def send() -> Receipt:
            order = partial(self.executor.dispatch, intent, intent.idempotency_key, send_s)
            return self._answer_of(intent, "the executor failed", order)

        try:
            receipt = within(self._deadline_s, send, late=lambda receipt: self._record_late_answer(intent, receipt))
        except LateError:
            facts = {"dfid": intent.dfid, "waited_ms": round(self._deadline_s * 1000)}
            self._log("executor.late", facts)
            return Receipt("unknown", detail=f"the executor did not answer within {facts['waited_ms']} ms")
        except NotStartedError as error:
            receipt = Receipt("unsent", detail=f"not sent: {error}")
        if receipt.status in ("settled", "pending"):
            return receipt
        if receipt.status in ("rejected", "unsent"):
            return self._refused(intent, receipt)
        known = self._lookup(intent)
        if not receipt.detail:
            return known
        found = f"looked up: {known.status}{': ' if known.detail else ''}{known.detail}"
        return replace(known, detail=one_line(f"{receipt.detail}; {found}", DETAIL_CHARS_MAX))

    def _refused(self, intent: ExecutionIntent, receipt: Receipt) -> Receipt:
        accepted = in_flight.accepted_as(self._store, intent.dfid)
        return in_flight.refusal(receipt, self._lookup(intent, accepted or ""), accepted=accepted is not None)

    def _record_late_answer(self, intent: ExecutionIntent, receipt: Receipt) -> None:
        """Record the late answer to an order that is UNKNOWN by now, unless somebody else has settled it meanwhile."""
        try:
            if receipt.status == "rejected":
                receipt = self._refused(intent, receipt)
            if receipt.status in ("settled", "rejected", "pending"):
                self.settle(intent, receipt)
                self._tell_breaker(answered=True)
        except Exception as error:  # noqa: BLE001  nobody waits here; recovery looks the order up again
            self._log("executor.late_answer_lost", {"dfid": intent.dfid, "error": type(error).__name__})

    def _ask(self, intent: ExecutionIntent, what: str, ask: Callable[[], Receipt]) -> Receipt:
        """Ask the executor a question within its deadline. No answer, or an exception, is `unknown`."""
        try:
            return within(self._deadline_s, lambda: self._answer_of(intent, f"{what} failed", ask))
        except LateError:
            return Receipt("unknown", detail=f"{what} failed: no answer within {round(self._deadline_s * 1000)} ms")
        except NotStartedError as error:
            return Receipt("unknown", detail=f"{what} failed: {error}")

    def _answer_of(self, intent: ExecutionIntent, what: str, ask: Callable[[], Receipt]) -> Receipt:
        """Ask in the executor's thread. What is raised in the thread that waits is not the executor's, but an interrupt."""
        try:
            return cleaned(ask())
        except BaseException as error:  # noqa: BLE001  whatever it raises, it may have acted
            text, place = raised(error)
            self._log("executor.failed", {"dfid": intent.dfid, "what": what, "error": text, "place": place})
            return Receipt("unknown", detail=one_line(f"{what}: {text} ({place})", DETAIL_CHARS_MAX))

    def _lookup(self, intent: ExecutionIntent, reference: str = "") -> Receipt:
        return self._ask(intent, "the look-up", lambda: self.executor.lookup(intent, reference, self._deadline_s))

    def resolve(self, intent: ExecutionIntent, still_valid: Callable[[ExecutionIntent], bool]) -> str:
        """Learn what became of an order whose sender is gone, by its key. Return the execution status.

        An order that is certainly absent is sent again if the executor is idempotent and the order would be reserved again
        now. Otherwise it is voided, and its event may have a fresh flow. Only what the executor has on record under the key
        settles anything here: the sender may be late rather than gone. When the outside may have forgotten the key, or had
        accepted the order before, `absent` says nothing, and the order is neither sent nor voided.

        An order that was altered in the record is neither looked up nor sent: its key may be another's. It stays UNKNOWN,
        and keeps what it reserved, until a human resolves it.
        """
        if (status := self._status(intent)) not in (None, *_IN_FLIGHT):  # it has ended meanwhile
            return str(status)
        if not intent.is_signed_by(self._signer):
            missing = self._signer.missing(intent.signature)
            self._log("keys.missing" if missing else "security.order_altered", {"dfid": intent.dfid})
            signed = (
                f"is signed with the key `{missing}`, which is missing here" if missing else f"does not carry {OUR_OWN}"
            )
            return self.settle(intent, Receipt("unknown", detail=f"the order {signed}"))
        accepted = in_flight.accepted_as(self._store, intent.dfid)
        receipt = self._lookup(intent, accepted or "")
        if receipt.status in _ANSWERED:
            self._tell_breaker(answered=True)
        if receipt.status != "absent":
            return self.settle(intent, receipt)
        again = self.executor.idempotent and still_valid(intent)
        if (doubt := self._doubt_of_absent(intent.dfid, accepted)) is not None:
            self._log(_DOUBTED[doubt], {"dfid": intent.dfid})
            return self.settle(intent, Receipt("unknown", detail=doubt))
        return self._send_again(intent) if again else self._void_absent(intent)

    def _status(self, intent: ExecutionIntent) -> str | None:
        found: str | None = self._store.value("SELECT status FROM execution_log WHERE dfid = ?", (intent.dfid,))
        return found

    def _send_again(self, intent: ExecutionIntent) -> str:
        """Send an absent order under its key again, unless it has ended meanwhile, within what its flow's deadline leaves.

        That it is sent is noted first: from then on `unsent` from any other sender does not free the order.
        """
        with self._store.transaction():
            if (status := self._status(intent)) in _IN_FLIGHT:
                self._store.run(_SENT_AGAIN, (intent.dfid,))
        if status not in _IN_FLIGHT:
            return str(status)
        _, until_ms = in_flight.times_ms(self._store, intent.dfid)
        left_s = self._deadline_s if until_ms is None else min(self._deadline_s, (until_ms - self._now_ms()) / 1000)
        if left_s <= 0:
            return self._void_absent(intent)
        sent = self._send(intent, left_s)
        return self.settle(intent, sent if sent.status in ("settled", "pending") else self._lookup(intent))

    def _doubt_of_absent(self, dfid: str, accepted: str | None) -> str | None:
        """Return why `absent` is not believed of an order; None: it is. `accepted`: as `in_flight.accepted_as` returns it."""
        if not self.keeps_key(dfid):
            return FORGOTTEN
        return None if accepted is None else ACCEPTED_BEFORE

    def keeps_key(self, dfid: str, since: Literal["RESERVED", "REVERSAL"] = "RESERVED") -> bool:
        """Tell whether the outside certainly still knows a flow's order, or its reversal, so that `absent` means something.

        A call that begins now arrives there within two deadlines: one for the question, one for the order sent after it.
        """
        margin_ms = CLOCK_MARGIN_MS + round(2_000 * self._deadline_s)
        kept_ms, now_ms = self.executor.keys_kept_ms, self._now_ms()
        return is_kept(self._store, dfid, since, kept_ms=kept_ms, now_ms=now_ms, margin_ms=margin_ms)

    def _void_absent(self, intent: ExecutionIntent) -> str:
        """Void an order, having recorded that: afterwards the executor only says `rejected`, and the entry tells a reader,
        after a crash too, that nobody decided it.
        """
        if self.executor.voids:
            with self._store.transaction():
                announced = in_flight.is_void_announced(self._store, intent.dfid)
                if self._status(intent) in _IN_FLIGHT and not announced:
                    body = {"idempotency_key": intent.idempotency_key}
                    ledger.append(self._store, self._now_ms(), "VOIDING", intent.dfid, body)
        return self.settle(intent, self._void(intent))

    def attest(self, intent: ExecutionIntent, stated: Receipt, *, by: Mapping[str, object]) -> str:
        """Settle an UNKNOWN order as a human found it outside. `by`: who says so and why, for the ledger.

        The executor is asked first, and its own definite answer wins; `absent` is no answer when it may have forgotten the
        key or had accepted the order. Raises UsageError when the executor is certain of something else (`_AT_ODDS`). An
        altered order is not looked up: see `resolve`.
        """
        accepted = in_flight.accepted_as(self._store, intent.dfid)
        known = self._lookup(intent, accepted or "") if intent.is_signed_by(self._signer) else Receipt("unknown")
        if known.status == "absent" and (doubt := self._doubt_of_absent(intent.dfid, accepted)) is not None:
            known = Receipt("unknown", detail=doubt)
        if known.status == "absent" and stated.status != "settled":
            known = self._void(intent)
        if known.status == "pending":  # remembered, though the human is refused
            self.settle(intent, known)
        if (why := _AT_ODDS.get((known.status, stated.status))) is not None:
            ended = "; if it stays UNKNOWN, resolve it as rejected" if known.status == "absent" else ""
            raise UsageError(why, hint=f"sds recover{ended}", dfid=intent.dfid)
        if known.status in ("settled", "rejected"):
            return self.settle(intent, known)
        return self.settle(intent, cleaned(stated), by=by)

    def _void(self, intent: ExecutionIntent) -> Receipt:
        """Void an order. If it was carried out after all, the look-up compares it, unless it is late and still says `absent`.
        What the look-up does not confirm is `pending`: nobody is to call it absent again.
        """
        receipt = self._ask(intent, "voiding", lambda: self.executor.void(intent.idempotency_key, self._deadline_s))
        if receipt.status != "settled" or (known := self._lookup(intent)).status == "absent":
            return receipt
        return known if known.status == "settled" else replace(known, status="pending")

    def statement(self, since_ms: int, until_ms: int) -> tuple[StatementLine, ...]:
        """Return what the executor lists of a time. Raises UsageError when it lists nothing, WorldError: unreadable."""
        try:
            return within(STATEMENT_S_MAX, lambda: self.executor.statement(since_ms, until_ms))
        except LateError:
            raise unreadable_statement(f"it did not arrive within {STATEMENT_S_MAX:.0f} s") from None

    def revert(self, intent: ExecutionIntent, *, sent_before: bool) -> Receipt:
        """Undo an order that was carried out. `sent_before`: only if a look-up says that it is certainly not undone."""
        if sent_before:
            known = self.reverted(intent)
            if known.status != "absent":
                return known
            if not self.keeps_key(intent.dfid, "REVERSAL"):
                return Receipt("absent", detail=FORGOTTEN)
        done = in_flight.reference_of(self._store, intent.dfid)
        receipt = self._ask(intent, "the reversal", lambda: self.executor.revert(intent, done, self._deadline_s))
        return receipt if receipt.status in ("settled", "rejected", "pending") else self.reverted(intent)

    def reverted(self, intent: ExecutionIntent) -> Receipt:
        """Look up whether an order was undone."""
        done = in_flight.reference_of(self._store, intent.dfid)
        return self._ask(intent, "the look-up", lambda: self.executor.reverted(intent, done, self._deadline_s))

    def settle(
        self, intent: ExecutionIntent, receipt: Receipt, *, by: Mapping[str, object] | None = None, until_ms: int = 0
    ) -> str:
        """Record what became of an order, or that it was accepted; return its status. Twice the same changes nothing.

        An order settled as FAILED that was carried out after all becomes DIRTY: what it took is taken again, and a human
        must look at it. The same holds of an end that a human has stated and the executor contradicts (`is_contradicted`).
        `by`: the human whose word it is. `until_ms`: until then only its sender can have sent it. `unsent` later, or of an
        UNKNOWN order, only means that this sender did not send it.
        """
        return self._settle(intent, receipt, by, until_ms)[0]

    def _settle(
        self, intent: ExecutionIntent, receipt: Receipt, by: Mapping[str, object] | None, until_ms: int
    ) -> tuple[str, int]:
        """Do what `settle` does; return the status, and how many orders in a row the executor had not answered before."""
        with self._store.transaction(in_flight.ORDER, (intent.dfid,)) as found:
            order = in_flight.standing_order(found)
            if order is None:
                raise StoreError(f"the order of flow `{intent.dfid}` is not in the record", dfid=intent.dfid)
            was, failures = order.status, order.failures
            # within its lease, and unless it is noted as sent again, only its sender can have sent a fresh order
            is_only_sender = was == "PENDING" and self._now_ms() <= until_ms and not order.sent_again
            if receipt.status == "unsent" and not is_only_sender:
                receipt = replace(receipt, status="unknown")
            status = _STATUS.get(receipt.status, "UNKNOWN")
            accepts = receipt.status == "pending" and in_flight.accepted_as(self._store, intent.dfid) is None
            if by is None and in_flight.is_contradicted(self._store, intent.dfid, was, receipt.status):
                status = self._write_dirty(intent, receipt, was)
            elif was in _IN_FLIGHT and (was != status or accepts):
                self._write(intent, receipt, order, by)
            else:
                return was, failures
        event = "security.settlement_contradicted" if status == "DIRTY" else "flow.settled"
        self._log(event, {"dfid": intent.dfid, "status": status})
        return status, failures

    def _write_dirty(self, intent: ExecutionIntent, receipt: Receipt, was: str) -> str:
        """Mark a contradicted order as DIRTY, and reserve again what it took; return DIRTY."""
        now_ms = self._now_ms()
        reservations.reserve_again(self._store, intent.dfid, succeeded=was == "SUCCESS")
        self._write_status(intent, receipt, was, "DIRTY", now_ms)
        self._store.run("UPDATE decision_flows SET tag = 'DIRTY' WHERE dfid = ?", (intent.dfid,))
        body = {"reference": receipt.reference, "detail": receipt.detail, "kept": True, "tag": "DIRTY"}
        ledger.append(self._store, now_ms, "CONTRADICTED", intent.dfid, {"status": "DIRTY", **body})
        return "DIRTY"

    def _write_status(self, intent: ExecutionIntent, receipt: Receipt, was: str, status: str, now_ms: int) -> None:
        beside = {"external_receipt": receipt.reference or None, "executed_at_ms": now_ms}
        move_on(self._store, "execution_log", intent.dfid, status, was=(was,), **beside)

    def _write(
        self, intent: ExecutionIntent, receipt: Receipt, order: StandingOrder, by: Mapping[str, object] | None
    ) -> None:
        """Write the new status; for an end also what it releases and the flow's end. Hand over what is a human's now."""
        status, now_ms = _STATUS.get(receipt.status, "UNKNOWN"), self._now_ms()
        self._write_status(intent, receipt, order.status, status, now_ms)
        tag = self._failure_tag(intent, receipt, by) if status == "FAILED" else None
        ours = order.contract_hash == self._contract_hash
        kept = self._draws_stay if ours else reservations.stays_drawn(self._store, intent.dfid)
        kind = "UNKNOWN" if status == "UNKNOWN" else "RESOLVED" if order.status == "UNKNOWN" else "SETTLED"
        if status != "UNKNOWN":
            succeeded = status == "SUCCESS"
            reservations.settle(self._store, intent.dfid, order.holds, succeeded=succeeded, kept=kept)
            end: State = transition("EXECUTING", "CLOSED" if succeeded else "ABORTED")
            move_on(self._store, "decision_flows", intent.dfid, end, was=("EXECUTING",), tag=tag)
        body = {"status": status, "reference": receipt.reference, "detail": receipt.detail, "kept": kept, "tag": tag}
        body |= {"accepted": True} if receipt.status == "pending" else {}
        ledger.append(self._store, now_ms, kind, intent.dfid, body | ({"by": dict(by)} if by else {}), after=order.head)
        if tag is not None and self._is_a_humans(intent.dfid, tag):
            why = f"the order was not carried out: {receipt.detail or status.lower()}"
            undecided.hand_over(self._store, intent.dfid, tag, why, now_ms=now_ms)

    def _failure_tag(self, intent: ExecutionIntent, receipt: Receipt, by: Mapping[str, object] | None) -> str:
        if receipt.status == "unsent":
            return NOT_SENT
        voided = by is None and in_flight.is_void_announced(self._store, intent.dfid)
        return undecided.INTERRUPTED if voided else EXECUTION_FAILED

    def _is_a_humans(self, dfid: str, tag: str) -> bool:
        """Tell whether a failed order's case is a human's now: a human's own decision at once, any other once no fresh flow
        is left. Never a saga's step: the saga compensates.
        """
        if undecided.is_child(self._store, dfid):
            return False
        if self._store.value("SELECT 1 FROM human_decisions WHERE dfid = ?", (dfid,)) is not None:
            return True
        return not undecided.has_restart(self._store, dfid, tag, self._restarts_max)
