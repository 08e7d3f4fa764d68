"""An order that the outside has accepted and not carried out yet: not settled, not sent again, not void, and not forgotten."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.errors import UsageError
from sds.kernel.executor import breaker
from sds.kernel.executor.protocol import ExecutionIntent, Receipt, Settlement
from sds.kernel.flow.decision_record import read_order
from sds.kernel.human import statement_cases
from sds.kernel.human.review import HumanReview, Resolution, attest
from sds.kernel.operations.recovery import Recovered
from tests.kernel.durable import World, refund
from tests.kernel.orders import execution, recovered
from tests.kernel.outside import Rail
from tests.kernel.statements import adopted, backup, cases, codes, listing, restore

ACCEPTED = Receipt("pending", "REF-1", "accepted")


class Clearing(Rail):
    """It accepts every order and answers `says` when it is asked about one. `asked`: (key, reference, kind) of look-ups."""

    def __init__(self, path: Path, says: Receipt) -> None:
        super().__init__(path)
        self.accepts, self.says = ACCEPTED, says
        self.asked: list[tuple[str, str, str]] = []
        self.voided: list[str] = []

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self.sent.append(key)
        return self.accepts

    def lookup_order(self, intent: ExecutionIntent, reference: str, deadline_s: float) -> Receipt:
        self.asked.append((intent.idempotency_key, reference, intent.kind))
        return self.says

    def void(self, key: str, deadline_s: float) -> Receipt:
        self.voided.append(key)
        return Receipt("rejected")


def clearing(world: World, says: Receipt) -> Clearing:
    made = Clearing(world.folder / "clearing.db", says)
    world.kernel = world.open_kernel(executor=made)
    return made


@pytest.mark.parametrize("idempotent", [True, False])
def test_what_was_accepted_and_is_called_absent_is_neither_sent_again_nor_voided(
    world: World, idempotent: bool
) -> None:
    outside = clearing(world, Receipt("absent"))
    outside.idempotent = idempotent
    world.kernel = world.open_kernel(executor=outside)
    answer = world.decide(refund())
    assert [Recovered(unknown=1)] * 3 == [recovered(world) for _ in range(3)]
    assert (1, [], ["UNKNOWN"]) == (len(outside.sent), outside.voided, execution(world))
    assert ("executor.accepted_order_absent", {"dfid": answer.dfid}) in world.logged
    outside.says = Receipt("settled", "PAY-1")
    assert Recovered(success=1) == recovered(world)
    assert ["SUCCESS"] == execution(world)
    assert () == verify.verify(world.store).faults


def test_it_is_looked_up_with_the_order_and_by_the_reference_it_was_accepted_under(world: World) -> None:
    outside = clearing(world, ACCEPTED)
    world.decide(refund())
    assert [] == outside.asked  # its answer was an answer
    recovered(world)
    assert [(outside.sent[0], "REF-1", "REFUND_TICKET")] == outside.asked


def test_a_human_may_say_what_became_of_it_although_the_outside_calls_it_absent(world: World) -> None:
    clearing(world, Receipt("absent"))
    dfid = world.decide(refund()).dfid
    stated = Receipt("settled", "on the bank's statement")
    attest(world.kernel, dfid, stated, who="ada", reason="seen", acknowledged=True, now_ms=world.clock())
    assert ["SUCCESS"] == execution(world)


def test_a_human_cannot_free_what_the_outside_may_still_carry_out(world: World) -> None:
    """Its event would be paid again, and then the first order, too."""
    outside = clearing(world, ACCEPTED)
    dfid = world.decide(refund()).dfid
    who = {"who": "ada", "reason": "they say so", "acknowledged": True, "now_ms": world.clock()}
    with pytest.raises(UsageError, match="has accepted the order, and may still carry it out"):
        attest(world.kernel, dfid, Receipt("rejected"), **who)  # type: ignore[arg-type]
    assert ["UNKNOWN"] == execution(world)
    outside.says = Receipt("unknown")
    attest(world.kernel, dfid, Receipt("rejected"), **who)  # type: ignore[arg-type]
    assert ["FAILED"] == execution(world)


def test_an_order_that_was_lost_and_never_accepted_is_still_voided(world: World) -> None:
    outside = clearing(world, Receipt("absent"))
    outside.accepts, outside.idempotent = Receipt("unknown"), False
    world.kernel = world.open_kernel(executor=outside)
    world.decide(refund())
    recovered(world)
    assert (1, ["FAILED"]) == (len(outside.voided), execution(world))


def test_a_void_that_finds_the_order_carried_out_leaves_it_to_the_look_up_which_compares(world: World) -> None:
    class Late(Clearing):
        def void(self, key: str, deadline_s: float) -> Receipt:
            self.says = Receipt("unknown", detail="settled with another amount")
            return Receipt("settled", "PAY-9")

    outside = Late(world.folder / "clearing.db", Receipt("absent"))
    outside.accepts, outside.idempotent = Receipt("unknown"), False
    world.kernel = world.open_kernel(executor=outside)
    world.decide(refund())
    assert Recovered(unknown=1) == recovered(world)
    assert ["UNKNOWN"] == execution(world)


def test_a_human_cannot_free_what_voiding_calls_carried_out_while_the_look_up_is_late(world: World) -> None:
    outside = clearing(world, Receipt("absent"))
    outside.accepts, outside.idempotent = Receipt("unknown"), False
    outside.void = lambda *_: Receipt("settled", "PAY-1")  # type: ignore[method-assign]
    world.kernel = world.open_kernel(executor=outside)
    dfid = world.decide(refund()).dfid
    who = {"who": "ada", "reason": "seen", "acknowledged": True, "now_ms": world.clock()}
    attest(world.kernel, dfid, Receipt("rejected"), **who)  # type: ignore[arg-type]
    assert ["SUCCESS"] == execution(world)


def cannot_be_called_rejected(world: World, outside: Clearing) -> None:
    """Have an order sent whose end nobody knows, and a human refused who calls it rejected."""
    world.kernel = world.open_kernel(executor=outside)
    dfid = world.decide(refund()).dfid
    who = {"who": "ada", "reason": "seen", "acknowledged": True, "now_ms": world.clock()}
    with pytest.raises(UsageError, match="has accepted the order, and may still carry it out"):
        attest(world.kernel, dfid, Receipt("rejected"), **who)  # type: ignore[arg-type]
    assert ["UNKNOWN"] == execution(world)


@pytest.mark.parametrize("found", ["unknown", "pending", "rejected"])
def test_nor_while_the_look_up_does_not_confirm_it(world: World, found: Settlement) -> None:
    outside = clearing(world, Receipt("absent"))
    outside.accepts, outside.idempotent = Receipt("unknown"), False

    def carried_out(key: str, deadline_s: float) -> Receipt:
        outside.says = Receipt(found)
        return Receipt("settled", "PAY-1")

    outside.void = carried_out  # type: ignore[method-assign]
    cannot_be_called_rejected(world, outside)


def test_nor_what_voiding_itself_calls_accepted(world: World) -> None:
    outside = clearing(world, Receipt("absent"))
    outside.accepts, outside.idempotent = Receipt("unknown"), False
    outside.void = lambda *_: ACCEPTED  # type: ignore[method-assign]
    cannot_be_called_rejected(world, outside)


def test_what_voiding_called_carried_out_is_not_believed_to_be_absent_later(world: World) -> None:
    outside = clearing(world, Receipt("absent"))
    outside.accepts, outside.idempotent = Receipt("unknown"), False

    def carried_out(key: str, deadline_s: float) -> Receipt:
        outside.says = Receipt("unknown")
        return Receipt("settled", "PAY-1")

    outside.void = carried_out  # type: ignore[method-assign]
    world.kernel = world.open_kernel(executor=outside)
    world.decide(refund())
    assert Recovered(unknown=1) == recovered(world)
    outside.void, outside.says = (lambda *_: Receipt("rejected")), Receipt("absent")  # type: ignore[method-assign]
    assert Recovered(unknown=1) == recovered(world)
    assert () == verify.verify(world.store).faults


@pytest.mark.parametrize("answer", ["rejected", "unsent"])
def test_a_refusal_frees_nothing_that_the_look_up_calls_accepted(world: World, answer: Settlement) -> None:
    """Its event would be paid again, and then the first order, too."""
    outside = clearing(world, ACCEPTED)
    outside.accepts = Receipt(answer)
    dfid = world.decide(refund()).dfid
    (detail,) = world.column("SELECT body ->> '$.detail' FROM ledger WHERE dfid = ? AND kind = 'UNKNOWN'", dfid)
    assert f"the executor answered {answer}, but its look-up says pending" == detail
    outside.says = Receipt("absent")
    assert (Recovered(unknown=1), []) == (recovered(world), outside.voided)
    outside.says = Receipt("settled", "PAY-1")
    assert Recovered(success=1) == recovered(world)


@pytest.mark.parametrize(("by_human", "status"), [(True, "DIRTY"), (False, "FAILED")])
def test_a_slow_look_up_that_says_accepted_contradicts_a_human_but_not_a_later_answer(
    world: World, by_human: bool, status: str
) -> None:
    outside = clearing(world, Receipt("unknown"))
    outside.accepts = Receipt("unknown")
    dfid = world.decide(refund()).dfid
    asked = outside.lookup_order

    def slow(intent: ExecutionIntent, reference: str, deadline_s: float) -> Receipt:
        outside.lookup_order = asked  # type: ignore[method-assign]
        if by_human:
            who = {"who": "ada", "reason": "seen", "acknowledged": True, "now_ms": world.clock()}
            attest(world.kernel, dfid, Receipt("rejected"), **who)  # type: ignore[arg-type]
        else:
            world.kernel.dispatcher.settle(intent, Receipt("rejected"))
        return ACCEPTED

    outside.lookup_order = slow  # type: ignore[method-assign]
    recovered(world)
    assert [status] == execution(world)
    assert by_human == (("security.settlement_contradicted", {"dfid": dfid, "status": "DIRTY"}) in world.logged)
    assert () == verify.verify(world.store).faults


@pytest.mark.parametrize("by", ["look-up", "voiding"])
def test_what_a_human_was_refused_for_is_not_believed_to_be_absent_later(world: World, by: str) -> None:
    outside = clearing(world, ACCEPTED if by == "look-up" else Receipt("absent"))
    outside.accepts, outside.idempotent = Receipt("unknown"), False
    if by == "voiding":
        outside.void = lambda *_: ACCEPTED  # type: ignore[method-assign]
    world.kernel = world.open_kernel(executor=outside)
    outside.says, found = Receipt("unknown"), outside.says
    dfid = world.decide(refund()).dfid
    outside.says = found
    who = {"who": "ada", "reason": "seen", "acknowledged": True, "now_ms": world.clock()}
    with pytest.raises(UsageError, match="has accepted the order, and may still carry it out"):
        attest(world.kernel, dfid, Receipt("rejected"), **who)  # type: ignore[arg-type]
    outside.says, outside.void = Receipt("absent"), (lambda *_: Receipt("rejected"))  # type: ignore[method-assign]
    assert (Recovered(unknown=1), ["UNKNOWN"]) == (recovered(world), execution(world))
    assert () == verify.verify(world.store).faults


def test_what_a_look_up_calls_accepted_is_remembered_with_its_reference_and_once(world: World) -> None:
    """The answer to the order was lost; a later look-up does not find it any more."""
    outside = clearing(world, ACCEPTED)
    outside.accepts = Receipt("unknown")
    outside.says = Receipt("unknown")
    dfid = world.decide(refund()).dfid
    outside.says = ACCEPTED
    for _ in range(3):
        recovered(world)
    assert ["", "", "REF-1", "REF-1"] == [reference for _, reference, _ in outside.asked]
    entries = (
        "SELECT json_type(body, '$.accepted') IS NOT NULL FROM ledger WHERE dfid = ? AND kind = 'UNKNOWN' ORDER BY idx"
    )
    assert [(0,), (1,)] == world.store.rows(entries, (dfid,))
    outside.says = Receipt("absent")
    assert Recovered(unknown=1) == recovered(world)
    assert (1, []) == (len(outside.sent), outside.voided)
    assert () == verify.verify(world.store).faults
    outside.says = Receipt("rejected")
    assert Recovered(failed=1) == recovered(world)
    assert () == verify.verify(world.store).faults


@pytest.mark.parametrize("says", [ACCEPTED, Receipt("unknown")])
@pytest.mark.parametrize("known", [True, False])
def test_a_late_refusal_frees_nothing_that_was_accepted(world: World, says: Receipt, known: bool) -> None:
    """Its order was sent twice under one key: the outside refuses the second, and the answers come in any order."""
    outside = clearing(world, Receipt("unknown"))
    outside.accepts = ACCEPTED if known else Receipt("unknown")
    dfid = world.decide(refund()).dfid
    order = read_order(world.store, dfid)
    assert order is not None
    outside.says = says
    world.kernel.dispatcher._record_late_answer(order, Receipt("rejected"))
    believed = not known and says.status == "unknown"
    assert ["FAILED" if believed else "UNKNOWN"] == execution(world)
    outside.says = Receipt("absent")
    recovered(world)
    assert ([], believed) == (outside.voided, execution(world) == ["FAILED"])


def test_an_answer_accepted_that_comes_too_late_is_remembered(world: World) -> None:
    outside = clearing(world, Receipt("absent"))
    outside.accepts = Receipt("unknown")
    answer = world.decide(refund())
    order = read_order(world.store, answer.dfid)
    assert order is not None
    world.kernel.dispatcher._record_late_answer(order, ACCEPTED)
    assert Recovered(unknown=1) == recovered(world)
    assert (1, [], "REF-1") == (len(outside.sent), outside.voided, outside.asked[-1][1])


def test_an_outside_that_accepts_every_order_is_not_down(world: World) -> None:
    outside = clearing(world, ACCEPTED)
    for number in range(breaker.FAILURES_MAX + 1):
        world.tickets.put(f"T{number}")
        world.decide(refund(), f"C{number}", f"T{number}")
    assert breaker.FAILURES_MAX + 1 == len(outside.sent)
    assert breaker.Breaker() == breaker.read(world.store, world.contract.gate)


def test_a_pending_order_that_the_record_has_lost_is_not_adopted_before_it_has_ended(world: World) -> None:
    """As failed it would free its event to be paid again."""
    rail = listing(world)
    data = backup(world)
    world.decide(refund())
    restore(world, data)
    rail.tells = lambda line: replace(line, outcome="pending")
    listing(world, rail)
    assert (["ORDER_UNKNOWN"], ()) == (codes(world), adopted(world))
    assert "RECORD_BEHIND" == world.decide(refund()).tag
    rail.tells = lambda line: line
    assert (["ORDER_UNKNOWN"], 1) == (codes(world), len(cases(world)))  # the same case
    assert 1 == len(adopted(world))
    assert (1, []) == (len(rail.paid()), cases(world))


def test_both_cases_that_an_older_version_opened_about_an_order_are_closed_by_whoever_takes_it_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rail, data = listing(world), backup(world)
    world.decide(refund())
    restore(world, data)
    rail = listing(world, rail)
    rail.tells = lambda line: replace(line, outcome="pending")
    codes(world)
    rail.tells = lambda line: line
    with monkeypatch.context() as older:
        older.setattr(statement_cases, "open_cases_of", lambda *_: [])
        codes(world)
    assert 2 == len(cases(world))
    assert 1 == len(adopted(world))
    assert [] == cases(world)


def test_what_has_ended_in_the_record_and_is_pending_outside_is_a_difference(world: World) -> None:
    rail = listing(world)
    world.decide(refund())
    rail.misfortunes = ["refuse"]
    world.tickets.put("T2")
    world.decide(refund(), "C2", "T2")
    rail.tells = lambda line: replace(line, outcome="pending")
    assert ["PENDING_OUTSIDE"] * 2 == codes(world)
    opened = {case.dfid for case in cases(world)}
    rail.tells = lambda line: replace(line, outcome={"settled": "rejected", "rejected": "settled"}[line.outcome])
    assert ["CARRIED_OUT_OUTSIDE", "REJECTED_OUTSIDE"] == sorted(codes(world))
    assert opened == {case.dfid for case in cases(world)}  # what became of it belongs to the case that waits
    for dfid in opened:
        HumanReview(world.kernel, now_ms=world.clock).resolve(dfid, Resolution("ABORT", "ada", "it will be paid"))
    codes(world)
    assert 2 == len(cases(world))  # what was closed as pending has not ended as the record says
