"""The just-in-time check (DIR 4.5): is the world still the one the decision was made for? Pure, microseconds.

Three questions: is the snapshot young enough, has any field moved beyond its tolerance, and, if anything at all
has changed, does the envelope derived from what is live now still contain the decision, with the same fills.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sds.kernel.contract import Contract, DriftSpec
from sds.kernel.envelope import DecisionEnvelope
from sds.kernel.governance import Situation
from sds.kernel.packet import DecisionPacket
from sds.kernel.proposal import Proposal
from sds.kernel.state import Fields, Value

Tolerance = tuple[str, int, int]  # path, permitted absolute move (-1: none declared), permitted move in percent


@dataclass(frozen=True, slots=True)
class JitReport:
    """What moved. `drift`: the fields. `rederived`: the envelope was derived again from live state.

    `version`: the source's version of the state that was found good, the executor's precondition.
    """

    ok: bool
    age_ms: int
    drift: tuple[str, ...] = ()
    objections: tuple[str, ...] = ()
    rederived: bool = False
    code: str | None = None
    version: str = ""


def tolerances(contract: Contract) -> tuple[Tolerance, ...]:
    """Compile the drift policy: every declared field, strict unless the contract says otherwise."""
    found: list[Tolerance] = []
    for path in contract.snapshot:
        rule = contract.drift.fields.get(path, DriftSpec(abs=0))
        found.append((path, -1 if rule.abs is None else rule.abs, -1 if rule.pct is None else rule.pct))
    return tuple(found)


def drift(policy: tuple[Tolerance, ...], then: Fields, now: Fields) -> tuple[str, ...]:
    """Return the paths that moved beyond their tolerance; a value that appeared or vanished has moved."""
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


def _same_types(then: Fields, now: Fields) -> bool:
    """Tell `1` from `True`, which are equal in Python and not in a contract."""
    return all(type(now[path]) is type(value) for path, value in then.items())


def check(
    contract: Contract,
    policy: tuple[Tolerance, ...],
    packet: DecisionPacket,
    proposal: Proposal,
    live: Situation,
    version: str,
    contract_hash: str,
    derive: Callable[[Situation], DecisionEnvelope],
    now_ms: int,
) -> JitReport:
    """Compare the packet with the live situation. `derive` gives the envelope in force for a situation."""
    age_ms = now_ms - packet.snapshot.taken_at_ms
    if not live.agent_active:
        return JitReport(False, age_ms, code="AGENT_SUSPENDED")
    if live.halted:
        return JitReport(False, age_ms, code="HALTED")
    if contract_hash != packet.contract_hash:
        return JitReport(False, age_ms, code="CONTRACT_REVOKED")
    if not 0 <= age_ms <= contract.drift.age_ms_max:
        return JitReport(False, age_ms, ("snapshot age",), code="STATE_DRIFT_DETECTED")
    if live == packet.situation and _same_types(packet.situation.fields, live.fields):
        return JitReport(True, age_ms, version=version)
    moved = drift(policy, packet.situation.fields, live.fields)
    envelope = derive(live)
    then, now = packet.envelope.kind(proposal.action), envelope.kind(proposal.action)
    objections = tuple(message for _, message in envelope.objections(proposal))
    if now is not None and then is not None and now.fills != then.fills:
        objections = (*objections, "a value the rules fix has changed")
    if moved or objections:
        return JitReport(False, age_ms, moved, objections, rederived=True, code="STATE_DRIFT_DETECTED")
    return JitReport(True, age_ms, rederived=True, version=version)
