"""Safeguards: each is a narrowing `(full, situation) -> DecisionEnvelope`, and none can widen.

`full` is always the contract's own envelope, never another safeguard's output. The envelope in force is the meet of all of
them. A safeguard that raises leaves `ESCALATE_ONLY`. A spend limit that leaves nothing for a kind escalates instead of
dropping the kind: an exhausted limit must not read as a denial of the claim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from sds.kernel.contract.sections import ContractFields
from sds.kernel.decision.context import Artifact
from sds.kernel.envelope.envelope import (
    ESCALATE,
    ESCALATE_ONLY,
    MAGNITUDE_MAX,
    Bound,
    DecisionEnvelope,
    KindBound,
    bound,
    envelope_of,
    meet,
)
from sds.kernel.envelope.state import Fields


@dataclass(frozen=True, slots=True)
class EnvelopeInputs:
    """Everything besides the contract that an envelope depends on.

    `fields`: live state less what is reserved. `spend_left`: minor units left under the tightest limit, None without a
    limit. `agent_active`: the registry has the agent active, and the flow is under the contract of this kernel. `halted`:
    an operator has halted the system, or the agent is not registered. `context_whole`: memory and artifacts could be read
    and are within their limits.
    """

    fields: Fields
    agent_active: bool
    in_effect: bool
    halted: bool
    spend_left: int | None
    context_whole: bool
    artifacts: tuple[Artifact, ...] = ()


@dataclass(frozen=True, slots=True)
class LiveState:
    """One reading of the world. `version` is the source's. `epochs` are those of the resources behind the fields, read
    before the state. `contract_hash`: of the contract the flow is under, "" when that is revoked. `notes` say why only the
    human is left.
    """

    situation: EnvelopeInputs
    version: str
    epochs: Mapping[str, int]
    contract_hash: str
    notes: tuple[str, ...] = ()


Safeguard = Callable[[DecisionEnvelope, EnvelopeInputs], DecisionEnvelope]


def envelope_in_force(
    full: DecisionEnvelope, situation: EnvelopeInputs, safeguards: tuple[Safeguard, ...]
) -> DecisionEnvelope:
    """Return the meet of the contract's envelope with those of all safeguards."""
    try:
        return meet(full, *(narrow(full, situation) for narrow in safeguards))
    except Exception:  # noqa: BLE001  fail closed: a broken safeguard leaves only the human
        return ESCALATE_ONLY


def safeguards_of(contract: ContractFields, *, for_human: bool = False) -> tuple[Safeguard, ...]:
    """Return the safeguards that every contract is under. For a human an exhausted limit drops the kind: a human can tell
    that from a denial, and has nobody to escalate to.
    """

    def draws(full: DecisionEnvelope, situation: EnvelopeInputs) -> DecisionEnvelope:
        """No kind draws more from a field than is there."""
        return _narrowed(full, [_within_draws(contract, kind, situation.fields) for kind in full.kinds])

    def spend(full: DecisionEnvelope, situation: EnvelopeInputs) -> DecisionEnvelope:
        """No kind spends more than is left, or a negative amount. When nothing is left for a kind, only the human is."""
        left = MAGNITUDE_MAX if situation.spend_left is None else situation.spend_left
        kinds = [_within_spend(contract, kind, left) for kind in full.kinds]
        return ESCALATE_ONLY if None in kinds and not for_human else _narrowed(full, kinds)

    return (standing, draws, spend)


def _narrowed(full: DecisionEnvelope, kinds: list[KindBound | None]) -> DecisionEnvelope:
    """Return the envelope of these kinds, which are in the order of `full`'s; `full` itself when none was narrowed."""
    if all(kind is was for kind, was in zip(kinds, full.kinds, strict=True)):
        return full
    return envelope_of((kind for kind in kinds if kind is not None), full.rationale_chars_max, refusal=full.refusal)


def standing(full: DecisionEnvelope, situation: EnvelopeInputs) -> DecisionEnvelope:
    """Leave only the human while the system is halted, the agent is not active, its contract is not in effect, or the model
    could not be given everything that it must read.
    """
    able = situation.agent_active and situation.in_effect and situation.context_whole
    return full if able and not situation.halted else ESCALATE_ONLY


def standing_notes(situation: EnvelopeInputs, effective_from: str) -> list[str]:
    """Say in words what `standing` objects to, except that the context is not whole. `effective_from`: the contract's."""
    found = [] if situation.agent_active else ["the agent is not active under this contract"]
    found += [] if situation.in_effect else [f"the contract is in effect only from {effective_from} (UTC) on"]
    return [*found, "an operator has halted the system"] if situation.halted else found


def with_notes(live: LiveState, envelope: DecisionEnvelope) -> LiveState:
    """Add a note on why only the human is left, when there is none yet."""
    if live.notes or envelope.names != (ESCALATE,):
        return live
    return replace(live, notes=("the contract's rules or limits leave only ESCALATE",))


def _within_draws(contract: ContractFields, kind: KindBound, fields: Fields) -> KindBound | None:
    """Narrow a kind to what the fields that it draws on still hold; None when nothing is left of it."""
    spec = contract.kinds.get(kind.kind)
    for path, drawn in (spec.draws if spec else {}).items():
        left = fields.get(path)
        if type(left) is not int:
            return None
        narrowed = _at_most(kind, drawn, left)
        if narrowed is None:
            return None
        kind = narrowed
    return kind


def _within_spend(contract: ContractFields, kind: KindBound, left: int) -> KindBound | None:
    spec = contract.kinds.get(kind.kind)
    return kind if spec is None or spec.spends is None else _at_most(kind, spec.spends, left)


def _at_most(kind: KindBound, name: str | int, limit: int) -> KindBound | None:
    """Narrow one number of a kind to 0..`limit` minor units; None when no value of it is left.

    A negative value is never permitted: to draw or spend it would give others what was never there.
    """
    if isinstance(name, int):
        return kind if name <= limit else None
    for fill, value, _ in kind.fills:
        if fill == name:
            return kind if 0 <= value <= limit else None
    params: list[tuple[str, Bound]] = []
    for param, allowed in kind.params:
        if param == name and allowed.lo >= 0 and allowed.hi <= limit:
            return kind
        narrowed = _capped(allowed, limit) if param == name else allowed
        if narrowed is None:
            return None
        params.append((param, narrowed))
    return KindBound(kind.kind, kind.reasons, tuple(params), kind.fills)


def _capped(allowed: Bound, limit: int) -> Bound | None:
    lo, hi = max(0, allowed.lo), min(limit, allowed.hi)
    return bound(lo, hi, step=allowed.step, residue=allowed.residue, scale=allowed.scale) if lo <= hi else None
