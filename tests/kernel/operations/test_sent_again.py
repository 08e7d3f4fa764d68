"""An order that recovery sends again: not one that ended meanwhile, not past its deadline nor without authority, and nobody's
`unsent` frees it then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.executor.wholeness import Wholeness
from sds.kernel.flow import decision_record
from sds.kernel.operations.recovery import recover
from sds.kernel.storage.store import Generation
from tests.kernel.authority import halt, revoke, suspend
from tests.kernel.durable import LEASE_MS, World, refund


@pytest.fixture
def order(world: World) -> ExecutionIntent:
    """One that never arrived, and whose look-up failed then."""
    world.rail.misfortunes, world.rail.blind = ["drop"], True
    dfid = world.decide(refund()).dfid
    world.rail.blind = False
    world.clock.advance(LEASE_MS + 1)
    found = decision_record.read_order(world.store, dfid)
    assert found is not None
    return found


def valid(_order: ExecutionIntent) -> bool:
    return True


def test_what_is_absent_and_would_be_reserved_again_is_sent_once(world: World, order: ExecutionIntent) -> None:
    assert "SUCCESS" == world.kernel.dispatcher.resolve(order, valid)
    assert 1 == len(world.rail.paid())


def test_one_that_was_settled_since_it_was_listed_is_not(world: World, order: ExecutionIntent) -> None:
    world.kernel.dispatcher.settle(order, Receipt("rejected"), by={"who": "ada", "reason": "the bank says so"})
    assert "FAILED" == world.kernel.dispatcher.resolve(order, valid)
    assert [] == world.rail.paid()


def test_nor_one_that_is_settled_while_the_world_is_looked_at(world: World, order: ExecutionIntent) -> None:
    def settled_meanwhile(order: ExecutionIntent) -> bool:
        world.kernel.dispatcher.settle(order, Receipt("rejected"), by={"who": "ada", "reason": "the bank says so"})
        return True

    assert "FAILED" == world.kernel.dispatcher.resolve(order, settled_meanwhile)
    assert [] == world.rail.paid()


@pytest.mark.parametrize("withdraw", [suspend, halt, revoke])
def test_nor_one_whose_authority_is_withdrawn_while_the_state_is_read(
    world: World, order: ExecutionIntent, withdraw: Callable[[World], None]
) -> None:
    """A source may take its time: what an operator was told is done by then binds."""
    world.tickets.on_read = lambda _key: withdraw(world)
    assert "FAILED" == world.kernel.dispatcher.resolve(order, world.kernel.still_valid)
    assert [] == world.rail.paid()


@pytest.mark.parametrize(("left_ms", "paid"), [(10, 1), (0, 0), (-1, 0)])
def test_nor_once_its_deadline_has_passed_while_the_world_is_looked_at(
    world: World, order: ExecutionIntent, left_ms: int, paid: int
) -> None:
    with world.store.transaction():
        world.store.insert("flow_deadlines", dfid=order.dfid, deadline_ms=world.clock() + 1_000)

    def slow(_order: ExecutionIntent) -> bool:
        world.clock.advance(1_000 - left_ms)
        return True

    world.kernel.dispatcher.resolve(order, slow)
    assert paid == len(world.rail.paid())


def test_what_its_sender_says_to_be_unsent_frees_nothing_while_another_sends_it(
    world: World, order: ExecutionIntent
) -> None:
    """As where a clock that was set back has made the sender's lease look over too early."""
    with world.store.transaction():
        world.store.run("UPDATE execution_log SET status = 'PENDING'")

    class Slow:
        idempotent = True
        lookup = world.rail.lookup

        def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
            unsent = Receipt("unsent", detail="connection refused")
            assert "UNKNOWN" == world.kernel.dispatcher.settle(intent, unsent, until_ms=world.clock())
            assert ["live"] == world.column("SELECT status FROM reservations")
            return world.rail.dispatch(intent, key, deadline_s)

    assert "SUCCESS" == world.open_kernel(executor=Slow()).dispatcher.resolve(order, valid)
    assert 1 == len(world.rail.paid())


def test_an_unknown_order_is_resolved_by_recovery_all_the_same(world: World, order: ExecutionIntent) -> None:
    assert 1 == recover(world.kernel, now_ms=world.clock()).success
    assert order.idempotency_key in str(world.column("SELECT idempotency_key FROM execution_log"))


def test_that_a_record_is_whole_holds_for_that_record_alone(world: World) -> None:
    asked = list[int]()
    generation = [Generation(1)]

    class Replaced:
        """The record, or one that was put in its place."""

        @property
        def generation(self) -> Generation:
            return generation[0]

        row, value = world.store.row, world.store.value
        rows = world.store.rows

    def statement(_since_ms: int, _until_ms: int) -> tuple[()]:
        asked.append(1)
        return ()

    whole = Wholeness(Replaced(), "claims", statement, now_ms=world.clock)  # type: ignore[arg-type]
    assert [None, None, 1] == [whole.doubt(), whole.doubt(), len(asked)]
    generation[0] = Generation(2)
    assert [None, None, 2] == [whole.doubt(), whole.doubt(), len(asked)]


def test_a_reversal_whose_key_is_not_here_is_unknown_and_not_refused(world: World, order: ExecutionIntent) -> None:
    class Reverting:
        idempotent = True
        dispatch = world.rail.dispatch
        lookup = world.rail.lookup

        def revert(self, key: str, deadline_s: float) -> Receipt:
            raise AssertionError("nothing is asked")

        def reverted(self, key: str, deadline_s: float) -> Receipt:
            raise AssertionError("nothing is asked")

    strange = replace(order, signature="0" * 64)
    receipt = world.open_kernel(executor=Reverting()).dispatcher.executor.revert(strange, "", 1.0)
    assert "unknown" == receipt.status
