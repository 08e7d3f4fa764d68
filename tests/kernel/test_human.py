"""Humans resolve escalated cases: once, within their own envelope, on a world that stands still, and on the record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sds.kernel import audit, human_record, ledger, recovery, registry
from sds.kernel.answer import Answer
from sds.kernel.attest import attest
from sds.kernel.contract import parse_contract
from sds.kernel.errors import ContractError, SdsError, StoreError, UsageError, WorldError
from sds.kernel.executor import Receipt
from sds.kernel.human import HumanDesk, Resolution
from sds.kernel.human_record import Decision
from sds.kernel.human_terms import human_contract, impact
from sds.kernel.packet import Decoding
from sds.kernel.store import Store
from tests.kernel.durable import (
    CONTRACT,
    LEASE_MS,
    Propose,
    World,
    compensate,
    contract,
    deny,
    escalate,
    refund,
    together,
)
from tests.kernel.test_runtime import halt, status, suspend

ALWAYS = "escalation: {always: [COMPENSATE, REFUND_TICKET, DENY], impact_high_minor: 50000}\n"
HUMAN = """
human:
  kinds:
    GOODWILL:
      params: {amount: {lo: 0, hi: 5000, scale: 2}}
      spends: amount
      impact: LOW
      reasons: [SHORT_DELAY, APOLOGY]
"""
TERMS = contract(more=ALWAYS + HUMAN)
HOUR_MS = 3_600_000


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    """A gate whose agent decides nothing alone, seen hours after it has handed its cases over."""
    made = World(folder, terms=TERMS)
    yield made
    made.close()


def escalated(world: World, propose: Propose = escalate, name: str = "C1", ticket: str = "T1") -> str:
    """Let the agent hand a case over; return its flow, two hours later."""
    packet = world.packet(name, ticket)
    answer = world.kernel.decide(packet, propose(packet), Decoding(confidence=0.5))
    assert "ESCALATED" == answer.state
    world.clock.advance(2 * HOUR_MS)
    return answer.dfid


def desk(world: World, store: Store | None = None) -> HumanDesk:
    return HumanDesk(world.open_kernel(store), now_ms=world.clock)


def change(action: str, reason: str, **params: str) -> str:
    numbers = ",".join(f'"{name}":{text}' for name, text in params.items())
    return f'{{"action":"{action}","params":{{{numbers}}},"reason_code":"{reason}"}}'


PAY = change("REFUND_TICKET", "NOT_TRAVELLED", amount="40.00")
SORRY = change("GOODWILL", "APOLOGY", amount="50.00")


def resolve(
    world: World,
    dfid: str,
    decision: Decision,
    text: str = "",
    *,
    seen: str = "",
    acknowledged: bool = True,
    who: str = "ada",
    store: Store | None = None,
) -> Answer:
    wanted = Resolution(decision, who, "looked into it", text, seen, acknowledged)
    return desk(world, store).resolve(dfid, wanted)


def refused(world: World, dfid: str, decision: Decision, text: str = "", **how: object) -> SdsError:
    """Return the refusal of a resolution, having made sure that it has changed nothing."""
    before = ledger.head(world.store), list(world.rail.sent)
    with pytest.raises((UsageError, WorldError)) as caught:
        resolve(world, dfid, decision, text, **how)  # type: ignore[arg-type]  # passed on by name
    assert before == (ledger.head(world.store), world.rail.sent)
    assert [] == world.column("SELECT 1 FROM human_decisions WHERE dfid = ?", dfid)
    assert ["ESCALATED"] == world.column("SELECT state FROM decision_flows WHERE dfid = ?", dfid)
    return caught.value


# --- carrying out ---------------------------------------------------------------------------------------------------


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
    assert () == audit.verify(world.store).faults


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
    assert () == audit.verify(world.store).faults


@pytest.mark.parametrize(("decision", "text"), [("OVERRIDE", ""), ("MODIFY", change("DENY", "NOT_ELIGIBLE"))])
def test_a_denial_closes_the_case_without_side_effect_and_is_of_low_impact(world: World, decision: Decision, text: str):
    answer = resolve(world, escalated(world, deny), decision, text, acknowledged=False)
    assert ("CLOSED", "DENY", None) == (answer.state, answer.action, answer.execution)
    assert () == audit.verify(world.store).faults


def test_the_same_event_again_gets_what_the_human_decided(world: World):
    dfid = escalated(world, refund("40.00"))
    answer = resolve(world, dfid, "MODIFY", PAY)
    assert answer == world.kernel.open(world.event())
    assert 1 == len(world.rail.paid())


def test_the_record_says_who_decided_what_when_why_and_on_what(world: World):
    dfid = escalated(world, refund("40.00"))
    resolve(world, dfid, "OVERRIDE")
    record = audit.flow_record(world.store, dfid)
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


# --- the human's own envelope ---------------------------------------------------------------------------------------


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
        (change("ESCALATE", "HUMAN_REVIEW"), "USAGE", "`ESCALATE` is no decision: a human is the last one asked"),
        ("pay them", "USAGE", "the decision is not JSON"),
        ("[]", "USAGE", "the decision is no object of action, params and reason_code"),
        ('{"action":"DENY","action":"DENY"}', "USAGE", "a name is given twice"),
        ('{"action":"DENY","reason_code":"NOT_ELIGIBLE","context_ref":"0"}', "USAGE", "is no object of action"),
        ('{"action":"GOODWILL","params":{"amount":"1.00"},"reason_code":"APOLOGY"}', "USAGE", "is a number"),
        ('{"action":"GOODWILL","params":{"amount":NaN},"reason_code":"APOLOGY"}', "SCHEMA_INVALID", "not the form"),
        ('{"action":"DENY\\",\\"params\\":{}","reason_code":"X"}', "SCHEMA_INVALID", "not the form of a proposal"),
        ('{"action":"\\ud800","reason_code":"X"}', "SCHEMA_INVALID", "not the form of a proposal"),
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
    look = desk(world).look(desk(world).case(dfid))
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
    newer = contract(("1.0.0", "1.0.1"), more=ALWAYS + HUMAN)
    registry.register(world.store, newer, by="registry", now_ms=world.clock())
    assert refused(world, dfid, "OVERRIDE").reason_code in ("AGENT_SUSPENDED", "CONTRACT_REVOKED")
    new = HumanDesk(world.open_kernel(terms=newer), now_ms=world.clock)
    assert "SUCCESS" == new.resolve(dfid, Resolution("OVERRIDE", "ada", "why", acknowledged=True)).execution


def test_a_retired_agent_leaves_no_authority_but_to_abort(world: World):
    dfid = escalated(world, refund())
    registry.transition(world.store, "claims-agent", "RETIRED", by="operator", reason="x", now_ms=world.clock())
    refused(world, dfid, "OVERRIDE")
    assert "ABORTED" == resolve(world, dfid, "ABORT").state


@pytest.mark.parametrize(
    "act",
    [
        halt,
        lambda w: registry.register(
            w.store, contract(("1.0.0", "2.0.0"), more=ALWAYS + HUMAN), by="registry", now_ms=1
        ),
    ],
)
def test_authority_is_asked_for_again_inside_the_reserving_transaction(world: World, act: Callable[[World], object]):
    dfid = escalated(world, refund())
    at_the_desk = desk(world)
    judged = at_the_desk._judge

    def judge_and_then(*given: object) -> object:
        verdict = judged(*given)  # type: ignore[arg-type]  # passed on
        act(world)
        return verdict

    at_the_desk._judge = judge_and_then  # type: ignore[assignment, method-assign]
    with pytest.raises(UsageError) as caught:
        at_the_desk.resolve(dfid, Resolution("OVERRIDE", "ada", "why", acknowledged=True))
    assert caught.value.reason_code in ("HALTED", "CONTRACT_REVOKED")
    assert ([], []) == (world.rail.sent, world.column("SELECT 1 FROM human_decisions"))


# --- what the human has seen ----------------------------------------------------------------------------------------


def test_a_world_that_moved_since_the_agent_looked_is_refused_until_the_human_has_seen_it(world: World):
    dfid = escalated(world, refund("40.00"))
    world.tickets.put("T1", refundable_minor=19_000)
    error = refused(world, dfid, "OVERRIDE")
    assert ("STATE_DRIFT_DETECTED", "the state has moved: ticket.refundable_minor") == (error.reason_code, str(error))
    look = desk(world).look(desk(world).case(dfid))
    assert ("ticket.refundable_minor",) == look.moved
    assert "SUCCESS" == resolve(world, dfid, "OVERRIDE", seen=look.seen).execution
    assert ["2"] == world.column("SELECT state_version FROM execution_log")


def test_what_moves_between_looking_and_deciding_is_refused(world: World):
    dfid = escalated(world, refund("40.00"))
    look = desk(world).look(desk(world).case(dfid))
    world.tickets.put("T1", mood="angry")
    error = refused(world, dfid, "OVERRIDE", seen=look.seen)
    assert "STATE_DRIFT_DETECTED" == error.reason_code
    assert "look again: sds escalations show" in error.hint


def test_a_look_at_another_case_or_a_made_up_one_counts_for_nothing(world: World):
    first, second = escalated(world, refund()), escalated(world, refund(), "C2")
    other = desk(world).look(desk(world).case(second)).seen
    for seen in (other, "f" * 64, "x", ":", "9" * 10_000, f"{other}:1"):
        assert "STATE_DRIFT_DETECTED" == refused(world, first, "OVERRIDE", seen=seen).reason_code


def test_looking_again_at_a_state_that_stood_still_gives_the_same_name_and_writes_nothing(world: World):
    dfid, before = escalated(world, refund()), ledger.head(world.store)
    names = set()
    for _ in range(3):
        names.add(desk(world).look(desk(world).case(dfid)).seen)
        world.clock.advance(1_000)
    world.tickets.put("T1")  # only its version
    names.add(desk(world).look(desk(world).case(dfid)).seen)
    assert (1, before) == (len(names), ledger.head(world.store))


@pytest.mark.parametrize(("now", "goes"), [(19_900, True), (19_899, False), (20_100, True), (20_101, False)])
def test_the_contracts_tolerances_hold_for_what_a_human_has_seen(folder: Path, now: int, goes: bool):
    loose = contract(more=ALWAYS + "drift: {fields: {ticket.refundable_minor: {abs: 100}}}\n")
    world = World(folder, terms=loose)
    dfid = escalated(world, refund("40.00"))
    seen = desk(world).look(desk(world).case(dfid)).seen
    world.tickets.put("T1", refundable_minor=now)
    if goes:
        assert "SUCCESS" == resolve(world, dfid, "OVERRIDE", seen=seen).execution
    else:
        bent = seen.rpartition(":")[0] + f":{now}"
        for said in ("", seen, bent):
            assert "STATE_DRIFT_DETECTED" == refused(world, dfid, "OVERRIDE", seen=said).reason_code
    world.close()


def test_age_alone_refuses_nothing(world: World):
    dfid = escalated(world, refund())
    world.clock.advance(100 * 24 * HOUR_MS)
    assert "SUCCESS" == resolve(world, dfid, "OVERRIDE").execution


@pytest.mark.parametrize("how", ["gone", "down"])
def test_on_state_that_cannot_be_read_nothing_but_an_abort_is_possible(world: World, how: str):
    dfid = escalated(world, refund())
    if how == "gone":
        del world.tickets.rows["T1"]
    else:
        world.tickets.down = True
    error = refused(world, dfid, "OVERRIDE")
    assert ("there is no state under this key" if how == "gone" else "the ticket system is down") in str(error)
    assert "ABORTED" == resolve(world, dfid, "ABORT").state


def test_an_override_never_carries_out_another_value_that_the_rules_fixed(folder: Path):
    fixed = contract(
        ("{amount: {value: 25000, scale: 2}}", "{amount: {value: ticket.refundable_minor, scale: 2}}"), more=ALWAYS
    )
    world = World(folder, terms=fixed)
    dfid = escalated(world, compensate)
    world.tickets.put("T1", refundable_minor=19_000)
    seen = desk(world).look(desk(world).case(dfid)).seen
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


# --- what is refused ------------------------------------------------------------------------------------------------


def test_what_the_agent_handed_over_without_a_proposal_cannot_be_overridden(world: World):
    error = refused(world, escalated(world), "OVERRIDE")
    assert ("the agent proposed nothing that could be carried out", True) == (str(error), "--modify" in error.hint)


def test_a_case_without_any_words_of_the_agent_can_be_decided_by_the_human(world: World):
    packet = world.packet()
    dfid = world.kernel.escalate(packet, "MODEL_UNAVAILABLE", "no weights").dfid
    refused(world, dfid, "OVERRIDE")
    assert "SUCCESS" == resolve(world, dfid, "MODIFY", PAY).execution


def test_a_second_resolution_is_refused_and_says_whose_the_first_was(world: World):
    dfid = escalated(world, refund())
    resolve(world, dfid, "ABORT", who="grace")
    with pytest.raises(UsageError, match=f"flow `{dfid}` is resolved already: ABORT by grace"):
        resolve(world, dfid, "OVERRIDE")
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


def test_a_record_that_was_altered_is_not_acted_on(world: World):
    dfid = escalated(world, refund("40.00"))
    with world.store.transaction():
        world.store.run(
            "UPDATE policy_proposals SET proposal = CAST(replace(CAST(proposal AS TEXT), '40', '90') AS BLOB)"
        )
    with pytest.raises(StoreError, match="is not what was written"):
        resolve(world, dfid, "OVERRIDE")
    assert [] == world.rail.sent


# --- impact ---------------------------------------------------------------------------------------------------------


def test_what_is_of_high_impact_is_refused_until_it_is_acknowledged(world: World):
    dfid = escalated(world, refund("40.00"))
    error = refused(world, dfid, "OVERRIDE", acknowledged=False)
    assert "ACKNOWLEDGEMENT_REQUIRED" == error.reason_code
    assert (
        "this is of HIGH impact: `REFUND_TICKET` (amount 4000) will be carried out on `T1` and cannot be undone"
        == str(error)
    )
    assert "SUCCESS" == resolve(world, dfid, "OVERRIDE", acknowledged=True).execution


@pytest.mark.parametrize(
    ("action", "numbers", "expected"),
    [
        ("REFUND_TICKET", {"amount": 1}, "HIGH"),
        ("DENY", {}, "LOW"),
        ("GOODWILL", {"amount": 49_999}, "LOW"),
        ("GOODWILL", {"amount": 50_000}, "HIGH"),
        ("GOODWILL", {}, "HIGH"),
        ("NO_SUCH_KIND", {}, "HIGH"),
    ],
)
def test_impact_is_high_for_side_effects_large_amounts_and_whatever_is_not_known(
    action: str, numbers: dict[str, int], expected: str
):
    assert expected == impact(human_contract(TERMS), action, numbers)


# --- an agent that waits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decision", ["OVERRIDE", "ABORT"])
def test_an_agent_that_waits_for_its_case_goes_on_when_it_is_resolved(world: World, decision: Decision):
    dfid = escalated(world, refund())
    registry.transition(world.store, "claims-agent", "ESCALATED", by="runtime", reason=dfid, now_ms=world.clock())
    resolve(world, dfid, decision)
    assert "ACTIVE" == status(world)
    (body,) = world.column("SELECT body FROM ledger WHERE kind = 'AGENT' ORDER BY idx DESC LIMIT 1")
    assert ("operator", "ada", f"{decision} of {dfid}: looked into it") == tuple(
        json.loads(str(body))[name] for name in ("by", "who", "reason")
    )
    assert () == audit.verify(world.store).faults


# --- two at once, recovery ------------------------------------------------------------------------------------------


def test_of_two_humans_at_once_one_decides(world: World):
    for number in range(8):
        dfid = escalated(world, refund("1.00"), f"C{number}")
        stores = [world.open_store(), world.open_store()]

        def one(turn: int, dfid: str = dfid, stores: list[Store] = stores) -> str:
            try:
                return resolve(world, dfid, "OVERRIDE", who=f"human {turn}", store=stores[turn]).resolved_by or ""
            except SdsError as error:
                assert error.reason_code in ("FLOW_CLOSED", "RESOURCE_CONTENTION", "STATE_DRIFT_DETECTED"), error
                return ""

        won = [name for name in together(2, one) if name]
        assert won == world.column("SELECT who FROM human_decisions WHERE dfid = ?", dfid)
        assert 1 == len([row for row in world.rail.paid() if row[0] == dfid])
        # what one has paid has moved the ticket: the next case looks at it anew
        world.tickets.put("T1")
    assert () == audit.verify(world.store).faults


def test_recovery_leaves_an_order_alone_that_a_human_has_just_sent(world: World):
    dfid = escalated(world, refund())
    world.rail.misfortunes, world.rail.blind = ["drop"], True
    waiting: list[recovery.Recovered] = []
    sent = world.rail.dispatch

    def dispatch(*given: object) -> Receipt:
        waiting.append(recovery.recover(world.open_kernel(), now_ms=world.clock()))
        return sent(*given)  # type: ignore[arg-type]  # passed on

    world.rail.dispatch = dispatch  # type: ignore[assignment, method-assign]
    resolve(world, dfid, "OVERRIDE")
    assert [recovery.Recovered(leased=1)] == waiting


@pytest.mark.parametrize(("moved", "paid"), [(False, 1), (True, 0)])
def test_a_humans_order_that_was_lost_is_sent_again_only_if_the_human_might_decide_it_now(
    world: World, moved: bool, paid: int
):
    dfid = escalated(world)
    world.rail.misfortunes = ["drop"]
    world.rail.blind = True
    assert "UNKNOWN" == resolve(world, dfid, "MODIFY", SORRY).execution
    world.rail.blind = False
    world.clock.advance(LEASE_MS)
    if moved:
        world.tickets.put("T1")
    recovery.recover(world.kernel, now_ms=world.clock())
    assert paid == len(world.rail.paid())
    assert () == audit.verify(world.store).faults


# --- orders whose end nobody knows ----------------------------------------------------------------------------------


class Silent:
    """A rail that carries out what it is sent and never answers, and can neither look up nor void."""

    idempotent = False

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.known = Receipt("unknown")

    def dispatch(self, intent: object, key: str, deadline_s: float) -> Receipt:
        self.sent.append(key)
        return Receipt("unknown")

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        return self.known


def unknown(world: World, silent: Silent) -> str:
    """Return a flow whose order was sent, and whose end nobody knows."""
    dfid = escalated(world, refund("40.00"))
    kernel = world.open_kernel(executor=silent)
    at_the_desk = HumanDesk(kernel, now_ms=world.clock)
    assert "UNKNOWN" == at_the_desk.resolve(dfid, Resolution("OVERRIDE", "ada", "why", acknowledged=True)).execution
    return dfid


def say(world: World, silent: Silent, dfid: str, receipt: Receipt, *, acknowledged: bool = True) -> Answer:
    kernel = world.open_kernel(executor=silent)
    who = {"who": "ada", "reason": "asked the bank", "acknowledged": acknowledged}
    return attest(kernel, dfid, receipt, now_ms=world.clock(), **who)  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    ("receipt", "state", "execution", "drawn"),
    [(Receipt("settled", "B-7"), "CLOSED", "SUCCESS", 4_000), (Receipt("rejected"), "ABORTED", "FAILED", 0)],
)
def test_a_human_says_what_became_of_an_order_and_that_is_in_the_ledger(
    world: World, receipt: Receipt, state: str, execution: str, drawn: int
):
    silent = Silent()
    dfid = unknown(world, silent)
    answer = say(world, silent, dfid, receipt)
    assert (state, execution, receipt.reference or None) == (answer.state, answer.execution, answer.reference)
    assert [drawn] == world.column("SELECT drawn FROM resources")
    (body,) = world.column("SELECT body FROM ledger WHERE kind = 'RESOLVED'")
    assert {"who": "ada", "reason": "asked the bank"} == json.loads(str(body))["by"]
    assert () == audit.verify(world.store).faults
    assert 1 == len(silent.sent)


def test_the_executors_own_definite_answer_wins_over_a_humans_word(world: World):
    silent = Silent()
    dfid = unknown(world, silent)
    silent.known = Receipt("settled", "its own")
    answer = say(world, silent, dfid, Receipt("rejected"))
    assert ("SUCCESS", "its own") == (answer.execution, answer.reference)
    (body,) = world.column("SELECT body FROM ledger WHERE kind = 'RESOLVED'")
    assert "by" not in json.loads(str(body))


def test_what_is_certainly_absent_was_not_carried_out_whatever_a_human_says(world: World):
    silent = Silent()
    dfid = unknown(world, silent)
    silent.known = Receipt("absent")
    with pytest.raises(UsageError, match="the executor is certain that nothing was done"):
        say(world, silent, dfid, Receipt("settled", "B-7"))
    assert "FAILED" == say(world, silent, dfid, Receipt("rejected")).execution


def test_a_humans_word_needs_an_acknowledgement_a_reference_and_an_order_that_is_unknown(world: World):
    silent = Silent()
    dfid = unknown(world, silent)
    with pytest.raises(UsageError, match="this is of HIGH impact: what the order holds stays taken for good"):
        say(world, silent, dfid, Receipt("settled", "B-7"), acknowledged=False)
    with pytest.raises(UsageError, match="has a reference where it was carried out"):
        say(world, silent, dfid, Receipt("settled", " "))
    say(world, silent, dfid, Receipt("rejected"))
    with pytest.raises(UsageError, match="has no order whose end is unknown"):
        say(world, silent, dfid, Receipt("settled", "B-7"))
    assert ["FAILED"] == world.column("SELECT status FROM execution_log")


def test_an_altered_order_is_neither_looked_up_nor_sent_and_a_human_may_still_end_it(world: World):
    silent = Silent()
    dfid = unknown(world, silent)
    silent.known = Receipt("settled", "another's")
    with world.store.transaction():
        world.store.run("UPDATE execution_log SET idempotency_key = ?", ("f" * 64,))
    assert ("FAILED", None) == (
        (answer := say(world, silent, dfid, Receipt("rejected"))).execution,
        answer.reference,
    )


# --- the queue ------------------------------------------------------------------------------------------------------


def test_what_waits_is_listed_oldest_first_with_what_is_proposed_and_its_impact(world: World):
    silent = Silent()
    world.tickets.put("T2")
    first = unknown(world, silent)
    second, third = escalated(world, deny, "C2", "T2"), escalated(world, escalate, "C3", "T2")
    resolve(world, escalated(world, refund(), "C4", "T2"), "ABORT")
    found = [
        (case.dfid, case.proposal.action if case.proposal else None, case.impact(desk(world).contract))
        for case in desk(world).waiting()
    ]
    assert [(first, "REFUND_TICKET", "HIGH"), (second, "DENY", "LOW"), (third, None, None)] == found
    assert [first] == [c.dfid for c in human_record.waiting(world.store, world.contract, limit=1)]


def test_the_queue_of_any_gate_is_read_by_its_registered_terms(world: World):
    assert desk(world).contract == human_record.registered_terms(world.store, "claims")
    with pytest.raises(UsageError, match="no contract is registered for gate `loans`"):
        human_record.registered_terms(world.store, "loans")


# --- tampering ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        ("UPDATE human_decisions SET who = 'eve'", "table human_decisions of flow"),
        ("UPDATE human_decisions SET reason = 'another'", "table human_decisions of flow"),
        ("UPDATE human_decisions SET params = '{\"amount\":1}'", "table human_decisions of flow"),
        ("DELETE FROM human_decisions", "table human_decisions of flow"),
        ("UPDATE decision_flows SET state = 'ESCALATED', tag = NULL", "the table says ('ESCALATED', None)"),
        (
            "INSERT INTO human_decisions SELECT 'x', decision, who, reason, impact, acknowledged, policy_kind, params,"
            " justification, proposal, seen, snapshot_id, snapshot, envelope_hash, envelope, contract_hash,"
            " lease_until_ms, decided_at_ms FROM human_decisions",
            "table human_decisions: flow x is not in the ledger",
        ),
    ],
)
def test_a_humans_decision_that_was_altered_behind_the_kernels_back_is_found(world: World, sql: str, found: str):
    resolve(world, escalated(world, refund()), "OVERRIDE")
    with world.store.transaction():
        world.store.run(sql)
    faults = audit.verify(world.store).faults
    assert any(found in line for line in faults), faults


def test_a_resolution_of_what_was_not_escalated_is_no_entry_this_program_writes(world: World):
    dfid = escalated(world, refund())
    resolve(world, dfid, "OVERRIDE")
    with world.store.transaction():
        ledger.append(world.store, 1, "HUMAN", dfid, {"state": "CLOSED", "tag": None, "rows": {}})
    assert f"entry {ledger.head(world.store).idx}: not an entry this program writes" in audit.verify(world.store).faults


# --- the section of the contract ------------------------------------------------------------------------------------


def human(section: str) -> str:
    return CONTRACT + "human:\n" + section


@pytest.mark.parametrize(
    ("section", "line", "message"),
    [
        ("  authority: [PAY]\n", 2, "human.authority.0: `PAY` is not one of the kinds"),
        ("  kinds: {ESCALATE: {reasons: [X]}}\n", 2, "human.kinds.ESCALATE: is always there and is not declared"),
        ('  kinds: {DENY: {reasons: [X], when: ticket.mood == "calm"}}\n', 2, "human.kinds.DENY: takes only reasons"),
        ("  when: ticket.nowhere > 1\n", 2, "human.when: "),
        ("  kinds:\n    PAY:\n      when: ticket.mood\n      reasons: [X]\n", 4, "human.kinds.PAY.when: expected bool"),
        (
            "  kinds:\n    PAY:\n      params: {n: {lo: 1, hi: 2}}\n      draws: {ticket.nowhere: n}\n      reasons: [X]\n",
            5,
            "human.kinds.PAY.draws.ticket.nowhere: `ticket.nowhere` is not a declared snapshot field",
        ),
        (
            "  kinds:\n    PAY:\n      params: {n: {lo: 1, hi: 2}}\n      spends: n\n      reasons: [X]\n",
            5,
            "human.kinds.PAY.spends: has another scale than what other kinds spend",
        ),
        (
            "  kinds:\n" + "".join(f"    K{n}: {{reasons: [X]}}\n" for n in range(13)),
            2,
            "human.kinds: with the agent's",
        ),
        ("  rank: captain\n", 2, "human.rank: is not a known field"),
    ],
)
def test_a_broken_human_section_is_refused_with_its_line(section: str, line: int, message: str):
    with pytest.raises(ContractError) as caught:
        parse_contract(human(section), "c.yaml")
    at = CONTRACT.count("\n") + line
    assert str(caught.value).startswith(f"c.yaml:{at}: {message}"), str(caught.value)


def test_what_the_human_section_leaves_out_is_as_the_agent_has_it():
    plain, own = human_contract(contract()), human_contract(TERMS)
    assert contract().authority == plain.authority
    assert contract().kinds == plain.kinds
    assert TERMS.when == own.when
    assert {"APOLOGY"} < {*own.kinds["GOODWILL"].reasons} != {*TERMS.kinds["GOODWILL"].reasons}
    assert ((), 0, 50_000) == (
        own.escalation.always,
        own.escalation.confidence_min_pct,
        own.escalation.impact_high_minor,
    )
    assert own == human_contract(own)


def test_a_human_with_less_authority_than_the_agent_has_just_that(folder: Path):
    world = World(folder, terms=contract(more=ALWAYS + "human: {authority: [DENY], when: 'true'}\n"))
    dfid = escalated(world, refund())
    assert "RBAC_DENIED" == refused(world, dfid, "OVERRIDE").reason_code
    assert "CLOSED" == resolve(world, dfid, "MODIFY", change("DENY", "NOT_ELIGIBLE")).state
    with closing(Store(world.path)) as store:
        assert () == audit.verify(store).faults
    world.close()
