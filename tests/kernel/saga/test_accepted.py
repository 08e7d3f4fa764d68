"""A saga at an outside that only accepts at first: it waits for the step, or the reversal, and goes on by what came of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from sds.kernel.flow.kernel import Kernel
from sds.kernel.human.cases import waiting
from sds.kernel.human.review import attest
from sds.kernel.operations import recovery
from sds.kernel.operations.recovery import Recovered
from sds.kernel.registry import registry
from sds.pipeline import Stream
from sds.sagas import SagaStream
from tests.kernel.durable import LEASE_MS, World, deny
from tests.kernel.outside import Rail
from tests.kernel.sagas import CLOSE_ALL, DIRTY, REVERT, Script, executions, parent, reversed_at, run
from tests.proposers import Says

ACCEPTED = Receipt("pending", "REF-1", "accepted")


class Clearing(Rail):
    """It accepts orders of the `kinds`, and reversals where `undoes_later`; `works` carries out what it has accepted."""

    def __init__(self, path: Path, *kinds: str, undoes_later: bool = False) -> None:
        super().__init__(path)
        self.kinds, self.undoes_later = kinds, undoes_later
        self.orders: dict[str, ExecutionIntent] = {}
        self.refused: set[str] = set()
        self.undoing: list[str] = []
        self.looked_up = 0

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        if intent.kind not in self.kinds:
            return super().dispatch(intent, key, deadline_s)
        self.orders[key] = intent
        return ACCEPTED

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        if key in self.refused:
            return Receipt("rejected")
        return ACCEPTED if key in self.orders else super().lookup(key, deadline_s)

    def void(self, key: str, deadline_s: float) -> Receipt:
        return ACCEPTED if key in self.orders else super().void(key, deadline_s)

    def revert(self, key: str, deadline_s: float) -> Receipt:
        if not self.undoes_later:
            return super().revert(key, deadline_s)
        self.undoing.append(key)
        return ACCEPTED

    def reverted(self, key: str, deadline_s: float) -> Receipt:
        self.looked_up += 1
        return ACCEPTED if key in self.undoing else super().reverted(key, deadline_s)

    def works(self, *, refuses: bool = False) -> None:
        orders, self.orders = self.orders, {}
        for key, intent in orders.items():
            if refuses:
                self.refused.add(key)
            else:
                super().dispatch(intent, key, 1.0)
        undoing, self.undoing = self.undoing, []
        for key in undoing:
            super().revert(key, 1.0)


def clearing(world: World, *kinds: str, undoes_later: bool = False) -> Clearing:
    made = Clearing(world.folder / "rail.db", *kinds, undoes_later=undoes_later)
    world.rail = made
    world.kernel = world.open_kernel()
    return made


def recovered(world: World, **options: bool) -> Recovered:
    return recovery.recover(world.kernel, now_ms=world.clock(), **options)


def carried_on(world: World, script: Script, *, breaks: str = "") -> Recovered:
    """Do what a gate's own recovery does once the orders are looked up. A step of the event `breaks` fails unforeseen."""

    def reasoned(packet: DecisionPacket, _: bytes) -> None:
        if breaks and packet.event_id.startswith(breaks):
            raise RuntimeError(breaks)

    def stream(kernel: Kernel) -> Stream:
        return Stream(kernel, Says(script), now_ms=world.clock, sleep=lambda _: None, on_reasoned=reasoned)

    return SagaStream(world.kernel, stream, now_ms=world.clock).take_on(Recovered())


@pytest.mark.parametrize("later_ms", [0, 10 * LEASE_MS])
def test_a_step_that_is_only_accepted_is_waited_for_and_the_next_follows_it(world: World, later_ms: int) -> None:
    outside, script = clearing(world, "REFUND_TICKET", "COMPENSATE"), Script()
    found = run(world.kernel, world, script)
    assert (("ACTIVE", None, None), ["UNKNOWN", None]) == (parent(found), executions(found))
    world.clock.advance(later_ms)
    assert Recovered(unknown=1) == recovered(world)
    carried_on(world, script)
    assert ["1"] == script.asked
    outside.works()
    assert Recovered(success=1, sagas_dirty=1) == recovered(world)
    assert Recovered() == carried_on(world, script)
    found = run(world.kernel, world, script)
    assert (("ACTIVE", None, None), ["SUCCESS", "UNKNOWN"]) == (parent(found), executions(found))
    outside.works()
    assert Recovered(success=1, sagas_ended=1) == recovered(world)
    found = run(world.kernel, world, script)
    assert (("CLOSED", None, None), ["1", "2"]) == (parent(found), script.asked)
    assert 2 == len(world.rail.paid())


def test_a_caller_who_sends_the_event_again_takes_it_on_as_well(world: World) -> None:
    outside, script = clearing(world, "REFUND_TICKET"), Script()
    run(world.kernel, world, script)
    outside.works()
    recovered(world)
    assert ("CLOSED", None, None) == parent(run(world.kernel, world, script))
    assert Recovered() == carried_on(world, script)
    assert 2 == len(world.rail.paid())


@pytest.mark.parametrize("step", [1, 2])
def test_what_is_refused_after_all_ends_the_saga_as_any_refusal_does(world: World, step: int) -> None:
    outside = clearing(world, ("REFUND_TICKET", "COMPENSATE")[step - 1])
    script = Script(compensation=REVERT)
    run(world.kernel, world, script)
    outside.works(refuses=True)
    ended = recovered(world)
    assert (1, 2 - step, step - 1) == (ended.failed, ended.sagas_ended, ended.sagas_dirty)
    if step == 2:
        assert ("ABORTED", "COMPENSATED", "REVERT") == parent(run(world.kernel, world, script))
    assert step - 1 == len(reversed_at(world.folder))
    assert [] == waiting(world.store, world.contract)


@pytest.mark.parametrize("stop", ["deadline", "halt"])
def test_neither_its_deadline_nor_a_halt_ends_a_saga_whose_step_may_still_be_carried_out(
    world: World, stop: str
) -> None:
    outside, script = clearing(world, "REFUND_TICKET"), Script(compensation=REVERT)
    until_ms = world.clock() + 1000
    assert "ACTIVE" == parent(run(world.kernel, world, script, deadline_ms=until_ms))[0]
    if stop == "halt":
        registry.set_halted(world.store, True, by="op", reason="x", now_ms=world.clock())
    else:
        world.clock.advance(10 * LEASE_MS)
    recovered(world)
    assert ("ACTIVE", None, None) == parent(run(world.kernel, world, script))
    outside.works()
    recovered(world)
    carried_on(world, script)
    end = ("ABORTED", "COMPENSATED", "REVERT") if stop == "deadline" else ("ESCALATED", DIRTY, "ALERT_HUMAN")
    assert end == parent(run(world.kernel, world, script))
    assert (1, int(stop == "deadline")) == (len(world.rail.paid()), len(reversed_at(world.folder)))


def test_a_human_who_settles_the_accepted_step_lets_the_saga_go_on(world: World) -> None:
    outside, script = clearing(world, "REFUND_TICKET"), Script()
    (step, _) = run(world.kernel, world, script).steps
    assert step is not None
    outside.blind = True
    outside.orders.clear()
    paid = Receipt("settled", "PAY-1")
    attest(world.kernel, step.dfid, paid, who="ada", reason="seen", acknowledged=True, now_ms=world.clock())
    assert Recovered(sagas_ended=1) == carried_on(world, script)
    assert ("CLOSED", None, None) == parent(run(world.kernel, world, script))


@pytest.mark.parametrize("choice", [REVERT, CLOSE_ALL])
def test_a_reversal_that_is_only_accepted_is_waited_for_and_the_rest_is_undone_after_it(
    world: World, choice: Callable[..., bytes]
) -> None:
    outside = clearing(world, undoes_later=True)
    script = Script(step_3=deny, compensation=choice)
    found = run(world.kernel, world, script, "ALL")
    assert (("ACTIVE", DIRTY, None), ["PENDING"]) == (parent(found), list(found.reversals.values()))
    world.clock.advance(2 * LEASE_MS)
    assert 0 == recovered(world).sagas_ended
    outside.works()
    assert 0 == recovered(world).sagas_ended  # the second has begun
    assert Recovered() == carried_on(world, script)
    outside.works()
    assert 1 == recovered(world).sagas_ended
    assert "COMPENSATED" == parent(run(world.kernel, world, script, "ALL"))[1]
    assert (["COMPENSATE", "REFUND_TICKET"], []) == (
        [kind for kind, _ in reversed_at(world.folder)],
        waiting(world.store, world.contract),
    )


def test_a_saga_that_cannot_be_carried_on_keeps_no_other_from_it_and_is_named(world: World) -> None:
    outside, script = clearing(world, "REFUND_TICKET"), Script()
    world.tickets.put("T2")
    broken, _ = (run(world.kernel, world, script, event=f"C{n}", ticket=f"T{n}") for n in (1, 2))
    outside.works()
    recovered(world)
    found = carried_on(world, script, breaks="C1/")
    assert (1, (f"{broken.answer.dfid}: RuntimeError: C1/",)) == (found.sagas_ended, found.errors)


def test_a_reversal_that_is_waited_for_is_looked_up_after_growing_pauses(world: World) -> None:
    outside = clearing(world, undoes_later=True)
    run(world.kernel, world, Script(step_2=deny, compensation=REVERT))
    world.clock.advance(2 * LEASE_MS)
    before = outside.looked_up
    for _ in range(60):
        recovered(world, at_once=False)
        world.clock.advance(1000)
    assert 4 == outside.looked_up - before  # at once, after 5 s, 10 s, 20 s


def test_an_accepted_reversal_whose_look_ups_fail_is_looked_up_again_after_growing_pauses(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, script, asked = clearing(world, undoes_later=True), Script(step_2=deny, compensation=REVERT), list[int]()
    run(world.kernel, world, script)
    world.clock.advance(2 * LEASE_MS)

    def fails(*_: object) -> Receipt:
        asked.append(world.clock())
        raise OSError("away")

    with monkeypatch.context() as away:
        away.setattr(outside, "reverted", fails)
        for _ in range(60):
            assert 0 == recovered(world, at_once=False).sagas_ended
            world.clock.advance(1000)
        found = run(world.kernel, world, script)
    assert [5_000, 10_000, 20_000] == [later - earlier for earlier, later in pairwise(asked[:4])]
    assert (("ACTIVE", DIRTY, None), ["PENDING"]) == (parent(found), list(found.reversals.values()))
    assert ([], 1) == (waiting(world.store, world.contract), len(outside.undoing))
    assert (["REF-1"], ()) == (world.column("SELECT reference FROM saga_reversals"), verify.verify(world.store).faults)
    outside.works()
    assert 1 == recovered(world).sagas_ended
    assert "COMPENSATED" == parent(run(world.kernel, world, script))[1]


def test_a_reversal_that_is_accepted_and_not_found_yet_is_waited_for(world: World) -> None:
    outside, script = clearing(world, undoes_later=True), Script(step_2=deny, compensation=REVERT)
    outside.reverted = lambda *_: Receipt("absent")  # type: ignore[method-assign]
    found = run(world.kernel, world, script)
    assert (("ACTIVE", DIRTY, None), ["PENDING"]) == (parent(found), list(found.reversals.values()))
    del outside.reverted
    outside.works()
    world.clock.advance(2 * LEASE_MS)
    assert 1 == recovered(world).sagas_ended


def test_an_accepted_reversal_whose_key_may_be_forgotten_is_a_humans(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = clearing(world, undoes_later=True)
    script = Script(step_2=deny, compensation=REVERT)
    run(world.kernel, world, script)
    outside.undoing.clear()
    monkeypatch.setattr(world.kernel.dispatcher, "keeps_key", lambda *_: False)
    found = run(world.kernel, world, script)
    assert (("ESCALATED", DIRTY, "REVERT"), ["UNKNOWN"]) == (parent(found), list(found.reversals.values()))


def test_a_reversal_that_is_found_accepted_after_nobody_knew_stays_unknown_until_its_end(world: World) -> None:
    """The ledger has no way back from UNKNOWN to PENDING: an honest record would not verify."""
    outside = clearing(world, undoes_later=True)
    outside.revert = outside.reverted = lambda *_: Receipt("unknown")  # type: ignore[method-assign]
    found = run(world.kernel, world, Script(step_2=deny, compensation=REVERT))
    assert (("ESCALATED", DIRTY, "REVERT"), ["UNKNOWN"]) == (parent(found), list(found.reversals.values()))
    del outside.revert, outside.reverted
    outside.undoing = [key for (key,) in world.store.rows("SELECT idempotency_key FROM saga_reversals")]
    recovered(world)
    assert (["UNKNOWN"], ()) == (world.column("SELECT status FROM saga_reversals"), verify.verify(world.store).faults)
    outside.works()
    recovered(world)
    assert (["REVERTED"], ()) == (world.column("SELECT status FROM saga_reversals"), verify.verify(world.store).faults)
