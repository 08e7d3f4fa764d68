"""One gate's kernel: open a flow, judge what is proposed, reserve, dispatch once, settle. It contains no model.

    packet = kernel.open(event)          # or the stored answer
    answer = kernel.decide(packet, proposal_bytes, decoding)

This file is the table of contents: each step has a module of its own. The caller passes everything in: contract, store,
state source, executor, signing key, context, clock and log. The id of a flow follows from its event. A kernel may be called
from several threads, and several processes may share one store.
"""

from __future__ import annotations

from collections.abc import Callable

from sds.kernel.canonical import one_line
from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.schema import Contract
from sds.kernel.decision import dim, jit
from sds.kernel.decision import packet as packets
from sds.kernel.decision.context import ContextReader, NoContext
from sds.kernel.decision.dim import AuthorityState, Reason, Verdict
from sds.kernel.decision.jit import JitReport
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.decision.safeguards import EnvelopeInputs, LiveState, envelope_in_force, safeguards_of, with_notes
from sds.kernel.envelope.envelope import DecisionEnvelope
from sds.kernel.envelope.state import StateSource
from sds.kernel.errors import UsageError
from sds.kernel.executor.protocol import ExecutionIntent, Executor
from sds.kernel.executor.wholeness import Wholeness
from sds.kernel.flow import decision_record, in_flight, intake
from sds.kernel.flow.commit import Committer
from sds.kernel.flow.decision_record import Attempt
from sds.kernel.flow.dispatch import Dispatcher, Log, no_log
from sds.kernel.flow.observe import Observer, Seen, authority_state, feedback, standing
from sds.kernel.flow.states import Answer, known_answer
from sds.kernel.registry import registry, reservations, spend
from sds.kernel.storage.keyring import Keyring, Signer
from sds.kernel.storage.store import Store


class Kernel:
    """One gate's kernel over a store. Raises UsageError when the contract's agent is not registered there.

    A flow belongs to the contract that was registered when it was created. A flow of another contract, or of a revoked one,
    can here only be escalated. `context` reads memory and artifacts; None: there are none.
    """

    def __init__(
        self,
        contract: Contract,
        store: Store,
        source: StateSource,
        executor: Executor,
        signer: Signer,
        *,
        now_ms: Callable[[], int],
        log: Log = no_log,
        context: ContextReader | None = None,
        looks: bool = False,
    ) -> None:
        self.contract, self.store, self.signer = contract, store, signer
        if not looks:  # else its key has sealed nothing: texts of a lost key would pass for another's
            store.unlock(Keyring(signer))
        self.rules, self.context = Rules(contract), context or NoContext(contract)
        self._now_ms, self.log = now_ms, log
        # None for an agent, which acts on events. A saga's step acts on the authorization of its saga.
        self.authorization: intake.ChildAuthorization | None = None
        self.dispatcher = Dispatcher(contract, store, executor, signer, now_ms=now_ms, log=log)
        listing = self.dispatcher.statement if self.dispatcher.executor.lists else None
        within_ms = 2 * contract.budget.dispatch_ms_max  # before it is sent, and until it arrives
        self.whole = Wholeness(store, contract.gate, listing, now_ms=now_ms, sent_within_ms=within_ms)
        self._observer = Observer(contract, store, source, self.context, self.rules)
        self._committer = Committer(contract, store, signer, self.context, self.whole, now_ms=now_ms, log=log)
        self._safeguards = safeguards_of(contract)
        self.tolerances = jit.tolerances(contract)
        if registry.lookup(store, contract.agent_id) is None:
            raise UsageError(f"agent `{contract.agent_id}` is not registered in this store")

    @property
    def now_ms(self) -> int:
        """The time by the kernel's clock, in milliseconds since 1970."""
        return self._now_ms()

    def open(
        self, event: intake.Event, *, anew: bool = False, deadline_ms: int | None = None
    ) -> DecisionPacket | Answer:
        """Claim the event and compile its packet, or return the known answer: final, waiting for a human, or pending.

        `anew`: open a fresh flow although the contract permits no more. `deadline_ms`: milliseconds since 1970. After it no
        order is sent, and a flow that has no answer by then ends undecided.
        """
        claimed = intake.claim(
            self.store,
            self.contract,
            event,
            now_ms=self.now_ms,
            authorization=self.authorization,
            anew=anew,
            deadline_ms=deadline_ms,
        )
        if isinstance(claimed, Answer):
            return claimed
        packet = self.compile(claimed)
        if packet.security:
            self.log("security.injection_suspected", {"dfid": packet.dfid, "patterns": packet.security})
        self.log("flow.opened", {"dfid": packet.dfid, "kinds": packet.envelope.names})
        return packet

    def known(self, event: intake.Event) -> Answer | None:
        """Return what `open` would return for an event that needs no deciding, by reading alone. None: call `open`."""
        found = intake.known_event(self.store, self.contract, event, now_ms=self.now_ms)
        if found is not None and not found.pending:
            self.log("stage.known", {"dfid": found.dfid})
        return found

    def preview(self, event: intake.Event) -> DecisionPacket:
        """Compile the packet an event would get now, claiming and recording nothing."""
        return self.compile(intake.ClaimedFlow(intake.PREVIEW, event))

    def decide(self, packet: DecisionPacket, data: bytes, decoding: Decoding | None = None) -> Answer:
        """Judge proposal bytes; if they are accepted and the world has not moved, carry them out exactly once.

        A rejected attempt leaves the flow ACTIVE and may be followed by another, up to the contract's limit.
        Raises UsageError when the flow is no longer open, StoreError when nothing could be recorded.
        """
        decoding = decoding or Decoding()
        flow = {"dfid": packet.dfid}
        seen = self._standing(packet)
        verdict = self.judge(packet, data, decoding, seen)
        self.log("stage.judged", flow)
        report = self.just_in_time(packet, verdict, seen) if verdict.outcome == "ACCEPTED" else None
        order = self.commit(packet, data, decoding, verdict, report)
        self.log("stage.committed", flow)
        if order is not None:
            self.send(order)
            self.log("stage.dispatched", flow)
        return self.answer(packet.dfid)

    def compile(self, claimed: intake.ClaimedFlow) -> DecisionPacket:
        """Read the world, derive the envelope in force, and make the packet of a claimed flow."""
        event, now_ms = claimed.event, self.now_ms
        dfid = "" if claimed.dfid == intake.PREVIEW else claimed.dfid
        live, memory = self._observer.with_memory(event.key, now_ms, dfid=dfid)
        envelope = self.envelope(live.situation)
        return packets.compile_packet(
            self.contract,
            self.rules,
            dfid=claimed.dfid,
            event_id=event.id,
            key=event.key,
            evidence=event.evidence,
            live=with_notes(live, envelope),
            envelope=envelope,
            now_ms=now_ms,
            memory=memory,
            deadline_ms=claimed.deadline_ms,
        )

    def observe(
        self, key: str, now_ms: int, *, dfid: str = "", without: str = "", seen: Seen | None = None
    ) -> LiveState:
        """Read the world: see `Observer.observe`."""
        return self._observer.observe(key, now_ms, dfid=dfid, without=without, seen=seen)

    def envelope(self, situation: EnvelopeInputs) -> DecisionEnvelope:
        """Return the envelope in force: the contract's own, met with every safeguard."""
        return envelope_in_force(self.rules.envelope(situation.fields), situation, self._safeguards)

    def judge(self, packet: DecisionPacket, data: bytes, decoding: Decoding, seen: Seen | None = None) -> Verdict:
        """Return the verdict on proposal bytes, as registry and store stand now. Changes nothing."""
        return dim.judge(self.contract, packet, data, self.authority(packet, seen), decoding, self.now_ms)

    def authority(self, packet: DecisionPacket, seen: Seen | None = None) -> AuthorityState:
        """Return what registry and store say of the packet's flow at the moment of judgement."""
        return authority_state(self.store, packet, seen or self._standing(packet))

    def _standing(self, packet: DecisionPacket) -> Seen:
        """Read once, before judging, what judging and the drift check both need from the record.

        The world is read after this. Whatever changes in the record from here on is found by the reserving transaction.
        """
        counters = spend.scopes(self.contract, packet.situation.fields, packet.snapshot.taken_at_ms).names
        return standing(self.store, self.contract, packet.agent_id, packet.key, packet.dfid, counters)

    def just_in_time(self, packet: DecisionPacket, verdict: Verdict, seen: Seen | None = None) -> JitReport:
        """Read the world again and tell whether an accepted decision still holds. Changes nothing.

        A decision that orders something does not hold while orders may be missing from the record (`Wholeness`).
        """
        doubt = self.whole.doubt() if self.needs_whole_record(verdict) else None
        now_ms = self.now_ms
        age_ms = now_ms - packet.snapshot.taken_at_ms
        if doubt is not None:
            return JitReport(False, age_ms, objections=(doubt.message,), code=doubt.code)
        live = self.observe(packet.key, now_ms, dfid=packet.dfid, seen=seen)
        if verdict.proposal is None or not live.situation.fields:
            return JitReport(False, age_ms, live.notes, code="STATE_DRIFT_DETECTED")
        return jit.check(self.contract, self.tolerances, packet, verdict.proposal, live, self.envelope, now_ms)

    def needs_whole_record(self, verdict: Verdict) -> bool:
        """Tell whether a decision does not hold while orders may be missing from the record: whether it orders something."""
        return verdict.proposal is not None and verdict.proposal.action in self.contract.orders

    def commit(
        self, packet: DecisionPacket, data: bytes, decoding: Decoding, verdict: Verdict, report: JitReport | None
    ) -> ExecutionIntent | None:
        """Reserve and write the outcome of one attempt, in one transaction; return the order to send, if any."""
        return self._committer.commit(Attempt(packet, data, decoding, verdict, report))

    def send(self, order: ExecutionIntent) -> None:
        """Send an order that has just been reserved. Raises StoreError, and sends nothing, where the record has lost it since.

        It was reserved within its lease less `dispatch_ms_max`: so its lease still runs while it may be sent.
        """
        reserved_at_ms, deadline_ms = in_flight.times_ms(self.store, order.dfid)
        until_ms = reserved_at_ms + self.contract.budget.dispatch_ms_max
        self.dispatcher.carry_out(order, until_ms=until_ms, deadline_ms=deadline_ms)

    def with_feedback(self, packet: DecisionPacket) -> DecisionPacket:
        """Return the packet for the next attempt: the same packet with this flow's rejected attempts and the reasons."""
        return packets.with_feedback(packet, feedback(self.store, self.contract, packet.dfid))

    def not_decided(self, packet: DecisionPacket, code: str, message: str) -> Answer:
        """End a flow that got no turn with the model or with its resource. Its event waits and may be sent again."""
        verdict = Verdict("REJECTED", (Reason(1, code, one_line(message, 300)),))
        self._committer.not_decided(Attempt(packet, b"", Decoding(), verdict))
        return self.answer(packet.dfid)

    def escalate(self, packet: DecisionPacket, code: str, message: str) -> Answer:
        """Hand the flow to a human because the user space failed: no model, no answer in time, a dead mask."""
        verdict = Verdict("ESCALATED", (Reason(1, code, one_line(message, 300)),))
        self.commit(packet, b"", Decoding(), verdict, None)
        return self.answer(packet.dfid)

    def holder(self, key: str) -> str | None:
        """Return the status, PENDING or UNKNOWN, of the order that holds resources of this key. None: nothing is held."""
        return reservations.holder(self.store, self.contract, key)

    def still_valid(self, order: ExecutionIntent) -> bool:
        """Tell whether an order in flight would be reserved again now: same authority, state, artifacts and amounts."""
        now_ms = self.now_ms
        live = self.observe(order.resource_key, now_ms, dfid=order.dfid, without=order.dfid)
        data, read = decision_record.read_basis(self.store, order.dfid)
        if read != tuple(artifact.reference for artifact in live.situation.artifacts):
            return False
        envelope = self.envelope(live.situation)
        return in_flight.is_reservable(self.store, self.contract, order, data, live, envelope, now_ms)

    def answer(self, dfid: str) -> Answer:
        """Return a flow's answer as the record has it now, and log it."""
        found = known_answer(self.store, dfid)
        facts = {"dfid": dfid, "state": found.state, "action": found.action, "reason_code": found.reason_code}
        self.log("flow.decided", {**facts, "tag": found.tag, "execution": found.execution})
        return found
