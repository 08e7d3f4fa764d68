"""The generated payments: seeded, by time, frauds at their rate and in their ways, known only later."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from sds.gates.fraud.world.accounts import EXCHANGED_AFTER_MIN, Accounts
from sds.gates.fraud.world.customers import DAY_MIN
from sds.gates.fraud.world.frauds import BEGIN_PER_DAY
from sds.gates.fraud.world.payments import (
    AMOUNT_MINOR_MAX,
    AMOUNT_MINOR_MIN,
    KNOWN_AFTER_MAX_MIN,
    KNOWN_AFTER_MIN,
    Payment,
    People,
    make_payments,
    make_people,
)

DAYS = 60


def world(seed: int) -> tuple[People, list[Payment]]:
    rng = Random(seed)
    people = make_people(rng)
    return people, make_payments(people, DAYS, rng)


@pytest.fixture(scope="module")
def people_and_payments() -> tuple[People, list[Payment]]:
    return world(7)


@pytest.fixture(scope="module")
def payments(people_and_payments: tuple[People, list[Payment]]) -> list[Payment]:
    return people_and_payments[1]


def test_the_same_seed_gives_the_same_payments_and_another_gives_others(payments: list[Payment]) -> None:
    assert world(7)[1] == payments
    assert world(8)[1] != payments


def test_payments_come_by_time_and_are_within_their_bounds(payments: list[Payment]) -> None:
    assert sorted(payment.at_min for payment in payments) == [payment.at_min for payment in payments]
    assert all(AMOUNT_MINOR_MIN <= payment.amount_minor <= AMOUNT_MINOR_MAX for payment in payments)
    assert {0, 1, 2, 3, 4} == {payment.band for payment in payments}


def test_between_a_half_and_two_per_cent_are_fraud_of_every_kind(payments: list[Payment]) -> None:
    frauds = [payment for payment in payments if payment.known_at_min is not None]
    assert 0.005 < len(frauds) / len(payments) < 0.02
    assert set(BEGIN_PER_DAY) == {payment.scenario for payment in frauds}
    assert {""} == {payment.scenario for payment in payments if payment.known_at_min is None}


def test_the_kinds_of_fraud_drift(payments: list[Payment]) -> None:
    early, late = (
        Counter(payment.scenario for payment in payments if payment.scenario and (payment.at_min < half) is first)
        for half in [DAYS * DAY_MIN // 2]
        for first in (True, False)
    )
    assert early["skimmed"] / early.total() > 1.2 * late["skimmed"] / late.total()
    assert early["coached"] / early.total() < late["coached"] / late.total()


def test_a_fraud_becomes_known_between_one_and_thirty_days_later(payments: list[Payment]) -> None:
    delays = [payment.known_at_min - payment.at_min for payment in payments if payment.known_at_min is not None]
    assert KNOWN_AFTER_MIN <= min(delays)
    assert max(delays) <= KNOWN_AFTER_MAX_MIN
    assert 4 * DAY_MIN < sum(delays) / len(delays) < 8 * DAY_MIN


def test_an_account_is_compromised_from_when_the_theft_is_known_until_its_card_is_exchanged(
    people_and_payments: tuple[People, list[Payment]],
) -> None:
    people, _ = people_and_payments
    open_ = next(each for each in people.customers if each.closed_day is None)
    stolen = Payment(100, open_.number, 1, 500, online=True, band=0, scenario="takeover", known_at_min=5_000)
    accounts = Accounts(people.customers)
    accounts.add(stolen)

    def status(at_min: int) -> object:
        return accounts.fields(stolen._replace(at_min=at_min))["account.status"]

    times = (101, 4_999, 5_000, 4_999 + EXCHANGED_AFTER_MIN, 5_000 + EXCHANGED_AFTER_MIN)
    assert ["active", "active", "compromised", "compromised", "active"] == [status(at_min) for at_min in times]


def test_a_closed_account_is_closed_from_its_day_on(people_and_payments: tuple[People, list[Payment]]) -> None:
    people, _ = people_and_payments
    closed = next(each for each in people.customers if each.closed_day)
    day = (closed.closed_day or 0) * DAY_MIN
    accounts = Accounts(people.customers)
    statuses = [
        accounts.fields(Payment(at_min, closed.number, 1, 500, online=True, band=0))["account.status"]
        for at_min in (day - 1, day)
    ]
    assert ["active", "closed"] == statuses
