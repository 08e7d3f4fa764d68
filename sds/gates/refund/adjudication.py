"""The written adjudication rule: what a careful human would decide. Agreement is measured by it; it binds nobody.

1. An unknown ticket, or a flight whose delay is not on record, goes to a human: ESCALATE.
2. Not yet due, nothing left to refund, or compensated before: DENY.
3. Circumstances are extraordinary when the stated cause is a strike of air traffic control, a security alert or a
   bird strike, or when it is the weather and the record shows severe weather at the origin. A weather claim that the
   record contradicts is ordinary. So is a claim that states no cause, because the carrier bears the burden of proof.
4. Cancelled, or at least 180 minutes late on arrival, and ordinary: COMPENSATE.
5. Cancelled, or at least 300 minutes late on departure: the fare is owed whatever the circumstances: REFUND_TICKET.
6. Stated weather with no measurement on record, where it would decide about COMPENSATE: ESCALATE.
7. At least 60 and under 180 minutes late, ordinary, no voucher yet, and the fare worth one: VOUCHER.
8. Everything else: DENY.
"""

from __future__ import annotations

from sds.gates.refund.world.claims import SEVERE, Cause
from sds.kernel.envelope.state import Fields

COMPENSATE_DELAY_MIN = 180
REFUND_DELAY_MIN = 300
VOUCHER_DELAY_MIN = 60
VOUCHER_FARE_MINOR = 1_000

_EXTRAORDINARY = frozenset({Cause.ATC_STRIKE, Cause.SECURITY, Cause.BIRD_STRIKE})
_NEEDED = (
    "flight.due",
    "flight.cancelled",
    "flight.arr_delay_min",
    "flight.dep_delay_min",
    "weather.condition",
    "ticket.fare_minor",
    "ticket.refundable_minor",
    "ticket.compensations_left",
    "ticket.vouchers_left",
)


def expected_action(fields: Fields | None, cause: Cause) -> str:
    """Return the action that the written rule gives for this state and this stated cause."""
    if fields is None or any(name not in fields for name in _NEEDED):
        return "ESCALATE"
    if not fields["flight.due"] or not fields["ticket.refundable_minor"] or not fields["ticket.compensations_left"]:
        return "DENY"
    compensable = fields["flight.cancelled"] or _at_least(fields, "flight.arr_delay_min", COMPENSATE_DELAY_MIN)
    ordinary = not _extraordinary(fields, cause)
    unproven = cause is Cause.WEATHER and fields["weather.condition"] == "unknown"
    if compensable and ordinary and not unproven:
        return "COMPENSATE"
    if fields["flight.cancelled"] or _at_least(fields, "flight.dep_delay_min", REFUND_DELAY_MIN):
        return "REFUND_TICKET"
    if compensable:
        return "ESCALATE" if unproven else "DENY"
    return "VOUCHER" if ordinary and _voucher_fits(fields) else "DENY"


def _extraordinary(fields: Fields, cause: Cause) -> bool:
    return cause in _EXTRAORDINARY or (cause is Cause.WEATHER and fields["weather.condition"] in SEVERE)


def _voucher_fits(fields: Fields) -> bool:
    late = _at_least(fields, "flight.arr_delay_min", VOUCHER_DELAY_MIN)
    return late and bool(fields["ticket.vouchers_left"]) and _at_least(fields, "ticket.fare_minor", VOUCHER_FARE_MINOR)


def _at_least(fields: Fields, name: str, least: int) -> bool:
    value = fields[name]
    return isinstance(value, int) and value >= least
