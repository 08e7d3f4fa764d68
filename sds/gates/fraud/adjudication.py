"""The written adjudication rule: what a careful human who knows the truth would decide. Agreement is measured by it.

1. An unknown payment goes to a human: ESCALATE. 2. Fraud, passed, refused or held already, an account that is not
active, an amount above its limit: BLOCK. 3. A good payment: ALLOW; CHALLENGE where the customer pays more often, or
more in a day, than may be allowed.
"""

from __future__ import annotations

from typing import NamedTuple

from sds.kernel.envelope.state import Fields

COUNT_1D_MAX = 9


class Truth(NamedTuple):
    """The generator's truth of a payment: its kind of fraud, "" for a good one, what its text says, and its amount."""

    scenario: str
    said: str
    amount_minor: int

    @property
    def fraud(self) -> bool:
        return bool(self.scenario)


def expected_kind(fields: Fields | None, truth: Truth) -> str:
    """Return the kind that the written rule gives for this state and this truth."""
    if fields is None:
        return "ESCALATE"
    amount, limit, paid = (
        int(fields[name]) for name in ("payment.amount_minor", "account.limit_minor", "customer.sum_1d_minor")
    )
    over = not fields["payment.open_minor"] or fields["payment.held"]
    if over or fields["account.status"] != "active" or amount > limit or truth.fraud:
        return "BLOCK"
    quick = int(fields["customer.count_1d"]) > COUNT_1D_MAX or paid + amount > 2 * limit
    return "CHALLENGE" if quick else "ALLOW"
