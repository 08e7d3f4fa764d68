"""The rail's statement against the record: an honest one agrees, and every wrong row is seen, whichever side it is on."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

import pytest

from sds.executors.sandbox.keyed_book import PAGE_LINES
from sds.gates.opening import recovery_kernel
from sds.gates.refund.chaos import Drift
from sds.gates.refund.gate import airline_path, ensure_world, gate, read_queue
from sds.gates.refund.rail.client import RailProcess
from sds.gates.refund.rail.store import Line, Order, PayoutStore
from sds.gates.refund.source import TicketSource
from sds.gates.runner import payments_of, wrongly_paid
from sds.host.clock import now_ms
from sds.host.paths import decisions_path
from sds.kernel.errors import ExecutorError
from sds.kernel.executor.protocol import NoExecutor
from sds.kernel.executor.statement import StatementLine
from sds.kernel.flow.states import Answer
from sds.kernel.human.cases import waiting
from sds.reconciliation import reconcile
from tests.gates.refund.opened import open_refund
from tests.gates.refund.rail.orders import key_of, raw
from tests.proposers import Greedy

CLAIMS = 40
FOREVER_MS = 10**15


class Run:
    """A finished run of a greedy proposer under drift, in a folder whose files may be tampered with."""

    def __init__(self, folder: Path, watch: Drift, answers: list[Answer]) -> None:
        self.folder, self.watch, self.answers = folder, watch, answers

    def chaos(self, folder: Path) -> dict[str, int]:
        with recovery_kernel(gate, folder) as kernel:
            lines = [line for line in kernel.dispatcher.statement(0, FOREVER_MS) if line.outcome != "rejected"]
            return self.watch.report(self.answers, lines, kernel.store)

    def left_alone(self, folder: Path) -> list[Line]:
        dfids = {answer.dfid for answer in self.answers if not self.watch.claims.get(answer.event_id, False)}
        return [payment for payment in payments(folder) if payment.dfid in dfids]


def payments(folder: Path) -> list[Line]:
    return [line for line in PayoutStore(folder / "rail.db", now_ms).statement(0, FOREVER_MS, 0) if line.reference]


def compared(folder: Path) -> list[tuple[str, str]]:
    """Compare through the rail's own process; return what differs: (code, the beginning of the key)."""
    with recovery_kernel(gate, folder) as kernel:
        found = reconcile(kernel, now_ms=now_ms)
        cases = [case for case in waiting(kernel.store, kernel.contract) if case.difference]
    assert [difference.as_data() for difference in found.differences] == [case.difference for case in cases]
    return [(difference.code, difference.key) for difference in found.differences]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("books")
    ensure_world(folder, claims=CLAIMS)
    watch = Drift(folder, NoExecutor(), 1)
    with open_refund(folder, engine=Greedy(), on_reasoned=watch.reasoned) as opened:
        answers = [opened.decide(claim.event) for claim in read_queue(folder)]
    return Run(folder, watch, answers)


@pytest.fixture
def folder(finished: Run, tmp_path: Path) -> Path:
    return shutil.copytree(finished.folder, tmp_path / "copy")


def tamper(path: Path, sql: str, *values: object, rows: int = 1) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        assert rows == db.execute(sql, values).rowcount


@contextmanager
def tampered(folder: Path, sql: str, key: str) -> Iterator[None]:
    """Alter an order in the record for a block: what is compared then is not what was sealed."""
    tamper(decisions_path(folder), sql, key)
    yield
    tamper(decisions_path(folder), "UPDATE execution_log SET status = 'SUCCESS' WHERE idempotency_key = ?", key)


def test_an_honest_rail_agrees_with_the_record(folder: Path) -> None:
    assert len(payments(folder)) > 5
    assert [] == compared(folder)


def test_no_ticket_is_refunded_beyond_its_fare_and_none_is_compensated_twice(folder: Path) -> None:
    refunded = Counter[str]()
    for paid in payments(folder):
        refunded[paid.ticket_id] += paid.amount_minor if paid.kind == "REFUND_TICKET" else 0
    with closing(TicketSource(airline_path(folder))) as source:
        fares = {ticket: read.fields["ticket.fare_minor"] for ticket in refunded if (read := source.read(ticket))}
    assert [] == [ticket for ticket, amount in refunded.items() if amount > int(fares[ticket])]
    once = Counter((p.ticket_id, p.kind) for p in payments(folder) if p.kind in ("COMPENSATE", "VOUCHER"))
    assert {1} == set(once.values())


def test_a_payment_that_the_record_does_not_know_is_seen(folder: Path) -> None:
    PayoutStore(folder / "rail.db", now_ms).pay(Order(key_of("x"), "VOUCHER", 500, "TKT-x", "dfid-x"))

    assert [("ORDER_UNKNOWN", key_of("x"))] == compared(folder)


def test_a_payment_that_the_record_calls_failed_is_seen(folder: Path) -> None:
    key = payments(folder)[0].key
    with tampered(folder, "UPDATE execution_log SET status = 'FAILED' WHERE idempotency_key = ?", key):
        assert [("CARRIED_OUT_OUTSIDE", key)] == compared(folder)


def test_a_payment_whose_order_is_still_in_the_air_is_honest(folder: Path) -> None:
    key = payments(folder)[0].key
    with tampered(folder, "UPDATE execution_log SET status = 'UNKNOWN' WHERE idempotency_key = ?", key):
        assert [] == compared(folder)


def test_a_payment_that_only_the_record_knows_is_seen(folder: Path) -> None:
    first, second, *_ = payments(folder)
    tamper(folder / "rail.db", "UPDATE payouts SET status = 'rejected' WHERE key = ?", first.key)
    tamper(folder / "rail.db", "DELETE FROM payouts WHERE key = ?", second.key)

    assert {("REJECTED_OUTSIDE", first.key), ("NOT_CARRIED_OUT", second.key)} == set(compared(folder))


def test_another_amount_than_was_ordered_is_seen(folder: Path) -> None:
    key = next(payment.key for payment in payments(folder) if payment.kind != "REFUND_TICKET")
    tamper(folder / "rail.db", "UPDATE payouts SET amount_minor = amount_minor + 1 WHERE key = ?", key)

    assert [("AMOUNT_DIFFERS", key)] == compared(folder)


def test_a_payment_on_another_ticket_than_was_ordered_is_seen(folder: Path) -> None:
    key = payments(folder)[0].key
    tamper(folder / "rail.db", "UPDATE payouts SET ticket_id = 'TKT-x' WHERE key = ?", key)

    assert [("ORDER_DIFFERS", key)] == compared(folder)


def test_a_second_payment_for_an_event_and_a_ticket_is_seen(folder: Path) -> None:
    first = next(payment for payment in payments(folder) if payment.kind == "COMPENSATE")
    again = Order(key_of("again"), first.kind, first.amount_minor, first.ticket_id, first.dfid)
    PayoutStore(folder / "rail.db", now_ms).pay(again)

    with open_refund(folder, engine=Greedy()) as opened:
        wrong = wrongly_paid(opened, gate, payments_of(opened, gate))

    unknown = f"ORDER_UNKNOWN: key {key_of('again')[:12]}:"
    twice = f"ticket {first.ticket_id}: COMPENSATE 2 times"
    assert [unknown, twice] == [line.partition(" record")[0] for line in wrong]


def test_a_rail_file_of_an_earlier_version_is_listed(folder: Path) -> None:
    """Its tables are what they were before anybody asked for a statement; only the reversals may be missing."""
    tamper(folder / "rail.db", "DROP TABLE reversals", rows=-1)

    assert [] == compared(folder)


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
    def many(self, tmp_path: Path) -> Iterator[tuple[RailProcess, list[tuple[str, str, int]]]]:
        clock = count(1)
        store, orders = PayoutStore(tmp_path / "rail.db", lambda: next(clock)), 2 * PAGE_LINES + 5
        for n in range(orders):
            store.pay(Order(key_of(str(n)), "VOUCHER", n + 1, f"T-{n}", f"d-{n}"), refuse=n % 7 == 0)
        store.revert(key_of("1"))
        store.void(key_of("void"))
        told = [(key_of(str(n)), "rejected" if n % 7 == 0 else "settled", n + 1) for n in range(orders)]
        told[1] = (key_of("1"), "reverted", 2)
        with RailProcess(tmp_path / "rail.db") as rail:
            yield rail, told

    def test_every_order_is_told_once_over_as_many_pages_as_it_takes(
        self, many: tuple[RailProcess, list[tuple[str, str, int]]]
    ) -> None:
        rail, told = many
        lines = list(rail.executor().statement(0, FOREVER_MS))
        assert told == [(line.key, line.outcome, line.amount_minor) for line in lines]
        whole = {"reference": "PAY-00000003", "dfid": "d-2", "kind": "VOUCHER", "resource_key": "T-2"}
        assert StatementLine(key_of("2"), "settled", 3, 3, params={"amount": 3}, **whole) == lines[2]

    def test_both_ends_of_a_time_are_in_it(self, many: tuple[RailProcess, list[tuple[str, str, int]]]) -> None:
        rail, _ = many
        assert [3, 4, 5] == [line.at_ms for line in rail.executor().statement(3, 5)]

    def test_a_rail_without_orders_tells_of_none(self, tmp_path: Path) -> None:
        with RailProcess(tmp_path / "rail.db") as rail:
            assert [] == list(rail.executor().statement(0, FOREVER_MS))

    @pytest.mark.parametrize("path", ["", "1", "1/2", "1/2/3/4", "1/2/x", "-1/2/3", "1/2/" + "9" * 19])
    def test_a_malformed_question_is_refused(self, rail: RailProcess, path: str) -> None:
        assert b" 400 " in raw(rail.port, f"GET /statement/{path} HTTP/1.0\r\n\r\n".encode())

    def test_a_rail_that_died_is_no_statement(self, tmp_path: Path) -> None:
        with RailProcess(tmp_path / "rail.db") as rail:
            executor = rail.executor()
            rail.kill()
            with pytest.raises(ExecutorError, match="the payment rail does not answer"):
                list(executor.statement(0, 1))
