"""A human resolves what waits for them: an escalated case, or an order that nobody else can tell the end of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sds.kernel.executor.protocol import Receipt
from sds.kernel.flow.answer import Answer
from sds.kernel.flow.dispatch import Log, no_log
from sds.kernel.flow.kernel import Kernel
from sds.kernel.human.attestation import attest
from sds.kernel.human.review import HumanReview, Resolution

Resolve = Literal["OVERRIDE", "MODIFY", "ABORT", "SETTLED", "REJECTED"]


@dataclass(frozen=True, slots=True)
class HumanDecision:
    """What a human decided about what waits for them, or found out about an order that is UNKNOWN.

    `change`: the JSON of another decision, with MODIFY. `seen`: the state they looked at, as the case view names it.
    `reference`: the outside's own id of what was carried out, with SETTLED. `acknowledge`: they know that it is of HIGH
    impact.
    """

    decision: Resolve
    who: str
    reason: str
    change: str = ""
    seen: str = ""
    reference: str = ""
    acknowledge: bool = False


def resolve(
    kernel: Kernel, dfid: str, decided: HumanDecision, *, now_ms: Callable[[], int], log: Log = no_log
) -> Answer:
    """Carry out what a human decided, or record what they found out; return the answer the flow then has.

    OVERRIDE, MODIFY and ABORT are for an escalated flow; SETTLED and REJECTED for an order that is UNKNOWN. Raises
    UsageError or WorldError when it is refused.
    """
    wanted, who, reason, acknowledged = decided.decision, decided.who, decided.reason, decided.acknowledge
    if wanted == "SETTLED" or wanted == "REJECTED":  # noqa: PLR1714  one by one, so that the type is narrowed
        receipt = Receipt("settled" if wanted == "SETTLED" else "rejected", reference=decided.reference)
        return attest(kernel, dfid, receipt, who=who, reason=reason, acknowledged=acknowledged, now_ms=now_ms())
    resolution = Resolution(wanted, who, reason, decided.change, decided.seen, acknowledged)
    return HumanReview(kernel, now_ms=now_ms, log=log).resolve(dfid, resolution)
