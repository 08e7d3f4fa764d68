"""The orders of a gate for whoever keeps its books: the pages hold what `sds orders --json` prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.durable import proposal
from tests.proposers import Says
from tests.service.routes.test_looking import reading
from tests.service.testbed import EVENT, Bed, check, opened_bed


@pytest.fixture
def paid(home: Path) -> Iterator[tuple[Bed, list[str]]]:
    """A service whose model hands over every case, and the flows of three cases that a human then paid."""
    with opened_bed(home, Says(proposal("ESCALATE", "HUMAN_REVIEW"))) as bed:
        flows = list[str]()
        change = {"action": "WAIVE", "params": {"amount": "1.00"}, "reason": "EMERGENCY"}
        given = {"decision": "MODIFY", "reason": "Secret hardship", "change": change, "acknowledge": True}
        for number in range(3):  # each is read after the one before was paid: it has drawn
            flows.append(bed.post({**EVENT, "trip_id": f"T-{number}"}).json()["dfid"])
            done = bed.client.post(f"/v1/escalations/{flows[-1]}/resolution", json=given)
            assert 200 == done.status_code, done.text
        yield bed, flows


def pages(bed: Bed, query: str = "") -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = []
    cursor = ""
    while True:
        page = bed.client.get(f"/v1/orders?gate=toll{query}{cursor}").json()
        found.append(page["orders"])
        if page["next"] is None:
            return found
        cursor = f"&cursor={page['next']}"


def test_the_pages_hold_what_the_command_prints(paid: tuple[Bed, list[str]]) -> None:
    bed, flows = paid
    listed = pages(bed, "&limit=2")
    assert [2, 1] == [len(page) for page in listed]
    together = [order for page in listed for order in page]
    assert flows == [order["dfid"] for order in together]
    assert {("PAID", "1.00", "MODIFY", "everything")} == {
        (order["status"], order["amount"], order["decision"], order["decided_by"]) for order in together
    }
    command = [sys.executable, "-m", "sds.cli.app", "orders", "toll", "--json"]
    assert json.loads(subprocess.run(command, capture_output=True, check=True).stdout) == together


def test_orders_that_ended_in_one_millisecond_are_each_on_one_page(paid: tuple[Bed, list[str]]) -> None:
    bed, flows = paid
    with bed.gate.store.transaction():
        bed.gate.store.run("UPDATE execution_log SET executed_at_ms = 2000000000000")
    assert [[dfid] for dfid in sorted(flows)] + [[]] == [
        [order["dfid"] for order in page] for page in pages(bed, "&limit=1")
    ]


def test_orders_that_are_open_stand_among_the_ended_by_when_they_were_ordered(paid: tuple[Bed, list[str]]) -> None:
    bed, flows = paid
    with bed.gate.store.transaction():
        bed.gate.store.run("UPDATE execution_log SET status = 'UNKNOWN' WHERE dfid = ?", (flows[1],))
        bed.gate.store.run("UPDATE decision_flows SET state = 'EXECUTING' WHERE dfid = ?", (flows[1],))
        bed.gate.store.run(
            "UPDATE execution_log SET reserved_at_ms = 1, executed_at_ms = 3 WHERE dfid = ?", (flows[0],)
        )
        bed.gate.store.run(
            "UPDATE execution_log SET reserved_at_ms = 2, executed_at_ms = 4 WHERE dfid = ?", (flows[1],)
        )
    assert [flows[1], flows[0], flows[2]] == [order["dfid"] for page in pages(bed, "&limit=1") for order in page]
    assert [flows[0]] == [order["dfid"] for page in pages(bed, "&since=3&until=4") for order in page]


def test_the_end_does_not_belong_to_the_period_and_the_start_does(bed: Bed) -> None:
    dfid = bed.post().json()["dfid"]
    at_ms = bed.gate.store.value("SELECT executed_at_ms FROM execution_log")
    (order,) = pages(bed, f"&since={at_ms}&until={at_ms + 1}")[0]
    assert dfid == order["dfid"]
    assert [[]] == pages(bed, f"&until={at_ms}") == pages(bed, f"&since={at_ms + 1}")
    check(bed.client.get(f"/v1/orders?gate=toll&since={at_ms}&until={at_ms}"), 400, "USAGE")


def test_a_reason_in_a_persons_words_is_for_reviewers(paid: tuple[Bed, list[str]]) -> None:
    bed, _ = paid
    (orders,) = pages(bed)
    assert {"Secret hardship"} == {order["reason"] for order in orders}
    shown = bed.client.get("/v1/orders?gate=toll", headers=reading(bed, "read")).json()["orders"]
    assert [{**order, "reason": None} for order in orders] == shown


def test_who_may_not_read_a_gate_sees_none_of_its_orders(bed: Bed) -> None:
    check(bed.client.get("/v1/orders?gate=toll", headers=reading(bed, "submit")), 403, "ROLE_MISSING")
    elsewhere = {"Authorization": f"Bearer {bed.key_for('elsewhere', ('read',), ('other',))}"}
    check(bed.client.get("/v1/orders?gate=toll", headers=elsewhere), 403, "GATE_FORBIDDEN")
    check(bed.client.get("/v1/orders"), 400, "USAGE")
    check(bed.client.get("/v1/orders?gate=toll&cursor=x"), 400, "CURSOR_INVALID")
