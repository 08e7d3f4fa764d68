"""The executor of the fraud gate: releases a payment, or holds it for some minutes. Every key has at most one effect."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from sds.kernel.errors import ExecutorError, StateError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.executor.statement import StatementLine

from .holds import ALLOW, BUSY_S, CHALLENGE, Answered, HoldOrder, Holds

PARAMETERS = {ALLOW: "amount", CHALLENGE: "minutes"}


class HoldExecutor:
    """Carries out the kernel's orders in the file of the holds. Safe in several threads, and idempotent.

    `version_of` (the state source's) is the precondition: an order for a payment that has moved is refused. It is checked
    under the lock of the holds, so no other order comes between. The bank's file is another, and may move after it.
    """

    idempotent = True

    def __init__(self, path: Path, version_of: Callable[[str], str | None], now_ms: Callable[[], int]) -> None:
        self.holds, self._version_of = Holds(path, now_ms), version_of

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        """Release the payment, or hold it, under `key`."""
        name = PARAMETERS.get(intent.kind)
        if [each for each, _ in intent.params] != [name] or intent.params[0][1] <= 0:
            return Receipt(
                "rejected", detail=f"{intent.kind} does not carry exactly one amount or time; nothing was done"
            )
        order = HoldOrder(key, intent.dfid, intent.kind, intent.resource_key, intent.params[0][1])
        return _receipt(self.holds.order(order, lambda: self._moved(intent), busy_s=min(deadline_s, BUSY_S)))

    def _moved(self, intent: ExecutionIntent) -> str:
        try:
            moved = self._version_of(intent.resource_key) != intent.state_version
        except StateError as error:
            return f"the payment cannot be read: {error}"[:200]
        return "the payment has changed" if moved else ""

    def lookup(self, key: str, deadline_s: float) -> Receipt:  # noqa: ARG002  it is quick
        """Return the outcome of `key`."""
        return _receipt(self.holds.find(key))

    def void(self, key: str, deadline_s: float) -> Receipt:  # noqa: ARG002  it is quick
        """Make sure that `key` never has an effect; a key that had its effect before is `settled`."""
        return _receipt(self.holds.void(key))

    def statement(self, since_ms: int, until_ms: int) -> Iterator[StatementLine]:
        """Yield every order of this time span in its current state. Raises ExecutorError."""
        try:
            listed = self.holds.listed(since_ms, until_ms)
        except sqlite3.Error as error:
            raise ExecutorError(f"the holds cannot be read: {error}") from error
        for order, answered, at_ms in listed:
            yield StatementLine(
                key=order.key,
                outcome="settled" if answered.outcome == "settled" else "rejected",
                at_ms=at_ms,
                amount_minor=order.quantity if order.kind == ALLOW else None,
                reference=_reference(answered),
                dfid=order.dfid,
                kind=order.kind,
                params={PARAMETERS[order.kind]: order.quantity},
                resource_key=order.payment_id,
            )


def _receipt(answered: Answered) -> Receipt:
    if answered.outcome == "settled":
        return Receipt("settled", reference=_reference(answered))
    if answered.outcome == "absent":
        return Receipt("absent")
    return Receipt("rejected", detail=f"{answered.why}; nothing was done")


def _reference(answered: Answered) -> str:
    return f"ORD-{answered.number:08d}" if answered.outcome == "settled" else ""
