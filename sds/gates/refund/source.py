"""The refund gate's state source: tickets, their flights and the weather, read live from the airline's database.

Before a flight is due nothing about its outcome is read: not cancelled, no delay, weather unknown. A flight that
departed without an arrival delay on record has no field `flight.arr_delay_min`, so a rule that needs it escalates.
"""

from __future__ import annotations

import re
from pathlib import Path

from sds.gates.databases import DatabaseReaders
from sds.kernel.envelope.state import StateRead, Value

_TICKET_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_READ = """
SELECT version, customer, fare_minor, refunded_minor, compensated, voucher_issued,
       carrier, number, origin, dest, sched_dep_at, due, dep_delay_min, arr_delay_min, distance_m, weather
FROM tickets JOIN flights USING (flight_id) WHERE ticket_id = ?
"""


class TicketSource:
    """Reads tickets from `path`, read-only. Safe in several threads: each read has its own connection."""

    def __init__(self, path: Path) -> None:
        self._readers = DatabaseReaders(path, "tickets", "refund")
        self.close = self._readers.close

    def read(self, key: str) -> StateRead | None:
        """Return the ticket's current fields and version; None for an unknown ticket. Raises StateError."""
        if not _TICKET_ID.fullmatch(key):
            return None
        with self._readers.connection() as db:
            row = db.execute(_READ, (key,)).fetchone()
        return None if row is None else StateRead(_fields(row), str(row[0]))

    def version(self, key: str) -> str | None:
        """Return the ticket's current version: the precondition that an executor checks before it sends."""
        state = self.read(key)
        return state.version if state else None


def _fields(row: tuple[int | str | None, ...]) -> dict[str, Value]:
    (_, customer, fare, refunded, compensated, voucher_issued, carrier, number, origin, dest) = row[:10]
    (sched_dep_at, due, dep_delay, arr_delay, distance_m, weather) = row[10:]
    cancelled = bool(due) and dep_delay is None
    happened = bool(due) and not cancelled
    fields: dict[str, Value | None] = {
        "flight.carrier": carrier,
        "flight.number": number,
        "flight.origin": origin,
        "flight.dest": dest,
        "flight.cancelled": cancelled,
        "flight.due": bool(due),
        "flight.arr_delay_min": arr_delay if happened else 0,
        "flight.dep_delay_min": dep_delay if happened else 0,
        "flight.distance_m": distance_m,
        "flight.sched_dep_at": sched_dep_at,
        "weather.condition": weather if due else "unknown",
        "ticket.customer": customer,
        "ticket.fare_minor": fare,
        "ticket.refundable_minor": int(fare or 0) - int(refunded or 0),
        "ticket.compensations_left": 0 if compensated else 1,
        "ticket.vouchers_left": 0 if voucher_issued else 1,
    }
    return {name: value for name, value in fields.items() if value is not None}
