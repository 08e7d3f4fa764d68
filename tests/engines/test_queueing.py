"""A burst is load, no failure: who gets no turn with an engine, or one too late, does not take it from the others."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sds.engines.fallback import FallbackEngine, Link
from sds.engines.native import NativeEngine
from sds.engines.queueing import FairPool, QueueTimeoutError, after_waiting
from sds.kernel.errors import ModelError
from sds.models.llamacpp.backend import LlamaBackend
from tests.embedding.elsewhere import held_elsewhere
from tests.engines.batches import FAR
from tests.engines.conftest import running_ms
from tests.engines.scripted import Scripted, answered, chain, opens
from tests.kernel.durable import World

LATE = "DEADLINE_EXCEEDED"


def test_a_chain_asks_an_engine_again_that_had_no_turn_for_one_decision(world: World) -> None:
    first, last = Scripted("first"), Scripted("last")
    engine, logged = chain(world, first, last)
    first.failure = QueueTimeoutError("busy")
    packet = world.kernel.preview(world.event("C1"))
    assert "last" == answered(engine, packet)
    first.failure = None
    assert ("first", []) == (answered(engine, packet), logged)


def test_an_engine_that_has_no_turn_for_its_probe_stays_down(tmp_path: Path) -> None:
    still = World(tmp_path)
    still.tickets.put("T1")
    first, last = Scripted("first"), Scripted("last")
    engine, logged = chain(still, first, last)
    packet = still.packet()
    first.failure = ModelError("gone")
    assert "last" == answered(engine, packet)
    still.clock.advance(1_000)
    first.failure = QueueTimeoutError("it hangs")
    assert "last" == answered(engine, packet)
    assert ["engine.down", "engine.down"] == [event for event, _ in logged]
    still.close()


def test_who_comes_back_at_once_goes_behind_whoever_waits() -> None:
    pool, served = FairPool("only"), list[str]()

    def asks() -> None:
        with pool.acquired(10.0, "late"):
            served.append("who waited")

    for _ in range(20):
        with pool.acquired(10.0, "late"):
            (waits := threading.Thread(target=asks)).start()
            while not pool._waiting:
                time.sleep(0.0001)
        with pool.acquired(10.0, "late"):
            served.append("who came back")
        waits.join()
    assert ["who waited", "who came back"] * 20 == served


def test_two_things_are_never_held_by_more_than_two_and_none_is_lost() -> None:
    """Some have no time to wait: what comes to them at the last moment goes on."""
    pool, most, now, lock = FairPool("a", "b"), list[int](), set[str](), threading.Lock()

    def asks(wait_s: float) -> bool:
        try:
            with pool.acquired(wait_s, "late") as thing:
                with lock:
                    assert thing not in now
                    now.add(thing)
                    most.append(len(now))
                time.sleep(0.0002)
                with lock:
                    now.remove(thing)
        except QueueTimeoutError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        served = list(threads.map(asks, [5.0, 0.0002, 0.0004, 0.0] * 200))
    assert 2 == max(most)
    assert 200 <= sum(served) < 800
    with pool.acquired(0.0, "late") as one, pool.acquired(0.0, "late") as other:
        assert {"a", "b"} == {one, other}


@pytest.mark.parametrize(
    ("admitted_ms", "kind"), [(0, ModelError), (50, ModelError), (51, QueueTimeoutError), (120, QueueTimeoutError)]
)
def test_late_after_a_turn_is_load_only_where_most_of_the_time_was_waited_away(
    admitted_ms: int, kind: type[ModelError]
) -> None:
    with pytest.raises(ModelError, match="late") as found, after_waiting(0, admitted_ms, 100):
        raise ModelError("late", reason_code=LATE)
    assert (kind, LATE) == (type(found.value), found.value.reason_code)


def test_what_fails_after_a_long_wait_is_told_as_what_it_is() -> None:
    with pytest.raises(ModelError, match="gone") as found, after_waiting(0, 99, 100):
        raise ModelError("gone", reason_code="BACKEND_FAILED")
    assert ModelError is type(found.value)


def test_a_model_that_is_not_free_in_time_is_not_waited_for(world: World, tiny: LlamaBackend) -> None:
    local = NativeEngine(tiny, now_ms=running_ms)
    engine = FallbackEngine([Link("here", opens(local), 5_000, 60_000)], now_ms=running_ms)
    packet = world.kernel.preview(world.event("C1"))
    busy = held_elsewhere(local._scheduler.tokenizer(FAR))
    with busy, pytest.raises(QueueTimeoutError, match="not free in time") as found:
        engine.propose(replace(packet, expires_at_ms=running_ms() + 50), tokens_max=1024)
    assert LATE == found.value.reason_code
    assert local.model == answered(engine, packet)


def test_that_of_which_most_are_free_is_given_and_of_equals_the_last_released() -> None:
    pool = FairPool(*("a", "b") * 2)
    with pool.acquired(0, "late") as first:
        with pool.acquired(0, "late") as second, pool.acquired(0, "late"), pool.acquired(0, "late"):
            assert {"a", "b"} == {first, second}
        with pool.acquired(0, "late") as third:
            assert third == second
    with pool.acquired(0, "late") as again:
        assert again == first
