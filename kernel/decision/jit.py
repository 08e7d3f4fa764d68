"""The just-in-time check (DIR 4.5): is the world still the one the decision was made for? Pure, microseconds.

It asks three questions. Is the snapshot young enough? Has any field moved beyond its tolerance? Does the envelope derived
anew from live state still contain the decision, with the same fills? The packet's own envelope is never relied on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import DriftSpec
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.decision.safeguards import EnvelopeInputs, LiveState
from sds.kernel.envelope.envelope import DecisionEnvelope
from sds.kernel.envelope.proposal import Proposal
from sds.kernel.envelope.state import Fields, Value

SNAPSHOT_AGE = "snapshot age"

Tolerance = tuple[str, int, int]  # path, permitted absolute move (-1: none declared), permitted move in percent


@dataclass(frozen=True, slots=True)
class JitReport:
    """What the check found. `drift`: the fields that moved; `objections`: why the live envelope does not contain the
    decision; `code`: why it no longer holds. `observed`: if it holds, the live state that was checked, and that reserving
    rests on.
    """

    ok: bool
    age_ms: int
    drift: tuple[str, ...] = ()
    objections: tuple[str, ...] = ()
    code: str | None = None
    observed: LiveState | None = None


def tolerances(contract: Contract) -> tuple[Tolerance, ...]:
    """Compile the drift policy: every declared field, which may not move unless the contract says otherwise."""
    found: list[Tolerance] = []
    for path in contract.snapshot:
        rule = contract.drift.fields.get(path, DriftSpec(abs=0))
        found.append((path, -1 if rule.abs is None else rule.abs, -1 if rule.pct is None else rule.pct))
    return tuple(found)


def drift(policy: tuple[Tolerance, ...], then: Fields, now: Fields) -> tuple[str, ...]:
    """Return the paths of fields that moved beyond their tolerance. A value that appeared or vanished has moved."""
    found: list[str] = []
    for path, absolute, percent in policy:
        before, after = then.get(path), now.get(path)
        if (before != after or type(before) is not type(after)) and not _tolerated(before, after, absolute, percent):
            found.append(path)
    return tuple(found)


def _tolerated(before: Value | None, after: Value | None, absolute: int, percent: int) -> bool:
    if type(before) is not int or type(after) is not int:
        return False
    moved = abs(after - before)
    return moved <= absolute if absolute >= 0 else moved * 100 <= percent * abs(before)


def in_age(contract: Contract, packet: DecisionPacket, now_ms: int) -> bool:
    """Tell whether a packet's snapshot may still be acted on: not older than the contract allows, nor from the future."""
    return 0 <= now_ms - packet.snapshot.taken_at_ms <= contract.drift.age_ms_max


def check(
    contract: Contract,
    policy: tuple[Tolerance, ...],
    packet: DecisionPacket,
    proposal: Proposal,
    observed: LiveState,
    derive: Callable[[EnvelopeInputs], DecisionEnvelope],
    now_ms: int,
) -> JitReport:
    """Compare the packet with what is observed now. `derive` returns the envelope in force for a situation."""
    live, age_ms = observed.situation, now_ms - packet.snapshot.taken_at_ms
    if observed.contract_hash != packet.contract_hash:
        return JitReport(False, age_ms, code="CONTRACT_REVOKED")
    if not live.agent_active:
        return JitReport(False, age_ms, code="AGENT_SUSPENDED")
    if live.halted:
        return JitReport(False, age_ms, code="HALTED")
    if not in_age(contract, packet, now_ms):
        return JitReport(False, age_ms, (SNAPSHOT_AGE,), code="STATE_DRIFT_DETECTED")
    moved = drift(policy, packet.situation.fields, live.fields)
    if live.artifacts != packet.situation.artifacts:
        moved = (*moved, "artifacts")
    envelope = derive(live)
    then, now = packet.envelope.kind(proposal.action), envelope.kind(proposal.action)
    objections = tuple(message for _, message in envelope.objections(proposal))
    if now is not None and then is not None and now.fills != then.fills:
        objections = (*objections, "a value the rules fix has changed")
    if moved or objections:
        return JitReport(False, age_ms, moved, objections, code="STATE_DRIFT_DETECTED")
    return JitReport(True, age_ms, observed=observed)
