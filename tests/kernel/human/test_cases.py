"""What waits for a human, and what humans decided, in the record: read in order, and every alteration found."""

from __future__ import annotations

import pytest

from sds.kernel.audit import verify
from sds.kernel.decision.packet import Decoding
from sds.kernel.errors import StoreError, UsageError
from sds.kernel.human import cases
from sds.kernel.storage import ledger
from tests.kernel.durable import (
    World,
    deny,
    escalate,
    refund,
)
from tests.kernel.humans import SORRY, Silent, desk, escalated, resolve, unknown
from tests.stores.opened import POSTGRESQL, Chosen
from tests.stores.records import alone, stranger_at

COLUMNS = (
    "decision, who, reason, impact, acknowledged, policy_kind, params, justification, proposal, seen, snapshot_id,"
    " snapshot, envelope_hash, envelope, contract_hash, lease_until_ms, decided_at_ms"
)

MADE_UP = f"INSERT INTO human_decisions SELECT 'x', {COLUMNS} FROM human_decisions"


def test_what_waits_is_listed_oldest_first_with_what_is_proposed_and_its_impact(world: World):
    silent = Silent()
    world.tickets.put("T2")
    first = unknown(world, silent)
    world.clock.advance(1)
    second = escalated(world, deny, "C2", "T2")
    world.clock.advance(1)
    third = escalated(world, escalate, "C3", "T2")
    resolve(world, escalated(world, refund(), "C4", "T2"), "ABORT")
    found = [(case.dfid, case.action, case.impact(desk(world).contract)) for case in desk(world).waiting()]
    assert [(first, "REFUND_TICKET", "HIGH"), (second, "DENY", "LOW"), (third, None, None)] == found
    assert [first] == [c.dfid for c in cases.waiting(world.store, world.contract, limit=1)]


def test_an_order_that_is_unknown_is_listed_as_it_was_sent_and_not_as_it_was_proposed(world: World):
    dfid = escalated(world, refund("40.00"))
    world.rail.misfortunes, world.rail.blind = ["drop"], True
    resolve(world, dfid, "MODIFY", SORRY)
    (case,) = desk(world).waiting()
    assert (True, "GOODWILL", {"amount": 5_000}, "HIGH") == (
        case.unknown,
        case.action,
        case.numbers,
        case.impact(desk(world).contract),
    )


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        *(("context_snapshots", "body", value) for value in ("x", "[]", "5", '{"key":5,"fields":{}}')),
        *(("policy_proposals", "params", value) for value in ("x", "[]", '{"amount":"4"}')),
        *(("policy_proposals", "alternatives", value) for value in ("x", "[5]")),
        *(("dim_validations", "reasons", value) for value in ("x", "[5]", '{"a":1}', "[" * 100_000)),
        *(("decision_flows", "trigger_event", value) for value in ("x", "[]")),
        ("dim_validations", "reasons", b"\xff"),
    ],
)
def test_a_case_that_cannot_be_read_is_listed_as_such_and_hides_no_other(
    world: World, table: str, column: str, value: str | bytes
):
    if isinstance(value, bytes) and Chosen.kind == POSTGRESQL:
        pytest.skip("SQLite's alone: a text that is no UTF-8")
    world.tickets.put("T2")
    dfids = [escalated(world, escalate, f"C{number}", f"T{number}") for number in (1, 2)]
    since = {case.dfid: case.since_ms for case in desk(world).waiting()}
    sql = f"UPDATE {table} SET {column} = CAST(? AS TEXT) WHERE dfid = ?"
    alone(world.store, sql, (value, dfids[0]))
    damaged, other = desk(world).waiting()
    assert (dfids[0], "C1", since[dfids[0]], True) == (
        damaged.dfid,
        damaged.event_id,
        damaged.since_ms,
        damaged.damaged,
    )
    assert (dfids[1], "T2", False) == (other.dfid, other.key, other.damaged)
    for act in (
        lambda: desk(world).case(dfids[0]),
        lambda: desk(world).view(damaged),
        lambda: resolve(world, dfids[0], "MODIFY", SORRY),
        lambda: resolve(world, dfids[0], "ABORT"),
    ):
        with pytest.raises(StoreError, match="cannot be read"):
            act()
    assert [] == world.column("SELECT 1 FROM human_decisions")
    assert () != verify.verify(world.store).faults


@pytest.mark.parametrize("value", ["x", "5", '{"amount":null}', "[5]", "[" * 100_000])
@pytest.mark.parametrize(("table", "column"), [("policy_proposals", "params"), ("dim_validations", "reasons")])
def test_an_answer_that_cannot_be_read_is_no_answer(world: World, table: str, column: str, value: str):
    answer = world.decide(escalate)
    (kept,) = world.column(f"SELECT {column} FROM {table}")
    alone(world.store, f"UPDATE {table} SET {column} = ?", (value,))
    with pytest.raises(StoreError, match=f"the record of flow `{answer.dfid}` cannot be read") as caught:
        world.kernel.open(world.event())
    assert "sds ledger verify" == caught.value.hint
    alone(world.store, f"UPDATE {table} SET {column} = ?", (kept,))
    assert answer == world.kernel.open(world.event())


@pytest.mark.parametrize("value", ["x", "[]", "{}"])
def test_a_case_whose_seals_cannot_be_read_is_not_carried_out(world: World, value: str):
    dfid = escalated(world, refund())
    with stranger_at(world.path) as db:
        db.execute("UPDATE ledger SET body = ? WHERE kind = 'DECIDED'", (value,))
    with pytest.raises(StoreError, match="was altered"):
        resolve(world, dfid, "OVERRIDE")
    assert [] == world.rail.sent


def test_the_queue_of_any_gate_is_read_by_its_registered_terms(world: World):
    assert desk(world).contract == cases.registered_terms(world.store, "claims")
    with pytest.raises(UsageError, match="no contract is registered for gate `loans`"):
        cases.registered_terms(world.store, "loans")


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        ("UPDATE human_decisions SET who = 'eve'", "table human_decisions of flow"),
        ("UPDATE human_decisions SET reason = 'another'", "table human_decisions of flow"),
        ("UPDATE human_decisions SET params = '{\"amount\":1}'", "table human_decisions of flow"),
        ("DELETE FROM human_decisions", "table human_decisions of flow"),
        ("UPDATE decision_flows SET state = 'ESCALATED', tag = NULL", "the table says ('ESCALATED', None)"),
        (MADE_UP, "table human_decisions: flow x is not in the ledger"),
    ],
)
def test_a_humans_decision_that_was_altered_behind_the_kernels_back_is_found(world: World, sql: str, found: str):
    resolve(world, escalated(world, refund()), "OVERRIDE")
    with world.store.transaction():
        world.store.run(sql)
    faults = verify.verify(world.store).faults
    assert any(found in line for line in faults), faults


def test_a_resolution_of_what_was_not_escalated_is_no_entry_this_program_writes(world: World):
    dfid = escalated(world, refund())
    resolve(world, dfid, "OVERRIDE")
    with world.store.transaction():
        ledger.append(world.store, 1, "HUMAN", dfid, {"state": "CLOSED", "tag": None, "rows": {}})
    assert (
        f"entry {ledger.head(world.store).idx}: not an entry this program writes" in verify.verify(world.store).faults
    )


def test_a_case_whose_engine_measures_no_probabilities_has_no_alternatives(world: World):
    packet = world.packet()
    world.kernel.decide(packet, escalate(packet), Decoding(alternatives=None))
    (case,) = desk(world).waiting()
    assert () == case.alternatives
