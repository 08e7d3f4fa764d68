"""Orders that are not as the kernel signed them: neither sent nor believed, and nothing is given back for them."""

from __future__ import annotations

from typing import Any

import pytest

from sds.kernel.audit import verify
from sds.kernel.executor.protocol import Receipt
from sds.kernel.flow.in_flight import orders_in_flight
from sds.kernel.flow.kernel import Kernel
from sds.kernel.human.review import attest
from sds.kernel.operations.recovery import Recovered, recover
from sds.kernel.storage.keyring import Signer
from tests.kernel.durable import KEY, LEASE_MS, World, refund
from tests.kernel.orders import execution, left_hanging, recovered

ALTERED: list[tuple[str, Any]] = [
    ("params", '{"amount":999999}'),
    ("params", "not JSON"),
    ("params", "[" * 10_000),
    ("params", '{"amount":1e40}'),
    ("params", '{"amount":99999999999999999999999999999999}'),
    ("params", "{}"),
    ("kind", "COMPENSATE"),
    ("resource_key", "T2"),
    ("state_version", "7"),
    ("idempotency_key", "f" * 64),
    ("signature", "0" * 64),
    ("signature", "ÿ"),
]


@pytest.mark.parametrize(("column", "value"), ALTERED, ids=[f"{c} {str(v)[:12]}" for c, v in ALTERED])
@pytest.mark.parametrize("paid", [False, True])
def test_an_altered_order_is_neither_sent_nor_believed_and_keeps_what_it_holds(
    world: World, column: str, value: str, paid: bool
):
    """Were it counted as failed, the ticket would be free again, and what was paid could be paid once more."""
    left_hanging(world, paid=paid)
    sent = len(world.rail.sent)
    with world.store.transaction():
        world.store.run(f"UPDATE execution_log SET {column} = ?", (value,))
    world.clock.advance(LEASE_MS)
    assert Recovered(unknown=1) == recovered(world)
    assert (sent, ["UNKNOWN"], ["live"]) == (
        len(world.rail.sent),
        execution(world),
        world.column("SELECT status FROM reservations"),
    )
    assert "security.order_altered" in [event for event, _ in world.logged]
    assert any("table execution_log" in fault for fault in verify.verify(world.store).faults)


def test_one_altered_order_does_not_keep_others_from_being_resolved(world: World):
    left_hanging(world, paid=False, name="C1")
    world.tickets.put("T2")
    world.rail.misfortunes = ["drop"]
    world.decide(refund(), "C2", "T2")
    with world.store.transaction():
        world.store.run("UPDATE execution_log SET params = '[' WHERE status = 'PENDING'")
    world.clock.advance(LEASE_MS)
    assert Recovered(success=1, unknown=1) == recovered(world)


def test_an_order_that_cannot_be_recovered_is_named_and_does_not_keep_others_from_it(world: World):
    lost = left_hanging(world, paid=True, name="C1")
    world.tickets.put("T2")
    world.rail.misfortunes = ["drop"]
    world.decide(refund(), "C2", "T2")
    with world.store.transaction():
        world.store.run("DELETE FROM resources WHERE resource LIKE 'tickets:T1#%'")
    world.clock.advance(LEASE_MS)
    found = recovered(world)
    what = "StoreError: resource `tickets:T1#ticket.refundable_minor` of a reservation is not in the record"
    assert Recovered(success=1, errors=(f"{lost.dfid}: {what}",)) == found
    assert ("recovery.failed", {"dfid": lost.dfid, "error": "StoreError"}) in world.logged
    assert ["PENDING", "SUCCESS"] == sorted(execution(world))


def test_a_kernel_with_another_key_sends_nothing_of_what_it_finds(world: World):
    left_hanging(world, paid=False)
    world.clock.advance(LEASE_MS)
    stranger = Kernel(
        world.contract,
        world.store,
        world.tickets,
        world.rail,
        Signer(b"another kernel's key, 32 bytes.."),
        now_ms=world.clock,
    )
    assert Recovered(unknown=1) == recover(stranger, now_ms=world.clock())
    assert [] == world.rail.sent


def test_a_kernel_with_a_newer_key_goes_on_with_what_an_older_one_signed(world: World):
    left_hanging(world, paid=False)
    world.clock.advance(LEASE_MS)
    newer = Signer(b"the key that came after it, new.", b"a key that came between the two..", KEY)
    kernel = Kernel(world.contract, world.store, world.tickets, world.rail, newer, now_ms=world.clock)
    assert Recovered(success=1) == recover(kernel, now_ms=world.clock())
    assert 1 == len(world.rail.paid())


def test_an_order_whose_key_is_lost_stays_unknown_until_a_human_says_what_became_of_it(world: World):
    """Nobody can tell it from a forged one: the rail is not even asked."""
    order = left_hanging(world, paid=True)
    world.clock.advance(LEASE_MS)
    lost = Signer(b"made after the one that was lost")
    world.kernel = Kernel(world.contract, world.store, world.tickets, world.rail, lost, now_ms=world.clock)
    assert Recovered(unknown=1) == recovered(world)
    found = attest(
        world.kernel,
        order.dfid,
        Receipt("settled", "seen at the bank"),
        who="ada",
        reason="the key is lost",
        acknowledged=True,
        now_ms=world.clock(),
    )
    assert ("SUCCESS", "seen at the bank") == (found.execution, found.reference)
    assert () == verify.verify(world.store).faults


def test_orders_are_read_back_as_they_were_signed(world: World):
    intent = left_hanging(world, paid=False)
    world.clock.advance(LEASE_MS)
    assert [intent] == orders_in_flight(world.store, world.contract.gate, world.clock())
