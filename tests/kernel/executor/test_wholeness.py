"""How often an outside is asked for a statement that it cannot give: a slow one must not make every decision as slow."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sds.kernel.decision.jit import JitReport
from sds.kernel.errors import StoreError, WorldError
from sds.kernel.executor.statement import CLOCKS_APART_MS, StatementLine
from sds.kernel.executor.wholeness import PAUSE_MS_MAX, PAUSE_MS_MIN, RECORD_BEHIND, Wholeness
from sds.kernel.storage.store import Generation
from tests.kernel.durable import START_MS, World, refund
from tests.kernel.statements import listing

PATIENCE_S = 20


class Outside:
    """An outside whose statement can be read only while it is `up`; `asked` says when it was asked for."""

    def __init__(self, world: World) -> None:
        self.up, self.asked, self._clock = False, list[int](), world.clock
        self.whole = Wholeness(world.store, world.contract.gate, self._statement, now_ms=world.clock)

    def _statement(self, _since_ms: int, _until_ms: int) -> tuple[StatementLine, ...]:
        self.asked.append(self._clock())
        if not self.up:
            raise WorldError("down")
        return ()

    @property
    def said(self) -> str | None:
        doubt = self.whole.doubt()
        return doubt.code if doubt else None


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def outside(world: World) -> Outside:
    return Outside(world)


def test_a_statement_that_cannot_be_read_is_asked_for_after_pauses_that_double_and_nothing_is_ordered_meanwhile(
    world: World, outside: Outside
) -> None:
    for _ in range(600):
        assert "EXECUTOR_DOWN" == outside.said
        world.clock.advance(200)
    apart = [later - earlier for earlier, later in zip(outside.asked, outside.asked[1:], strict=False)]
    assert [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000] == apart
    assert (1_000, 30_000) == (PAUSE_MS_MIN, PAUSE_MS_MAX)


def test_once_it_can_be_read_again_that_is_remembered_and_the_next_pause_is_the_first(
    world: World, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        assert "EXECUTOR_DOWN" == outside.said
        world.clock.advance(PAUSE_MS_MAX)
    outside.up = True
    assert [None, None] == [outside.said, outside.said]
    assert 4 == len(outside.asked)
    monkeypatch.setattr(type(world.store), "generation", Generation(1))  # it was put back meanwhile
    outside.up = False
    assert "EXECUTOR_DOWN" == outside.said
    world.clock.advance(PAUSE_MS_MIN)
    outside.up = True
    assert None is outside.said


def test_what_is_asked_for_begins_before_the_last_order_whatever_the_clock_showed_at_an_earlier_one(
    world: World,
) -> None:
    asked = list[int]()

    def statement(since_ms: int, _: int) -> tuple[StatementLine, ...]:
        asked.append(since_ms)
        return ()

    def compare() -> None:
        assert Wholeness(world.store, world.contract.gate, statement, now_ms=world.clock).doubt() is None

    compare()
    for days, name in ((10, "C1"), (-10, "C2"), (1, "C3")):
        world.clock.advance(days * CLOCKS_APART_MS)
        assert "SUCCESS" == world.decide(refund("1.00"), name).execution
        compare()
    world.clock.advance(5 * CLOCKS_APART_MS)
    compare()
    assert [0, *(START_MS + days * CLOCKS_APART_MS for days in (9, -1, 0, 0))] == asked
    world.close()


def test_a_clock_that_is_set_back_delays_no_longer(world: World, outside: Outside) -> None:
    assert "EXECUTOR_DOWN" == outside.said
    world.clock.advance(-2 * PAUSE_MS_MAX)
    outside.up = True
    assert None is outside.said


def test_while_one_asks_again_the_others_do_not_wait_for_it(world: World) -> None:
    asking, answered = threading.Event(), threading.Event()

    def hangs(_since_ms: int, _until_ms: int) -> tuple[StatementLine, ...]:
        if world.clock() > began_ms:
            asking.set()
            assert answered.wait(PATIENCE_S)
        raise WorldError("down")

    began_ms, whole = world.clock(), Wholeness(world.store, world.contract.gate, hangs, now_ms=world.clock)
    assert whole.doubt() is not None
    world.clock.advance(PAUSE_MS_MIN)
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(whole.doubt)
        assert asking.wait(PATIENCE_S)
        doubt = pool.submit(whole.doubt).result(PATIENCE_S / 2)
        assert doubt is not None
        assert ("EXECUTOR_DOWN", False) == (doubt.code, slow.done())
        answered.set()
        assert slow.result(PATIENCE_S) is not None


class Replaced:
    """A record of which one can say that another server has taken the place of its own."""

    def __init__(self, world: World) -> None:
        self.generation = Generation(1, "began", "00000001")
        self.row, self.rows, self.value = world.store.row, world.store.rows, world.store.value


def test_after_another_server_took_over_nothing_is_compared_until_no_order_can_be_on_its_way(world: World) -> None:
    asked = list[int]()

    def statement(since_ms: int, _: int) -> tuple[StatementLine, ...]:
        asked.append(since_ms)
        return ()

    record = Replaced(world)
    whole = Wholeness(record, "claims", statement, now_ms=world.clock, sent_within_ms=4_000)  # type: ignore[arg-type]
    assert (None, 1, True) == (whole.doubt(), len(asked), whole.holds)
    record.generation = Generation(1, "came again", "00000001")  # the same server: nothing that it had said is lost
    assert not whole.holds
    assert (None, 2, True) == (whole.doubt(), len(asked), whole.holds)

    record.generation = Generation(1, "promoted", "00000002")
    for left in (4_000, 3_000, 2_000, 1_000):
        doubt = whole.doubt()
        assert (RECORD_BEHIND, True) == (doubt and doubt.code, f" {left} ms" in str(doubt))
        assert (2, False) == (len(asked), whole.holds)
        world.clock.advance(1_000)
    assert (None, 3, True) == (whole.doubt(), len(asked), whole.holds)


def test_where_a_server_does_not_say_which_history_it_has_another_start_may_be_another_server(world: World) -> None:
    record = Replaced(world)
    record.generation = Generation(1, "began")
    whole = Wholeness(record, "claims", lambda *_: (), now_ms=world.clock, sent_within_ms=4_000)  # type: ignore[arg-type]
    assert whole.doubt() is None
    record.generation = Generation(1, "came again")
    assert whole.doubt() is not None


def test_nothing_is_reserved_at_another_server_than_the_one_that_was_compared(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took over between the drift check and the transaction that reserves."""
    world.kernel = world.open_kernel(executor=listing(world))
    packet = world.packet("C1", "T1")
    just_in_time = world.kernel.just_in_time

    def then_replaced(*given: Any) -> JitReport:
        report = just_in_time(*given)
        monkeypatch.setattr(type(world.store), "generation", Generation(1, "promoted", "00000002"))
        return report

    monkeypatch.setattr(world.kernel, "just_in_time", then_replaced)
    answer = world.kernel.decide(packet, refund()(packet))
    assert ("ABORTED", RECORD_BEHIND, True) == (answer.state, answer.tag, answer.retryable)
    assert [] == world.rail.paid()


def test_an_order_that_the_record_has_lost_since_it_was_reserved_is_not_sent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server that confirmed it is lost, and the one in its place had not heard of it."""
    packet = world.packet("C1", "T1")
    monkeypatch.setattr("sds.kernel.flow.in_flight._TIMES", "SELECT 1, 1 FROM meta WHERE key = ?")
    with pytest.raises(StoreError, match="the order was not sent") as lost:
        world.kernel.decide(packet, refund()(packet))
    assert (packet.dfid, True) == (lost.value.dfid, lost.value.retryable)
    assert [] == world.rail.paid()
