"""What moved since a human has looked, and what does not count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sds.kernel.errors import WorldError
from sds.kernel.human.review import HumanReview, Resolution
from sds.kernel.registry import registry
from sds.kernel.storage import ledger
from tests.kernel.durable import World, contract, refund
from tests.kernel.humans import ALWAYS, HOUR_MS, HUMAN, PAY, change, desk, escalated, refused, resolve
from tests.kernel.outside import FARE_MINOR

GIFT = """    GIFT:
      fills: {amount: {value: VALUE, scale: 2}}
      spends: amount
      impact: LOW
      reasons: [APOLOGY]
"""


def test_a_world_that_moved_since_the_agent_looked_is_refused_until_the_human_has_seen_it(world: World):
    dfid = escalated(world, refund("40.00"))
    world.tickets.put("T1", refundable_minor=19_000)
    error = refused(world, dfid, "OVERRIDE")
    assert ("STATE_DRIFT_DETECTED", "the state has moved: ticket.refundable_minor") == (error.reason_code, str(error))
    look = desk(world).view(desk(world).case(dfid))
    assert ("ticket.refundable_minor",) == look.moved
    assert "SUCCESS" == resolve(world, dfid, "OVERRIDE", seen=look.seen).execution
    assert ["2"] == world.column("SELECT state_version FROM execution_log")


def test_what_moves_between_looking_and_deciding_is_refused(world: World):
    dfid = escalated(world, refund("40.00"))
    look = desk(world).view(desk(world).case(dfid))
    world.tickets.put("T1", mood="angry")
    error = refused(world, dfid, "OVERRIDE", seen=look.seen)
    assert "STATE_DRIFT_DETECTED" == error.reason_code
    assert "look again: sds escalations show" in error.hint


def test_what_was_seen_under_another_contract_is_refused_since_its_rules_may_fix_other_values(world: World):
    gifts = [HUMAN + GIFT.replace("VALUE", value) for value in ("1000", "2000")]
    older, newer = (
        contract(("1.0.0", version), ALWAYS, more=more) for version, more in zip(("1.0.1", "1.0.2"), gifts, strict=True)
    )
    dfid = escalated(world, refund("40.00"))
    registry.register(world.store, older, by="registry", now_ms=world.clock())
    before = HumanReview(world.open_kernel(terms=older), now_ms=world.clock)
    seen = before.view(before.case(dfid)).seen
    registry.register(world.store, newer, by="registry", now_ms=world.clock())
    review = HumanReview(world.open_kernel(terms=newer), now_ms=world.clock)
    wanted = Resolution("MODIFY", "ada", "sorry", change("GIFT", "APOLOGY"), seen, acknowledged=True)
    with pytest.raises(WorldError, match="the contract or a field that must not move changed after you saw the case"):
        review.resolve(dfid, wanted)
    assert [] == world.rail.paid()
    now = review.view(review.case(dfid)).seen
    assert {"amount": 2_000} == review.resolve(dfid, replace(wanted, seen=now)).params


def test_a_look_at_another_case_or_a_made_up_one_counts_for_nothing(world: World):
    first, second = escalated(world, refund()), escalated(world, refund(), "C2")
    other = desk(world).view(desk(world).case(second)).seen
    for seen in (other, "f" * 64, f"{other}:1"):
        assert "STATE_DRIFT_DETECTED" == refused(world, first, "OVERRIDE", seen=seen).reason_code


def test_looking_again_at_a_state_that_stood_still_gives_the_same_name_and_writes_nothing(world: World):
    dfid, before = escalated(world, refund()), ledger.head(world.store)
    names = set()
    for _ in range(3):
        names.add(desk(world).view(desk(world).case(dfid)).seen)
        world.clock.advance(1_000)
    world.tickets.put("T1")  # only its version
    names.add(desk(world).view(desk(world).case(dfid)).seen)
    assert (1, before) == (len(names), ledger.head(world.store))


@pytest.mark.parametrize(("now", "goes"), [(19_900, True), (19_899, False), (20_100, True), (20_101, False)])
def test_the_contracts_tolerances_hold_for_what_a_human_has_seen(folder: Path, now: int, goes: bool):
    loose = contract(ALWAYS, more="drift: {fields: {ticket.refundable_minor: {abs: 100}}}\n")
    world = World(folder, terms=loose)
    dfid = escalated(world, refund("40.00"))
    seen = desk(world).view(desk(world).case(dfid)).seen
    world.tickets.put("T1", refundable_minor=now)
    if goes:
        assert "SUCCESS" == resolve(world, dfid, "OVERRIDE", seen=seen).execution
    else:
        bent = seen.rpartition(":")[0] + f":{now}"
        for said in ("", seen, bent):
            assert "STATE_DRIFT_DETECTED" == refused(world, dfid, "OVERRIDE", seen=said).reason_code
    world.close()


def test_a_field_that_may_move_a_little_but_was_missing_may_not_appear_unseen(folder: Path):
    loose = contract(ALWAYS, more="drift: {fields: {ticket.refundable_minor: {abs: 500}}}\n")
    world = World(folder, terms=loose)
    del world.tickets.rows["T1"]["ticket.refundable_minor"]
    dfid = escalated(world)
    seen = desk(world).view(desk(world).case(dfid)).seen
    world.tickets.put("T1", refundable_minor=FARE_MINOR)
    error = refused(world, dfid, "MODIFY", PAY, seen=seen)
    assert ("STATE_DRIFT_DETECTED", "the state has moved: ticket.refundable_minor") == (error.reason_code, str(error))
    again = desk(world).view(desk(world).case(dfid)).seen
    assert "SUCCESS" == resolve(world, dfid, "MODIFY", PAY, seen=again).execution
    world.close()


def test_age_alone_refuses_nothing(world: World):
    dfid = escalated(world, refund())
    world.clock.advance(100 * 24 * HOUR_MS)
    assert "SUCCESS" == resolve(world, dfid, "OVERRIDE").execution


def test_on_state_with_a_mistyped_field_nothing_but_an_abort_is_possible(world: World):
    dfid = escalated(world, refund())
    world.tickets.put("T1", customer=b"ada")  # type: ignore[arg-type]  # what a careless source may return
    assert ("ticket.customer",) == desk(world).view(desk(world).case(dfid)).moved
    assert "`ticket.customer` is not of its declared type" in str(refused(world, dfid, "OVERRIDE"))
    assert "ABORTED" == resolve(world, dfid, "ABORT").state


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
