"""A rationale after the decision: one entry, once decided, bounded, and nothing hangs on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sds.kernel.audit import verify
from sds.kernel.errors import ContractError, StoreError, UsageError
from sds.kernel.flow.states import Answer, answer
from sds.kernel.storage import ledger
from tests.kernel.crashes import every_step
from tests.kernel.durable import World, contract, deny, escalate, refund
from tests.kernel.faults import Crash, Faults, failing
from tests.kernel.humans import PAY, resolve
from tests.stores.opened import opened_store
from tests.stores.records import alone

AFTER = "rationale: {order: after, chars_max: 12}\n"
TERMS = contract(more=AFTER)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, terms=TERMS)
    yield made
    made.close()


def kinds(world: World, dfid: str) -> list[str]:
    return [kind for (kind,) in world.store.rows("SELECT kind FROM ledger WHERE dfid = ? ORDER BY idx", (dfid,))]


def faults(world: World) -> tuple[str, ...]:
    return verify.verify(world.store).faults


def test_it_follows_the_decision_in_the_ledger_and_the_answer_tells_it(world: World):
    decided = world.decide(refund())
    assert "NOT_TRAVELLED" == decided.justification
    world.explain(decided.dfid, "not flown")
    assert ["RESERVED", "DECIDED", "SETTLED", "RATIONALE"] == kinds(world, decided.dfid)
    now = answer(world.store, decided.dfid)
    assert now is not None
    assert ("NOT_TRAVELLED: not flown", "SUCCESS") == (now.justification, now.execution)
    assert () == faults(world)


def test_the_proposal_itself_has_none(world: World):
    assert 0 == world.packet().envelope.rationale_chars_max


@pytest.mark.parametrize("text", ["", "x" * 12, "[ ]{}'~!#,.:"])
def test_what_its_alphabet_and_length_allow_is_recorded(world: World, text: str):
    world.explain(world.decide(deny).dfid, text)
    assert () == faults(world)


@pytest.mark.parametrize("propose", [deny, escalate], ids=["denied", "escalated"])
def test_whatever_was_decided_may_have_one_but_only_one(world: World, propose: Callable[..., bytes]):
    dfid = world.decide(propose).dfid
    world.explain(dfid, "one")
    with pytest.raises(UsageError, match="no rationale is recorded: the flow has a rationale already") as refused:
        world.explain(dfid, "two")
    assert ("RATIONALE_REFUSED", dfid) == (refused.value.reason_code, refused.value.dfid)
    assert 1 == kinds(world, dfid).count("RATIONALE")
    assert () == faults(world)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x" * 13, "it is longer than 12 characters"),
        ('a"b', "it has characters that no rationale may have"),
        ("a\\b", "it has characters that no rationale may have"),
        ("a\n", "it has characters that no rationale may have"),
        ("caf\u00e9", "it has characters that no rationale may have"),
    ],
)
def test_what_its_alphabet_and_length_forbid_is_refused(world: World, text: str, why: str):
    dfid = world.decide(deny).dfid
    with pytest.raises(UsageError, match=f"no rationale is recorded: {why}"):
        world.explain(dfid, text)
    assert ["DECIDED"] == kinds(world, dfid)


def test_an_open_flow_and_one_that_is_not_there_have_none(world: World):
    with pytest.raises(UsageError, match="the flow is not decided"):
        world.explain(world.packet().dfid, "soon")
    with pytest.raises(UsageError, match="there is no such flow"):
        world.explain("nobody", "x")


@pytest.mark.parametrize("more", ["", AFTER.replace("after", "before")], ids=["off", "before"])
def test_a_contract_that_asks_for_none_after_the_decision_gets_none(tmp_path: Path, more: str):
    world = World(tmp_path, terms=contract(more=more))
    dfid = world.decide(escalate).dfid
    with pytest.raises(UsageError, match="the contract asks for none after the decision"):
        world.explain(dfid, "x")
    world.close()


def test_a_flow_of_another_contract_has_none(world: World):
    dfid = world.decide(deny).dfid
    other = contract(("version: 1.0.0", "version: 1.1.0"), more=AFTER)
    with pytest.raises(UsageError, match="the flow is under another contract"):
        world.explain(dfid, "x", world.open_kernel(terms=other))


@pytest.mark.parametrize(
    "body", [{}, {"text": "x" * 13}, {"text": "\n"}, {"text": 1}, {"text": "x", "who": "me"}], ids=str
)
def test_an_entry_that_no_kernel_writes_is_found(world: World, body: Mapping[str, Any]):
    forge(world, world.decide(deny).dfid, body)
    assert any("not an entry this program writes" in fault for fault in faults(world))


def test_a_second_entry_and_one_before_the_decision_are_found(world: World):
    dfid = world.decide(deny).dfid
    world.explain(dfid, "x")
    forge(world, dfid, {"text": "y"})
    assert 1 == len(faults(world))
    forge(world, world.packet("C2").dfid, {"text": "y"})
    assert 2 == len(faults(world))


@pytest.mark.parametrize("body", ["x", "5", "null", "[]", '"x"', "{}", "[" * 100_000])
def test_a_contract_that_cannot_be_read_is_named_with_what_is_bounded_by_it(world: World, body: str):
    world.explain(world.decide(deny).dfid, "x")
    (entry,) = world.column("SELECT idx FROM ledger WHERE kind = 'RATIONALE'")
    alone(world.store, "UPDATE contracts SET body = ?", (body,))
    found = faults(world)
    assert f"entry {entry}: a registered contract cannot be read by this program" in found
    assert any(fault.startswith(f"contract {world.contract.hash}: the table says") for fault in found)


def forge(world: World, dfid: str, body: Mapping[str, Any]) -> None:
    with world.store.transaction():
        ledger.append(world.store, world.clock(), "RATIONALE", dfid, body)


def test_what_a_human_says_is_not_mixed_with_what_the_model_said(world: World):
    dfid = world.decide(escalate).dfid
    world.explain(dfid, "not sure")
    assert "HUMAN_REVIEW: not sure" == getattr(answer(world.store, dfid), "justification", None)
    found = resolve(world, dfid, "MODIFY", PAY)
    assert ("SUCCESS", "NOT_TRAVELLED") == (found.execution, found.justification)
    assert () == faults(world)


def test_stopped_at_any_step_the_decision_stands_and_at_most_one_is_recorded(tmp_path: Path):
    folders = itertools.count()

    def fresh() -> World:
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        return World(folder, terms=TERMS)

    def stop_once(world: World, found: Faults) -> bool:
        decided = world.decide(refund())
        stopped = not explained(world, decided, found)
        found.bury()
        with_it = answer(world.store, decided.dfid)
        assert with_it is not None
        assert (decided.state, decided.execution, decided.reference) == (
            with_it.state, with_it.execution, with_it.reference
        )  # fmt: skip
        assert 1 == len(world.rail.paid())
        assert () == faults(world)
        if stopped and "RATIONALE" not in kinds(world, decided.dfid):
            world.explain(decided.dfid, "not flown")  # nothing of the first is in the way
        assert 1 == kinds(world, decided.dfid).count("RATIONALE")
        return not stopped

    assert every_step(fresh, stop_once) > 10


def explained(world: World, decided: Answer, faults: Faults) -> bool:
    try:
        with_faults = world.open_kernel(opened_store(world.path, connect=failing(faults)))
        world.explain(decided.dfid, "not flown", with_faults)
    except (Crash, StoreError):
        return False
    return True


def test_the_old_key_is_refused_with_the_new_one():
    words = "contract:.*: rationale_chars_max: is now `rationale: {order: before, chars_max: N}`"
    with pytest.raises(ContractError, match=words):
        contract(more="rationale_chars_max: 80\n")


@pytest.mark.parametrize(
    "said", ["{order: during, chars_max: 5}", "{order: after}", "{chars_max: 5}", "{order: after, chars_max: 0}"]
)
def test_an_order_and_a_length_are_needed(said: str):
    with pytest.raises(ContractError, match="rationale"):
        contract(more=f"rationale: {said}\n")
