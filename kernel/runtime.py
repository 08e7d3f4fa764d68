"""The kernel: open a flow, judge what is proposed, reserve, dispatch once, settle. It contains no model.

    packet = kernel.open(event)          # or the stored answer
    answer = kernel.decide(packet, proposal_bytes, decoding)

Everything is passed in: contract, store, state source, executor, signing key, clock, ids, log. Safe to call from
several threads, and several processes may share one store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from sds.kernel import dim, intake, jit, record, registry, reserve
from sds.kernel.answer import Answer, answer
from sds.kernel.canonical import idempotency_key, one_line
from sds.kernel.contract import Contract
from sds.kernel.dim import Reason, Standing, Verdict
from sds.kernel.dispatch import Dispatcher, Log, no_log
from sds.kernel.envelope import DecisionEnvelope
from sds.kernel.errors import SdsError, UsageError
from sds.kernel.executor import ExecutionIntent, Executor, Signer
from sds.kernel.flow import State, walk
from sds.kernel.governance import Situation, envelope_in_force, safeguards_of
from sds.kernel.jit import JitReport
from sds.kernel.packet import DecisionPacket, Decoding, compile_packet
from sds.kernel.rules import Rules
from sds.kernel.snapshot import take_snapshot
from sds.kernel.state import Fields, StateRead, StateSource
from sds.kernel.store import Store

_NOT_THE_AGENT = frozenset({"AGENT_SUSPENDED", "CONTRACT_REVOKED", "HALTED", "KERNEL_FAULT", "RESOURCE_CONTENTION"})


class Kernel:
    """One gate's kernel over a store. Raises UsageError when the contract is not the registered one."""

    def __init__(
        self,
        contract: Contract,
        store: Store,
        source: StateSource,
        executor: Executor,
        signer: Signer,
        *,
        now_ms: Callable[[], int],
        new_id: Callable[[], str],
        log: Log = no_log,
    ) -> None:
        self.contract, self.store, self.signer = contract, store, signer
        self.rules = Rules(contract)
        self._source = source
        self._now_ms, self._new_id, self._log = now_ms, new_id, log
        self.dispatcher = Dispatcher(contract, store, executor, signer, now_ms=now_ms, log=log)
        self._safeguards = safeguards_of(contract)
        self._tolerances = jit.tolerances(contract)
        self._effective_ms = int(datetime.fromisoformat(contract.effective_from).replace(tzinfo=UTC).timestamp() * 1000)
        if registry.lookup(store, contract.agent_id) is None:
            raise UsageError(f"agent `{contract.agent_id}` is not registered in this store")

    def open(self, event: intake.Event) -> DecisionPacket | Answer:
        """Claim the event and compile its packet; or return what is known: final, or pending elsewhere."""
        claimed = intake.claim(self.store, self.contract, event, dfid=self._new_id(), now_ms=self._now_ms())
        if isinstance(claimed, Answer):
            return claimed
        packet = self._compile(claimed)
        if packet.security:
            self._log("security.injection_suspected", {"dfid": packet.dfid, "patterns": packet.security})
        self._log("flow.opened", {"dfid": packet.dfid, "kinds": packet.envelope.names})
        return packet

    def preview(self, event: intake.Event) -> DecisionPacket:
        """Compile the packet an event would get now, claiming and recording nothing."""
        return self._compile(intake.Claim("preview", event))

    def _compile(self, claimed: intake.Claim) -> DecisionPacket:
        now_ms = self._now_ms()
        situation, version, epochs, notes = self._observe(claimed.event.key, now_ms)
        snapshot = take_snapshot(self.rules.fields, claimed.event.key, situation.fields, version, now_ms)
        return compile_packet(
            self.contract,
            self.rules,
            dfid=claimed.dfid,
            event_id=claimed.event.id,
            key=claimed.event.key,
            evidence=claimed.event.evidence,
            snapshot=snapshot,
            situation=situation,
            envelope=self.envelope(situation),
            epochs=epochs,
            notes=notes,
            now_ms=now_ms,
        )

    def envelope(self, situation: Situation) -> DecisionEnvelope:
        """Return the envelope in force: the contract's own, met with every safeguard."""
        return envelope_in_force(self.rules.envelope(situation.fields), situation, self._safeguards)

    def _observe(self, key: str, now_ms: int) -> tuple[Situation, str, Mapping[str, int], tuple[str, ...]]:
        """Read live state net of what is drawn, and everything else an envelope depends on.

        The epochs are read before the state: a reservation that comes between shows when this decision reserves.
        """
        draws = reserve.read_draws(self.store, self.contract, key)
        read, notes = self._read(key)
        fields: dict[str, bool | int | str] = {}
        if read is not None:
            fields = self._net(read.fields, draws.drawn)
            notes += self.rules.faults(fields)
        known = registry.lookup(self.store, self.contract.agent_id)
        situation = Situation(
            fields=fields,
            agent_active=known is not None and known.active,
            in_effect=now_ms >= self._effective_ms,
            halted=known is not None and known.halted,
            spend_left=reserve.spend_left(self.store, self.contract, reserve.scopes(self.contract, fields, now_ms)),
        )
        return situation, read.version if read else "", draws.epochs, tuple(notes)

    def _read(self, key: str) -> tuple[StateRead | None, list[str]]:
        """Read live state; state that cannot be read, or is none, is state that is not there."""
        try:
            read = self._source.read(key)
            if read is None:
                return None, ["there is no state under this key"]
            read.version.encode()
            return StateRead(dict(read.fields), read.version), []
        except Exception as error:  # noqa: BLE001  a foreign source may fail in any way
            return None, [one_line(f"state cannot be read: {str(error) or type(error).__name__}", 200)]

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
            self.dispatcher.carry_out(intent)
        return self._answer(packet.dfid)

    def escalate(self, packet: DecisionPacket, code: str, message: str, decoding: Decoding | None = None) -> Answer:
        """Hand the flow to a human because the user space failed: no model, no answer in time, a dead mask."""
        verdict = Verdict("ESCALATED", (Reason(1, code, message[:300]),), 1)
        self.conclude(packet, b"", decoding or Decoding(), verdict, None)
        return self._answer(packet.dfid)

    def judge(self, packet: DecisionPacket, data: bytes, decoding: Decoding) -> Verdict:
        """Return the verdict on proposal bytes, as registry and store stand now. Changes nothing."""
        return dim.judge(self.contract, packet, data, self._standing(packet), decoding, self._now_ms())

    def _standing(self, packet: DecisionPacket) -> Standing:
        known = registry.lookup(self.store, packet.agent_id)
        spent = self.store.value("SELECT total(tokens) FROM attempts WHERE dfid = ?", (packet.dfid,))
        return Standing(
            agent_active=known is not None and known.active,
            halted=known is not None and known.halted,
            contract_hash=known.contract_hash if known else "",
            mission_hash=known.mission_hash if known else "",
            held=reserve.read_draws(self.store, self.contract, packet.key).held,
            tokens_spent=int(spent),
        )

    def just_in_time(self, packet: DecisionPacket, verdict: Verdict) -> JitReport:
        """Read the world again and tell whether an accepted decision still holds. Changes nothing."""
        now_ms = self._now_ms()
        live, version, _, notes = self._observe(packet.key, now_ms)
        if verdict.proposal is None or (notes and not live.fields):
            return JitReport(False, now_ms - packet.snapshot.taken_at_ms, notes, code="STATE_DRIFT_DETECTED")
        known = registry.lookup(self.store, packet.agent_id)
        return jit.check(
            self.contract,
            self._tolerances,
            packet,
            verdict.proposal,
            live,
            version,
            known.contract_hash if known else "",
            self.envelope,
            now_ms,
        )

    def conclude(
        self, packet: DecisionPacket, data: bytes, decoding: Decoding, verdict: Verdict, report: JitReport | None
    ) -> ExecutionIntent | None:
        """Reserve and write the outcome of one attempt, in one transaction; return the order to send, if any."""
        with self.store.transaction():
            return self._conclude(packet, data, decoding, verdict, report)

    def _conclude(
        self, packet: DecisionPacket, data: bytes, decoding: Decoding, verdict: Verdict, report: JitReport | None
    ) -> ExecutionIntent | None:
        now_ms = self._now_ms()
        attempt = self._next_attempt(packet)
        if verdict.outcome == "REJECTED":
            self._reject(packet, data, decoding, verdict, attempt, now_ms)
            return None
        intent: ExecutionIntent | None = None
        code = self._revoked(packet, now_ms) if verdict.outcome == "ACCEPTED" else None
        if code is None and report is not None and not report.ok:
            code = report.code or "STATE_DRIFT_DETECTED"
        if code is None and verdict.outcome == "ACCEPTED" and report is not None and verdict.proposal is not None:
            intent, code = self._reserve(packet, verdict, report, now_ms)
        if code is not None:
            why = "; ".join((*report.drift, *report.objections)) if report else ""
            rejected = Verdict(
                "REJECTED", (Reason(5, code, why or code.lower()),), 5, verdict.proposal, verdict.numbers
            )
            self._finish(packet, data, decoding, rejected, report, attempt, "ABORTED", code, now_ms)
        elif verdict.outcome == "ESCALATED":
            self._finish(packet, data, decoding, verdict, report, attempt, "ESCALATED", verdict.reason_code, now_ms)
        else:
            state: State = "EXECUTING" if intent else "CLOSED"
            self._finish(packet, data, decoding, verdict, report, attempt, state, None, now_ms)
        return intent

    def _next_attempt(self, packet: DecisionPacket) -> int:
        earlier = self.store.value(
            "SELECT (SELECT count(*) FROM attempts a WHERE a.dfid = f.dfid) FROM decision_flows f"
            " WHERE f.dfid = ? AND f.state = 'ACTIVE'",
            (packet.dfid,),
        )
        if earlier is None:
            raise UsageError(f"flow `{packet.dfid}` is no longer open", reason_code="FLOW_CLOSED", dfid=packet.dfid)
        return 1 + int(earlier)

    def _revoked(self, packet: DecisionPacket, now_ms: int) -> str | None:
        """Tell, inside the reserving transaction, whether authority has been withdrawn or has run out since."""
        known = registry.lookup(self.store, packet.agent_id)
        if known is None or not known.active:
            return "AGENT_SUSPENDED"
        if known.halted:
            return "HALTED"
        if known.contract_hash != packet.contract_hash:
            return "CONTRACT_REVOKED"
        return "PROPOSAL_EXPIRED" if now_ms > packet.expires_at_ms else None

    def _reserve(
        self, packet: DecisionPacket, verdict: Verdict, report: JitReport, now_ms: int
    ) -> tuple[ExecutionIntent | None, str | None]:
        kind = verdict.proposal.action if verdict.proposal else ""
        if not self.contract.kinds[kind].executes:
            return None, None
        numbers = dict(verdict.numbers)
        needs = reserve.needs_of(self.contract, kind, numbers)
        names = reserve.scopes(self.contract, packet.situation.fields, now_ms)
        code = reserve.take(self.store, self.contract, packet.dfid, packet.key, needs, packet.epochs, names)
        if code is not None:
            return None, code
        key = idempotency_key(packet.dfid, record.STEP_ID, {"action": kind, **numbers})
        unsigned = ExecutionIntent(packet.dfid, key, kind, tuple(sorted(numbers.items())), packet.key, report.version)
        intent = self.signer.signed(unsigned)
        record.write_reservation(self.store, intent, (needs.draws, needs.spends), now_ms)
        return intent, None

    def _reject(
        self, packet: DecisionPacket, data: bytes, decoding: Decoding, verdict: Verdict, attempt: int, now_ms: int
    ) -> None:
        """Keep the attempt and let the flow go on, or end it when the limit is reached or nothing can help."""
        kept = data[: dim.PROPOSAL_KEPT_BYTES_MAX]
        exhausted = attempt >= self.contract.retry.attempts_max
        if verdict.contended:
            self._finish(packet, kept, decoding, verdict, None, attempt, "ABORTED", verdict.reason_code, now_ms)
            return
        if not verdict.final and not exhausted:
            record.write_attempt(self.store, packet.dfid, attempt, kept, verdict, decoding.tokens, now_ms)
        else:
            ends = (reason.code for reason in verdict.reasons if reason.code in dim.FINAL_CODES)
            tag = next(ends, "REASONING_EXHAUSTION")
            self._finish(packet, kept, decoding, verdict, None, attempt, "ABORTED", tag, now_ms)
        self._count_rejection(packet, verdict, now_ms)

    def _count_rejection(self, packet: DecisionPacket, verdict: Verdict, now_ms: int) -> None:
        """Suspend an agent that is rejected too often in a row, or that acts for another mission (DIR 3.5a).

        What an operator or a deployment did while the flow was open is not held against the agent.
        """
        if any(reason.code in _NOT_THE_AGENT for reason in verdict.reasons):
            return
        self.store.run("UPDATE agents SET rejections = rejections + 1 WHERE agent_id = ?", (packet.agent_id,))
        known = registry.lookup(self.store, packet.agent_id)
        if known is None or not known.active:
            return
        dissonant = any(reason.code == "MISSION_DISSONANCE" for reason in verdict.reasons)
        if dissonant or known.rejections >= self.contract.retry.rejections_to_suspend:
            why = "MISSION_DISSONANCE" if dissonant else f"{known.rejections} rejections in a row"
            registry.move(self.store, packet.agent_id, "SUSPENDED", by="runtime", reason=why, now_ms=now_ms)
            self._log("agent.suspended", {"dfid": packet.dfid, "agent_id": packet.agent_id, "reason": why})

    def _finish(
        self,
        packet: DecisionPacket,
        data: bytes,
        decoding: Decoding,
        verdict: Verdict,
        report: JitReport | None,
        attempt: int,
        state: State,
        tag: str | None,
        now_ms: int,
    ) -> None:
        steps: tuple[State, ...] = (
            ("VALIDATING", "ACCEPTED", state) if state in ("EXECUTING", "CLOSED") else ("VALIDATING", state)
        )
        record.write_decision(
            self.store,
            packet,
            data,
            decoding,
            verdict,
            report,
            attempt=attempt,
            state=walk("ACTIVE", *steps),
            tag=tag,
            now_ms=now_ms,
        )
        self.store.run("UPDATE decision_flows SET state = ?, tag = ? WHERE dfid = ?", (state, tag, packet.dfid))
        if verdict.outcome == "ACCEPTED":
            self.store.run("UPDATE agents SET rejections = 0 WHERE agent_id = ? AND rejections > 0", (packet.agent_id,))

    def _answer(self, dfid: str) -> Answer:
        found = answer(self.store, dfid)
        if found is None:
            raise SdsError(f"flow `{dfid}` is not in the record", dfid=dfid)
        facts = {"dfid": dfid, "state": found.state, "action": found.action, "reason_code": found.reason_code}
        self._log("flow.decided", {**facts, "execution": found.execution})
        return found
