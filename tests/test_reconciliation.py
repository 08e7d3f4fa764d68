"""A gate that runs for long compares now and again, in a thread that ends with it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from sds.gate import Gate
from sds.kernel.errors import UsageError, WorldError
from tests.gates.refund.rail.orders import key_of
from tests.kernel.durable import Clock, Tickets, refund, usual_contract
from tests.kernel.outside import PaysOnly
from tests.kernel.statements import ListingRail, paid_elsewhere
from tests.proposers import Says

SOON_S = 10.0
DAY_MS = 86_400_000


def gate_of(folder: Path, rail: object, clock: Clock | None = None) -> Gate:
    tickets = Tickets()
    tickets.put("T1")
    engine = Says(refund())
    return Gate(usual_contract(), tickets, rail, folder=folder, engine=engine, now_ms=clock or Clock())  # type: ignore[arg-type]  # any rail


def soon(true: Callable[[], bool]) -> bool:
    ends = time.monotonic() + SOON_S
    while not (found := true()) and time.monotonic() < ends:
        time.sleep(0.01)
    return found


def logged(folder: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (folder / "log.jsonl").read_text().splitlines()]


def workers() -> int:
    return sum(thread.name == "sds-reconcile" for thread in threading.enumerate())


def test_it_compares_again_and_again_and_ends_with_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sds.reconciliation.EVERY_S_MIN", 0.01)
    rail = ListingRail(tmp_path / "rail.db")
    with gate_of(tmp_path / "gate", rail) as gate:
        gate.decide({"claim_id": "C1", "ticket_id": "T1", "text": "please"})
        gate.reconcile_every(0.01)
        assert soon(lambda: logged(tmp_path / "gate").count("reconcile.compared") > 2)
        assert [] == gate.escalations()
        paid_elsewhere(tmp_path, key_of("x"), 500)
        assert soon(lambda: bool(gate.escalations()))
        assert ["STATEMENT_DIFFERS"] == [case.reason_code for case in gate.escalations()]
        assert 1 == workers()
    assert 0 == workers()
    assert 1 == logged(tmp_path / "gate").count("statement.differs")


@pytest.mark.parametrize("moved_ms", [DAY_MS, -DAY_MS])
def test_an_order_that_is_reversed_weeks_later_is_found_within_a_day_or_when_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved_ms: int
) -> None:
    monkeypatch.setattr("sds.reconciliation.EVERY_S_MIN", 0.01)
    rail, clock = ListingRail(tmp_path / "rail.db"), Clock()

    def compares_again() -> bool:
        before = rail.listed
        return soon(lambda: rail.listed > before + 2)

    with gate_of(tmp_path / "gate", rail, clock) as gate:
        gate.decide({"claim_id": "C1", "ticket_id": "T1", "text": "please"})
        gate.reconcile_every(0.01)
        assert compares_again()
        clock.advance(20 * DAY_MS)
        assert compares_again()
        rail.tells = lambda line: replace(line, outcome="reverted")
        clock.advance(moved_ms)
        assert soon(lambda: bool(gate.escalations()))
        (case,) = gate.escalations()
        assert "STATEMENT_DIFFERS" == case.reason_code
        assert "REVERSED_OUTSIDE" in str(case.reasons)


def test_an_outside_that_is_down_is_logged_and_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sds.reconciliation.EVERY_S_MIN", 0.01)
    rail = ListingRail(tmp_path / "rail.db")
    failures = iter([OSError("down"), OSError("down")])

    def meanwhile() -> None:
        with suppress(StopIteration):
            raise next(failures)

    rail.while_listing = meanwhile
    with gate_of(tmp_path / "gate", rail) as gate:
        gate.reconcile_every(0.01)
        assert soon(lambda: "reconcile.compared" in logged(tmp_path / "gate"))
    assert 2 == logged(tmp_path / "gate").count("statement.unreadable")


@pytest.mark.parametrize("every_s", [0.0, -1.0, 0.5, float("nan"), float("inf"), "10"])
def test_no_time_between_two_comparisons_is_refused(tmp_path: Path, every_s: float) -> None:
    rail, refused = (
        ListingRail(tmp_path / "rail.db"),
        pytest.raises(UsageError, match="is not a time between two comparisons"),
    )
    with gate_of(tmp_path / "gate", rail) as gate, refused:
        gate.reconcile_every(every_s)
    assert 0 == workers()


def test_an_executor_without_a_statement_is_told_so(tmp_path: Path) -> None:
    with gate_of(tmp_path / "gate", PaysOnly(ListingRail(tmp_path / "rail.db"))) as gate:
        for ask in (gate.reconcile, lambda: gate.reconcile_every(60.0), lambda: gate.adopt(who="ada", reason="why")):
            with pytest.raises(UsageError, match="this executor offers no statement"):
                ask()


def test_what_the_record_does_not_know_is_taken_over_by_name_and_reason(tmp_path: Path) -> None:
    with gate_of(tmp_path / "gate", ListingRail(tmp_path / "rail.db")) as gate:
        paid_elsewhere(tmp_path, key_of("x"), 500)
        event = {"claim_id": "C1", "ticket_id": "T1", "text": "please"}
        assert "RECORD_BEHIND" == gate.decide(event).tag
        assert ("somebody-else",) == gate.adopt(who="ada", reason="it is ours")
        assert "SUCCESS" == gate.decide(event).execution


def test_a_gate_that_closes_waits_for_a_comparison_under_way(tmp_path: Path) -> None:
    rail = ListingRail(tmp_path / "rail.db")
    gate = gate_of(tmp_path / "gate", rail)
    paid_elsewhere(tmp_path, key_of("x"), 500)
    closer = threading.Thread(target=gate.close)

    def is_closing() -> bool:
        try:
            gate.recover()
        except WorldError:
            return True
        return False

    def close_meanwhile() -> None:
        rail.while_listing = lambda: None
        closer.start()
        assert soon(is_closing)
        closer.join(0.1)
        assert closer.is_alive()

    rail.while_listing = close_meanwhile
    assert ["ORDER_UNKNOWN"] == [each.code for each in gate.reconcile().differences]
    closer.join()
    with pytest.raises(UsageError, match="the gate is closed"):
        gate.reconcile()
