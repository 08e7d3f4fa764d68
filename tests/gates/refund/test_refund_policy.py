"""The refund gate's policy, at each of its boundaries: exactly the permitted kinds, exactly their bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.schema import load_contract
from sds.kernel.decision.safeguards import EnvelopeInputs, envelope_in_force, safeguards_of
from sds.kernel.envelope.envelope import ESCALATE_ONLY, Bound, DecisionEnvelope
from sds.kernel.envelope.state import Value

CONTRACT = load_contract(Path(__file__).parents[3] / "sds" / "gates" / "refund" / "contract.yaml")
RULES = Rules(CONTRACT)
FARE = 20_000
# On time, due, nothing refunded, nothing paid: every test says what is different.
ON_TIME: dict[str, Value] = {
    "flight.carrier": "UA",
    "flight.number": 1545,
    "flight.origin": "EWR",
    "flight.dest": "IAH",
    "flight.cancelled": False,
    "flight.due": True,
    "flight.arr_delay_min": 0,
    "flight.dep_delay_min": 0,
    "flight.distance_m": 1_000_000,
    "flight.sched_dep_at": 1_385_000_000,
    "weather.condition": "clear",
    "ticket.customer": "c-1",
    "ticket.fare_minor": FARE,
    "ticket.refundable_minor": FARE,
    "ticket.compensations_left": 1,
    "ticket.vouchers_left": 1,
}
ALWAYS = {"DENY", "ESCALATE"}


def envelope(spend_left: int | None = None, /, **changes: Value | None) -> DecisionEnvelope:
    named = {name.replace("_", ".", 1): value for name, value in changes.items()}
    fields = {path: value for path, value in {**ON_TIME, **named}.items() if value is not None}
    now = EnvelopeInputs(
        fields, agent_active=True, in_effect=True, halted=False, spend_left=spend_left, context_whole=True
    )
    return envelope_in_force(RULES.envelope(fields), now, safeguards_of(CONTRACT))


def kinds(**changes: Value | None) -> set[str]:
    return set(envelope(**changes).names)


def compensation(**changes: Value | None) -> int | None:
    found = envelope(**changes).kind("COMPENSATE")
    return None if found is None else found.fills[0][1]


def amounts(kind: str, **changes: Value | None) -> Bound | None:
    found = envelope(**changes).kind(kind)
    return None if found is None else dict(found.params)["amount"]


@pytest.mark.parametrize(
    ("arrival", "departure", "cancelled", "expected"),
    [
        (-10, -5, False, set()),
        (0, 0, False, set()),
        (59, 59, False, set()),
        (60, 0, False, {"VOUCHER"}),
        (179, 299, False, {"VOUCHER"}),
        (179, 300, False, {"VOUCHER", "REFUND_TICKET"}),
        (180, 0, False, {"COMPENSATE"}),
        (180, 299, False, {"COMPENSATE"}),
        (180, 300, False, {"COMPENSATE", "REFUND_TICKET"}),
        (59, 300, False, {"REFUND_TICKET"}),
        (300, 299, False, {"COMPENSATE"}),
        (1272, 1301, False, {"COMPENSATE", "REFUND_TICKET"}),
        (0, 0, True, {"COMPENSATE", "REFUND_TICKET"}),
    ],
)
def test_the_delay_decides_which_kinds_are_permitted(arrival: int, departure: int, cancelled: bool, expected: set[str]):
    found = kinds(flight_arr_delay_min=arrival, flight_dep_delay_min=departure, flight_cancelled=cancelled)
    assert ALWAYS | expected == found


@pytest.mark.parametrize(
    ("metres", "delay", "minor"),
    [
        (1, 180, 25_000),
        (1_500_000, 180, 25_000),
        (1_500_000, 1000, 25_000),
        (1_500_001, 180, 40_000),
        (3_500_000, 239, 40_000),
        (3_500_000, 240, 40_000),
        (3_500_001, 180, 30_000),
        (3_500_001, 239, 30_000),
        (3_500_001, 240, 60_000),
        (8_000_000, 1000, 60_000),
        (8_000_000, 179, None),
    ],
)
def test_article_7_fixes_the_compensation(metres: int, delay: int, minor: int | None):
    assert minor == compensation(flight_distance_m=metres, flight_arr_delay_min=delay)


@pytest.mark.parametrize(
    ("metres", "minor"), [(1_500_000, 25_000), (1_500_001, 40_000), (3_500_000, 40_000), (3_500_001, 60_000)]
)
def test_a_cancelled_flight_is_compensated_in_full(metres: int, minor: int):
    assert minor == compensation(flight_distance_m=metres, flight_cancelled=True)


def test_the_compensation_is_not_the_models_to_say():
    found = envelope(flight_cancelled=True).kind("COMPENSATE")
    assert found is not None
    assert () == found.params
    assert (("amount", 25_000, 2),) == found.fills


@pytest.mark.parametrize("left", [1, 2, 4_999, FARE - 1, FARE])
def test_a_refund_is_from_one_cent_to_what_is_left_of_the_fare(left: int):
    assert Bound(1, left, 1, 0, 2) == amounts("REFUND_TICKET", flight_cancelled=True, ticket_refundable_minor=left)


def test_a_partial_refund_only_lowers_the_bound():
    whole, part = (kinds(flight_cancelled=True, ticket_refundable_minor=left) for left in (FARE, 1))
    assert whole == part == ALWAYS | {"COMPENSATE", "REFUND_TICKET"}
    assert 25_000 == compensation(flight_cancelled=True, ticket_refundable_minor=1)


@pytest.mark.parametrize(
    ("fare", "expected"),
    [
        (50_000, Bound(1_000, 15_000, 500, 0, 2)),
        (15_000, Bound(1_000, 15_000, 500, 0, 2)),
        (14_999, Bound(1_000, 14_500, 500, 0, 2)),
        (1_500, Bound(1_000, 1_500, 500, 0, 2)),
        (1_499, Bound(1_000, 1_000, 1, 0, 2)),
        (1_000, Bound(1_000, 1_000, 1, 0, 2)),
        (999, None),
    ],
)
def test_a_voucher_is_a_multiple_of_five_from_ten_to_150_or_the_fare(fare: int, expected: Bound | None):
    assert expected == amounts("VOUCHER", flight_arr_delay_min=60, ticket_fare_minor=fare)


def test_a_voucher_is_given_once():
    assert ALWAYS == kinds(flight_arr_delay_min=60, ticket_vouchers_left=0)


@pytest.mark.parametrize(
    "bar",
    [{"flight_due": False}, {"ticket_refundable_minor": 0}, {"ticket_compensations_left": 0}],
    ids=["not due", "fully refunded", "already compensated"],
)
@pytest.mark.parametrize(
    "case",
    [{"flight_cancelled": True}, {"flight_arr_delay_min": 100}, {"flight_dep_delay_min": 400}, {}],
    ids=["cancelled", "short delay", "long delay", "on time"],
)
def test_what_is_barred_can_only_be_denied_or_escalated(bar: dict[str, Value], case: dict[str, Value]):
    assert ALWAYS == kinds(**case, **bar)


@pytest.mark.parametrize("path", sorted(ON_TIME))
def test_a_field_that_is_not_known_goes_to_a_human(path: str):
    fields = {name: value for name, value in {**ON_TIME, "flight.cancelled": True}.items() if name != path}
    assert ESCALATE_ONLY == RULES.envelope(fields)


def test_a_flight_that_departed_without_an_arrival_delay_goes_to_a_human():
    assert ESCALATE_ONLY == envelope(flight_arr_delay_min=None, flight_dep_delay_min=400)


def test_weather_that_could_not_be_joined_is_a_value_like_any_other():
    assert kinds(flight_cancelled=True) == kinds(flight_cancelled=True, weather_condition="unknown")
    assert ESCALATE_ONLY == envelope(weather_condition="hail")


def test_what_the_weather_was_does_not_change_what_may_be_decided():
    conditions = ("clear", "rain", "snow", "fog", "wind", "storm", "unknown")
    assert 1 == len({envelope(flight_cancelled=True, weather_condition=weather).hash for weather in conditions})


def test_every_kind_has_reasons_of_its_own():
    reasons = [code for kind in CONTRACT.kinds.values() for code in kind.reasons]
    assert len(reasons) == len(set(reasons))
    assert "HUMAN_REVIEW" not in reasons


def test_an_exhausted_budget_goes_to_a_human_and_is_no_denial():
    assert ESCALATE_ONLY == envelope(0, flight_cancelled=True)
    assert ESCALATE_ONLY == envelope(24_999, flight_cancelled=True)
    assert ALWAYS | {"COMPENSATE", "REFUND_TICKET"} == set(envelope(25_000, flight_cancelled=True).names)
