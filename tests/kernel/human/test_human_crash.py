"""Crashes and races while a human's decision is carried out: it is either not made at all, or kept and recovered, never lost."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.errors import StoreError, UsageError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import Answer
from sds.kernel.human.review import HumanReview, Resolution, attest
from sds.kernel.operations import recovery
from sds.kernel.storage.store import Store
from tests.kernel.authority import halt
from tests.kernel.crashes import check, copied, crashing, every_step, made_once
from tests.kernel.durable import LEASE_MS, World, refund, together
from tests.kernel.faults import Faults
from tests.kernel.humans import SORRY, TERMS, escalated, resolve
from tests.scale import scale, seeded
from tests.stores.opened import opened_store

RESOLUTIONS = {
    "override": Resolution("OVERRIDE", "ada", "why", acknowledged=True),
    "modify": Resolution("MODIFY", "ada", "why", SORRY),
    "abort": Resolution("ABORT", "ada", "why"),
}


@pytest.fixture
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one case has waited for a human for two hours."""

    def waiting(folder: Path) -> World:
        world = World(folder, terms=TERMS)
        escalated(world, refund())
        return world

    return made_once(waiting, tmp_path_factory, __name__)


@pytest.fixture
def fresh(template: Path, folder: Path) -> Callable[..., World]:
    def make(*, idempotent: bool = True) -> World:
        world = World(copied(template, folder), terms=TERMS, idempotent=idempotent)
        world.clock.advance(3 * LEASE_MS)
        return world

    return make


def the_case(world: World) -> str:
    (dfid,) = world.column("SELECT dfid FROM decision_flows")
    return str(dfid)


def resolving(world: World, wanted: Resolution) -> Callable[[Kernel], Answer]:
    dfid = the_case(world)
    return lambda kernel: HumanReview(kernel, now_ms=world.clock).resolve(dfid, wanted)


def afterwards(world: World, wanted: Resolution, acknowledged: object) -> None:
    """Start again with everything fresh and recover: the decision is whole, or was never made and can be made now."""
    world.clock.advance(LEASE_MS + 1)
    with closing(opened_store(world.path)) as store:
        kernel = world.open_kernel(store)
        recovery.recover(kernel, now_ms=world.clock())
        assert () == verify.verify(store).faults
        made = store.rows("SELECT decision, who FROM human_decisions")
        if acknowledged is not None:
            assert [(wanted.decision, "ada")] == made
        if not made:
            assert ([], []) == (world.rail.paid(), store.rows("SELECT * FROM reservations"))
            resolving(world, wanted)(kernel)
        answer = kernel.open(world.event())
        assert isinstance(answer, Answer)
        if answer.state == "ESCALATED":  # what they decided was declined: it is a human's again
            assert ["FAILED"] == [row[0] for row in store.rows("SELECT status FROM execution_log")]
            check(world, store, answer)
            return
        assert (wanted.decision, "ada") == (answer.resolution, answer.resolved_by)
        assert 1 == store.value("SELECT count(*) FROM ledger WHERE kind = 'HUMAN'")
        check(world, store, answer)
        if isinstance(acknowledged, Answer) and not acknowledged.pending and acknowledged.execution != "UNKNOWN":
            assert acknowledged == answer


@pytest.mark.parametrize(
    ("name", "misfortune"),
    [*((name, "") for name in RESOLUTIONS), *(("override", fate) for fate in ("lose", "drop", "raise", "refuse"))],
)
def test_stopped_at_any_step_a_decision_is_made_whole_or_not_at_all(
    fresh: Callable[..., World], name: str, misfortune: str
):
    wanted = RESOLUTIONS[name]

    def stop_once(world: World, faults: Faults) -> bool:
        world.rail.misfortunes = [misfortune] if misfortune else []
        acknowledged = crashing(world, resolving(world, wanted), faults)
        world.rail.misfortunes = []
        afterwards(world, wanted, acknowledged)
        return acknowledged is not None

    assert every_step(fresh, stop_once, stride=3 if misfortune else 1) > 30


def test_stopped_again_at_any_step_of_its_recovery_the_same_holds(fresh: Callable[..., World]):
    wanted, whole = RESOLUTIONS["override"], Faults()
    world = fresh()
    crashing(world, resolving(world, wanted), whole)
    world.close()
    sent = whole.steps.index("before dispatch")
    interesting = {sent, sent + 1, sent + 2, seeded(11).randrange(sent + 3, len(whole.steps))}
    for at in sorted(interesting) if scale(1, 0) else range(1, len(whole.steps)):

        def stop_twice(world: World, again: Faults, at: int = at) -> bool:
            crashing(world, resolving(world, wanted), Faults(at=at))
            world.clock.advance(LEASE_MS + 1)
            recovered = crashing(world, lambda kernel: recovery.recover(kernel, now_ms=world.clock()), again)
            afterwards(world, wanted, None)
            return recovered is not None

        assert every_step(fresh, stop_twice, stride=4) > 10


def test_an_executor_that_is_not_idempotent_is_called_at_most_once_for_a_humans_order(fresh: Callable[..., World]):
    def stop_once(world: World, faults: Faults) -> bool:
        acknowledged = crashing(world, resolving(world, RESOLUTIONS["override"]), faults)
        world.clock.advance(LEASE_MS + 1)
        recovery.recover(world.kernel, now_ms=world.clock())
        assert len(world.rail.sent) <= 1
        assert len(world.rail.paid()) <= 1
        assert () == verify.verify(world.store).faults
        return acknowledged is not None

    every_step(lambda: fresh(idempotent=False), stop_once, stride=3)


def test_stopped_at_any_step_a_humans_word_about_an_order_settles_it_whole_or_not_at_all(fresh: Callable[..., World]):
    def stop_once(world: World, faults: Faults) -> bool:
        dfid = the_case(world)
        world.rail.misfortunes, world.rail.blind = ["lose"], True
        assert "UNKNOWN" == resolving(world, RESOLUTIONS["override"])(world.kernel).execution
        word = {"who": "ada", "reason": "asked the bank", "acknowledged": True, "now_ms": world.clock()}
        said = crashing(world, lambda kernel: attest(kernel, dfid, Receipt("settled", "B-7"), **word), faults)  # type: ignore[arg-type]  # by name
        assert () == verify.verify(world.store).faults
        (status,) = world.column("SELECT status FROM execution_log")
        assert status in ({"SUCCESS"} if said else {"UNKNOWN", "SUCCESS"})
        assert [status == "UNKNOWN"] == [row == "live" for row in world.column("SELECT status FROM reservations")]
        return said is not None

    assert every_step(fresh, stop_once) > 10


# --- two at once, recovery --------------------------------------------------------------------------------------------


def test_of_two_humans_at_once_one_decides(world: World):
    for number in range(8):
        dfid = escalated(world, refund("1.00"), f"C{number}")
        stores = [world.open_store(), world.open_store()]

        def one(turn: int, dfid: str = dfid, stores: list[Store] = stores) -> str:
            try:
                return resolve(world, dfid, "OVERRIDE", who=f"human {turn}", store=stores[turn]).resolved_by or ""
            except UsageError as error:
                return str(error)

        told = sorted(map(str, together(2, one)))
        (first,) = world.column("SELECT who FROM human_decisions WHERE dfid = ?", dfid)
        assert [f"flow `{dfid}` is resolved already: OVERRIDE by {first}", first] == told
        assert 1 == len([row for row in world.rail.paid() if row[0] == dfid])
        # what one has paid has moved the ticket: the next case looks at it anew
        world.tickets.put("T1")
    assert () == verify.verify(world.store).faults


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


@pytest.mark.parametrize(("moved", "paid"), [("", 1), ("before", 0), ("halted meanwhile", 0)])
def test_a_humans_order_that_was_lost_is_sent_again_only_if_the_human_might_decide_it_now(
    world: World, moved: str, paid: int
):
    dfid = escalated(world)
    world.rail.misfortunes = ["drop"]
    world.rail.blind = True
    assert "UNKNOWN" == resolve(world, dfid, "MODIFY", SORRY).execution
    world.rail.blind = False
    world.clock.advance(LEASE_MS)
    if moved == "before":
        world.tickets.put("T1")
    elif moved:
        world.tickets.on_read = lambda _key: halt(world)
    recovery.recover(world.kernel, now_ms=world.clock())
    assert paid == len(world.rail.paid())
    assert () == verify.verify(world.store).faults


def then_lost(world: World, reserve: Callable[..., ExecutionIntent | None]) -> Callable[..., ExecutionIntent | None]:
    """Return `reserve`, after which the record is what it was before: a standby that lagged has taken over."""
    lagging = sqlite3.connect(":memory:")
    with closing(sqlite3.connect(world.path)) as record:
        record.backup(lagging)

    def reserved(*given: object) -> ExecutionIntent | None:
        made = reserve(*given)
        assert made is not None
        with closing(sqlite3.connect(world.path)) as record, closing(lagging):
            lagging.backup(record)
        return made

    return reserved


@pytest.mark.sqlite_alone("what a standby lacks is imitated by a copy of the file")
def test_a_humans_order_that_the_record_has_lost_since_it_was_reserved_is_not_sent(fresh: Callable[..., World]):
    world = fresh()
    review, dfid = HumanReview(world.kernel, now_ms=world.clock), the_case(world)
    review._commit = then_lost(world, review._commit)  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreError, match="the record has lost an order that was just reserved"):
        review.resolve(dfid, RESOLUTIONS["override"])
    assert [] == world.rail.sent
    assert [dfid] == [case.dfid for case in review.waiting()]
    world.close()


@pytest.mark.sqlite_alone("what a standby lacks is imitated by a copy of the file")
def test_an_agents_order_that_the_record_has_lost_since_it_was_reserved_is_not_sent(folder: Path):
    world = World(folder)
    packet = world.packet()
    world.kernel.commit = then_lost(world, world.kernel.commit)  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreError, match="the record has lost an order that was just reserved"):
        world.kernel.decide(packet, refund()(packet))
    assert [] == world.rail.sent
    world.close()
