"""`sds orders`: what was paid, when and by whom, agrees to the cent with the gateway's books, whatever happened on the way."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from sds import Gate
from sds.executors.sandbox.server import GatewayServer
from sds.host.clock import now_ms
from sds.kernel.flow.states import Answer
from tests.cli.conftest import Cli
from tests.executors.gateways import asked, in_thread, written
from tests.executors.test_gate_by_http import GATE
from tests.gates.own import written as write_gate
from tests.proposers import Greedy

BERLIN = ZoneInfo("Europe/Berlin")


class Company:
    """A gate by path over a sandbox gateway, and the command line of its finance department."""

    def __init__(self, home: Path, gateway: GatewayServer, cli: Cli) -> None:
        self.home, self.gateway, self.cli = home, gateway, cli
        self.path = write_gate(home.parent / "code", GATE)
        edits = [("outcomes: {settled: settled,", "outcomes: {settled: settled, reverted: reverted,")]
        written(self.path.parent, gateway.url, *edits)

    @contextmanager
    def gate(self, kind: str = "GIVE_BACK", clock: Callable[[], int] = now_ms) -> Iterator[Gate]:
        with Gate.load(self.path, folder=self.home / "toll", engine=Greedy(kind), now_ms=clock) as gate:
            yield gate

    def orders(self, *options: str) -> list[dict[str, str]]:
        return self.cli.json("orders", "--gate", str(self.path), *options)  # type: ignore[no-any-return]

    def books(self) -> int:
        return sum(each["amount"] for each in self.gateway.books.statement(0, 10**14, 0) if each["status"] == "settled")


@pytest.fixture
def company(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Company]:
    home = tmp_path / "home"
    monkeypatch.setenv("SDS_HOME", str(home))
    monkeypatch.setenv("COLUMNS", "200")
    with in_thread(tmp_path) as gateway:
        yield Company(home, gateway, Cli(capsys, monkeypatch, home / "toll"))


def decide(gate: Gate, number: int, prefix: str = "T") -> Answer:
    return gate.decide({"trip_id": f"{prefix}-{number}", "car_id": f"CAR-{number}"})


def modified(gate: Gate, answer: Answer, amount: str) -> Answer:
    change = f'{{"action": "GIVE_BACK", "params": {{"amount": {amount}}}, "reason": "EMERGENCY"}}'
    return gate.resolve(answer.dfid, "MODIFY", who="ada", reason="as a courtesy", change=change, acknowledge=True)


def test_it_agrees_with_the_gateways_books_after_lost_replies_humans_and_a_lost_record(company: Company) -> None:
    with company.gate() as gate:
        for number in range(3):
            decide(gate, number)
        asked(company.gateway.url, "POST", "/faults", {"lose-replies": 1.0})
        assert "UNKNOWN" == decide(gate, 3).execution
        asked(company.gateway.url, "POST", "/faults", {})
        assert 1 == gate.recover().success
    with company.gate("ESCALATE") as gate:
        modified(gate, decide(gate, 4), "3.00")
    totals = company.orders("--by", "decision,decided_by", "--statement")
    assert [
        {"decision": "AGENT", "decided_by": "toll-agent", "orders": 4, "paid": "20.00", "outside": "20.00"},
        {"decision": "MODIFY", "decided_by": "ada", "orders": 1, "paid": "3.00", "outside": "3.00"},
    ] == [{name: row[name] for name in ("decision", "decided_by", "orders", "paid", "outside")} for row in totals]
    (company.home / "toll").rename(company.home / "lost")
    with company.gate() as gate:
        assert "RECORD_BEHIND" == decide(gate, 5).tag
        gate.adopt(who="ada", reason="the disk was lost")
        decide(gate, 5)
    (total,) = company.orders("--by", "kind", "--statement")
    assert (2800, "28.00", "28.00", 0) == (company.books(), total["paid"], total["outside"], total["differing"])
    assert [("ADOPTED", "ada")] * 5 == [(row["decision"], row["decided_by"]) for row in company.orders()][:5]


def test_what_the_provider_took_back_or_carried_out_otherwise_is_named_and_ends_with_1(company: Company) -> None:
    with company.gate() as gate:
        for number in range(3):
            decide(gate, number)
    books = company.gateway.books
    with books.durably():
        books.db.execute("UPDATE payments SET amount = 120 WHERE number = 2")
        books.db.execute("DELETE FROM payments WHERE number = 3")
    ended, said, told = company.cli("orders", "--gate", str(company.path), "--by", "month", "--statement", "--json")
    assert 1 == ended
    assert '"paid": "15.00", "taken_back": "0.00", "open": "0.00", "outside": "6.20", "differing": 2' in said
    assert "2 orders differ between record and statement" in told
    company.cli("reconcile", "--gate", str(company.path))
    assert ["", "AMOUNT_DIFFERS open", "NOT_CARRIED_OUT open"] == [row["case"] for row in company.orders()]


def test_an_order_that_only_the_gateway_has_is_listed_with_its_amount(company: Company) -> None:
    with company.gate() as gate:
        decide(gate, 1)
    said = {"amount": 250, "kind": "GIVE_BACK", "account": "CAR-9", "reference": "flow-9"}
    company.gateway.books.pay("somebody-elses-key", said)
    ended, shown, _ = company.cli("orders", "--gate", str(company.path), "--statement", "--json")
    assert (1, True) == (ended, '"status": "UNKNOWN_TO_RECORD"' in shown)
    assert '"outside_amount": "2.50"' in shown


def test_days_and_months_are_those_of_the_time_zone(company: Company) -> None:
    """The clocks go back on 25 October 2026: in Berlin that day has 25 hours. UTC's day ends an hour or two later."""
    ends = [
        "2026-10-24T23:59:59.900",
        "2026-10-25T00:00:00",
        "2026-10-25T23:59:59.900",
        "2026-10-31T23:59:59.900",
        "2026-11-01",
    ]
    for number, end in enumerate(ends):
        at_ms = round(datetime.fromisoformat(end).replace(tzinfo=BERLIN).timestamp() * 1000)
        with company.gate(clock=lambda at_ms=at_ms: at_ms) as gate:  # type: ignore[misc]
            assert "SUCCESS" == decide(gate, number).execution
    period = ("--since", "2026-10-01", "--until", "2026-11-01", "--timezone", "Europe/Berlin")
    days = [(row["day"], row["paid"]) for row in company.orders(*period, "--by", "day")]
    assert [("2026-10-24", "5.00"), ("2026-10-25", "10.00"), ("2026-10-31", "5.00")] == days
    assert [("2026-10", "25.00")] == [
        (r["month"], r["paid"]) for r in company.orders("--until", "2026-11-01", "--by", "month")
    ]
    assert "2026-10-24T23:59:59.900+02:00" == company.orders(*period)[0]["at"]


def test_csv_has_one_row_for_each_order_and_no_formula_of_a_callers(company: Company) -> None:
    with company.gate() as gate:
        for number, prefix in enumerate(("=HYPERLINK(1)", "\uff1dHYPERLINK(1)", "x;=HYPERLINK(1);-1")):
            decide(gate, number, prefix=prefix)
    shown = company.cli.ok("orders", "--gate", str(company.path), "--csv")
    row, *others = csv.DictReader(io.StringIO(shown))
    assert shown == company.cli.ok("orders", "toll", "--csv")
    assert ("'=HYPERLINK(1)-0", "5.00", "PAID", "AGENT") == tuple(
        row[n] for n in ("event_id", "amount", "status", "decision")
    )
    assert ["'\uff1dHYPERLINK(1)-1", "x;'=HYPERLINK(1);'-1-2"] == [each["event_id"] for each in others]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--by", "weather"), "there are no totals by `weather`"),
        (("--timezone", "Mars"), "there is no time zone `Mars`"),
        (("--since", "2026-02-01", "--until", "2026-01-01"), "--until is not after --since"),
        (("--csv", "--json"), "--csv and --json exclude each other"),
    ],
)
def test_a_mistake_is_one_line(company: Company, options: tuple[str, ...], said: str) -> None:
    with company.gate():
        pass
    ended, _, told = company.cli("orders", "--gate", str(company.path), *options)
    assert (2, True) == (ended, said in told)
