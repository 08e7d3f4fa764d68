"""Amounts in several currencies: their decimals are those of contract, file and statement, and one account has several gates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sds import Gate
from sds.executors.sandbox.server import GatewayServer
from sds.host.clock import now_ms
from sds.kernel.errors import UsageError, WorldError
from sds.reconciliation import adopt
from tests.executors.gateways import in_thread, written
from tests.executors.test_gate_by_http import GATE, decide
from tests.gates.own import written as write_gate
from tests.proposers import Greedy

SHARED = (
    ('    reference: "{dfid}"', '    reference: "{dfid}"\n    gate: GATE'),
    ("    key: key\n", "    key: key\n    where: {order.gate: GATE}\n    currency: order.currency\n"),
)


@contextmanager
def opened(
    folder: Path, url: str, currency: str, scale: int, *edits: tuple[str, str], name: str = "toll", engine: Any = None
) -> Iterator[Gate]:
    text = GATE.replace("scale: 2", f"scale: {scale}").replace("fixed(2)", f"fixed({scale})").replace("toll", name)
    path = write_gate(folder / name, text)
    written(
        path.parent, url, ("currency: EUR", f"currency: {currency}"), *((a, b.replace("GATE", name)) for a, b in edits)
    )
    with Gate.load(path, folder=folder / f"home-{name}", engine=engine or Greedy("GIVE_BACK")) as gate:
        yield gate


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayServer]:
    with in_thread(tmp_path) as server:
        yield server


@pytest.mark.parametrize(
    ("currency", "scale", "places", "said"),
    [
        ("JPY", 2, "", "`JPY` has 0 decimals, but kind `GIVE_BACK` spends with 2"),
        ("KWD", 2, "", "`KWD` has 3 decimals, but kind `GIVE_BACK` spends with 2"),
        ("eur", 3, ":3", "`eur` has 2 decimals, but kind `GIVE_BACK` spends with 3"),
        ("JPY", 0, ":2", "`JPY` has 0 decimals, but the gateway's file writes `params.amount` with others"),
        ("EUR", 0, ":3n", "`EUR` has 2 decimals, but the gateway's file writes `params.amount` with others"),
    ],
)
def test_an_amount_that_would_be_wrong_by_a_factor_of_ten_or_more_is_refused(
    tmp_path: Path, currency: str, scale: int, places: str, said: str
) -> None:
    edit = ('    amount: "{params.amount}" ', f'    amount: "{{params.amount{places}}}" ')
    with pytest.raises(UsageError) as caught, opened(tmp_path, "http://127.0.0.1:9", currency, scale, edit):
        pass
    assert said == str(caught.value)


@pytest.mark.parametrize(
    ("currency", "scale", "places"),
    [
        ("JPY", 0, ""),
        ("KWD", 3, ":3"),
        ("EUR", 2, ":2n"),
        ("EUR", 0, ":2"),
        ("EUR", 0, ""),
        ("XTS", 5, ":5"),
        ("ISK", 2, ""),
    ],
)
def test_an_amount_with_the_currencys_decimals_or_in_minor_units_is_ordered(
    tmp_path: Path, currency: str, scale: int, places: str
) -> None:
    edit = ('    amount: "{params.amount}" ', f'    amount: "{{params.amount{places}}}" ')
    with opened(tmp_path, "http://127.0.0.1:9", currency, scale, edit) as gate:
        assert [] == gate.escalations()


@pytest.mark.parametrize(("currency", "scale"), [("EUR", 4), ("JPY", 2)])
def test_an_amount_that_is_written_with_its_own_decimals_everywhere_is_ordered(
    tmp_path: Path, currency: str, scale: int
) -> None:
    """A wallet that keeps a hundredth of a cent takes "0.0125": nobody can take that for another amount."""
    edits = [("{params.amount}", f"{{params.amount:{scale}}}")]
    edits += [("    amount_minor: amount\n", f"    amount_minor: amount\n    decimals: {scale}\n")]
    with opened(tmp_path, "http://127.0.0.1:9", currency, scale, *edits) as gate:
        assert [] == gate.escalations()


def test_nor_may_the_statement_have_whole_numbers_then(tmp_path: Path) -> None:
    edit = ("{params.amount}", "{params.amount:3}")
    refused = "`EUR` has 2 decimals, but kind `GIVE_BACK` spends with 3"
    with pytest.raises(UsageError, match=refused), opened(tmp_path, "http://127.0.0.1:9", "EUR", 3, edit):
        pass


def test_a_statement_with_other_decimals_than_the_contract_is_refused(tmp_path: Path) -> None:
    edit = ("    amount_minor: amount\n", "    amount_minor: amount\n    decimals: 3\n")
    refused = "the gateway's statement has amounts with 3 decimals, but kind `GIVE_BACK` has 2"
    with pytest.raises(UsageError, match=refused), opened(tmp_path, "http://127.0.0.1:9", "EUR", 2, edit):
        pass


def test_gates_of_several_currencies_share_an_account(tmp_path: Path, gateway: GatewayServer) -> None:
    """Each sees its own orders in the statement of all, and a restored record takes over no others."""
    with opened(tmp_path, gateway.url, "EUR", 2, *SHARED, name="eur") as euros:
        assert "SUCCESS" == decide(euros, 1).execution
        with opened(tmp_path, gateway.url, "JPY", 0, *SHARED, name="jpy") as yen:
            assert "SUCCESS" == decide(yen, 2).execution
            assert [(1, 1, ())] * 2 == [
                (c.orders, c.lines, c.differences) for c in (euros.reconcile(), yen.reconcile())
            ]
    with opened(tmp_path / "lost", gateway.url, "JPY", 0, *SHARED, name="jpy") as yen:
        assert "RECORD_BEHIND" == decide(yen, 3).tag
        with yen.acting() as kernel:
            assert 1 == len(adopt(kernel, who="ada", reason="lost", now_ms=now_ms))
        assert "SUCCESS" == decide(yen, 2).execution
    paid = [(line["amount"], line["order"]["currency"]) for line in gateway.books.statement(0, 10**14, 0)]
    assert [(500, "EUR"), (500, "JPY")] == paid


def test_without_saying_whose_a_line_is_another_gates_orders_are_unknown_ones(
    tmp_path: Path, gateway: GatewayServer
) -> None:
    with opened(tmp_path, gateway.url, "EUR", 2, name="eur") as euros:
        decide(euros, 1)
    with opened(tmp_path, gateway.url, "JPY", 0, name="jpy") as yen:
        assert "RECORD_BEHIND" == decide(yen, 2).tag


def test_an_order_that_was_carried_out_in_another_currency_is_a_difference(
    tmp_path: Path, gateway: GatewayServer
) -> None:
    with opened(tmp_path, gateway.url, "EUR", 2, *SHARED, name="eur") as euros:
        decide(euros, 1)
        with gateway.books.durably():
            gateway.books.db.execute("UPDATE payments SET order_body = replace(order_body, 'EUR', 'USD')")
        (found,) = euros.reconcile().differences
        assert "AMOUNT_DIFFERS" == found.code
        assert found.outside.startswith("settled 500 USD, another currency: GIVE_BACK amount 500")


def test_a_currency_is_the_same_in_small_letters_and_none_is_no_currency(
    tmp_path: Path, gateway: GatewayServer
) -> None:
    with opened(tmp_path, gateway.url, "EUR", 2, *SHARED, name="gate_of_euros") as euros:
        decide(euros, 1)
        for said, differences in (("eur", ()), ("usd", ("AMOUNT_DIFFERS",))):
            with gateway.books.durably():
                change = "UPDATE payments SET order_body = replace(replace(order_body, '\"EUR\"', ?), '\"eur\"', ?)"
                gateway.books.db.execute(change, (f'"{said}"', f'"{said}"'))
            assert differences == tuple(each.code for each in euros.reconcile().differences)
        with gateway.books.durably():
            gateway.books.db.execute("UPDATE payments SET order_body = replace(order_body, '\"usd\"', '\"\"')")
        with pytest.raises(WorldError, match=r"an empty `order\.currency`"):
            euros.reconcile()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("    key: key\n", '    key: key\n    where: {order.account: "{resource_key}"}\n'), "names no facts"),
        (("currency: EUR\n", ""), "needs the file's `currency`"),
    ],
)
def test_a_line_is_ours_by_fixed_values_and_has_a_currency_to_compare(
    tmp_path: Path, edit: tuple[str, str], said: str
) -> None:
    path = write_gate(tmp_path / "toll", GATE)
    edits = (edit, SHARED[1]) if "account" not in edit[1] else (edit,)
    written(path.parent, "http://127.0.0.1:9", *edits)
    with pytest.raises(UsageError, match=said):
        Gate.load(path, folder=tmp_path / "home", engine=Greedy("GIVE_BACK"))


@pytest.mark.parametrize(
    ("currency", "scale", "paid", "refused"),
    [
        ("EUR", 2, "4.00", ["4", "4.0", "400", "4.000", "0.04"]),
        ("JPY", 0, "400", ["4.00", "400.0", "4e2"]),
        ("KWD", 3, "0.400", ["400", "0.4", "0.40", "4.00"]),
    ],
)
def test_a_human_chooses_no_unit(
    tmp_path: Path, gateway: GatewayServer, currency: str, scale: int, paid: str, refused: list[str]
) -> None:
    """All of it is within the bounds of 100 to 500 minor units, if it is read in another unit."""
    with opened(tmp_path, gateway.url, currency, scale, engine=Greedy("ESCALATE")) as gate:
        case = decide(gate, 1)
        change = '{{"action": "GIVE_BACK", "params": {{"amount": {}}}, "reason": "EMERGENCY"}}'
        for number in refused:
            with pytest.raises(UsageError):
                gate.resolve(
                    case.dfid, "MODIFY", who="ada", reason="why", change=change.format(number), acknowledge=True
                )
        done = gate.resolve(case.dfid, "MODIFY", who="ada", reason="why", change=change.format(paid), acknowledge=True)
        assert ("SUCCESS", {"amount": 400}) == (done.execution, dict(done.params))
        assert [400] == [line["amount"] for line in gateway.books.statement(0, 10**14, 0)]
