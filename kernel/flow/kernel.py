"""The kernel: open a flow, judge what is proposed, reserve, dispatch once, settle. It contains no model.

    packet = kernel.open(event)          # or the stored answer
    answer = kernel.decide(packet, proposal_bytes, decoding)

Everything is passed in: contract, store, state source, executor, signing key, clock, log; ids follow from events. Safe to call from
several threads, and several processes may share one store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from sds.kernel.canonical import in_words, one_line
from sds.kernel.context import memory as context_store
from sds.kernel.context.artifacts import ArtifactReader, CountTokens, read_by
from sds.kernel.context.rationale import explain
from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.snapshot import take_snapshot, well_typed
from sds.kernel.decision import dim, jit
from sds.kernel.decision.dim import AuthorityState, Reason, Verdict
from sds.kernel.decision.jit import JitReport
from sds.kernel.decision.packet import DecisionPacket, Decoding, compile_packet, with_feedback
from sds.kernel.decision.safeguards import EnvelopeInputs, LiveState, envelope_in_force, safeguards_of, standing_notes
from sds.kernel.envelope.envelope import ESCALATE, DecisionEnvelope
from sds.kernel.envelope.proposal import parse_recorded
from sds.kernel.envelope.state import Fields, StateRead, StateSource
from sds.kernel.errors import SdsError, UsageError
from sds.kernel.executor.protocol import ExecutionIntent, Executor, Signer
from sds.kernel.flow import decision_record, intake
from sds.kernel.flow.answer import Answer, answer
from sds.kernel.flow.commit import Committer
from sds.kernel.flow.decision_record import Attempt
from sds.kernel.flow.dispatch import Dispatcher, Log, no_log
from sds.kernel.flow.wholeness import Wholeness
from sds.kernel.registry import registry, reservations, spend
from sds.kernel.registry.authority import authority_now
from sds.kernel.storage.keyring import Keyring
from sds.kernel.storage.store import Store
from sds.kernel.storage.vault import PROPOSAL, Texts

PREVIEW = "preview"  # in the place of a flow's id, in the packet of no flow


def bytes_of(text: str) -> int:
    """Count UTF-8 bytes: no byte-level tokenizer makes more tokens of a text."""
    return len(text.encode())


class Kernel:
    """One gate's kernel over a store. Raises UsageError when the contract's agent is not registered there.

    A flow is under the contract that was registered when it was created. Of flows under another contract than its
    own, or a revoked one, this kernel only escalates.
    `count_tokens`: how long a text is for the model
    that decides, or an upper bound.
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
        count_tokens: CountTokens = bytes_of,
    ) -> None:
        self.contract, self.store, self.signer = contract, store, signer
        store.unlock(Keyring(signer))
        self.rules = Rules(contract)
        self._source = source
        self._now_ms, self.log = now_ms, log
        self._contract_hash = contract.hash
        self._shelf, self._count_tokens = ArtifactReader(store, contract.artifacts, count_tokens), count_tokens
        self._mandate: intake.ChildAuthorization | None = (
            None  # an agent acts on triggers; a step of a saga, on its saga's
        )
        self.dispatcher = Dispatcher(contract, store, executor, signer, now_ms=now_ms, log=log)
        listing = self.dispatcher.statement if self.dispatcher.lists else None
        self.whole = Wholeness(store, contract.gate, listing, now_ms=now_ms)
        self._concluder = Committer(contract, store, signer, now_ms=now_ms, log=log)
        self._safeguards = safeguards_of(contract)
        self._tolerances = jit.tolerances(contract)
        self._effective_ms = int(datetime.fromisoformat(contract.effective_from).replace(tzinfo=UTC).timestamp() * 1000)
        if registry.lookup(store, contract.agent_id) is None:
            raise UsageError(f"agent `{contract.agent_id}` is not registered in this store")

    @property
    def now_ms(self) -> int:
        """The time by the kernel's clock, in milliseconds since 1970."""
        return self._now_ms()

    def open(self, event: intake.Event, *, anew: bool = False) -> DecisionPacket | Answer:
        """Claim the event and compile its packet; or return what is known: final, waiting for a human, or pending.

        `anew`: give it a fresh flow although the contract permits no more.
        """
        claimed = intake.claim(
            self.store, self.contract, event, now_ms=self._now_ms(), mandate=self._mandate, anew=anew
        )
        if isinstance(claimed, Answer):
            return claimed
        packet = self._compile(claimed)
        if packet.security:
            self.log("security.injection_suspected", {"dfid": packet.dfid, "patterns": packet.security})
        self.log("flow.opened", {"dfid": packet.dfid, "kinds": packet.envelope.names})
        return packet

    def preview(self, event: intake.Event) -> DecisionPacket:
        """Compile the packet an event would get now, claiming and recording nothing."""
        return self._compile(intake.Claim(PREVIEW, event))

    def _compile(self, claimed: intake.Claim) -> DecisionPacket:
        now_ms = self._now_ms()
        memory, unread = self._remember(claimed.event.key, now_ms)
        seen = self.observe(claimed.event.key, now_ms, dfid="" if claimed.dfid == PREVIEW else claimed.dfid)
        if unread:
            seen = replace(seen, situation=replace(seen.situation, context_whole=False), notes=(*seen.notes, unread))
        envelope, notes = self.envelope(seen.situation), seen.notes
        if envelope.names == (ESCALATE,) and not notes:
            notes = ("the contract's rules or limits leave only the human",)
        snapshot = take_snapshot(self.rules.fields, claimed.event.key, seen.situation.fields, seen.version, now_ms)
        return compile_packet(
            self.contract,
            self.rules,
            dfid=claimed.dfid,
            event_id=claimed.event.id,
            key=claimed.event.key,
            evidence=claimed.event.evidence,
            snapshot=snapshot,
            situation=seen.situation,
            envelope=envelope,
            notes=notes,
            now_ms=now_ms,
            memory=memory,
        )

    def _remember(self, key: str, now_ms: int) -> tuple[str, str]:
        """Return what the model is told of earlier decisions, or why that cannot be said."""
        try:
            entries = context_store.memory(self.store, self.contract, key, now_ms=now_ms)
            return context_store.memory_text(self.contract.memory, entries, self._count_tokens), ""
        except Exception as error:  # noqa: BLE001  rows and a tokenizer that are not as they should be: a human decides
            return "", one_line(f"memory cannot be read: {in_words(error)}", 200)

    def envelope(self, situation: EnvelopeInputs) -> DecisionEnvelope:
        """Return the envelope in force: the contract's own, met with every safeguard."""
        return envelope_in_force(self.rules.envelope(situation.fields), situation, self._safeguards)

    def observe(self, key: str, now_ms: int, *, dfid: str = "", without: str = "") -> LiveState:
        """Look at the world: live state net of what is drawn, and everything else an envelope depends on.

        A field that is not of its declared type is left out, and `notes` say so: a foreign source may return anything.

        The resources' epochs are read before the state: what is reserved in between shows when this decision
        reserves. `dfid`: the flow it is for; without one, one that would be created now. `without`: an order in the air, looked at as if it had taken nothing.
        """
        draws = reservations.read_draws(self.store, self.contract, key)
        own_draws = reservations.own(self.store, without) if without else {}
        read, notes = self._read(key)
        fields: dict[str, bool | int | str] = {}
        if read is not None:
            taken = {
                p: n - own_draws.get(reservations.resource(self.contract, key, p), 0) for p, n in draws.drawn.items()
            }
            net = self._net(read.fields, taken)
            wrong = self.rules.faults(net)
            fields = well_typed(self.rules.fields, net) if wrong else net
            notes += wrong
        spending = spend.scopes(self.contract, fields, now_ms)
        artifacts, faults = self._shelf.read()
        authority = authority_now(self.store, self.contract.agent_id, dfid)
        situation = EnvelopeInputs(
            fields=fields,
            agent_active=authority.active and authority.contract_hash == self._contract_hash,
            in_effect=now_ms >= self._effective_ms,
            halted=authority.halted,
            spend_left=spend.left(self.store, self.contract, spending, without=without),
            artifacts=artifacts,
            context_whole=not faults,
        )
        notes += [*standing_notes(situation), *faults]
        version = read.version if read else ""
        return LiveState(situation, version, draws.epochs, authority.contract_hash, tuple(notes))

    def _read(self, key: str) -> tuple[StateRead | None, list[str]]:
        """Read live state; state that cannot be read, or is none, is state that is not there."""
        try:
            read = self._source.read(key)
            if read is None:
                return None, ["there is no state under this key"]
            read.version.encode()
            return StateRead(dict(read.fields), read.version), []
        except Exception as error:  # noqa: BLE001  a foreign source may fail in any way
            return None, [one_line(f"state cannot be read: {in_words(error)}", 200)]

    def _net(self, fields: Fields, drawn: Mapping[str, int]) -> dict[str, bool | int | str]:
        net = {spec.path: fields[spec.path] for spec in self.rules.fields if fields.get(spec.path) is not None}
        for path, amount in drawn.items():
            value = net.get(path)
            if amount and type(value) is int:
                net[path] = value - amount
        return net

    def decide(self, packet: DecisionPacket, data: bytes, decoding: Decoding | None = None) -> Answer:
        """Judge proposal bytes; if they are accepted and the world has not moved, carry them out exactly once.

        A rejected attempt leaves the flow ACTIVE and may be followed by another, up to the contract's limit.
        Raises UsageError when the flow is no longer open, StoreError when nothing could be recorded.
        """
        decoding = decoding or Decoding()
        verdict = self.judge(packet, data, decoding)
        report = self.just_in_time(packet, verdict) if verdict.outcome == "ACCEPTED" else None
        intent = self.conclude(packet, data, decoding, verdict, report)
        if intent is not None:
            # within the lease: what is reserved is reserved within the budget, which the lease is longer than by as much
            until_ms = decision_record.reserved_at_ms(self.store, packet.dfid) + self.contract.budget.dispatch_ms_max
            self.dispatcher.carry_out(intent, until_ms=until_ms)
        return self._answer(packet.dfid)

    def told(self, packet: DecisionPacket) -> DecisionPacket:
        """Return the packet for the next attempt: the same, with what this flow has had rejected and why."""
        return with_feedback(packet, context_store.session(self.store, self.contract, packet.dfid))

    def not_decided(self, packet: DecisionPacket, code: str, message: str, decoding: Decoding | None = None) -> Answer:
        """End a flow that got no turn with the model, or with its resource: its event waits and may be sent again."""
        verdict = Verdict("REJECTED", (Reason(1, code, one_line(message, 300)),), 1)
        self._concluder.not_decided(Attempt(packet, b"", decoding or Decoding(), verdict))
        return self._answer(packet.dfid)

    def holder(self, key: str) -> str | None:
        """Return what is known of the order that holds what this key has: PENDING or UNKNOWN; None: it is free."""
        return reservations.holder(self.store, self.contract, key)

    def escalate(self, packet: DecisionPacket, code: str, message: str, decoding: Decoding | None = None) -> Answer:
        """Hand the flow to a human because the user space failed: no model, no answer in time, a dead mask."""
        verdict = Verdict("ESCALATED", (Reason(1, code, one_line(message, 300)),), 1)
        self.conclude(packet, b"", decoding or Decoding(), verdict, None)
        return self._answer(packet.dfid)

    def explain(self, dfid: str, text: str) -> None:
        """Record what the model says, after the decision, of why it decided so. Raises UsageError: it may not be."""
        explain(self.store, self.contract, dfid, text, now_ms=self._now_ms())
        self.log("rationale.recorded", {"dfid": dfid})

    def judge(self, packet: DecisionPacket, data: bytes, decoding: Decoding) -> Verdict:
        """Return the verdict on proposal bytes, as registry and store stand now. Changes nothing."""
        return dim.judge(self.contract, packet, data, self._standing(packet), decoding, self._now_ms())

    def _standing(self, packet: DecisionPacket) -> AuthorityState:
        authority = authority_now(self.store, packet.agent_id, packet.dfid)
        rejected, spent = context_store.rejected(self.store, packet.dfid)
        under = authority.contract_hash == packet.contract_hash
        return AuthorityState(
            agent_active=authority.active,
            halted=authority.halted,
            contract_hash=authority.contract_hash,
            # of another contract there is no mission to compare: gate 2 objects, and a human may still be asked
            mission_hash=authority.mission_hash if under else packet.mission_hash,
            held=reservations.read_draws(self.store, self.contract, packet.key).held,
            tokens_spent=spent,
            rejected=rejected,
        )

    def just_in_time(self, packet: DecisionPacket, verdict: Verdict) -> JitReport:
        """Read the world again and tell whether an accepted decision still holds. Changes nothing.

        Nothing that would be ordered does while the record may not know what has been paid.
        """
        doubt = self.whole.doubt() if verdict.proposal and self.contract.executes(verdict.proposal.action) else None
        now_ms = self._now_ms()
        if doubt is not None:
            age_ms = now_ms - packet.snapshot.taken_at_ms
            return JitReport(False, age_ms, objections=(doubt.message,), code=doubt.code)
        seen = self.observe(packet.key, now_ms, dfid=packet.dfid)
        if verdict.proposal is None or not seen.situation.fields:
            return JitReport(False, now_ms - packet.snapshot.taken_at_ms, seen.notes, code="STATE_DRIFT_DETECTED")
        return jit.check(
            self.contract,
            self._tolerances,
            packet,
            verdict.proposal,
            seen,
            self.envelope,
            now_ms,
        )

    def conclude(
        self, packet: DecisionPacket, data: bytes, decoding: Decoding, verdict: Verdict, report: JitReport | None
    ) -> ExecutionIntent | None:
        """Reserve and write the outcome of one attempt, in one transaction; return the order to send, if any."""
        return self._concluder.conclude(Attempt(packet, data, decoding, verdict, report))

    def still_valid(self, intent: ExecutionIntent) -> bool:
        """Tell whether an order in the air would be reserved again now: same authority, same state, same numbers, and
        counted against the same spend limits.
        """
        now_ms = self.now_ms
        seen = self.observe(intent.resource_key, now_ms, dfid=intent.dfid, without=intent.dfid)
        stored = self.store.value("SELECT proposal FROM policy_proposals WHERE dfid = ?", (intent.dfid,))
        said = Texts(self.store, intent.dfid, shown=True).data(PROPOSAL, stored) if isinstance(stored, bytes) else b""
        proposal = parse_recorded(said)
        if seen.version != intent.state_version or isinstance(proposal, str):
            return False
        if read_by(self.store, intent.dfid) != tuple(a.reference for a in seen.situation.artifacts):
            return False
        if not spend.still_counted(self.store, self.contract, intent.dfid, seen.situation.fields, now_ms):
            return False
        envelope = self.envelope(seen.situation)
        kind = envelope.kind(proposal.action)
        if kind is None or envelope.objections(proposal):
            return False
        return dict(intent.params) == dict(dim.numbers(proposal, kind))

    def _answer(self, dfid: str) -> Answer:
        found = answer(self.store, dfid)
        if found is None:
            raise SdsError(f"flow `{dfid}` is not in the record", dfid=dfid)
        facts = {"dfid": dfid, "state": found.state, "action": found.action, "reason_code": found.reason_code}
        facts["tag"] = found.tag
        self.log("flow.decided", {**facts, "execution": found.execution})
        return found
