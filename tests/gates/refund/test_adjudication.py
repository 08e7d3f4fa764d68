"""The written adjudication rule, one line of it after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sds.gates.refund.adjudication import expected_action
from sds.gates.refund.world.claims import Cause
from sds.kernel.envelope.state import Value

ORDINARY: dict[str, Value] = {
    "flight.due": True,
    "flight.cancelled": False,
    "flight.arr_delay_min": 200,
    "flight.dep_delay_min": 190,
    "weather.condition": "clear",
    "ticket.fare_minor": 20_000,
    "ticket.refundable_minor": 20_000,
    "ticket.compensations_left": 1,
    "ticket.vouchers_left": 1,
}


def adjudications() -> Iterator[tuple[str, dict[str, Value], Cause]]:
    """One line of the written rule each."""
    yield "COMPENSATE", {}, Cause.TECHNICAL
    yield "COMPENSATE", {"flight.cancelled": True}, Cause.UNSTATED
    yield "COMPENSATE", {}, Cause.WEATHER
    yield "DENY", {}, Cause.ATC_STRIKE
    yield "DENY", {"weather.condition": "storm"}, Cause.WEATHER
    yield "COMPENSATE", {"weather.condition": "storm"}, Cause.CREW
    yield "ESCALATE", {"weather.condition": "unknown"}, Cause.WEATHER
    yield "REFUND_TICKET", {"flight.cancelled": True}, Cause.SECURITY
    yield "REFUND_TICKET", {"flight.dep_delay_min": 300}, Cause.BIRD_STRIKE
    yield "REFUND_TICKET", {"flight.cancelled": True, "weather.condition": "unknown"}, Cause.WEATHER
    yield "VOUCHER", {"flight.arr_delay_min": 179}, Cause.CREW
    yield "VOUCHER", {"flight.arr_delay_min": 60}, Cause.LATE_INBOUND
    yield "DENY", {"flight.arr_delay_min": 59}, Cause.CREW
    yield "DENY", {"flight.arr_delay_min": 100}, Cause.ATC_STRIKE
    yield "DENY", {"flight.arr_delay_min": 100, "ticket.vouchers_left": 0}, Cause.CREW
    yield "DENY", {"flight.arr_delay_min": 100, "ticket.fare_minor": 560}, Cause.CREW
    yield "DENY", {"flight.due": False}, Cause.CREW
    yield "DENY", {"ticket.refundable_minor": 0}, Cause.CREW
    yield "DENY", {"ticket.compensations_left": 0}, Cause.CREW


class TestAdjudication:
    @pytest.mark.parametrize(("expected", "changes", "cause"), list(adjudications()))
    def test_the_written_rule(self, expected: str, changes: dict[str, Value], cause: Cause) -> None:
        assert expected == expected_action({**ORDINARY, **changes}, cause)

    @pytest.mark.parametrize("missing", sorted(ORDINARY))
    def test_a_missing_field_goes_to_a_human(self, missing: str) -> None:
        fields = {name: value for name, value in ORDINARY.items() if name != missing}

        assert "ESCALATE" == expected_action(fields, Cause.TECHNICAL)

    def test_an_unknown_ticket_goes_to_a_human(self) -> None:
        assert "ESCALATE" == expected_action(None, Cause.TECHNICAL)
