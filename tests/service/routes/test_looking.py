"""Looking at decisions: audit facts without texts, texts for reviewers, pages."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from sds.service.routes import looking
from sds.service.routes.looking import MS_MAX, PAGE, Cursor, Page
from tests.kernel.durable import World, deny
from tests.service.testbed import EVENT, Bed, check
from tests.stores.records import alone


def reading(bed: Bed, *roles: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {bed.key_for('-'.join(roles), roles, ('toll',))}"}


def decided(bed: Bed, count: int) -> list[str]:
    return [bed.post({**EVENT, "trip_id": f"T-{n}", "text": f"Secret {n}."}).json()["dfid"] for n in range(count)]


def test_one_decision_is_shown_with_what_an_audit_needs_and_no_text(bed: Bed) -> None:
    (dfid,) = decided(bed, 1)
    shown = bed.client.get(f"/v1/decisions/{dfid}", headers=reading(bed, "read"))
    assert 200 == shown.status_code
    assert {"decision", "audit"} == set(shown.json())
    assert "Secret" not in shown.text
    found = shown.json()
    assert ("WAIVE", "EMERGENCY") == (found["decision"]["action"], found["decision"]["justification"])
    kinds = [entry["kind"] for entry in found["audit"]["ledger"]]
    assert {"DECIDED", "SETTLED"} <= set(kinds)
    assert "SUCCESS" == found["audit"]["execution_log"]["status"]


def test_a_reviewer_sees_the_whole_record(bed: Bed) -> None:
    (dfid,) = decided(bed, 1)
    shown = bed.client.get(f"/v1/decisions/{dfid}", headers=reading(bed, "read", "review"))
    assert "Secret 0." in shown.json()["record"]["decision_flows"]["trigger_event"]


def test_pages_have_every_decision_once_the_newest_first(bed: Bed) -> None:
    made = decided(bed, 5)
    found: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = bed.client.get(f"/v1/decisions?gate=toll&limit=2{cursor}").json()
        found += page["decisions"]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert sorted(made) == sorted(each["dfid"] for each in found)
    assert found == sorted(found, key=lambda each: (each["opened_at_ms"], each["dfid"]), reverse=True)
    assert "Secret" not in str(found)


def test_a_period_holds_what_was_opened_from_its_start_to_before_its_end(bed: Bed) -> None:
    made = decided(bed, 4)
    with bed.gate.store.transaction():
        for number, dfid in enumerate(made):
            bed.gate.store.run("UPDATE decision_flows SET created_at_ms = ? WHERE dfid = ?", (1_000 + number, dfid))

    def listed(query: str) -> list[str]:
        page = bed.client.get(f"/v1/decisions?{query}").json()
        return [each["dfid"] for each in page["decisions"]]

    assert [made[2], made[1]] == listed("since=1001&until=1003")
    assert [made[0]] == listed("until=1001")
    late = Cursor(MS_MAX, made[3])
    assert [made[1], made[0]] == listed(f"until=1002&state=CLOSED&cursor={late}")
    check(bed.client.get("/v1/decisions?since=5&until=5"), 400, "USAGE")


def test_flows_that_were_opened_in_one_millisecond_are_each_on_one_page(bed: Bed) -> None:
    decided(bed, 4)
    with bed.gate.store.transaction():
        bed.gate.store.run("UPDATE decision_flows SET created_at_ms = 1000000")
    found, cursor = list[str](), Cursor(MS_MAX, "")
    while page := Page(0, cursor, None, 3).rows(bed.gate.store, None):
        found += [dfid for _, dfid in page]
        cursor = Cursor(*page[-1])
    assert sorted(found, reverse=True) == found
    assert 4 == len(found)


@pytest.mark.parametrize("state", ["", " AND state = 'CLOSED'"])
def test_a_page_is_read_from_where_it_begins_however_many_decisions_there_are(bed: Bed, state: str) -> None:
    asked = f"EXPLAIN QUERY PLAN {PAGE.format(state=state)}"
    (plan,) = [row[3] for row in bed.gate.store._fetched(asked, (0, "", MS_MAX, "", 50))]
    assert "flows_by_opening ((created_at_ms,dfid)>(?,?) AND (created_at_ms,dfid)<(?,?))" in plan


def test_for_a_page_of_a_state_that_hardly_any_is_in_only_so_many_are_looked_at(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.post({**EVENT, "trip_id": "T-9", "car_id": "CAR-2"})
    decided(bed, 7)
    monkeypatch.setattr(looking, "FLOWS_READ_MAX", 3)
    pages, cursor = list[list[str]](), ""
    while cursor is not None:
        page = bed.client.get(f"/v1/decisions?state=ESCALATED{cursor and f'&cursor={cursor}'}").json()
        pages.append([each["event_id"] for each in page["decisions"]])
        cursor = page["next"]
    assert [[], [], ["T-9"]] == pages


@pytest.mark.parametrize("state", [None, "CLOSED", "ABORTED"])
def test_pages_of_several_records_have_every_flow_once_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str | None
) -> None:
    rng, expected = Random(5), list[tuple[int, str]]()
    worlds = list[World]()
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        worlds.append(World(tmp_path / name))
    for world, count in zip(worlds, (0, 9, 40), strict=True):
        for number in range(count):
            at_ms, in_state = rng.randrange(30), rng.choice(["CLOSED"] * 5 + ["ABORTED"])
            world.tickets.put(f"T{number}")
            dfid = world.decide(deny, f"C{number}", f"T{number}").dfid
            change = "UPDATE decision_flows SET created_at_ms = ?, state = ? WHERE dfid = ?"
            alone(world.store, change, (at_ms, in_state, dfid))
            expected += [(at_ms, dfid)] if state in {None, in_state} else []
    monkeypatch.setattr(looking, "FLOWS_READ_MAX", 4)
    found, cursor = list[tuple[int, str]](), Cursor(MS_MAX, "")
    while cursor:
        page, cursor = Page(3, cursor, state, 5).flows([world.store for world in worlds])
        found += [flow[:2] for flow in page]
    assert sorted((flow for flow in expected if flow[0] >= 3), reverse=True) == found
    for world in worlds:
        world.close()


def test_a_page_may_be_of_one_state_or_since_a_time(bed: Bed) -> None:
    decided(bed, 2)
    bed.post({**EVENT, "trip_id": "T-9", "car_id": "CAR-2"})
    escalated = bed.client.get("/v1/decisions?state=ESCALATED").json()["decisions"]
    assert ["T-9"] == [each["event_id"] for each in escalated]
    since = escalated[0]["opened_at_ms"] + 1
    assert [] == bed.client.get(f"/v1/decisions?since={since}").json()["decisions"]


def test_gates_are_listed_that_a_key_is_for(bed: Bed) -> None:
    (gate,) = bed.client.get("/v1/gates").json()["gates"]
    assert ("toll", ["DENY", "WAIVE"], 30_000) == (gate["gate"], gate["kinds"], gate["deadline_ms_max"])
    assert {"id": "trip_id", "key": "car_id", "evidence": "text"} == gate["event"]
    assert bed.gate.contract.hash == gate["hash"]
    elsewhere = {"Authorization": f"Bearer {bed.key_for('elsewhere', ('read',), ('refund',))}"}
    assert [] == bed.client.get("/v1/gates", headers=elsewhere).json()["gates"]
    assert {"decisions": [], "next": None} == bed.client.get("/v1/decisions", headers=elsewhere).json()
