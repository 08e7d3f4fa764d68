"""Gates over a service with amounts as JSON numbers, signed bodies and pages by link: exact to the last digit."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from tests.executors.apis.ledger_service import LedgerService
from tests.executors.apis.serving import Reply, Request
from tests.executors.test_gate_by_http import decide
from tests.executors.test_known_apis import compared, opened


@pytest.mark.parametrize("decimals", [2, 0])
def test_an_amount_is_a_number_with_its_decimals_and_fits_however_it_is_answered(tmp_path: Path, decimals: int) -> None:
    api = LedgerService("done", decimals=decimals)
    with opened(tmp_path, api) as gate:
        assert "SUCCESS" == decide(gate, 1).execution
        (body,) = api.bodies
        assert b'"amount": 5.00,' in body
        (payment,) = api.payments.values()
        payment.amount = Decimal("4.99")
        assert ("AMOUNT_DIFFERS",) == compared(gate)[3]


def test_another_amount_is_not_settled(tmp_path: Path) -> None:
    class Mistaken(LedgerService):
        def answer(self, request: Request) -> Reply:
            status, headers, data = super().answer(request)
            return status, headers, data | ({"amount": 5.01} if "amount" in data else {})

    with opened(tmp_path, Mistaken("done")) as gate:
        assert "UNKNOWN" == decide(gate, 1).execution


def test_without_the_right_signature_nothing_is_paid(tmp_path: Path) -> None:
    api = LedgerService("done")
    with opened(tmp_path, api, ("encoding: base64", "encoding: hex")) as gate:
        assert ("EXECUTOR_DOWN", {}) == (decide(gate, 1).tag, api.payments)


def test_a_statement_follows_the_links_of_its_pages(tmp_path: Path) -> None:
    api = LedgerService("done")
    with opened(tmp_path, api) as gate:
        for number in range(5):
            assert "SUCCESS" == decide(gate, number).execution
        api.pages.clear()
        assert (5, 5, 0, ()) == compared(gate)
        assert ["", "2", "3"] == [page.partition("&page=")[2] for page in api.pages]


def test_what_is_lost_is_looked_up_and_paid_once(tmp_path: Path) -> None:
    api = LedgerService("done", loses=1)
    with opened(tmp_path, api) as gate:
        assert "SUCCESS" == decide(gate, 1).execution
        assert (1, 1) == (api.orders, len(api.payments))
        assert 5.0 == json.loads(api.bodies[0])["amount"]
