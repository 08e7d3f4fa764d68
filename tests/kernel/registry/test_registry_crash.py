"""Crashes of what operators and deployments do: at any step, all of it is there or nothing, and doing it again ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from sds.kernel.audit import verify
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import ContractError, TransitionError, UsageError
from sds.kernel.registry import registry
from sds.kernel.storage.store import Row, Store
from tests.kernel.authority import AGENT
from tests.kernel.crashes import every_step
from tests.kernel.durable import World, contract, escalate, refund
from tests.kernel.faults import Crash, Faults, failing
from tests.stores.opened import opened_store
from tests.stores.records import emptied

TERMS = contract(("escalation: {per_hour: 1000000}", "escalation: {per_hour: 1}"))
NARROWER = contract(("1.0.0", "1.1.0"), ("REFUND_TICKET, GOODWILL, DENY]", "GOODWILL, DENY]"))
STRANGER = contract(("gate: claims", "gate: others"), ("agent_id: claims-agent", "agent_id: others-agent"))
WRONG = contract(("version: 1.0.0", "version: 1.1.0"), more="proposal_schema: 5.0.0\n")

TABLES = ("agents", "contracts", "contract_revocations", "escalation_budgets", "decision_flows", "ledger")
Act = Callable[[Store, World], object]


def suspended_and_back(store: Store, world: World) -> None:
    registry.transition(store, AGENT, "SUSPENDED", by="operator", reason="a look", now_ms=1)
    registry.transition(store, AGENT, "ACTIVE", by="operator", reason="all well", now_ms=1)


def refused(store: Store, world: World) -> None:
    with pytest.raises(ContractError):
        registry.register(store, WRONG, by="operator", now_ms=1)


def exhausted(store: Store, world: World) -> None:
    """Decide the two cases that `opened` has opened: the second one is one too many."""
    kernel = world.open_kernel(store)
    for name in ("C1", "C2"):
        packet = world.opened[name]  # type: ignore[attr-defined]
        with suppress(UsageError):  # decided before the crash: then it is no longer open
            kernel.decide(packet, escalate(packet))


ACTS: dict[str, Act] = {
    "a new agent": lambda store, _: registry.register(store, STRANGER, by="operator", now_ms=1),
    "a version that takes a kind away": lambda store, _: registry.register(store, NARROWER, by="operator", now_ms=1),
    "a revocation": lambda store, world: registry.revoke(store, world.contract.hash, who="me", reason="x", now_ms=1),
    "a refused handshake": refused,
    "a suspension and its end": suspended_and_back,
    "the budget runs out": exhausted,
}


def contents(store: Store) -> list[object]:
    return [store.rows(f"SELECT * FROM {table}") for table in TABLES]


def opened(folder: Path) -> World:
    emptied(folder)
    world = World(folder, terms=TERMS, random=bytes)
    world.opened = {name: world.packet(name) for name in ("C1", "C2")}  # type: ignore[attr-defined]
    return world


@pytest.mark.parametrize("name", ACTS)
def test_stopped_at_any_step_it_is_done_whole_or_not_at_all_and_done_again_it_is_done(folder: Path, name: str):
    seen: list[list[object]] = []

    def stop_once(world: World, faults: Faults) -> bool:
        finished = False
        try:
            ACTS[name](opened_store(world.path, connect=failing(faults)), world)
            finished = True
        except Crash:
            pass
        finally:
            faults.bury()
        with closing(opened_store(world.path)) as store:
            assert () == verify.verify(store).faults
            now = contents(store)
            seen.extend([] if now in seen else [now])
            with suppress(TransitionError):  # a suspension that was there already
                ACTS[name](store, world)
            assert () == verify.verify(store).faults
        return finished

    assert every_step(lambda: opened(folder), stop_once) > 10
    stages = {"a suspension and its end": 3, "the budget runs out": 3}.get(name, 2)
    assert stages == len(seen)


def test_a_revocation_that_was_acknowledged_binds_at_every_step_of_a_decision(folder: Path):
    """Revoked by another process before step 1, 2, 3 ...: unless it was reserved before, it is not paid."""
    outcomes: set[tuple[object, int]] = set()
    at, finished = 0, False
    while not finished:
        at += 1
        world = opened(folder)
        packet, tags = world.opened["C1"], []  # type: ignore[attr-defined]
        finished = not _decide_while_revoking(world, packet, at)
        tags = world.column("SELECT tag FROM decision_flows WHERE dfid = ?", packet.dfid)
        reserved, revoked = (
            (world.column("SELECT idx FROM ledger WHERE kind = ?", kind) or [10**9])[0]
            for kind in ("RESERVED", "REVOKED")
        )
        assert (reserved < revoked) == bool(world.rail.paid())  # type: ignore[operator]
        outcomes.add((tags[0], len(world.rail.paid())))
        assert () == verify.verify(world.store).faults
        world.close()
    assert {("CONTRACT_REVOKED", 0), (None, 1)} == outcomes
    assert at > 5


def _decide_while_revoking(world: World, packet: DecisionPacket, at: int) -> bool:
    """Decide, and revoke just before the statement number `at` that is not in a transaction; tell whether it came."""
    store, count, inside = world.open_store(), 0, False
    kernel, other = world.open_kernel(store), world.open_store()
    rows, transaction = store.rows, store.transaction

    def tick() -> None:
        nonlocal count
        if not inside:
            count += 1
            if count == at:
                registry.revoke(other, world.contract.hash, who="me", reason="wrong", now_ms=1)

    @contextmanager
    def within(*first: Any, **how: bool) -> Iterator[list[Row]]:
        nonlocal inside
        tick()
        with transaction(*first, **how) as found:
            inside = True
            try:
                yield found
            finally:
                inside = False

    store.rows = lambda sql, values=(): (tick(), rows(sql, values))[1]  # type: ignore[method-assign,func-returns-value]
    store.transaction = within  # type: ignore[method-assign]
    kernel.decide(packet, refund()(packet))
    return count >= at
