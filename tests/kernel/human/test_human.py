"""Humans resolve escalated cases: once, within their own envelope, on a world that stands still, and on the record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.errors import StoreError, UsageError, WorldError
from sds.kernel.human.cases import Decision
from sds.kernel.human.review import HumanReview, Resolution
from sds.kernel.registry import registry
from tests.kernel.authority import halt, status, suspend
from tests.kernel.durable import World, compensate, contract, deny, proposal, refund
from tests.kernel.humans import ALWAYS, HUMAN, PAY, SORRY, change, desk, escalated, refused, resolve
from tests.stores.records import alone

# --- carrying out -----------------------------------------------------------------------------------------------------


def test_an_override_carries_out_what_the_agent_proposed(world: World):
    dfid = escalated(world, refund("40.00"))
    answer = resolve(world, dfid, "OVERRIDE")
    assert ("CLOSED", "REFUND_TICKET", {"amount": 4_000}, "SUCCESS", "OVERRIDE", "ada") == (
        answer.state,
        answer.action,
        answer.params,
        answer.execution,
        answer.resolution,
        answer.resolved_by,
    )
    assert [(dfid, "T1", "REFUND_TICKET", 4_000)] == world.rail.paid()
    assert ["DECIDED", "RESERVED", "HUMAN", "SETTLED"] == world.column("SELECT kind FROM ledger WHERE dfid = ?", dfid)
    assert () == verify.verify(world.store).faults


def test_a_change_is_carried_out_instead_of_what_the_agent_proposed(world: World):
    dfid = escalated(world, refund("40.00"))
    answer = resolve(world, dfid, "MODIFY", change("REFUND_TICKET", "NOT_TRAVELLED", amount="12.50"))
    assert ("REFUND_TICKET", {"amount": 1_250}, "NOT_TRAVELLED", "MODIFY") == (
        answer.action,
        answer.params,
        answer.justification,
        answer.resolution,
    )
    assert [(dfid, "T1", "REFUND_TICKET", 1_250)] == world.rail.paid()


def test_what_the_rules_fix_is_filled_in_for_a_human_too(world: World):
    answer = resolve(world, escalated(world), "MODIFY", change("COMPENSATE", "LONG_DELAY"))
    assert ({"amount": 25_000}, "SUCCESS") == (answer.params, answer.execution)


def test_an_abort_carries_out_nothing_and_the_case_does_not_start_afresh(world: World):
    dfid = escalated(world, refund())
    answer = resolve(world, dfid, "ABORT", acknowledged=False)
    assert ("ABORTED", "HUMAN_ABORTED", None, "ABORT") == (
        answer.state,
        answer.tag,
        answer.execution,
        answer.resolution,
    )
    assert answer == world.kernel.open(world.event())
    assert [] == world.rail.sent
    assert () == verify.verify(world.store).faults


@pytest.mark.parametrize(("decision", "text"), [("OVERRIDE", ""), ("MODIFY", change("DENY", "NOT_ELIGIBLE"))])
def test_a_denial_closes_the_case_without_side_effect_and_is_of_low_impact(world: World, decision: Decision, text: str):
    answer = resolve(world, escalated(world, deny), decision, text, acknowledged=False)
    assert ("CLOSED", "DENY", None) == (answer.state, answer.action, answer.execution)
    assert () == verify.verify(world.store).faults


def test_the_same_event_again_gets_what_the_human_decided(world: World):
    dfid = escalated(world, refund("40.00"))
    answer = resolve(world, dfid, "MODIFY", PAY)
    assert answer == world.kernel.open(world.event())
    assert 1 == len(world.rail.paid())


def test_the_record_says_who_decided_what_when_why_and_on_what(world: World):
    dfid = escalated(world, refund("40.00"))
    resolve(world, dfid, "OVERRIDE")
    record = verify.flow_record(world.store, dfid)
    assert record is not None
    (entry,) = [entry for entry in record["ledger"] if entry["kind"] == "HUMAN"]
    body, row = json.loads(entry["body"]), record["human_decisions"]
    assert world.clock() == entry["at_ms"] == row["decided_at_ms"]
    assert ("OVERRIDE", "ada", "looked into it", "HIGH", 1, "ACCEPTED") == tuple(
        body[name] for name in ("decision", "who", "reason", "impact", "acknowledged", "outcome")
    )
    assert body["seen"] == record["context_snapshots"]["snapshot_id"]
    assert body["snapshot_id"] == row["snapshot_id"] != body["seen"]
    assert record["policy_proposals"]["proposal"] != row["proposal"]
    assert ("ESCALATED", 1) == (record["dim_validations"]["outcome"], len(record["attempts"]) + 1)


# --- the human's own envelope -----------------------------------------------------------------------------------------


def test_a_human_may_do_what_their_own_terms_add_and_the_agent_may_not(world: World):
    assert "GOODWILL" not in world.packet("C0").envelope.names
    dfid = escalated(world)
    answer = resolve(world, dfid, "MODIFY", SORRY, acknowledged=False)
    assert ("GOODWILL", {"amount": 5_000}, "SUCCESS") == (answer.action, answer.params, answer.execution)


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (change("GOODWILL", "APOLOGY", amount="50.01"), "RBAC_DENIED", "`amount` is outside its bounds"),
        (change("GOODWILL", "APOLOGY", amount="50"), "SCHEMA_INVALID", "`amount` is not a number with 2 decimals"),
        (change("REFUND_TICKET", "NOT_TRAVELLED", amount="200.01"), "RBAC_DENIED", "`amount` is outside its bounds"),
        (change("COMPENSATE", "APOLOGY"), "SCHEMA_INVALID", "`APOLOGY` is not a reason of `COMPENSATE`"),
        (change("COMPENSATE", "LONG_DELAY", amount="1.00"), "SCHEMA_INVALID", "`COMPENSATE` does not take these"),
        (change("PAY", "NOW"), "RBAC_DENIED", "`PAY` is not permitted now"),
        (change("ESCALATE", "HUMAN_REVIEW"), "USAGE", "a human cannot decide `ESCALATE`: nobody is left to ask"),
        ("pay them", "USAGE", "the decision is not JSON"),
        ("[]", "USAGE", "the decision is not an object of action, params and reason"),
        ('{"action":"DENY","action":"DENY"}', "USAGE", "a name is given twice"),
        ('{"action":"DENY","reason":"NOT_ELIGIBLE","context_ref":"0"}', "USAGE", "is not an object of action"),
        ('{"action":"GOODWILL","params":{"amount":"1.00"},"reason":"APOLOGY"}', "USAGE", "must be a number"),
        (
            '{"action":"GOODWILL","params":{"amount":NaN},"reason":"APOLOGY"}',
            "SCHEMA_INVALID",
            "does not have the form",
        ),
        ('{"action":"DENY\\",\\"params\\":{}","reason":"X"}', "SCHEMA_INVALID", "does not have the form of a proposal"),
        ('{"action":"\\ud800","reason":"X"}', "SCHEMA_INVALID", "does not have the form of a proposal"),
        ("[" * 3_000, "USAGE", "the decision is not JSON"),
        (" " * 5_000, "USAGE", "the decision has more than 4096 characters"),
    ],
)
def test_a_human_is_held_to_the_form_and_to_the_bounds(world: World, text: str, code: str, message: str):
    error = refused(world, escalated(world), "MODIFY", text)
    assert (code, True) == (error.reason_code, message in str(error)), str(error)


def test_a_human_draws_on_what_is_there_now_and_spends_what_is_left(world: World):
    dfid = escalated(world)
    world.decide(compensate, "C2")
    look = desk(world).view(desk(world).case(dfid))
    assert "COMPENSATE" in look.packet.envelope.names
    resolve(world, dfid, "MODIFY", change("COMPENSATE", "LONG_DELAY"))
    second = escalated(world, name="C3")
    error = refused(world, second, "MODIFY", change("COMPENSATE", "LONG_DELAY"))
    assert ("RBAC_DENIED", "`COMPENSATE` is not permitted now") == (error.reason_code, str(error))


def test_an_agent_that_is_suspended_does_not_stop_the_human(world: World):
    dfid = escalated(world, refund())
    suspend(world)
    assert ("SUCCESS", "SUSPENDED") == (resolve(world, dfid, "OVERRIDE").execution, status(world))


def test_while_halted_a_human_may_only_abort(world: World):
    first, second = escalated(world, refund()), escalated(world, refund(), "C2")
    halt(world)
    error = refused(world, first, "OVERRIDE")
    assert ("HALTED", True) == (error.reason_code, "an operator has halted the system" in str(error))
    assert "ABORTED" == resolve(world, second, "ABORT").state
    halt(world, halted=False)
    assert "SUCCESS" == resolve(world, first, "OVERRIDE").execution


def test_a_contract_that_is_no_longer_in_force_gives_a_human_no_authority(world: World):
    dfid = escalated(world, refund())
    newer = contract(("1.0.0", "1.0.1"), ALWAYS, more=HUMAN)
    registry.register(world.store, newer, by="registry", now_ms=world.clock())
    assert refused(world, dfid, "OVERRIDE").reason_code in ("AGENT_SUSPENDED", "CONTRACT_REVOKED")
    new = HumanReview(world.open_kernel(terms=newer), now_ms=world.clock)
    assert "SUCCESS" == new.resolve(dfid, Resolution("OVERRIDE", "ada", "why", acknowledged=True)).execution


def test_a_retired_agent_leaves_no_authority_but_to_abort(world: World):
    dfid = escalated(world, refund())
    registry.transition(world.store, "claims-agent", "RETIRED", by="operator", reason="x", now_ms=world.clock())
    refused(world, dfid, "OVERRIDE")
    assert "ABORTED" == resolve(world, dfid, "ABORT").state


def newer_contract(world: World, _other: str) -> None:
    terms = contract(("1.0.0", "2.0.0"), ALWAYS, more=HUMAN)
    registry.register(world.store, terms, by="registry", now_ms=world.clock())


@pytest.mark.parametrize(
    ("act", "code"),
    [
        (lambda world, _other: halt(world), "HALTED"),
        (newer_contract, "CONTRACT_REVOKED"),
        (lambda world, other: resolve(world, other, "OVERRIDE"), "RESOURCE_CONTENTION"),
        (lambda world, _other: world.clock.advance(30_001), "STATE_DRIFT_DETECTED"),
    ],
    ids=["halted", "another contract", "another payment", "too long ago"],
)
def test_what_can_have_changed_is_asked_for_again_inside_the_reserving_transaction(
    world: World, act: Callable[[World, str], object], code: str
):
    dfid, other = escalated(world, refund("40.00")), escalated(world, refund("1.00"), "C2")
    at_the_desk = desk(world)
    judged = at_the_desk._judge

    def judge_and_then(*given: object) -> object:
        verdict = judged(*given)  # type: ignore[arg-type]  # passed on
        act(world, other)
        return verdict

    at_the_desk._judge = judge_and_then  # type: ignore[assignment, method-assign]
    with pytest.raises((UsageError, WorldError)) as caught:
        at_the_desk.resolve(dfid, Resolution("OVERRIDE", "ada", "why", acknowledged=True))
    assert code == caught.value.reason_code
    assert [] == world.column("SELECT 1 FROM human_decisions WHERE dfid = ?", dfid)
    assert dfid not in [row[0] for row in world.rail.paid()]
    assert () == verify.verify(world.store).faults


def test_limits_of_what_may_be_spent_hold_for_humans_too_and_leave_what_is_within_them(folder: Path):
    world = World(folder, terms=contract(("per: ticket.customer, max_minor: 100000", "max_minor: 25500"), ALWAYS))
    first, second = escalated(world, refund("40.00")), escalated(world, compensate, "C2")
    assert "SUCCESS" == resolve(world, first, "OVERRIDE").execution
    seen = desk(world).view(desk(world).case(second)).seen
    assert "`COMPENSATE` is not permitted now" == str(refused(world, second, "OVERRIDE", seen=seen))
    assert "SUCCESS" == resolve(world, second, "MODIFY", PAY, seen=seen).execution
    world.close()


# --- what the human has seen ------------------------------------------------------------------------------------------


def test_an_override_never_carries_out_another_value_that_the_rules_fixed(folder: Path):
    fixed = contract(
        ("{amount: {value: 25000, scale: 2}}", "{amount: {value: ticket.refundable_minor, scale: 2}}"), ALWAYS
    )
    world = World(folder, terms=fixed)
    dfid = escalated(world, compensate)
    world.tickets.put("T1", refundable_minor=19_000)
    seen = desk(world).view(desk(world).case(dfid)).seen
    error = refused(world, dfid, "OVERRIDE", seen=seen)
    assert "a value that the rules fix has changed since it was proposed" == str(error)
    answer = resolve(world, dfid, "MODIFY", change("COMPENSATE", "LONG_DELAY"), seen=seen)
    assert {"amount": 19_000} == answer.params
    world.close()


def test_what_was_reserved_meanwhile_is_not_taken_twice(world: World):
    first, second = escalated(world, compensate), escalated(world, compensate, "C2")
    world.rail.misfortunes, world.rail.blind = ["drop"], True
    assert "UNKNOWN" == resolve(world, first, "OVERRIDE").execution
    error = refused(world, second, "OVERRIDE")
    assert error.reason_code in ("RBAC_DENIED", "RESOURCE_CONTENTION")


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_the_agent_handed_over_without_a_proposal_cannot_be_overridden(world: World):
    error = refused(world, escalated(world), "OVERRIDE")
    assert ("the agent proposed nothing that could be carried out", True) == (str(error), "--modify" in error.hint)


def test_a_case_without_any_words_of_the_agent_can_be_decided_by_the_human(world: World):
    packet = world.packet()
    dfid = world.kernel.escalate(packet, "MODEL_UNAVAILABLE", "no weights").dfid
    refused(world, dfid, "OVERRIDE")
    assert "SUCCESS" == resolve(world, dfid, "MODIFY", PAY).execution


@pytest.mark.parametrize("decision", ["abort", "Override", "", "APPROVE"])
def test_a_decision_that_there_is_none_of_is_refused_and_pays_nothing(world: World, decision: str):
    dfid = escalated(world, refund("40.00"))
    error = refused(world, dfid, decision)  # type: ignore[arg-type]  # callers may not be type-checked
    assert f"there is no decision `{decision}`" == str(error)


def test_a_second_resolution_is_refused_and_says_whose_the_first_was(world: World):
    dfid = escalated(world, refund())
    resolve(world, dfid, "ABORT", who="grace")
    with pytest.raises(UsageError, match=f"flow `{dfid}` is resolved already: ABORT by grace") as refused:
        resolve(world, dfid, "OVERRIDE")
    assert f"sds audit {dfid}" == refused.value.hint
    assert [] == world.rail.sent


def test_only_an_escalated_flow_is_resolved(world: World):
    packet = world.packet()
    with pytest.raises(UsageError, match="is ACTIVE, not ESCALATED"):
        resolve(world, packet.dfid, "ABORT")
    with pytest.raises(UsageError, match="there is no flow `flow-99999` of gate `claims`"):
        resolve(world, "flow-99999", "ABORT")


@pytest.mark.parametrize("field", ["who", "reason"])
def test_who_and_why_are_needed(world: World, field: str):
    dfid = escalated(world)
    said = {"who": "ada", "reason": "why"} | {field: " \n"}
    with pytest.raises(UsageError, match=f"a {'name' if field == 'who' else 'reason'} is needed, for the record"):
        desk(world).resolve(dfid, Resolution("ABORT", **said))  # type: ignore[arg-type]  # by name


def test_what_a_human_types_is_kept_on_one_line_and_within_limits(world: World):
    dfid = escalated(world)
    with pytest.raises(UsageError, match="the name has 201 characters, and the record keeps 200"):
        desk(world).resolve(dfid, Resolution("ABORT", "ada\n" + "a" * 197, "why"))
    desk(world).resolve(dfid, Resolution("ABORT", "ada\n" + "a" * 196, "why\ud800\x1b[2J" + "!" * 493))
    ((who, why),) = world.store.rows("SELECT who, reason FROM human_decisions")
    assert (200, 500) == (len(who), len(why))
    assert (who + why).isprintable()


@pytest.mark.parametrize("decision", ["ABORT", "OVERRIDE", "MODIFY"])
@pytest.mark.parametrize(
    "seen", ["foo", "0" * 63, "0" * 64 + ":", "0" * 64 + ":1.5", "0" * 64 + ":1" * 5_000, "\udcff"]
)
def test_what_a_human_has_seen_is_the_id_of_a_state(world: World, decision: Decision, seen: str):
    dfid = escalated(world, refund("40.00"))
    with pytest.raises(UsageError, match="is not the id of a state"):
        resolve(world, dfid, decision, PAY if decision == "MODIFY" else "", seen=seen)
    assert [] == world.store.rows("SELECT * FROM human_decisions")


def test_a_record_that_was_altered_is_not_acted_on(world: World):
    dfid = escalated(world, refund("40.00"))
    params, sealed = world.store.rows("SELECT params, proposal FROM policy_proposals")[0]
    for column, value, why in (
        ("params", params.replace("40", "90"), "the record of flow `.*` was altered"),
        ("proposal", sealed + b"\0", "a text of event `C1` differs from what was sealed"),
    ):
        alone(world.store, f"UPDATE policy_proposals SET {column} = ?", (value,))
        with pytest.raises(StoreError, match=why):
            resolve(world, dfid, "OVERRIDE")
    assert [] == world.rail.sent


# --- an agent that waits ----------------------------------------------------------------------------------------------


# --- impact -----------------------------------------------------------------------------------------------------------


def test_what_is_of_high_impact_is_refused_until_it_is_acknowledged(world: World):
    dfid = escalated(world, refund("40.00"))
    error = refused(world, dfid, "OVERRIDE", acknowledged=False)
    assert "ACKNOWLEDGEMENT_REQUIRED" == error.reason_code
    assert (
        "this is of HIGH impact: `REFUND_TICKET amount 40.00` will be carried out on `T1` and cannot be undone"
        == str(error)
    )
    assert "SUCCESS" == resolve(world, dfid, "OVERRIDE", acknowledged=True).execution


def test_an_override_never_pays_what_the_rules_fix_for_a_human_when_it_is_not_known_what_they_fixed_before(
    folder: Path,
):
    """A repeated proposal was never judged to its end, and a human's own terms fix another amount."""
    gift = "GIFT: {when: '%s', fills: {amount: {value: %d, scale: 2}}, spends: amount, reasons: [SHORT_DELAY]}\n"
    human = f"human:\n  authority: [GIFT, DENY]\n  kinds:\n    {gift % ('true', 90_000)}"
    angry = gift % ('ticket.mood == "angry"', 100)
    world = World(folder, terms=contract(("  DENY: {", f"  {angry}  DENY: {{"), more=human))
    packet = world.packet()
    data = proposal("GIFT", "SHORT_DELAY")(packet)
    world.kernel.decide(packet, data)
    answer = world.kernel.decide(packet, data)
    assert ("ESCALATED", "REPEATED_PROPOSAL") == (answer.state, answer.reason_code)
    assert "STATE_DRIFT_DETECTED" == refused(world, answer.dfid, "OVERRIDE").reason_code
    assert "SUCCESS" == resolve(world, answer.dfid, "MODIFY", change("GIFT", "SHORT_DELAY")).execution
    world.close()
