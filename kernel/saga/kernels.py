"""The two kinds of child flow of a saga. The whole kernel decides each of them, under an authority narrower than its own.

A step may decide its one kind, DENY or ESCALATE, by the contract's rules for that kind, met with every safeguard. The
compensation decision may choose from the contract's menu and nothing else (DIR-8). What cannot be carried out is not in the
menu. ALERT_HUMAN always is, in the place where other envelopes have ESCALATE: every escalation, rejection or failure of the
model leads there, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sds.kernel.contract.compiler import FieldSpec, Rules, take_snapshot
from sds.kernel.contract.expressions import STRING
from sds.kernel.decision.dim import Verdict
from sds.kernel.decision.packet import DecisionPacket, static_text
from sds.kernel.decision.safeguards import EnvelopeInputs, LiveState
from sds.kernel.envelope.envelope import ESCALATE_ONLY, DecisionEnvelope, KindBound
from sds.kernel.executor.protocol import ExecutionIntent
from sds.kernel.flow import intake
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import Answer
from sds.kernel.registry.authority import authority_now
from sds.kernel.saga import state as saga
from sds.kernel.saga.state import COMPENSATION, Saga

REVERT, CLOSE_ALL, ALERT_HUMAN = "REVERT", "CLOSE_ALL", "ALERT_HUMAN"
_REASONS = {REVERT: ("STEP_FAILED",), CLOSE_ALL: ("STEP_FAILED",), ALERT_HUMAN: ("HUMAN_REVIEW",)}
_EXPLAINED = (
    "The steps below belong together, and not all of them were carried out.\n"
    "REVERT takes back what was done. CLOSE_ALL takes it back and voids what is still open."
    " ALERT_HUMAN leaves everything to a human."
)


class ChildKernel(Kernel):
    """A kernel that opens one child of a saga. It shares everything with the kernel that it is made from.

    `deadline_ms`: the deadline of the flows that it opens; None: they have none.
    """

    deadline_ms: int | None = None

    def __init__(self, kernel: Kernel, parent: Saga, number: int) -> None:
        vars(self).update(vars(kernel))
        self._parent, self._number = parent, number
        self.authorization = intake.ChildAuthorization(parent.dfid, self._check_due)

    def _check_due(self) -> None:
        """Raise UsageError unless this child may be decided now, inside the caller's transaction."""
        if self._number == COMPENSATION:
            saga.check_phase(self.store, self._parent.dfid, "DIRTY")
        else:
            saga.check_steps(self.store, self.contract, self._parent)

    @property
    def event(self) -> intake.Event:
        return saga.child_event(self._parent, self._number)


class StepKernel(ChildKernel):
    """Decides one step, within the deadline of its saga."""

    def __init__(self, kernel: Kernel, parent: Saga, number: int) -> None:
        super().__init__(kernel, parent, number)
        self.deadline_ms = parent.deadline_ms
        self._kind = parent.steps[number - 1].kind
        # a newer contract may lack the kind: then nothing is permitted, but an order in flight can still be looked up
        self._named = (self._kind,) if self._kind in self.contract.kinds else ()
        self.rules = Rules(self.contract, authority=self._named)

    def open(
        self, event: intake.Event, *, anew: bool = False, deadline_ms: int | None = None
    ) -> DecisionPacket | Answer:
        """Do what `Kernel.open` does, under the earlier of the given deadline and the saga's."""
        given = [each for each in (deadline_ms, self.deadline_ms) if each is not None]
        return super().open(event, anew=anew, deadline_ms=min(given, default=None))

    def compile(self, claimed: intake.ClaimedFlow) -> DecisionPacket:
        packet = super().compile(claimed)
        _, recurring, *rest = packet.texts
        static = static_text(self.contract, packet.situation.artifacts, self._named)
        return replace(packet, texts=(static, f"{self._due()}{recurring}", *rest))

    def needs_whole_record(self, verdict: Verdict) -> bool:  # noqa: ARG002
        """A refusal does, too: its step may have been carried out, and would not be undone with the others."""
        return True

    def _due(self) -> str:
        """Return what the model reads about a later step; "" for the first, which is shown like any other case."""
        before = ", ".join(child.kind for child in self._parent.steps[: self._number - 1])
        place = f"Step {self._number} of {len(self._parent.steps)} of {self._parent.name}"
        return f"{place}: {before} was carried out; {self._kind} is due.\n" if before else ""

    def still_valid(self, intent: ExecutionIntent) -> bool:
        """Tell whether an order in flight would be reserved again now: no longer once its saga takes no further step."""
        phase = self.store.value("SELECT phase FROM sagas WHERE dfid = ?", (self._parent.dfid,))
        return phase == "STEPS" and super().still_valid(intent)


class MenuKernel(ChildKernel):
    """Decides which compensation to carry out, whatever deadline the saga had. The state that it rests on is what became of
    the steps, not what the source says.
    """

    def __init__(self, kernel: Kernel, parent: Saga) -> None:
        super().__init__(kernel, parent, COMPENSATION)
        self.tolerances = tuple((path, 0, -1) for path in parent.standing())

    def possible(self) -> tuple[str, ...]:
        """Return, sorted, what of the menu can be carried out now."""
        return self._possible(self.observe("", self.now_ms).situation.fields)

    def _possible(self, steps: Mapping[str, object]) -> tuple[str, ...]:
        """Return, sorted, what of the menu can be carried out: nothing that is known to fail is offered."""
        became = [str(value).rpartition(" ")[2] for value in steps.values()]
        certain = "UNKNOWN" not in became and "DIRTY" not in became
        reverts, voids = self.dispatcher.executor.reverts, self.dispatcher.executor.voids and self._is_known_outside()
        can = {
            REVERT: reverts and certain and "DONE" in became,
            CLOSE_ALL: reverts and "DIRTY" not in became and (voids or "UNKNOWN" not in became),
        }
        return tuple(sorted({ALERT_HUMAN, *(name for name in self._parent.menu if can.get(name))}))

    def _is_known_outside(self) -> bool:
        """Tell whether the outside still knows the keys of all open steps: a key that it has forgotten cannot be voided."""
        now = saga.load(self.store, self.contract, self._parent.dfid)
        orders = [child.answer.dfid for child in now.steps if child.became == "UNKNOWN" and child.answer]
        return all(map(self.dispatcher.keeps_key, orders))

    def envelope(self, situation: EnvelopeInputs) -> DecisionEnvelope:
        """Return the menu as it stands; only the human when the agent may not act."""
        if not situation.agent_active or situation.halted:
            return ESCALATE_ONLY
        return DecisionEnvelope(tuple(KindBound(name, _REASONS[name]) for name in self._possible(situation.fields)))

    def observe(self, *_: object, **__: object) -> LiveState:
        """Read what became of the steps: the fields are `step.1`, `step.2` ... None of them may move."""
        authority = authority_now(self.store, self.contract.agent_id, self._parent.dfid)
        situation = EnvelopeInputs(
            fields=saga.load(self.store, self.contract, self._parent.dfid).standing(),
            agent_active=authority.active and authority.contract_hash == self.contract.hash,
            in_effect=True,
            halted=authority.halted,
            spend_left=None,
            context_whole=True,
        )
        return LiveState(situation, "", {}, authority.contract_hash)

    def compile(self, claimed: intake.ClaimedFlow) -> DecisionPacket:
        now_ms = self.now_ms
        seen = self.observe(claimed.event.key, now_ms)
        fields = seen.situation.fields
        envelope = self.envelope(seen.situation)
        specs = tuple(FieldSpec(path, STRING) for path in fields)
        menu = f"{_EXPLAINED}\nPermitted: {', '.join(envelope.names)}\n"
        steps = "\n".join(f"{path}: {value}" for path, value in fields.items())
        return DecisionPacket(
            dfid=claimed.dfid,
            event_id=claimed.event.id,
            key=claimed.event.key,
            agent_id=self.contract.agent_id,
            contract_hash=self.contract.hash,
            mission_hash=self.contract.mission_hash,
            snapshot=take_snapshot(specs, claimed.event.key, fields, seen.version, now_ms),
            situation=seen.situation,
            envelope=envelope,
            texts=(static_text(self.contract), menu, steps),
            security=(),
            notes=(),
            created_at_ms=now_ms,
            expires_at_ms=now_ms + self.contract.budget.ttl_ms,
        )


def kernel_of_child(kernel: Kernel, parent: str, number: int) -> Kernel:
    """Return the kernel that a child of a saga is decided by; for a step, one narrower than the gate's own."""
    if number == COMPENSATION:
        return kernel
    return StepKernel(kernel, saga.load(kernel.store, kernel.contract, parent), number)


def stopped(kernel: Kernel, dfid: str) -> str | None:
    """Return the code of why no further step or reversal may begin: a halt, a suspension, a revocation; None: they may."""
    return authority_now(kernel.store, kernel.contract.agent_id, dfid).withdrawn(kernel.contract.hash)
