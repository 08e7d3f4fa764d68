"""What a payment is described by: exactly what was known at its own time, and nothing of what came later."""

from __future__ import annotations

from random import Random

import pytest

from sds.gates.fraud.world.customers import DAY_MIN
from sds.gates.fraud.world.features import IDLE_MIN_MAX, PERCENT_MAX, WINDOWS_DAYS, History
from sds.gates.fraud.world.payments import Payment, make_payments, make_people

DAYS = 40


@pytest.fixture(scope="module")
def payments() -> list[Payment]:
    rng = Random(11)
    return make_payments(make_people(rng), DAYS, rng)


def described(payments: list[Payment]) -> list[dict[str, int]]:
    history, fields = History(), []
    for payment in payments:
        fields.append(history.fields(payment))
        history.add(payment)
    return fields


@pytest.fixture(scope="module")
def fields(payments: list[Payment]) -> list[dict[str, int]]:
    return described(payments)


def by_definition(earlier: list[Payment], payment: Payment) -> dict[str, int]:
    """Describe a payment by looking at all that came before it, the slow way."""
    now = payment.at_min
    own = [each for each in earlier if each.customer == payment.customer]
    here = [each for each in earlier if each.terminal == payment.terminal]
    counted: dict[str, int] = {}
    for days in WINDOWS_DAYS:
        start = now - days * DAY_MIN
        amounts = [each.amount_minor for each in own if each.at_min > start]
        taken = sum(each.at_min > start for each in here)
        known = sum(each.known_at_min is not None and start < each.known_at_min <= now for each in here)
        counted |= {
            f"customer.count_{days}d": len(amounts),
            f"customer.sum_{days}d_minor": sum(amounts),
            f"customer.mean_{days}d_minor": sum(amounts) // len(amounts) if amounts else 0,
            f"terminal.count_{days}d": taken,
            f"terminal.fraud_{days}d_permille": min(1_000, known * 1_000 // max(1, taken)),
        }
    mean = counted["customer.mean_28d_minor"]
    last = max((each.at_min for each in own), default=-IDLE_MIN_MAX)
    last_here = max((each.at_min for each in own if each.terminal == payment.terminal), default=-IDLE_MIN_MAX)
    return counted | {
        "payment.amount_minor": payment.amount_minor,
        "payment.hour": now // 60 % 24,
        "payment.online": payment.online,
        "payment.distance_band": payment.band,
        "payment.of_mean_pct": min(PERCENT_MAX, payment.amount_minor * 100 // mean) if mean else 0,
        "customer.idle_min": min(IDLE_MIN_MAX, now - last),
        "customer.idle_here_min": min(IDLE_MIN_MAX, now - last_here),
    }


def test_what_is_updated_payment_by_payment_is_what_the_definition_counts(
    payments: list[Payment], fields: list[dict[str, int]]
) -> None:
    frauds = [index for index, payment in enumerate(payments) if payment.scenario]
    for index in [*Random(1).sample(range(len(payments)), 60), *frauds[-40:]]:
        assert by_definition(payments[:index], payments[index]) == fields[index], f"payment {index}"
    assert any(each["terminal.fraud_28d_permille"] for each in fields)


def test_every_feature_is_a_whole_number_and_none_is_negative(fields: list[dict[str, int]]) -> None:
    assert all(isinstance(value, int) and value >= 0 for each in fields for value in each.values())


def test_nothing_that_comes_later_changes_what_a_payment_was_described_by(
    payments: list[Payment], fields: list[dict[str, int]]
) -> None:
    cut = len(payments) * 2 // 3
    later = [each._replace(amount_minor=1, terminal=0, scenario="", known_at_min=None) for each in payments[cut:]]
    assert fields[:cut] == described([*payments[:cut], *later])[:cut]


def test_a_label_says_nothing_before_it_is_known(payments: list[Payment], fields: list[dict[str, int]]) -> None:
    cut = len(payments) * 2 // 3
    now = payments[cut].at_min

    def shifted(payment: Payment) -> Payment:
        """Every label that is unknown at the cut becomes known much later, and good payments turn out to be fraud."""
        if payment.known_at_min is not None and payment.known_at_min <= now:
            return payment
        return payment._replace(known_at_min=now + 1 + payment.at_min % 1_000)

    assert fields[: cut + 1] == described(list(map(shifted, payments)))[: cut + 1]


def test_a_label_counts_from_the_minute_in_which_it_becomes_known() -> None:
    fraud = Payment(100, 1, 7, 500, online=True, band=0, scenario="skimmed", known_at_min=2_000)
    history = History()
    history.add(fraud)
    seen = [
        history.fields(Payment(at_min, 2, 7, 500, online=True, band=0))["terminal.fraud_28d_permille"]
        for at_min in (101, 1_999, 2_000, 2_000 + 26 * DAY_MIN)
    ]
    assert [0, 0, 1_000, 1_000] == seen


def test_a_customers_own_fraud_is_no_feature_of_the_payment_that_is_fraud(payments: list[Payment]) -> None:
    unlabelled = [each._replace(scenario="", known_at_min=None) for each in payments[:5_000]]
    labelled = [each._replace(scenario="quiet", known_at_min=each.at_min + 40 * DAY_MIN) for each in payments[:5_000]]
    assert described(unlabelled) == described(labelled)
