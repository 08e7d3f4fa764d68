"""The rail's books against the record: honest books agree, and every wrong row is seen, whichever side it is on."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from sds.gates.refund import books
from sds.gates.refund.desk import airline_path, ensure_world, open_refund, read_queue
from sds.gates.refund.rail_client import RailProcess
from sds.gates.refund.rail_store import PAGE_PAYMENTS, Order, Payment, PayoutStore
from sds.gates.refund.run import Watch, _chaos_report, fare_of
from sds.gates.refund.source import TicketSource
from sds.home import decisions_path
from sds.kernel.answer import Answer
from sds.kernel.store import Store
from tests.gates.orders import key_of
from tests.proposers import Greedy

CLAIMS = 40


class Run:
    """A finished run of a greedy proposer under drift, in a folder whose files may be tampered with."""

    def __init__(self, folder: Path, watch: Watch, answers: list[Answer]) -> None:
        self.folder, self.watch, self.answers = folder, watch, answers

    def faults(self, folder: Path) -> list[str]:
        source = TicketSource(airline_path(folder))
        with closing(Store(decisions_path(folder))) as store, closing(source):
            return list(books.faults(payments(folder), store, lambda ticket: fare_of(source, ticket)))

    def chaos(self, folder: Path) -> dict[str, int]:
        with closing(Store(decisions_path(folder))) as store:
            return _chaos_report(self.watch, store, payments(folder), [(a, 0.0, "") for a in self.answers])

    def left_alone(self, folder: Path) -> list[Payment]:
        dfids = {answer.dfid for answer in self.answers if not self.watch.claims.get(answer.event_id, False)}
        return [payment for payment in payments(folder) if payment.dfid in dfids]


def payments(folder: Path) -> list[Payment]:
    return PayoutStore(folder / "rail.db", lambda: 0).payments(0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("books")
    ensure_world(folder, claims=CLAIMS)
    watch = Watch(airline_path(folder), Random(1))
    with open_refund(folder, engine=Greedy(), on_reasoned=watch.reasoned) as gate:  # type: ignore[arg-type]  # any proposer
        answers = [gate.decide(claim.event) for claim in read_queue(folder)]
    return Run(folder, watch, answers)


@pytest.fixture
def folder(finished: Run, tmp_path: Path) -> Path:
    return shutil.copytree(finished.folder, tmp_path / "copy")


def tamper(path: Path, sql: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        assert 1 == db.execute(sql, values).rowcount


def test_honest_books_agree_with_the_record(finished: Run, folder: Path) -> None:
    assert len(payments(folder)) > 5
    assert [] == finished.faults(folder)


def test_a_payment_that_the_record_does_not_know_is_seen(finished: Run, folder: Path) -> None:
    PayoutStore(folder / "rail.db", lambda: 0).pay(Order(key_of("x"), "VOUCHER", 500, "TKT-x", "dfid-x"))

    assert [f"key {key_of('x')[:12]}: paid at the rail, in the record it is not there"] == finished.faults(folder)


def test_a_payment_that_the_record_calls_failed_is_seen(finished: Run, folder: Path) -> None:
    key = payments(folder)[0].key
    tamper(decisions_path(folder), "UPDATE execution_log SET status = 'FAILED' WHERE idempotency_key = ?", key)

    assert [f"key {key[:12]}: paid at the rail, in the record it is FAILED"] == finished.faults(folder)


def test_a_payment_whose_order_is_still_in_the_air_is_honest(finished: Run, folder: Path) -> None:
    key = payments(folder)[0].key
    tamper(decisions_path(folder), "UPDATE execution_log SET status = 'UNKNOWN' WHERE idempotency_key = ?", key)

    assert [] == finished.faults(folder)


def test_a_payment_that_only_the_record_knows_is_seen(finished: Run, folder: Path) -> None:
    key = payments(folder)[0].key
    tamper(folder / "rail.db", "UPDATE payouts SET status = 'rejected' WHERE key = ?", key)

    assert [f"key {key[:12]}: SUCCESS in the record, not paid at the rail"] == finished.faults(folder)


def test_another_amount_than_was_ordered_is_seen(finished: Run, folder: Path) -> None:
    key = next(payment.key for payment in payments(folder) if payment.kind != "REFUND_TICKET")
    tamper(folder / "rail.db", "UPDATE payouts SET amount_minor = amount_minor + 1 WHERE key = ?", key)

    assert [f"key {key[:12]}: the rail paid another order than the record has"] == finished.faults(folder)


def test_a_second_payment_for_an_event_and_a_ticket_is_seen(finished: Run, folder: Path) -> None:
    first = next(payment for payment in payments(folder) if payment.kind == "COMPENSATE")
    again = Order(key_of("again"), first.kind, first.amount_minor, first.ticket_id, first.dfid)
    PayoutStore(folder / "rail.db", lambda: 0).pay(again)
    event = next(answer.event_id for answer in finished.answers if answer.dfid == first.dfid)

    assert {
        f"key {key_of('again')[:12]}: paid at the rail, in the record it is not there",
        f"event {event}: paid 2 times",
        f"ticket {first.ticket_id}: COMPENSATE 2 times",
    } == set(finished.faults(folder))


@pytest.mark.parametrize(
    ("amounts", "expected"), [((60, 40), []), ((60, 41), ["ticket T: refunded 101, its fare is 100"])]
)
def test_several_refunds_of_one_ticket_are_honest_up_to_its_fare(
    folder: Path, amounts: tuple[int, ...], expected: list[str]
) -> None:
    made = [Payment(n, key_of(str(n)), f"d{n}", "T", "REFUND_TICKET", amount) for n, amount in enumerate(amounts)]
    with closing(Store(decisions_path(folder))) as store:
        found = [line for line in books.faults(made, store, lambda _: 100) if line.startswith("ticket")]
        unknown = [line for line in books.faults(made, store, lambda _: None) if line.startswith("ticket")]

    assert expected == found
    assert [f"ticket T: refunded {sum(amounts)}, its fare is not known"] == unknown


def test_chaos_moves_every_second_ticket_and_the_rest_is_paid(finished: Run, folder: Path) -> None:
    told = finished.chaos(folder)

    assert 0 == told["moved_tickets_paid"]
    assert finished.left_alone(folder)
    assert len(finished.left_alone(folder)) == told["unmoved_paid"]
    assert 0 < told["moved_tickets_that_would_have_paid"] < told["moved_tickets"]
    moved_paying = sum(finished.watch.would_pay[dfid] for dfid in finished.watch.moved)
    assert abs(finished.watch.met[True] - 2 * moved_paying) <= 2


def test_a_moved_ticket_that_was_paid_is_counted(finished: Run, folder: Path) -> None:
    before = finished.chaos(folder)
    dfid = next(dfid for dfid in sorted(finished.watch.moved) if finished.watch.would_pay[dfid])
    number = finished.left_alone(folder)[0].number
    tamper(folder / "rail.db", "UPDATE payouts SET dfid = ? WHERE number = ?", dfid, number)

    assert 1 == finished.chaos(folder)["moved_tickets_paid"]
    assert before["unmoved_paid"] - 1 == finished.chaos(folder)["unmoved_paid"]


def test_a_claim_that_was_paid_after_a_second_look_at_its_moved_ticket_is_in_neither_group(
    finished: Run, folder: Path
) -> None:
    told = finished.chaos(folder)

    assert 0 == told["moved_tickets_paid"]
    assert told["unmoved_paid"] < len(payments(folder))


def test_a_moved_flow_that_ended_for_another_reason_proves_nothing(finished: Run, folder: Path) -> None:
    before = finished.chaos(folder)["moved_tickets_that_would_have_paid"]
    dfid = next(dfid for dfid in sorted(finished.watch.moved) if finished.watch.would_pay[dfid])
    tamper(decisions_path(folder), "UPDATE decision_flows SET tag = 'HALTED' WHERE dfid = ?", dfid)

    assert before - 1 == finished.chaos(folder)["moved_tickets_that_would_have_paid"]


class TestOverTheWire:
    @pytest.fixture
    def many(self, tmp_path: Path) -> Iterator[tuple[RailProcess, list[str]]]:
        store = PayoutStore(tmp_path / "rail.db", lambda: 0)
        for n in range(2 * PAGE_PAYMENTS + 5):
            store.pay(Order(key_of(str(n)), "VOUCHER", n + 1, f"T-{n}", f"d-{n}"), refuse=n % 7 == 0)
        with RailProcess(tmp_path / "rail.db") as rail:
            yield rail, [key_of(str(n)) for n in range(2 * PAGE_PAYMENTS + 5) if n % 7]

    def test_every_payment_is_told_once_over_as_many_pages_as_it_takes(
        self, many: tuple[RailProcess, list[str]]
    ) -> None:
        rail, keys = many
        assert keys == [payment.key for payment in rail.payments()]

    def test_a_rail_without_payments_tells_of_none(self, tmp_path: Path) -> None:
        with RailProcess(tmp_path / "rail.db") as rail:
            assert [] == list(rail.payments())
