"""A record that its host has stopped, because it was altered or its key is lost: nothing is sent from it, and it can be ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.kernel.decision.packet import Decoding
from sds.kernel.errors import SdsError, WorldError
from sds.kernel.executor.wholeness import KEY_LOST, LEDGER_ALTERED, Doubt
from sds.kernel.human.review import HumanReview, Resolution
from sds.kernel.operations.recovery import Recovered, recover, recover_order
from tests.kernel.durable import LEASE_MS, World, deny, refund
from tests.kernel.humans import PAY, TERMS, escalated

WHY = Doubt(LEDGER_ALTERED, "the ledger was altered")


@pytest.fixture
def human(folder: Path) -> Iterator[World]:
    """A gate whose agent decides nothing alone."""
    made = World(folder, terms=TERMS)
    yield made
    made.close()


def said(world: World, dfid: str, decision: str, change: str = "") -> str:
    """Return the reason code of a human's decision that is refused; "" where it is not."""
    wanted = Resolution(decision, "ada", "looked into it", change, acknowledged=True)  # type: ignore[arg-type]  # by name
    try:
        HumanReview(world.kernel, now_ms=world.clock).resolve(dfid, wanted)
    except SdsError as error:
        return error.reason_code
    return ""


def test_a_human_sends_nothing_from_a_stopped_record_and_can_end_what_waits(human: World) -> None:
    cases = [escalated(human, refund("40.00"), f"C{number}") for number in range(4)]
    human.kernel.whole.stopped = WHY
    assert LEDGER_ALTERED == said(human, cases[0], "OVERRIDE")
    assert LEDGER_ALTERED == said(human, cases[0], "MODIFY", PAY)
    assert ("", "") == (said(human, cases[1], "ABORT"), said(human, cases[2], "RETURN"))
    assert [] == human.rail.sent
    human.kernel.whole.stopped = None
    assert "" == said(human, cases[0], "OVERRIDE")
    assert 1 == len(human.rail.sent)


def test_recovery_neither_asks_nor_sends_while_a_record_is_stopped(world: World) -> None:
    world.rail.misfortunes = ["drop"]
    dfid = world.decide(refund()).dfid
    world.clock.advance(LEASE_MS + 1)
    world.kernel.whole.stopped = WHY
    for again in (
        lambda: recover(world.kernel, now_ms=world.clock()),
        lambda: recover_order(world.kernel, dfid, now_ms=world.clock()),
    ):
        with pytest.raises(WorldError) as caught:
            again()
        assert (LEDGER_ALTERED, True) == (caught.value.reason_code, caught.value.retryable)
    assert 1 == len(world.rail.sent)
    assert ["UNKNOWN"] == world.column("SELECT status FROM execution_log")
    world.kernel.whole.stopped = None
    assert Recovered(success=1) == recover(world.kernel, now_ms=world.clock())
    assert 2 == len(world.rail.sent)


@pytest.mark.parametrize("code", [LEDGER_ALTERED, KEY_LOST])
@pytest.mark.parametrize("when", ["before the drift check", "after it"])
def test_what_was_being_decided_when_a_record_was_stopped_waits(
    world: World, monkeypatch: pytest.MonkeyPatch, code: str, when: str
) -> None:
    packet, whole = world.packet(), world.kernel.whole
    if when == "after it":
        held = type(whole).doubt

        def found(self: object) -> Doubt | None:
            doubt = held(whole)
            whole.stopped = Doubt(code, "so it is")
            return doubt

        monkeypatch.setattr(type(whole), "doubt", found)
    else:
        whole.stopped = Doubt(code, "so it is")
    answer = world.kernel.decide(packet, refund()(packet), Decoding())
    assert ("ABORTED", code, True) == (answer.state, answer.tag, answer.retryable)
    assert ([], []) == (world.rail.sent, world.column("SELECT status FROM reservations WHERE status = 'live'"))
    monkeypatch.undo()
    whole.stopped = None
    assert "SUCCESS" == world.decide(refund()).execution


def test_what_orders_nothing_is_decided_all_the_same(world: World) -> None:
    world.kernel.whole.stopped = WHY
    assert "CLOSED" == world.decide(deny).state
