"""A human's decision passes the kernel (DIR 4.7): once, within the human's own envelope, on a world that has not moved.

    review.view(case)                  the state now, what moved, what may be decided
    review.resolve(dfid, resolution)   the five gates, the drift check, one reservation, one order, or a refusal

A refusal changes nothing: the case goes on waiting. A human is not above the kernel, and is the last one who can be asked:
so a human can always abort a case, even while the system is halted and no state can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from sds.kernel.canonical import digest, is_seen, kept_whole
from sds.kernel.contract.human_terms import Impact, impact
from sds.kernel.decision import jit
from sds.kernel.decision.dim import Verdict
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.decision.safeguards import LiveState
from sds.kernel.envelope.envelope import ESCALATE, format_literal
from sds.kernel.envelope.proposal import write_proposal
from sds.kernel.errors import SdsError, UsageError, WorldError, unreadable
from sds.kernel.executor.protocol import REFERENCE_CHARS_MAX, ExecutionIntent, Receipt
from sds.kernel.executor.wholeness import RECORD_BEHIND
from sds.kernel.flow import adopted, in_flight
from sds.kernel.flow.commit import ALREADY_ORDERED, ORDERED_BEFORE
from sds.kernel.flow.decision_record import Attempt
from sds.kernel.flow.dispatch import Log, no_log
from sds.kernel.flow.in_flight import orders_in_flight
from sds.kernel.flow.intake import saga_child
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import Answer, State, known_answer, transition
from sds.kernel.human import cases
from sds.kernel.human.cases import Case, Decision, read_case
from sds.kernel.human.decisions import TAGS, HumanDecision, write_human
from sds.kernel.human.kernel import HumanKernel
from sds.kernel.human.parsing import looked_at, moved_since, parse_change, said, seen_id, unacknowledged
from sds.kernel.registry import registry
from sds.kernel.registry.authority import authority_now


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a human wants. `change`: for MODIFY, the JSON of another decision. `seen`: the id of the live state that they
    have looked at; without it they have looked at the flow's snapshot. `acknowledged`: they know that a decision of HIGH
    impact cannot be undone. `reference`: for SETTLED, the outside's own id of the order.
    """

    decision: Decision
    who: str
    reason: str
    change: str = ""
    seen: str = ""
    acknowledged: bool = False
    reference: str = ""


@dataclass(frozen=True, slots=True)
class CaseView:
    """A case's world as it is now. `packet`: live state and the human's envelope. `seen`: the id of that state. `moved`:
    the fields that moved beyond their tolerance since the agent looked.
    """

    packet: DecisionPacket
    observed: LiveState
    seen: str
    moved: tuple[str, ...]


class HumanReview:
    """Where humans resolve one gate's cases. `now_ms` is the kernel's clock."""

    def __init__(self, kernel: Kernel, *, now_ms: Callable[[], int], log: Log = no_log) -> None:
        self._kernel = HumanKernel(kernel, now_ms=now_ms)
        self._store, self._now_ms, self._log = kernel.store, now_ms, log
        self.contract = self._kernel.contract

    def waiting(self) -> list[Case]:
        """Return the cases that wait for a human, oldest first. A case that cannot be read is `damaged`."""
        return cases.waiting(self._store, self.contract)

    def case(self, dfid: str) -> Case:
        """Return one flow of this gate. Raises UsageError when there is none, StoreError when it cannot be read."""
        return cases.read_case(self._store, self.contract, dfid)

    def view(self, case: Case) -> CaseView:
        """Read the world as it is now and derive what a human may decide. Changes nothing.

        Raises StoreError for a case that is `damaged`.
        """
        if case.damaged:
            raise unreadable(case.dfid)
        now_ms, tolerances = self._now_ms(), self._kernel.tolerances
        live = self._kernel.observe(case.key, now_ms)
        packet = self._kernel.packet(case, live, now_ms)
        fields = packet.snapshot.fields
        seen = seen_id(tolerances, case, fields, self.contract.hash)
        return CaseView(packet, live, seen, jit.drift(tolerances, case.fields, fields))

    def resolve(self, dfid: str, wanted: Resolution) -> Answer:
        """Carry out a human's decision about a case, exactly once, or record what they found out about its order; return the
        answer that the case then has.

        Raises UsageError or WorldError when it is refused; then nothing has changed.
        """
        if wanted.decision not in get_args(Decision):  # a caller need not be type-checked
            raise UsageError(f"there is no decision `{wanted.decision}`", hint=", ".join(get_args(Decision)))
        if wanted.decision in ("SETTLED", "REJECTED"):
            found = Receipt("settled" if wanted.decision == "SETTLED" else "rejected", reference=wanted.reference)
            by = wanted.who, wanted.reason, wanted.acknowledged
            return attest(self._kernel, dfid, found, *by, now_ms=self._now_ms())
        who, why = said("name", wanted.who), said("reason", wanted.reason)
        wanted = replace(wanted, who=who, reason=why, seen=looked_at(wanted.seen, dfid))
        case = self.case(dfid)
        cases.refuse_unless_waiting(case)
        if wanted.decision in TAGS:
            self._end(case, wanted)
        else:
            order = self._carried(case, wanted)
            if order is not None:
                self._kernel.send(order)
        return self._answer(dfid)

    def _carried(self, case: Case, wanted: Resolution) -> ExecutionIntent | None:
        """Do what `_carry` does. Of two humans at once, the second learns of the first before anything else."""
        try:
            return self._carry(case, wanted)
        except SdsError:
            cases.refuse_unless_waiting(self.case(case.dfid))
            raise

    def _end(self, case: Case, wanted: Resolution) -> None:
        """End a case with nothing carried out. After RETURN its event, sent again, gets a fresh flow from the agent."""
        if wanted.decision == "RETURN" and not case.can_be_carried_out:
            what = "a part of a saga" if case.of_saga else "a difference"
            raise UsageError(
                f"{what} cannot be returned to the agent", hint="end the case with --abort", dfid=case.dfid
            )
        made = self._human_decision(wanted, "LOW", wanted.seen or case.snapshot_id)
        with self._store.transaction():
            self._write(case, made, transition("ESCALATED", "ABORTED"), self._now_ms())

    def _carry(self, case: Case, wanted: Resolution) -> ExecutionIntent | None:
        """Judge, check and reserve what a human decided; return the order to send, if any."""
        if case.of_saga:
            hint = "end the case with --abort; send what is still due as a new event"
            raise UsageError("a part of a saga cannot be carried out by itself", hint=hint, dfid=case.dfid)
        if not case.can_be_carried_out:
            hint = "settle the difference outside, then end the case with --abort"
            raise UsageError("this case is a difference, not a decision to carry out", hint=hint, dfid=case.dfid)
        cases.refuse_altered(self._store, case.dfid)
        doubt = self._kernel.whole.doubt()
        view = self.view(case)
        data = self._proposal(case, wanted, view.packet)
        verdict = self._judge(view.packet, data)
        self._refuse_other_amounts(case, wanted, view.packet, verdict)
        what = self._acknowledged(case, wanted, verdict)
        self._refuse_drift(case, wanted, view)
        if doubt is not None and verdict.proposal and verdict.proposal.action in self.contract.orders:
            hint = f'sds reconcile {self.contract.gate} --adopt --reason "..."' if doubt.code == RECORD_BEHIND else ""
            raise WorldError(doubt.message, reason_code=doubt.code, hint=hint, dfid=case.dfid)
        return self._commit(
            case, view, data, verdict, self._human_decision(wanted, what, wanted.seen or case.snapshot_id)
        )

    def _proposal(self, case: Case, wanted: Resolution, packet: DecisionPacket) -> bytes:
        """Return the proposal to judge: the human's own for MODIFY, else the agent's. Raises UsageError: there is none."""
        if wanted.decision == "MODIFY":
            return write_proposal(parse_change(wanted.change, packet.snapshot.id))
        if case.proposal is None:
            hint = "decide it yourself with --modify, or end it with --abort"
            raise UsageError("the agent proposed nothing that could be carried out", hint=hint, dfid=case.dfid)
        return write_proposal(replace(case.proposal, rationale=None, context_ref=packet.snapshot.id))

    def _judge(self, packet: DecisionPacket, data: bytes) -> Verdict:
        """Return the verdict of the five gates when they accept. Raises UsageError with everything they object to."""
        verdict = self._kernel.judge(packet, data, Decoding())
        if verdict.outcome == "ACCEPTED":
            return verdict
        if verdict.outcome == "ESCALATED":
            raise UsageError(f"a human cannot decide `{ESCALATE}`: nobody is left to ask", dfid=packet.dfid)
        why = dict.fromkeys([*(reason.message for reason in verdict.reasons), *packet.notes])
        code = verdict.reason_code or "RBAC_DENIED"
        raise UsageError("; ".join(why), reason_code=code, hint=_look_again(packet.dfid), dfid=packet.dfid)

    def _refuse_other_amounts(self, case: Case, wanted: Resolution, packet: DecisionPacket, verdict: Verdict) -> None:
        """Refuse an OVERRIDE whose amounts are no longer those that were proposed: what the rules fix may have changed
        since. For a proposal that was not fully judged, the amounts were never known.
        """
        now = dict(verdict.amounts_minor)
        kind = packet.envelope.kind(verdict.proposal.action if verdict.proposal else "")
        fixed = {*case.numbers, *(name for name, _, _ in (kind.fills if kind else ()))}
        if wanted.decision == "OVERRIDE" and any(now.get(name) != case.numbers.get(name) for name in fixed):
            hint = f"decide on the present values with --modify; {_look_again(case.dfid)}"
            raise _moved(case, "a value that the rules fix has changed since it was proposed", hint)

    def _acknowledged(self, case: Case, wanted: Resolution, verdict: Verdict) -> Impact:
        """Return the impact of a decision. Raises UsageError when it is HIGH and not acknowledged."""
        action, numbers = verdict.proposal.action if verdict.proposal else "", dict(verdict.amounts_minor)
        what = impact(self.contract, action, numbers)
        if what == "HIGH" and not wanted.acknowledged:
            shown = "".join(f" {name} {value}" for name, value in self._literals(action, numbers))
            will = f"`{action}{shown}` will be carried out on `{case.key}`"
            raise unacknowledged(case.dfid, f"this is of HIGH impact: {will} and cannot be undone")
        return what

    def _literals(self, action: str, numbers: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        spec = self.contract.kinds[action]
        return ((name, format_literal(value, spec.scale(name))) for name, value in numbers.items())

    def _refuse_drift(self, case: Case, wanted: Resolution, view: CaseView) -> None:
        """Refuse when the world is not the one that the human has looked at.

        Age alone refuses nothing here: a human takes hours where a model takes milliseconds, and their decision is judged
        on a state read a moment ago. What counts is whether that is still the state they have seen.
        """
        moved = view.moved
        if wanted.seen:
            fields = view.packet.snapshot.fields
            moved = moved_since(self._kernel.tolerances, wanted.seen, case, fields, self.contract.hash)
        if moved:
            raise _moved(case, f"the state has moved: {', '.join(moved)}", _look_again(case.dfid))

    def _human_decision(self, wanted: Resolution, what: Impact, seen: str) -> HumanDecision:
        until_ms = self._now_ms() + self.contract.budget.dispatch_ms_max
        return HumanDecision(
            decision=wanted.decision,
            who=wanted.who,
            reason=wanted.reason,
            impact=what,
            acknowledged=wanted.acknowledged,
            seen=seen,
            contract_hash=self._kernel.registered.hash,
            lease_until_ms=until_ms,
        )

    def _commit(
        self, case: Case, view: CaseView, data: bytes, verdict: Verdict, made: HumanDecision
    ) -> ExecutionIntent | None:
        """Reserve and write, in one transaction that checks again everything that can have changed meanwhile."""
        with self._store.transaction():
            now_ms = self._now_ms()
            attempt = Attempt(view.packet, data, Decoding(), verdict, now_ms=now_ms)
            self._refuse_withdrawn(case, view, now_ms)
            order, code = self._kernel.reserve(attempt, view.observed)
            if code == ALREADY_ORDERED or (order and self._was_carried_out(case)):
                raise UsageError(
                    ORDERED_BEFORE, reason_code=ALREADY_ORDERED, hint="end the case with --abort", dfid=case.dfid
                )
            if code is not None:
                message, hint = f"the decision cannot be reserved now: {code.lower()}", _look_again(case.dfid)
                raise WorldError(message, reason_code=code, hint=hint, dfid=case.dfid)
            proposal = verdict.proposal
            made = replace(
                made,
                packet=view.packet,
                data=data,
                action=proposal.action if proposal else None,
                numbers=verdict.amounts_minor,
                justification=proposal.reason_code if proposal else None,
                lease_until_ms=now_ms + self.contract.budget.dispatch_ms_max,
            )
            self._write(case, made, transition("ESCALATED", "ACCEPTED", "EXECUTING" if order else "CLOSED"), now_ms)
        return order

    def _was_carried_out(self, case: Case) -> bool:
        """Tell whether an order of the case's event was adopted from the outside, under whatever amounts and flow."""
        gate = self.contract.gate
        if not adopted.any_in(self._store, gate):
            return False
        event = cases.event_of(self._store, case.dfid)
        if event is None:  # nobody can tell
            return True
        found = adopted.flow_of_event(self._store, gate, event.id, digest(event.body))
        return found is not None and found.settled

    def _refuse_withdrawn(self, case: Case, view: CaseView, now_ms: int) -> None:
        """Raise UsageError when a human may no longer act, WorldError when the state was read too long ago."""
        authority = authority_now(self._store, self.contract.agent_id)
        if authority.halted:
            hint = "sds resume --reason ..."
            raise UsageError("an operator has halted the system", reason_code="HALTED", hint=hint, dfid=case.dfid)
        if not self._kernel.permits(authority):
            message, hint = "the contract is no longer in force", "sds contracts list"
            raise UsageError(message, reason_code="CONTRACT_REVOKED", hint=hint, dfid=case.dfid)
        if now_ms > view.packet.expires_at_ms or not jit.in_age(self.contract, view.packet, now_ms):
            raise _moved(case, "the state was read too long ago", "try again")

    def _write(self, case: Case, made: HumanDecision, state: State, now_ms: int) -> None:
        """Write the decision, once, and reactivate an agent that was waiting for it."""
        cases.refuse_unless_waiting(self.case(case.dfid))
        write_human(self._store, case, made, state=state, now_ms=now_ms)
        known = registry.lookup(self._store, case.agent_id)
        if known is not None and known.status == "ESCALATED" and self._waited_for(case):
            why = f"{made.decision} of {case.dfid}: {made.reason}"
            registry.move(self._store, case.agent_id, "ACTIVE", by="operator", reason=why, now_ms=now_ms, who=made.who)

    def _waited_for(self, case: Case) -> bool:
        """Tell whether this is the case that the agent waits for, or the saga that contains it."""
        waits_for = registry.waits_for(self._store, case.agent_id)
        trigger = self._store.value("SELECT trigger_event FROM decision_flows WHERE dfid = ?", (waits_for,))
        child = saga_child(trigger) if trigger else None  # not its parent, which may be the flow it was restarted from
        return not waits_for or case.dfid == waits_for or (child is not None and case.dfid == child[0])

    def _answer(self, dfid: str) -> Answer:
        answer = known_answer(self._store, dfid)
        facts = {"dfid": dfid, "state": answer.state, "action": answer.action, "execution": answer.execution}
        self._log("flow.resolved", {**facts, "resolution": answer.resolution})
        return answer


def _look_again(dfid: str) -> str:
    return f"look again: sds escalations show {dfid}"


def _moved(case: Case, message: str, hint: str) -> WorldError:
    return WorldError(message, reason_code="STATE_DRIFT_DETECTED", hint=hint, dfid=case.dfid)


def attest(
    kernel: Kernel, dfid: str, receipt: Receipt, who: str, reason: str, acknowledged: bool, *, now_ms: int
) -> Answer:
    """Settle an UNKNOWN order as a human found it outside (DIR 4.7): `settled` with its reference there, or `rejected`.

    The executor is asked once more first, and its definite answer wins. The ledger entry that settles the order says who
    found it out, and why they say so.

    Raises UsageError when there is no such order, when it is not acknowledged that this is final, when the executor is certain
    that nothing was done and the human says that something was, when it may still carry out what the human calls rejected, or
    when another human's word was recorded meanwhile.
    """
    by = {"who": said("name", who), "reason": said("reason", reason)}
    kept_whole("reference", receipt.reference, REFERENCE_CHARS_MAX)
    case = read_case(kernel.store, kernel.contract, dfid)
    intent = next(
        (order for order in orders_in_flight(kernel.store, kernel.contract.gate, now_ms) if order.dfid == dfid), None
    )
    if intent is None or not case.unknown:
        message, hint = f"flow `{dfid}` has no order whose outcome is unknown", f"sds escalations show {dfid}"
        raise UsageError(message, reason_code="FLOW_CLOSED", hint=hint, dfid=dfid)
    if receipt.status == "settled" and not (receipt.reference.strip() and all(map(is_seen, receipt.reference))):
        raise UsageError("a settled order needs the reference that it has outside, in printable text", dfid=dfid)
    if not acknowledged:
        fate = "stays taken for good" if receipt.status == "settled" else "is given back and may be paid to others"
        raise unacknowledged(dfid, f"this is of HIGH impact: what the order reserved {fate}, and that cannot be undone")
    kernel.dispatcher.attest(intent, receipt, by=by)
    word = in_flight.attestation(kernel.store, dfid)
    ours = by, "SUCCESS" if receipt.status == "settled" else "FAILED"
    if word is not None and ours != word:
        message = f"flow `{dfid}` has no order whose outcome is unknown: {word[0]['who']} has said what became of it"
        raise UsageError(message, reason_code="FLOW_CLOSED", hint=f"sds escalations show {dfid}", dfid=dfid)
    return known_answer(kernel.store, dfid)
