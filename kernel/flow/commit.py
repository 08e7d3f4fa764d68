"""How one attempt ends, in one durable transaction: reject, escalate, close, or reserve and return the order to send.

The proposal was judged before, and time has passed since: the state was read again, and the write lock was awaited. So the
transaction checks again what can have changed. The flow must still be open and in time, the agent active, the contract in
force, the system not halted and the snapshot young enough. Nothing of this key may have been reserved or settled since the
drift check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from sds.kernel.canonical import idempotency_key
from sds.kernel.contract.schema import Contract
from sds.kernel.decision import dim, jit
from sds.kernel.decision.context import ContextReader
from sds.kernel.decision.dim import Reason, Verdict
from sds.kernel.decision.packet import Decoding
from sds.kernel.decision.safeguards import LiveState
from sds.kernel.envelope.proposal import PROPOSAL_BYTES_MAX
from sds.kernel.errors import UsageError
from sds.kernel.executor import breaker
from sds.kernel.executor.protocol import ExecutionIntent
from sds.kernel.executor.statement import known_keys
from sds.kernel.executor.wholeness import RECORD_BEHIND, Wholeness
from sds.kernel.flow import decision_record, monitored, undecided
from sds.kernel.flow.decision_record import Attempt, write_attempt
from sds.kernel.flow.dispatch import Log
from sds.kernel.flow.observe import asking_for_open, open_flow
from sds.kernel.flow.states import CONTENTION, DEADLINE_EXCEEDED, NOT_DECIDED, State, move_on, transition
from sds.kernel.registry import escalation_budget, registry, reservations, spend
from sds.kernel.registry.monitors import Watched
from sds.kernel.storage.keyring import Signer
from sds.kernel.storage.ledger import Head
from sds.kernel.storage.store import Store

# Rejections that do not count against the agent: an operator, a deployment, another flow or the load caused them.
_NOT_THE_AGENT = frozenset(
    {"AGENT_SUSPENDED", "CONTRACT_REVOKED", "HALTED", "KERNEL_FAULT", "PROPOSAL_EXPIRED", "RESOURCE_CONTENTION"}
)
ALREADY_ORDERED = "ALREADY_ORDERED"
ORDERED_BEFORE = "the record already has this order under another flow, or one of this event that was carried out although recorded as failed"


class Committer:
    """Writes how attempts end, for one gate."""

    def __init__(
        self,
        contract: Contract,
        store: Store,
        signer: Signer,
        context: ContextReader,
        whole: Wholeness,
        *,
        now_ms: Callable[[], int],
        log: Log,
    ) -> None:
        self._contract, self._store, self._signer, self._context = contract, store, signer, context
        self._contract_hash, self._orders = contract.hash, contract.orders
        self._whole, self._now_ms, self._log = whole, now_ms, log
        self._monitors = monitored.decision_monitors(contract)

    def commit(self, judged: Attempt) -> ExecutionIntent | None:
        """Reserve and write the outcome of one attempt; return the order to send, if any. Raises UsageError: not open."""
        order: ExecutionIntent | None = None
        with self._ending(judged) as attempt:
            deadline_ms = attempt.open_flow.deadline_ms
            if deadline_ms is not None and attempt.now_ms > deadline_ms:
                watched = self._finish(_too_late(attempt, attempt.now_ms - deadline_ms), "ABORTED", NOT_DECIDED)
            elif attempt.verdict.outcome == "REJECTED":
                watched = self._reject(attempt)
            elif attempt.verdict.outcome == "ESCALATED":
                watched = self._escalate(attempt)
            else:
                order, watched = self._accept(attempt)
        monitored.tell(self._log, judged.packet.dfid, judged.packet.agent_id, watched)
        return order

    @contextmanager
    def _ending(self, attempt: Attempt) -> Iterator[Attempt]:
        """Begin the transaction that ends an attempt; yield the attempt with its flow. Raises UsageError: not open."""
        dfid = attempt.packet.dfid
        key = self._idempotency_key(attempt, dfid) if attempt.verdict.outcome == "ACCEPTED" else ""
        resources = reservations.named(self._contract, attempt.packet.key)
        bounds, counters = reservations.bounds(self._contract, attempt.packet.key), self._counters(attempt)
        asking = asking_for_open(dfid, self._contract.agent_id, key, bounds, counters)
        with self._store.transaction(*asking) as found:
            flow = open_flow(found, key, resources, counters)
            if flow is None:
                raise UsageError(f"flow `{dfid}` is no longer open", reason_code="FLOW_CLOSED", dfid=dfid)
            yield replace(attempt, number=flow.attempts + 1, now_ms=self._now_ms(), flow=flow)

    def _counters(self, attempt: Attempt) -> tuple[str, ...]:
        """Return the spend counters of an accepted decision, by the time of its drift check: read along with its flow."""
        if attempt.report is None or attempt.report.observed is None:
            return ()
        checked_ms = attempt.packet.snapshot.taken_at_ms + attempt.report.age_ms
        return spend.scopes(self._contract, attempt.report.observed.situation.fields, checked_ms).names

    def _idempotency_key(self, attempt: Attempt, named_by: str) -> str:
        """Return the key of the order. `named_by`: the flow whose id goes into it (`undecided.named_by`)."""
        verdict = attempt.verdict
        kind = verdict.proposal.action if verdict.proposal else ""
        return idempotency_key(named_by, decision_record.STEP_ID, {"action": kind, **dict(verdict.amounts_minor)})

    def _accept(self, attempt: Attempt) -> tuple[ExecutionIntent | None, Watched]:
        """Reserve what was accepted, if all that it rests on still holds; else end the flow undecided, or for a human."""
        attempt, live, code = self._checked_again(attempt)
        order, code, head = (None, code, None) if live is None else self.reserve(attempt, live)
        if code is None:
            flow = replace(attempt.open_flow, head=head or attempt.open_flow.head)
            return order, self._finish(replace(attempt, flow=flow), "EXECUTING" if order else "CLOSED", None)
        verdict, report = attempt.verdict, attempt.report
        if code == ALREADY_ORDERED:
            reasons = (Reason(dim.AFTER_THE_GATES, code, ORDERED_BEFORE),)
            verdict = replace(verdict, outcome="ESCALATED", reasons=reasons)
            return None, self._escalate(replace(attempt, verdict=verdict))
        why = "; ".join((*report.drift, *report.objections)) if report else ""
        reasons = (Reason(dim.AFTER_THE_GATES, code, why or code.lower()),)
        verdict = replace(verdict, outcome="REJECTED", reasons=reasons)
        return None, self._undecided(replace(attempt, verdict=verdict), code)

    def _checked_again(self, attempt: Attempt) -> tuple[Attempt, LiveState | None, str | None]:
        """Check again what may have changed since the drift check. Return (the attempt, the live state to reserve on, None),
        or (the attempt with what moved, None, the reason code).
        """
        report = attempt.report
        code = self._withdrawn(attempt)
        if code is not None:
            return attempt, None, code
        if report is None or not report.ok or report.observed is None:
            return attempt, None, (report.code if report else None) or "STATE_DRIFT_DETECTED"
        moved = self._moved(attempt, report.observed)
        if not moved:
            return attempt, report.observed, None
        age_ms = attempt.now_ms - attempt.packet.snapshot.taken_at_ms
        report = replace(report, ok=False, age_ms=age_ms, drift=moved)
        return replace(attempt, report=report), None, "STATE_DRIFT_DETECTED"

    def not_decided(self, judged: Attempt) -> None:
        """End a flow that got no turn: it waits, no human sees it, and nobody is charged. Raises UsageError: not open."""
        with self._ending(judged) as attempt:
            self._finish(attempt, "ABORTED", NOT_DECIDED)

    def _undecided(self, attempt: Attempt, tag: str) -> Watched:
        """End a flow that nobody has decided: ABORTED while its event may have a fresh flow, else ESCALATED."""
        if undecided.has_restart(self._store, attempt.packet.dfid, tag, self._contract.retry.restarts_max):
            return self._finish(attempt, "ABORTED", tag)
        verdict = attempt.verdict
        if all(reason.code != tag for reason in verdict.reasons):
            why = Reason(dim.AFTER_THE_GATES, tag, f"attempt {attempt.number} was the last")
            verdict = replace(verdict, reasons=(*verdict.reasons, why))
        return self._finish(replace(attempt, verdict=verdict), "ESCALATED", tag)

    def _withdrawn(self, attempt: Attempt) -> str | None:
        """Return the code of what ended the agent's authority since: withdrawn, revoked or expired; None: nothing did."""
        flow = attempt.open_flow
        code = flow.authority.withdrawn(self._contract_hash)
        if code is not None or attempt.packet.contract_hash != self._contract_hash:
            return code or "CONTRACT_REVOKED"
        return "PROPOSAL_EXPIRED" if attempt.now_ms > flow.created_at_ms + self._contract.budget.ttl_ms else None

    def _moved(self, attempt: Attempt, observed: LiveState) -> tuple[str, ...]:
        """Name what the drift check could not see yet: the snapshot is too old by now, or an artifact was replaced."""
        if not jit.in_age(self._contract, attempt.packet, attempt.now_ms):
            return (jit.SNAPSHOT_AGE,)
        return () if self._context.in_force(observed.situation.artifacts) else ("artifacts",)

    def reserve(self, attempt: Attempt, observed: LiveState) -> tuple[ExecutionIntent | None, str | None, Head | None]:
        """Reserve what an accepted decision takes, in the caller's transaction: (the signed order, None, its entry), or
        (None, why not, None). All three are None for a decision that orders nothing.
        """
        packet, verdict, flow = attempt.packet, attempt.verdict, attempt.flow
        kind = verdict.proposal.action if verdict.proposal else ""
        if kind not in self._orders:  # this includes a choice from a saga's menu: the saga carries that out
            return None, None, None
        if (stopped := self._whole.stopped) is not None:
            return None, stopped.code, None
        if not self._whole.holds:  # this transaction runs at another server than the drift check did
            return None, RECORD_BEHIND, None
        circuit = flow.breaker if flow else breaker.read(self._store, self._contract.gate)
        if not breaker.lets_through(self._store, self._contract.gate, circuit, attempt.now_ms):
            return None, breaker.EXECUTOR_DOWN, None
        key, is_ordered = self._check_key(attempt)
        if is_ordered:
            return None, ALREADY_ORDERED, None
        amounts = dict(verdict.amounts_minor)
        claim = reservations.claim_of(self._contract, kind, amounts)
        spending = spend.scopes(self._contract, observed.situation.fields, attempt.now_ms)
        usage = flow.usage if flow else reservations.usage(self._store, self._contract, packet.key)
        known = flow.totals if flow else None
        code = reservations.reserve(
            self._store, self._contract, packet.dfid, packet.key, claim, usage, observed.epochs, spending, known
        )
        if code is not None:
            return None, code, None
        order = ExecutionIntent(packet.dfid, key, kind, tuple(sorted(amounts.items())), packet.key, observed.version)
        order = order.signed_by(self._signer)
        taken = {
            "reservations": reservations.taken(self._contract, packet.dfid, packet.key, claim),
            "spend": spend.taken(packet.dfid, spending, claim.spends),
        }
        needs, after = (claim.draws, claim.spends), flow.head if flow else None
        head = decision_record.write_reservation(self._store, order, needs, taken, attempt.now_ms, after=after)
        return order, None, head

    def _check_key(self, attempt: Attempt) -> tuple[str, bool]:
        """Return the order's key, and whether its case has been ordered already: the record has an order under that key, or has
        learnt that one which it has as failed was carried out. A flow without parent has read all that there is.
        """
        dfid, flow = attempt.packet.dfid, attempt.flow
        if flow and flow.parent is None:
            return flow.key, bool(flow.ordered)
        key = self._idempotency_key(attempt, undecided.named_by(self._store, dfid))
        return key, bool(known_keys(self._store, [key])) or undecided.was_carried_out(self._store, dfid)

    def _reject(self, attempt: Attempt) -> Watched:
        """Keep the attempt and let the flow go on, or end it when the limit is reached or another attempt cannot help.

        Return what the monitors found, and why the agent was suspended for it, if it was.
        """
        attempt, verdict = replace(attempt, data=attempt.data[:PROPOSAL_BYTES_MAX]), attempt.verdict
        if verdict.contended:
            return self._undecided(attempt, CONTENTION)
        watched = Watched()
        if verdict.final or attempt.number >= self._contract.retry.attempts_max:
            ends = (reason.code for reason in verdict.reasons if reason.code in dim.FINAL_CODES)
            watched = self._undecided(attempt, next(ends, "REASONING_EXHAUSTION"))
        else:
            write_attempt(self._store, attempt)
        return replace(watched, suspended=self._count_rejection(attempt) or watched.suspended)

    def _count_rejection(self, attempt: Attempt) -> str | None:
        """Count a rejection. Suspend an agent after too many in a row, or at once for another mission (DIR 3.5a)."""
        agent_id, reasons = attempt.packet.agent_id, attempt.verdict.reasons
        if any(reason.code in _NOT_THE_AGENT for reason in reasons):
            return None
        self._store.run("UPDATE agents SET rejections = rejections + 1 WHERE agent_id = ?", (agent_id,))
        known = registry.lookup(self._store, agent_id)
        if known is None or not known.active:
            return None
        dissonant = any(reason.code == "MISSION_DISSONANCE" for reason in reasons)
        if not dissonant and known.rejections < self._contract.retry.rejections_to_suspend:
            return None
        why = "MISSION_DISSONANCE" if dissonant else f"{known.rejections} rejections in a row"
        registry.move(self._store, agent_id, "SUSPENDED", by="runtime", reason=why, now_ms=attempt.now_ms)
        return why

    def _escalate(self, attempt: Attempt) -> Watched:
        """Hand the case to a human and charge the agent's budget; return what was monitored, and why it was suspended."""
        packet, code, now_ms = attempt.packet, attempt.verdict.reason_code, attempt.now_ms
        authority, by_choice = attempt.open_flow.authority, not packet.notes
        charged = escalation_budget.charge(
            self._store, self._contract, authority, code, by_choice=by_choice, now_ms=now_ms
        )
        watched = self._finish(attempt, "ESCALATED", code, charged.spent)
        if charged.moves_to is None or watched.suspended:
            return watched
        status, why = charged.moves_to
        registry.move(self._store, packet.agent_id, status, by="runtime", reason=why, now_ms=now_ms, case=packet.dfid)
        return replace(watched, suspended=why if status == "SUSPENDED" else None)

    def _finish(
        self, attempt: Attempt, state: State, tag: str | None, spent: escalation_budget.Level | None = None
    ) -> Watched:
        """Write the end of the flow and count it in the monitors; return what they found and suspended the agent for."""
        dfid, verdict = attempt.packet.dfid, attempt.verdict
        passed: tuple[State, ...] = ("ACCEPTED",) if state in ("EXECUTING", "CLOSED") else ()
        counted = monitored.count(self._contract, self._monitors, self._store, attempt, state, tag)
        more: dict[str, object] = {"escalations": [spent.parts, spent.at_ms]} if spent else {}
        more |= {"monitors": counted.digest} if counted.digest else {}
        end = transition("ACTIVE", "VALIDATING", *passed, state)
        decision_record.write_decision(self._store, attempt, state=end, tag=tag, more=more)
        move_on(self._store, "decision_flows", dfid, state, was=("ACTIVE",), tag=tag)
        if verdict.outcome == "ACCEPTED" and attempt.open_flow.rejections:
            self._store.write("UPDATE agents SET rejections = 0 WHERE agent_id = ?", (attempt.packet.agent_id,))
        return self._monitors.settle(self._store, counted, attempt.now_ms)


def _too_late(attempt: Attempt, late_ms: int) -> Attempt:
    """Return the attempt as one that nobody decided: its deadline had passed when it would have been committed."""
    reason = Reason(dim.AFTER_THE_GATES, DEADLINE_EXCEEDED, f"the decision is {late_ms} ms past its deadline")
    verdict = Verdict("REJECTED", (reason,))
    return replace(attempt, data=b"", decoding=Decoding(), verdict=verdict, report=None)
