"""How often an outside is asked for a statement that it cannot give: a slow one must not make every decision as slow."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sds.kernel.errors import WorldError
from sds.kernel.executor.statement import CLOCKS_APART_MS, StatementLine
from sds.kernel.executor.wholeness import PAUSE_MS_MAX, PAUSE_MS_MIN, Wholeness
from tests.kernel.durable import START_MS, World, refund

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
    monkeypatch.setattr(type(world.store), "generation", "another")  # it was put back meanwhile
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
