"""A human resolves what waits for them: an escalated case, or an order that nobody else can tell the end of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from sds.kernel.executor.protocol import Receipt
from sds.kernel.flow.answer import Answer
from sds.kernel.flow.dispatch import Log, no_log
from sds.kernel.flow.kernel import Kernel
from sds.kernel.human.attestation import attest
from sds.kernel.human.review import HumanReview, Resolution

Resolve = Literal["OVERRIDE", "MODIFY", "ABORT", "SETTLED", "REJECTED"]


def resolve(
    kernel: Kernel,
    dfid: str,
    decision: Resolve,
    *,
    who: str,
    reason: str,
    change: str = "",
    seen: str = "",
    reference: str = "",
    acknowledge: bool = False,
    now_ms: Callable[[], int],
    log: Log = no_log,
) -> Answer:
    """Carry out what a human decided, or record what they found out; return the answer the flow then has.

    OVERRIDE, MODIFY (`change`: the JSON of another decision) and ABORT are for an escalated flow; SETTLED (with its
    `reference` outside) and REJECTED for an order that is UNKNOWN. Raises UsageError or WorldError when it is refused.
    """
    if decision == "SETTLED" or decision == "REJECTED":  # noqa: PLR1714  one by one, so that the type is narrowed
        receipt = Receipt("settled" if decision == "SETTLED" else "rejected", reference=reference)
        return attest(kernel, dfid, receipt, who=who, reason=reason, acknowledged=acknowledge, now_ms=now_ms())
    wanted = Resolution(decision, who, reason, change, seen, acknowledge)
    return HumanReview(kernel, now_ms=now_ms, log=log).resolve(dfid, wanted)
