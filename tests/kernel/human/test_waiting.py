"""The list of what waits for a human, in pages: together they are the list, whatever is resolved or asked about meanwhile."""

from __future__ import annotations

import pytest

from sds.kernel.human import cases
from sds.kernel.human.cases import BEFORE_ALL, Place
from tests.kernel.durable import World, deny, escalate, refund
from tests.kernel.humans import Silent, desk, escalated, resolve, unknown
from tests.stores.records import alone

NUMBER = 7


def place(case: cases.Case) -> Place:
    return case.since_ms, case.dfid


@pytest.fixture
def flows(world: World) -> list[str]:
    """The flows of an order that is UNKNOWN and of cases of every sort, two of them of the same moment."""
    made = [unknown(world, Silent())]
    for number in range(2, NUMBER):
        world.tickets.put(f"T{number}")
        made.append(escalated(world, (deny, escalate, refund())[number % 3], f"C{number}", f"T{number}"))
    sql = "UPDATE dim_validations SET evaluated_at_ms = (SELECT evaluated_at_ms FROM dim_validations WHERE dfid = ?)"
    alone(world.store, f"{sql} WHERE dfid = ?", (made[2], made[3]))
    return made


@pytest.mark.parametrize("size", [1, 2, 3, NUMBER])
def test_pages_together_are_the_list(world: World, flows: list[str], size: int):
    found, after = list[str](), BEFORE_ALL
    while page := cases.waiting(world.store, world.contract, limit=size, after=after):
        assert len(page) <= size
        found, after = [*found, *(case.dfid for case in page)], place(page[-1])
    assert [case.dfid for case in desk(world).waiting()] == found
    assert sorted(flows) == sorted(found)


def test_a_page_is_full_though_cases_of_it_are_resolved_while_it_is_read(
    world: World, flows: list[str], monkeypatch: pytest.MonkeyPatch
):
    listed, other = [case.dfid for case in desk(world).waiting()], world.open_store()
    read = world.store.row

    def row(sql: str, values: tuple[object, ...] = ()) -> object:
        if listed[2] in values and cases.read_case(other, world.contract, listed[2]).state == "ESCALATED":
            resolve(world, listed[2], "ABORT", store=other)
        return read(sql, values)

    monkeypatch.setattr(world.store, "row", row)
    page = cases.waiting(world.store, world.contract, limit=3)
    assert [*listed[:2], listed[3]] == [case.dfid for case in page]


def test_a_case_keeps_the_place_it_was_found_at_though_its_order_is_asked_about_meanwhile(
    world: World, flows: list[str], monkeypatch: pytest.MonkeyPatch
):
    before, read = {case.dfid: place(case) for case in desk(world).waiting()}, world.store.row

    def row(sql: str, values: tuple[object, ...] = ()) -> object:
        if flows[0] in values:
            alone(
                world.store, "UPDATE execution_log SET executed_at_ms = ? WHERE dfid = ?", (world.clock() + 1, flows[0])
            )
        return read(sql, values)

    monkeypatch.setattr(world.store, "row", row)
    found = {case.dfid: place(case) for case in cases.waiting(world.store, world.contract)}
    assert before == found


def test_heads_have_the_order_reason_and_impact_of_the_cases(world: World, flows: list[str]):
    terms = desk(world).contract
    heads = cases.heads(world.store, terms)
    of_cases = [
        (case.dfid, case.since_ms, "UNKNOWN" if case.unknown else case.reason_code, case.action, case.impact(terms))
        for case in desk(world).waiting()
    ]
    assert of_cases == [(each.dfid, each.since_ms, each.reason, each.action, each.impact(terms)) for each in heads]
    assert {"HIGH", "LOW", None} == {each.impact(terms) for each in heads}
    assert flows[:1] == [each.dfid for each in heads if each.reason == "UNKNOWN"]
    assert desk(world).waiting() == [cases.case_of(world.store, terms, each) for each in heads]


@pytest.mark.parametrize("value", ["x", "[]", '{"amount":"4"}'])
def test_a_head_that_cannot_be_read_hides_no_other_and_its_case_is_damaged(world: World, flows: list[str], value: str):
    alone(world.store, "UPDATE policy_proposals SET params = ? WHERE dfid = ?", (value, flows[1]))
    heads = {each.dfid: each for each in cases.heads(world.store, world.contract)}
    assert set(flows) == set(heads)
    assert None is heads[flows[1]].impact(world.contract)
    case = cases.case_of(world.store, world.contract, heads[flows[1]])
    assert (flows[1], True) == (case and case.dfid, case and case.damaged)
