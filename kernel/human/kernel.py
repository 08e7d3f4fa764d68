"""The gate's kernel under the terms a human decides under (DIR 4.7): the same store, source, executor and safeguards.

A suspended or paused agent does not stop a human. A halt, a contract not in force and a retired agent do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sds.kernel.contract.compiler import Rules, take_snapshot
from sds.kernel.contract.human_terms import human_contract
from sds.kernel.decision import jit
from sds.kernel.decision.dim import AuthorityState
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.decision.safeguards import LiveState, safeguards_of, standing_notes
from sds.kernel.executor.protocol import ExecutionIntent
from sds.kernel.flow import in_flight
from sds.kernel.flow.commit import Committer
from sds.kernel.flow.decision_record import Attempt
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.observe import Seen
from sds.kernel.human import cases
from sds.kernel.human.cases import Case
from sds.kernel.registry import reservations
from sds.kernel.registry.authority import Authority, authority_now


class HumanKernel(Kernel):
    """A kernel for cases that a human decides. `registered`: the agent's own contract. `contract`: the human's terms."""

    def __init__(self, kernel: Kernel, *, now_ms: Callable[[], int]) -> None:
        vars(self).update(vars(kernel))
        self._now_ms = now_ms
        self.registered, self.contract = kernel.contract, human_contract(kernel.contract)
        self.rules = Rules(self.contract)
        self._safeguards = safeguards_of(self.contract, for_human=True)
        self.tolerances = jit.tolerances(self.contract)
        self._committer = Committer(
            self.contract, self.store, self.signer, self.context, self.whole, now_ms=now_ms, log=kernel.log
        )

    def permits(self, authority: Authority) -> bool:
        """Tell whether a human may act for the agent now."""
        return authority.in_service and authority.contract_hash == self.registered.hash

    def observe(
        self, key: str, now_ms: int, *, dfid: str = "", without: str = "", seen: Seen | None = None
    ) -> LiveState:
        """Read the world as the agent does. Whether its memory and artifacts could be read does not bind a human."""
        live = super().observe(key, now_ms, dfid=dfid, without=without, seen=seen)
        permitted = self.permits(authority_now(self.store, self.contract.agent_id))
        situation = replace(live.situation, agent_active=permitted, context_whole=True)
        of_agent, of_human = (
            standing_notes(each, self.contract.effective_from) for each in (live.situation, situation)
        )
        others = [note for note in live.notes if note not in of_agent]
        return replace(live, situation=situation, notes=(*others, *of_human))

    def packet(self, case: Case, live: LiveState, now_ms: int) -> DecisionPacket:
        """Return what a human decides on: live state and their own envelope. No model reads its texts: they are empty."""
        return DecisionPacket(
            dfid=case.dfid,
            event_id=case.event_id,
            key=case.key,
            agent_id=case.agent_id,
            contract_hash=self.contract.hash,
            mission_hash=self.contract.mission_hash,
            snapshot=take_snapshot(self.rules.fields, case.key, live.situation.fields, live.version, now_ms),
            situation=live.situation,
            envelope=self.envelope(live.situation),
            texts=("", "", ""),
            security=(),
            notes=live.notes,
            created_at_ms=now_ms,
            expires_at_ms=now_ms + self.contract.budget.ttl_ms,
        )

    def authority(self, packet: DecisionPacket, seen: Seen | None = None) -> AuthorityState:  # noqa: ARG002
        """Return what registry and store say at the moment of judgement. A human's decision has no earlier attempts."""
        authority = authority_now(self.store, packet.agent_id)
        permitted = self.permits(authority)
        return AuthorityState(
            agent_active=permitted,
            halted=authority.halted,
            contract_hash=self.contract.hash if permitted else "",
            mission_hash=authority.mission_hash,
            held=reservations.usage(self.store, self.contract, packet.key).held,
        )

    def reserve(self, attempt: Attempt, live: LiveState) -> tuple[ExecutionIntent | None, str | None]:
        """Reserve what an accepted decision takes, in the caller's transaction: (the signed order, why not)."""
        return self._committer.reserve(attempt, live)[:2]

    def still_valid(self, order: ExecutionIntent) -> bool:
        """Tell whether a human's order in flight would be reserved again now, by the terms it was decided under."""
        sql = "SELECT proposal, contract_hash FROM human_decisions WHERE dfid = ?"
        data, decided_under = self.store.row(sql, (order.dfid,)) or (b"", "")
        if decided_under != self.registered.hash:
            return False
        now_ms, case = self.now_ms, cases.read_case(self.store, self.contract, order.dfid)
        live = self.observe(case.key, now_ms, without=order.dfid)
        envelope = self.envelope(live.situation)
        return in_flight.is_reservable(self.store, self.contract, order, data, live, envelope, now_ms)
