"""From a policy's decision to the bytes of a proposal within an envelope. Pure."""

from __future__ import annotations

from sds.kernel.contract.policy import Proposed
from sds.kernel.envelope.envelope import DecisionEnvelope, format_literal
from sds.kernel.envelope.proposal import Proposal, write_proposal


def written(envelope: DecisionEnvelope, proposed: Proposed, context_ref: str) -> bytes | None:
    """Return the proposal's bytes; None where the envelope lacks the kind or has other parameters for it."""
    permitted = envelope.kind(proposed.action)
    if permitted is None or {name for name, _ in permitted.params} != {name for name, _ in proposed.params}:
        return None
    values = dict(proposed.params)
    numbers = tuple((name, format_literal(values[name], bound.scale)) for name, bound in permitted.params)
    return write_proposal(Proposal(proposed.action, numbers, proposed.reason, context_ref))


def permits(envelope: DecisionEnvelope, proposed: Proposed) -> bool:
    """Return whether a policy's decision lies within an envelope."""
    data = written(envelope, proposed, "0" * 64)
    return data is not None and envelope.contains(data)
