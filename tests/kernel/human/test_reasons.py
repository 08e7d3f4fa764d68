"""Whatever a person does needs a reason that others can read: one of which nothing can be seen is none, and nothing is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from sds.kernel.context import artifacts
from sds.kernel.errors import UsageError
from sds.kernel.executor.protocol import Receipt
from sds.kernel.human.parsing import parse_change
from sds.kernel.human.review import Resolution, attest
from sds.kernel.operations import adoption, erasure
from sds.kernel.registry import registry
from tests.kernel.durable import World, contract
from tests.kernel.humans import NO_REASONS, Silent, desk, escalated, unknown

Act = Callable[[str], object]


def acts(world: World) -> dict[str, Act]:
    store, agent, by = world.store, "claims-agent", dict[str, Any](who="ada", now_ms=world.clock())
    order, case = unknown(world, Silent()), escalated(world, name="C2", ticket="T2")
    settled, kernel, now_ms = Receipt("settled", "B-7"), world.open_kernel(store), world.clock()
    higher = contract(("1.0.0", "1.1.0"))
    return {
        "halt": lambda why: registry.set_halted(store, True, by="ada", reason=why, now_ms=now_ms),
        "resume": lambda why: registry.set_halted(store, False, by="ada", reason=why, now_ms=now_ms),
        "suspend": lambda why: registry.transition(store, agent, "SUSPENDED", by="operator", reason=why, **by),
        "retire": lambda why: registry.request_retire(store, agent, reason=why, now_ms=now_ms),
        "register": lambda why: registry.register(store, higher, by="operator", reason=why, **by),
        "revoke": lambda why: registry.revoke(store, world.contract.hash, reason=why, **by),
        "recover": lambda why: registry.write_act(store, "RECOVER", reason=why, **by),
        "resolve": lambda why: desk(world).resolve(case, Resolution("ABORT", "ada", why)),
        "attest": lambda why: attest(kernel, order, settled, reason=why, acknowledged=True, **by),
        "adopt": lambda why: adoption.adopt(kernel, (), reason=why, **by),
        "erase": lambda why: erasure.erase(store, "claims", "C2", reason=why, **by),
        "artifact": lambda why: artifacts.put(store, "fares", "a text", reason=why, **by),
    }


def test_a_reason_of_which_nothing_can_be_seen_is_refused_and_nothing_is_done(world: World) -> None:
    every = acts(world)
    before = world.column("SELECT kind FROM ledger")
    for act in every.values():
        for reason in NO_REASONS:
            with pytest.raises(UsageError, match="a reason is needed"):
                act(reason)
    assert before == world.column("SELECT kind FROM ledger")


@pytest.mark.parametrize("reason", ["\u3164x\u3164", "-", "\u05e9", "\U0001f600", "e\u0301"])
def test_a_reason_of_which_something_can_be_seen_is_kept(world: World, reason: str) -> None:
    assert registry.set_halted(world.store, True, by="ada", reason=reason, now_ms=world.clock())
    assert [reason] == world.column("SELECT json_extract(body, '$.reason') FROM ledger WHERE kind = 'HALT'")


def test_a_reason_or_a_name_that_is_no_text_is_none(world: World) -> None:
    """A program hands on what its form has: None where nobody filled it in. `None` would stand in the ledger."""
    every, nothing = acts(world), cast("str", None)
    before = world.column("SELECT kind FROM ledger")
    for act in every.values():
        with pytest.raises(UsageError, match="a reason is needed"):
            act(nothing)
    with pytest.raises(UsageError, match="a name is needed"):
        erasure.erase(world.store, "claims", "C2", who=nothing, reason="asked", now_ms=world.clock())
    assert before == world.column("SELECT kind FROM ledger")


def test_another_decision_is_taken_as_text_alone() -> None:
    with pytest.raises(UsageError, match="the decision is not JSON text"):
        parse_change(cast("str", {"action": "DENY"}), "0" * 64)


def test_a_reason_longer_than_the_record_keeps_is_refused_not_cut_and_nothing_is_done(world: World) -> None:
    every = acts(world)
    before = world.column("SELECT kind FROM ledger")
    for act in every.values():
        with pytest.raises(UsageError, match="the reason has 501 characters, and the record keeps 500"):
            act("é" * 501)
    assert before == world.column("SELECT kind FROM ledger")


def test_a_reason_as_long_as_the_record_keeps_is_kept_whole_also_where_it_frees_an_agent(world: World) -> None:
    dfid, why = escalated(world), "w" * 500
    with world.store.transaction():
        registry.move(
            world.store, "claims-agent", "ESCALATED", by="runtime", reason="r" * 900, now_ms=world.clock(), case=dfid
        )
    desk(world).resolve(dfid, Resolution("ABORT", "ada", f"  {why}\n"))
    assert [why] == world.column("SELECT reason FROM human_decisions")
    assert "ACTIVE" == world.column("SELECT status FROM agents")[0]


@pytest.mark.parametrize("receipt", [Receipt("settled", "B" * 201), Receipt("rejected", "B" * 201)])
def test_a_reference_longer_than_the_record_keeps_is_refused_not_cut(world: World, receipt: Receipt) -> None:
    order, by = unknown(world, Silent()), dict[str, Any](who="ada", reason="looked", now_ms=world.clock())
    with pytest.raises(UsageError, match="the reference has 201 characters, and the record keeps 200"):
        attest(world.open_kernel(), order, receipt, acknowledged=True, **by)
