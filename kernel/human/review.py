"""A human's decision passes the kernel (DIR 4.7): once, within the human's own envelope, on a world that stands still.

    desk.look(case)                    the state now, what moved, what may be decided
    desk.resolve(dfid, resolution)     the five gates, the drift check, one reservation, one order, or a refusal

A refusal changes nothing: the case goes on waiting. Nobody is above the kernel, but there is nobody below the human
either: they can always abort, even while everything is halted and no state can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.human_terms import Impact, human_contract, impact
from sds.kernel.contract.snapshot import take_snapshot
from sds.kernel.decision import dim, jit
from sds.kernel.decision.dim import AuthorityState, Verdict
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.decision.safeguards import LiveState, envelope_in_force, safeguards_of, standing_notes
from sds.kernel.envelope.bounds import format_literal
from sds.kernel.envelope.envelope import ESCALATE
from sds.kernel.envelope.proposal import parse_recorded, write_proposal
from sds.kernel.errors import SdsError, UsageError, WorldError, unreadable
from sds.kernel.executor.protocol import ExecutionIntent
from sds.kernel.flow.answer import Answer, answer
from sds.kernel.flow.attempts import Attempt
from sds.kernel.flow.commit import ALREADY_ORDERED, ORDERED_BEFORE, Committer
from sds.kernel.flow.dispatch import Log, no_log
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import State, transition
from sds.kernel.human import cases
from sds.kernel.human.cases import Case, Decision, HumanDecision
from sds.kernel.human.parsing import looked_at, moved_since, parse_change, said, seen_id, unacknowledged
from sds.kernel.registry import registry, reservations, spend
from sds.kernel.registry.authority import Authority, authority_now
from sds.kernel.saga import state as saga


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a human wants. `change`: for MODIFY, the JSON of another decision. `seen`: the id of the live state they
    have looked at; without one, what they have looked at is the flow's snapshot. `acknowledged`: that what is of HIGH
    impact cannot be undone.
    """

    decision: Decision
    who: str
    reason: str
    change: str = ""
    seen: str = ""
    acknowledged: bool = False


@dataclass(frozen=True, slots=True)
class CaseView:
    """A case's world as it is now. `packet` carries live state and the human's envelope; `seen` names that state;
    `moved`: the fields that moved since the agent looked, beyond their tolerance.
    """

    packet: DecisionPacket
    observed: LiveState
    seen: str
    moved: tuple[str, ...]


class HumanReview:
    """Where humans resolve one gate's cases. `now_ms` is the kernel's clock."""

    def __init__(self, kernel: Kernel, *, now_ms: Callable[[], int], log: Log = no_log) -> None:
        self._kernel, self._store, self._now_ms, self._log = kernel, kernel.store, now_ms, log
        self.contract = human_contract(kernel.contract)
        self._contract_hash = self.contract.hash
        self._rules = Rules(self.contract)
        self._safeguards = safeguards_of(self.contract, for_human=True)
        self._policy = jit.tolerances(self.contract)
        self._concluder = Committer(self.contract, kernel.store, kernel.signer, kernel.context, now_ms=now_ms, log=log)

    def waiting(self) -> list[Case]:
        """Return what waits for a human, oldest first; what cannot be read is `damaged`."""
        return cases.waiting(self._store, self.contract)

    def case(self, dfid: str) -> Case:
        """Return one flow of this gate. Raises UsageError when there is none, StoreError when it cannot be read."""
        return cases.read_case(self._store, self.contract, dfid)

    def look(self, case: Case, *, without: str = "") -> CaseView:
        """Read the world as it is now and derive what a human may decide. Changes nothing.

        A suspended or paused agent does not stop the human; a halt, a contract that is not in force and an agent
        that is retired do. Raises StoreError for a case that is `damaged`.
        """
        if case.damaged:
            raise unreadable(case.dfid)
        now_ms, terms = self._now_ms(), self.contract
        seen = self._kernel.observe(case.key, now_ms, without=without)
        situation = replace(seen.situation, agent_active=self._in_force(), context_whole=True)
        others = [note for note in seen.notes if note not in standing_notes(seen.situation)]
        snapshot = take_snapshot(self._rules.fields, case.key, situation.fields, seen.version, now_ms)
        packet = DecisionPacket(
            dfid=case.dfid,
            event_id=case.event_id,
            key=case.key,
            agent_id=case.agent_id,
            contract_hash=self._contract_hash,
            mission_hash=terms.mission_hash,
            snapshot=snapshot,
            situation=situation,
            envelope=envelope_in_force(self._rules.envelope(situation.fields), situation, self._safeguards),
            texts=("", "", ""),
            security=(),
            notes=(*others, *standing_notes(situation)),
            created_at_ms=now_ms,
            expires_at_ms=now_ms + terms.budget.ttl_ms,
        )
        moved = jit.drift(self._policy, case.fields, snapshot.fields)
        return CaseView(packet, seen, seen_id(self._policy, case, snapshot.fields), moved)

    def _in_force(self) -> bool:
        return self._permits(authority_now(self._store, self.contract.agent_id))

    def _permits(self, authority: Authority) -> bool:
        return authority.in_service and authority.contract_hash == self._kernel.contract.hash

    def resolve(self, dfid: str, wanted: Resolution) -> Answer:
        """Carry out what a human decided about an escalated case, exactly once; return the answer it then has.

        Raises UsageError or WorldError when it is refused; then nothing has changed.
        """
        if wanted.decision not in get_args(Decision):  # whoever calls this may not be type-checked
            raise UsageError(f"there is no decision `{wanted.decision}`", hint=", ".join(get_args(Decision)))
        who, why = said("name", wanted.who), said("reason", wanted.reason)
        wanted = replace(wanted, who=who, reason=why, seen=looked_at(wanted.seen))
        case = self.case(dfid)
        cases.refuse_unless_waiting(case)
        if wanted.decision == "ABORT":
            self._abort(case, wanted)
        else:
            made, intent = self._carried(case, wanted)
            if intent is not None:
                self._kernel.dispatcher.carry_out(intent, until_ms=made.lease_until_ms)
        return self._answer(dfid)

    def _carried(self, case: Case, wanted: Resolution) -> tuple[HumanDecision, ExecutionIntent | None]:
        """Do what `_carry` does; of two humans at once, the second is told of the first before anything else."""
        try:
            return self._carry(case, wanted)
        except SdsError:
            cases.refuse_unless_waiting(self.case(case.dfid))
            raise

    def _abort(self, case: Case, wanted: Resolution) -> None:
        made = self._made(wanted, "LOW", wanted.seen or case.snapshot_id)
        with self._store.transaction():
            self._write(case, made, transition("ESCALATED", "ABORTED"), self._now_ms())

    def _carry(self, case: Case, wanted: Resolution) -> tuple[HumanDecision, ExecutionIntent | None]:
        """Judge, check and reserve what a human decided."""
        if case.of_saga:
            hint = "end it with --abort; what is still due takes an event of its own"
            raise UsageError("a part of a saga cannot be carried out by itself", hint=hint, dfid=case.dfid)
        if not case.can_be_carried_out:
            hint = "settle it where it happened, then end the case with --abort"
            raise UsageError("a difference to the outside cannot be carried out", hint=hint, dfid=case.dfid)
        cases.refuse_altered(self._store, case.dfid)
        doubt = self._kernel.whole.doubt()
        look = self.look(case)
        data = self._proposal(case, wanted, look.packet)
        verdict = self._judge(look.packet, data)
        self._refuse_other_numbers(case, wanted, look.packet, verdict)
        what = self._acknowledged(case, wanted, verdict)
        self._refuse_drift(case, wanted, look)
        if doubt is not None and verdict.proposal and self.contract.executes(verdict.proposal.action):
            raise WorldError(doubt.message, reason_code=doubt.code, dfid=case.dfid)
        return self._conclude(case, look, data, verdict, self._made(wanted, what, wanted.seen or case.snapshot_id))

    def _proposal(self, case: Case, wanted: Resolution, packet: DecisionPacket) -> bytes:
        if wanted.decision == "MODIFY":
            return write_proposal(parse_change(wanted.change, packet.snapshot.id))
        if case.proposal is None:
            hint = "decide it yourself with --modify, or end it with --abort"
            raise UsageError("the agent proposed nothing that could be carried out", hint=hint, dfid=case.dfid)
        return write_proposal(replace(case.proposal, rationale=None, context_ref=packet.snapshot.id))

    def _judge(self, packet: DecisionPacket, data: bytes) -> Verdict:
        """Return the five gates' acceptance of a human's decision. Raises UsageError with everything they object to."""
        authority = authority_now(self._store, packet.agent_id)
        in_force = self._permits(authority)
        standing = AuthorityState(
            agent_active=in_force,
            halted=authority.halted,
            contract_hash=self._contract_hash if in_force else "",
            mission_hash=authority.mission_hash,
            held=reservations.usage(self._store, self.contract, packet.key).held,
        )
        verdict = dim.judge(self.contract, packet, data, standing, Decoding(), self._now_ms())
        if verdict.outcome == "ACCEPTED":
            return verdict
        if verdict.outcome == "ESCALATED":
            raise UsageError(f"`{ESCALATE}` is no decision: a human is the last one asked", dfid=packet.dfid)
        why = dict.fromkeys([*(reason.message for reason in verdict.reasons), *packet.notes])
        code = verdict.reason_code or "RBAC_DENIED"
        raise UsageError("; ".join(why), reason_code=code, hint=_look_again(packet.dfid), dfid=packet.dfid)

    def _refuse_other_numbers(self, case: Case, wanted: Resolution, packet: DecisionPacket, verdict: Verdict) -> None:
        """An OVERRIDE carries out what was proposed, and nothing else: what the rules fix may have changed since, and
        of what was not judged to its end nobody knows what it was.
        """
        now, kind = (
            dict(verdict.amounts_minor),
            packet.envelope.kind(verdict.proposal.action if verdict.proposal else ""),
        )
        fixed = {*case.numbers, *(name for name, _, _ in (kind.fills if kind else ()))}
        if wanted.decision == "OVERRIDE" and any(now.get(name) != case.numbers.get(name) for name in fixed):
            hint = f"decide on what it is now with --modify; {_look_again(case.dfid)}"
            raise _moved(case, "a value that the rules fix has changed since it was proposed", hint)

    def _acknowledged(self, case: Case, wanted: Resolution, verdict: Verdict) -> Impact:
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

    def _refuse_drift(self, case: Case, wanted: Resolution, look: CaseView) -> None:
        """Refuse when the world is not the one the human has looked at.

        Age alone refuses nothing here: a human takes hours where a model takes milliseconds, and what they decide is
        judged on the state read a moment ago. What counts is whether that is still what they have seen.
        """
        moved = look.moved
        if wanted.seen:
            moved = moved_since(self._policy, wanted.seen, case, look.packet.snapshot.fields)
        if moved:
            raise _moved(case, f"the state has moved: {', '.join(moved)}", _look_again(case.dfid))

    def _made(self, wanted: Resolution, what: Impact, seen: str) -> HumanDecision:
        until_ms = self._now_ms() + self.contract.budget.dispatch_ms_max
        return HumanDecision(
            decision=wanted.decision,
            who=wanted.who,
            reason=wanted.reason,
            impact=what,
            acknowledged=wanted.acknowledged,
            seen=seen,
            contract_hash=self._kernel.contract.hash,
            lease_until_ms=until_ms,
        )

    def _conclude(
        self, case: Case, look: CaseView, data: bytes, verdict: Verdict, made: HumanDecision
    ) -> tuple[HumanDecision, ExecutionIntent | None]:
        """Reserve and write, in one transaction that asks again for everything that can have changed meanwhile."""
        with self._store.transaction():
            now_ms = self._now_ms()
            attempt = Attempt(look.packet, data, Decoding(), verdict, now_ms=now_ms)
            self._refuse_withdrawn(case, look, now_ms)
            intent, code = self._concluder.reserve(attempt, look.observed)
            if code == ALREADY_ORDERED:
                raise UsageError(ORDERED_BEFORE, reason_code=code, hint="end it with --abort", dfid=case.dfid)
            if code is not None:
                raise WorldError(
                    f"what this takes is not free now: {code.lower()}",
                    reason_code=code,
                    hint=_look_again(case.dfid),
                    dfid=case.dfid,
                )
            proposal = verdict.proposal
            made = replace(
                made,
                packet=look.packet,
                data=data,
                action=proposal.action if proposal else None,
                numbers=verdict.amounts_minor,
                justification=proposal.reason_code if proposal else None,
                lease_until_ms=now_ms + self.contract.budget.dispatch_ms_max,
            )
            self._write(case, made, transition("ESCALATED", "ACCEPTED", "EXECUTING" if intent else "CLOSED"), now_ms)
        return made, intent

    def _refuse_withdrawn(self, case: Case, look: CaseView, now_ms: int) -> None:
        authority = authority_now(self._store, self.contract.agent_id)
        if authority.halted:
            raise UsageError("an operator has halted the system", reason_code="HALTED", dfid=case.dfid)
        if not self._permits(authority):
            raise UsageError("the contract is no longer in force", reason_code="CONTRACT_REVOKED", dfid=case.dfid)
        if now_ms > look.packet.expires_at_ms or not jit.in_age(self.contract, look.packet, now_ms):
            raise _moved(case, "the state was read too long ago", "try again")

    def _write(self, case: Case, made: HumanDecision, state: State, now_ms: int) -> None:
        """Write the decision, once, and let an agent go on that was waiting for it."""
        cases.refuse_unless_waiting(self.case(case.dfid))
        cases.write_human(self._store, case, made, state=state, now_ms=now_ms)
        known = registry.lookup(self._store, case.agent_id)
        if known is not None and known.status == "ESCALATED" and self._waited_for(case):
            why = f"{made.decision} of {case.dfid}: {made.reason}"
            registry.move(self._store, case.agent_id, "ACTIVE", by="operator", reason=why, now_ms=now_ms, who=made.who)

    def _waited_for(self, case: Case) -> bool:
        """Tell whether this is the case the agent waits for, or the saga which that is a part of."""
        waits_for = registry.waits_for(self._store, case.agent_id)
        trigger = self._store.value("SELECT trigger_event FROM decision_flows WHERE dfid = ?", (waits_for,))
        mandate = saga.mandate_in(trigger) if trigger else None  # its parent may be the flow it was restarted from
        return not waits_for or case.dfid == waits_for or (mandate is not None and case.dfid == mandate[0])

    def still_valid(self, intent: ExecutionIntent) -> bool:
        """Tell whether a human's order in the air would be reserved again now, by the terms it was decided under."""
        sql = "SELECT proposal, contract_hash FROM human_decisions WHERE dfid = ?"
        stored, decided_under = self._store.row(sql, (intent.dfid,)) or (b"", "")
        proposal = parse_recorded(stored)
        if decided_under != self._kernel.contract.hash:
            return False
        look = self.look(self.case(intent.dfid), without=intent.dfid)
        if isinstance(proposal, str) or look.packet.snapshot.version != intent.state_version:
            return False
        fields, at_ms = look.observed.situation.fields, look.packet.created_at_ms
        if not spend.still_counted(self._store, self.contract, intent.dfid, fields, at_ms):
            return False
        kind = look.packet.envelope.kind(proposal.action)
        if kind is None or look.packet.envelope.objections(proposal):
            return False
        return dict(intent.params) == dict(dim.amounts_minor(proposal, kind))

    def _answer(self, dfid: str) -> Answer:
        found = answer(self._store, dfid)
        if found is None:
            raise SdsError(f"flow `{dfid}` is not in the record", dfid=dfid)
        facts = {"dfid": dfid, "state": found.state, "action": found.action, "execution": found.execution}
        self._log("flow.resolved", {**facts, "resolution": found.resolution})
        return found


def _look_again(dfid: str) -> str:
    return f"look again: sds escalations show {dfid}"


def _moved(case: Case, message: str, hint: str) -> WorldError:
    return WorldError(message, reason_code="STATE_DRIFT_DETECTED", hint=hint, dfid=case.dfid)


def still_valid(kernel: Kernel, intent: ExecutionIntent) -> bool:
    """Tell whether an order in the air would be reserved again now, by the terms of who decided it."""
    if kernel.whole.doubt() is not None:
        return False
    if kernel.store.value("SELECT 1 FROM human_decisions WHERE dfid = ?", (intent.dfid,)) is None:
        return kernel.still_valid(intent)
    return HumanReview(kernel, now_ms=lambda: kernel.now_ms).still_valid(intent)
