"""Gates whose orders go to payment APIs as they are known: what is accepted is not settled, and nothing is sent twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sds import Gate
from sds.kernel.audit import verify
from sds.kernel.executor.breaker import FAILURES_MAX
from sds.kernel.flow.states import Answer
from tests.executors.apis.banks import Adyen, Bank, GoCardless, ModernTreasury
from tests.executors.apis.paypal import PayPal
from tests.executors.apis.serving import Api, Reply, Request, serving
from tests.executors.apis.stripe import Stripe
from tests.executors.test_gate_by_http import GATE, decide
from tests.gates.own import written as write_gate
from tests.proposers import Greedy

ENDS: list[tuple[type[Api], str, str, str]] = [
    (Stripe, "pending", "succeeded", "failed"),
    (PayPal, "PENDING", "COMPLETED", "FAILED"),
    (GoCardless, "created", "paid", "bounced"),
    (ModernTreasury, "approved", "completed", "failed"),
    (Bank, "RCVD", "ACSC", "RJCT"),
]
NO_RESTARTS = GATE.replace("restarts_max: 10", "restarts_max: 0")
EACH = pytest.mark.parametrize(("kind", "accepted", "settled", "failed"), ENDS, ids=[end[0].__name__ for end in ENDS])


@contextmanager
def opened(folder: Path, api: Api, *edits: tuple[str, str]) -> Iterator[Gate]:
    with serving(api) as url:
        path, text = write_gate(folder / "toll", NO_RESTARTS), api.file(url)
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        path.with_name("gateway.yaml").write_text(text, encoding="utf-8")
        with Gate.load(path, folder=folder / "home", engine=Greedy("GIVE_BACK")) as gate:
            yield gate


def state(gate: Gate, answer: Answer) -> tuple[str, str]:
    sql = "SELECT f.state, e.status FROM decision_flows f JOIN execution_log e ON e.dfid = f.dfid WHERE f.dfid = ?"
    (row,) = gate.store.rows(sql, (answer.dfid,))
    return str(row[0]), str(row[1])


@EACH
def test_what_is_accepted_is_looked_up_until_it_has_ended_and_is_a_humans_meanwhile(
    tmp_path: Path, kind: Any, accepted: str, settled: str, failed: str
) -> None:
    api = kind(accepted)
    with opened(tmp_path, api) as gate:
        answer = decide(gate, 1)
        assert ("EXECUTING", "UNKNOWN") == state(gate, answer)
        for _ in range(3):
            assert (1, 0, 0) == (gate.recover().unknown, gate.recover().success, gate.recover().failed)
        assert [answer.dfid] == [case.dfid for case in gate.escalations() if case.unknown]
        assert "UNKNOWN" == decide(gate, 1).execution
        api.end(settled)
        assert (1, 0) == (gate.recover().success, gate.recover().unknown)
        assert ("CLOSED", "SUCCESS") == state(gate, answer)
        assert "p-1" == gate.store.value("SELECT external_receipt FROM execution_log")
        assert 1 == api.orders
        assert () == verify.verify(gate.store).faults


@EACH
def test_what_is_accepted_and_refused_later_has_failed(
    tmp_path: Path, kind: Any, accepted: str, settled: str, failed: str
) -> None:
    api = kind(accepted)
    with opened(tmp_path, api) as gate:
        answer = decide(gate, 1)
        api.end(failed)
        assert 1 == gate.recover().failed
        assert ("ABORTED", "FAILED") == state(gate, answer)
        assert 1 == api.orders


@EACH
def test_a_look_up_that_does_not_find_what_was_accepted_yet_has_nothing_sent_again(
    tmp_path: Path, kind: Any, accepted: str, settled: str, failed: str
) -> None:
    """It answers that there is no such order, and knows it a moment later."""
    api = kind(accepted, hides=True)
    with opened(tmp_path, api) as gate:
        answer = decide(gate, 1)
        for _ in range(3):
            assert 1 == gate.recover().unknown
        assert (1, ("EXECUTING", "UNKNOWN")) == (api.orders, state(gate, answer))
        api.show()
        api.end(settled)
        assert 1 == gate.recover().success
        assert 1 == api.orders


@EACH
def test_orders_that_are_accepted_do_not_open_the_circuit_breaker(
    tmp_path: Path, kind: Any, accepted: str, settled: str, failed: str
) -> None:
    """A gateway that answers each order at once, and carries it out a day later, is not down."""
    api = kind(accepted)
    with opened(tmp_path, api) as gate:
        answers = [decide(gate, number) for number in range(FAILURES_MAX + 2)]
        assert ["UNKNOWN"] * len(answers) == [answer.execution for answer in answers]
        assert len(answers) == api.orders


@pytest.mark.parametrize(
    ("kind", "accepted", "settled", "wrong"),
    [
        pytest.param(kind, accepted, settled, wrong, id=f"{kind.__name__}-{wrong}")
        for kind, accepted, settled, _ in ENDS
        for wrong in ("amount", "currency")
    ],
)
def test_what_was_carried_out_otherwise_than_ordered_is_not_settled(
    tmp_path: Path, kind: Any, accepted: str, settled: str, wrong: str
) -> None:
    api = kind(accepted)
    with opened(tmp_path, api) as gate:
        answer = decide(gate, 1)
        (payment,) = api.payments.values()
        payment.amount = {int: 499, str: "4.99"}[type(payment.amount)] if wrong == "amount" else payment.amount
        payment.currency = "JPY" if wrong == "currency" else payment.currency
        api.end(settled)
        assert 1 == gate.recover().unknown
        assert ("EXECUTING", "UNKNOWN") == state(gate, answer)


@pytest.mark.parametrize("field", ["amount", "currency"])
def test_an_order_that_is_answered_with_another_amount_or_currency_is_not_settled(tmp_path: Path, field: str) -> None:
    class Mistaken(Stripe):
        def _shown(self, made: Any) -> dict[str, Any]:
            return {**super()._shown(made), field: {"amount": 499, "currency": "jpy"}[field]}

    api = Mistaken("succeeded")
    with opened(tmp_path, api) as gate:
        assert "UNKNOWN" == decide(gate, 1).execution
        assert (1, 1) == (gate.recover().unknown, api.orders)


def test_adyen_has_no_look_up_so_that_what_it_has_received_is_a_humans(tmp_path: Path) -> None:
    api = Adyen("received")
    with opened(tmp_path, api) as gate:
        answer = decide(gate, 1)
        assert (1, 1) == (gate.recover().unknown, api.orders)
        human = {"who": "ada", "reason": "its webhook says so", "acknowledge": True}
        settled = gate.resolve(answer.dfid, "SETTLED", reference="p-1", **human)  # type: ignore[arg-type]
        assert ("CLOSED", "SUCCESS") == (settled.state, settled.execution)


def test_a_list_that_has_only_others_says_absent_and_one_that_has_ours_twice_says_nothing(tmp_path: Path) -> None:
    class Twice(Stripe):
        times = 0

        def answer(self, request: Request) -> Reply:
            if request.method == "POST" and self.times == 0:
                self.orders += 1
                return 503, {}, {}
            status, headers, data = super().answer(request)
            if request.method == "GET":
                data["data"] = data["data"] * self.times + [{"id": "p-9", "status": "succeeded", "metadata": {}}]
            return status, headers, data

    api = Twice("pending")
    with opened(tmp_path, api) as gate:
        answer = decide(gate, 1)  # an order that was lost on its way
        assert ("EXECUTING", "UNKNOWN") == state(gate, answer)
        api.times = 2
        assert (1, 2) == (gate.recover().unknown, api.orders)  # absent, so that it was sent again
        api.end("succeeded")
        assert 1 == gate.recover().unknown
        api.times = 1
        assert 1 == gate.recover().success


def test_an_answer_without_the_key_says_absent_only_where_the_file_says_so(tmp_path: Path) -> None:
    class Lost(Bank):
        def answer(self, request: Request) -> Reply:
            if request.method == "POST":
                self.orders += 1
                return 503, {}, {}
            return super().answer(request)

    by_key = ("path: /payments/{reference}/status", "path: /payments/{key}/status")
    for declared, orders in ((True, 2), (False, 1)):
        api = Lost("RCVD")
        kept = ("absent_without_key: true", f"absent_without_key: {str(declared).lower()}")
        with opened(tmp_path / str(declared), api, by_key, kept) as gate:
            decide(gate, 1)
            assert (1, orders) == (gate.recover().unknown, api.orders)


def test_a_statement_with_pending_orders_is_read_and_its_pages_are_followed(tmp_path: Path) -> None:
    """A gate over a bank that lists what is under way can order, and compares what has ended."""
    api = Bank("RCVD")
    with opened(tmp_path, api) as gate:
        answers = [decide(gate, number) for number in range(3)]
        assert (3, 3, 3, ()) == compared(gate)
        api.end("ACSC")
        assert 3 == gate.recover().success
        assert (3, 3, 0, ()) == compared(gate)
        first = next(iter(api.payments.values()))
        first.status = "PDNG"
        assert (3, 3, 0, ("PENDING_OUTSIDE",)) == compared(gate)
        first.status = "ACSC"
        first.key = "of somebody else"
        assert {"NOT_CARRIED_OUT", "ORDER_UNKNOWN"} == set(compared(gate)[3])
        assert {"", answers[0].dfid} == {each.dfid for each in gate.reconcile().differences}


def compared(gate: Gate) -> tuple[int, int, int, tuple[str, ...]]:
    found = gate.reconcile()
    return found.orders, found.lines, found.in_flight, tuple(each.code for each in found.differences)
