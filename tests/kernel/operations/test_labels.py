"""Later labels: said once of a decision, on the record, and what `calibration` counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.kernel.audit.agent_history import agent_record
from sds.kernel.errors import UsageError
from sds.kernel.operations.labels import Labelled, record_label
from sds.kernel.registry import registry
from tests.kernel.authority import reactivate, status
from tests.kernel.durable import World, contract, deny, whole
from tests.kernel.tampering import faults, found_after, sign

CALIBRATION = "\naggregate_thresholds: [{name: c, of: calibration, window: {last: 10}, warn: 0.2, stop: 0.3}]\n"


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with whole(World(folder, terms=contract(more=CALIBRATION))) as made:
        yield made


def labelled(world: World, name: str, *, right: bool, confidence: float = 0.9) -> Labelled:
    """Decide an event, and label the decision."""
    dfid = world.decide(deny, name, confidence=confidence).dfid
    return label(world, dfid, right=right)


def label(world: World, dfid: str, *, right: bool, by: str = "desk") -> Labelled:
    log = lambda event, facts: world.logged.append((event, facts))  # noqa: E731
    return record_label(world.store, dfid, right, by=by, now_ms=world.clock(), log=log)


def value(world: World) -> str | None:
    found = agent_record(world.store, "claims-agent", now_ms=world.clock())
    assert found is not None
    return found.monitors[0].value


def test_a_label_is_on_the_record_once_with_who_said_it(world: World):
    dfid = world.decide(deny, "C1", confidence=0.75).dfid
    assert Labelled(changed=True) == label(world, dfid, right=False)
    assert Labelled(changed=False) == label(world, dfid, right=False, by="another")
    (entry,) = world.store.rows(
        "SELECT dfid, body -> '$.right', body ->> '$.by', body -> '$.confidence' FROM ledger WHERE kind = 'LABEL'"
    )
    assert (dfid, "false", "desk", "0.75") == entry
    with pytest.raises(UsageError, match=f"flow `{dfid}` is labelled as wrong already"):
        label(world, dfid, right=True)


@pytest.mark.parametrize("by", ["", " \n"])
def test_whoever_labels_has_a_name(world: World, by: str):
    dfid = world.decide(deny, "C1").dfid
    with pytest.raises(UsageError, match="a label needs the name of the person who gives it"):
        label(world, dfid, right=True, by=by)


def test_what_is_no_truth_value_is_no_label(world: World):
    with pytest.raises(UsageError, match="`right` must be true or false"):
        label(world, world.decide(deny, "C1").dfid, right=1)  # type: ignore[arg-type]


def test_only_what_an_agent_decided_has_a_label(world: World):
    open_flow = world.packet("open").dfid
    waits = world.packet("waits")
    world.kernel.not_decided(waits, "QUEUE_FULL", "256 decisions wait already")
    for dfid, said in (
        ("nothing", "there is no flow `nothing` in the record"),
        (open_flow, "has no decision in the record"),
        (waits.dfid, "was not decided by an agent"),
    ):
        with pytest.raises(UsageError, match=said):
            label(world, dfid, right=True)


def test_confidence_far_from_the_share_that_was_right_warns_and_then_stops_the_agent(world: World):
    for number in range(8):
        labelled(world, f"right {number}", right=True)
    for number in range(2):
        labelled(world, f"wrong {number}", right=False)
    assert "0.1" == value(world)
    found = [labelled(world, f"wrong again {number}", right=False).suspended for number in range(2)]
    assert [None, None] == found
    assert 1 == sum(event == "monitor.warn" for event, _ in world.logged)
    found = [labelled(world, f"all wrong {number}", right=False).suspended for number in range(1)]
    assert ["monitor c: calibration 0.4 is over 0.3 in the last 10 decisions, at decision 13"] == found
    assert "SUSPENDED" == status(world)
    assert 1 == sum(event == "agent.suspended" for event, _ in world.logged)


def test_a_decision_without_a_measured_confidence_is_labelled_and_not_counted(world: World):
    for number in range(20):
        dfid = world.decide(deny, f"C{number}").dfid
        assert Labelled(changed=True) == label(world, dfid, right=False)
    assert None is value(world)


def test_labels_begin_anew_when_the_agent_is_reactivated(world: World):
    for number in range(10):
        labelled(world, f"C{number}", right=False)
    assert "SUSPENDED" == status(world)
    reactivate(world)
    assert None is value(world)
    labelled(world, "the next", right=False)
    assert "ACTIVE" == status(world)


def test_a_newer_contract_with_another_window_counts_the_labels_that_are_there(world: World):
    for number in range(10):
        labelled(world, f"C{number}", right=True)
    world.contract = contract(("version: 1.0.0", "version: 1.1.0"), more=CALIBRATION.replace("10", "11"))
    registry.register(world.store, world.contract, by="operator", now_ms=world.clock())
    world.kernel = world.open_kernel()
    assert None is value(world)
    labelled(world, "the eleventh", right=True)
    assert "0.1" == value(world)


def test_a_label_that_was_altered_or_never_said_so_is_found(world: World):
    sign(world)
    labelled(world, "C1", right=True)
    assert () == faults(world)
    assert found_after(world, ("UPDATE policy_proposals SET confidence = 0.1", ()))
    assert found_after(world, ("DELETE FROM monitor_windows WHERE stream = 'labels'", ()))
    altered = """UPDATE ledger SET body = replace(body, '"right":true', '"right":2') WHERE kind = 'LABEL'"""
    assert found_after(world, (altered, ()))
