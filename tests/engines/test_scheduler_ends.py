"""How decisions over one model end: late, cancelled, failed or closed, each ends alone and the others go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence

import numpy as np
import pytest

from sds.engines.queueing import QueueTimeoutError
from sds.engines.request import Request
from sds.engines.scheduler import RESTARTS_MAX, Scheduler
from sds.kernel.errors import LanguageError, ModelError, SdsError
from sds.models.protocol import BackendError, Row
from tests.embedding.elsewhere import is_held
from tests.engines.batches import CONTRACTS, FAR, alone, held_up, make, start, until
from tests.engines.hashing import HashBackend, Logits
from tests.hostile import Panic
from tests.scale import scale, seeded


def test_a_full_queue_refuses_and_has_room_again_when_somebody_gives_up(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(1)
    scheduler = batching(backend, queue_max=2)
    waiting = [held_up(backend, scheduler), *(start(scheduler, [CONTRACTS[0], [n]]) for n in (1, 2))]
    with pytest.raises(ModelError, match="2 decisions are already waiting") as refused:
        start(scheduler, [CONTRACTS[0], [3]])
    assert "QUEUE_FULL" == refused.value.reason_code
    waiting.pop(1).cancel()
    waiting.append(start(scheduler, [CONTRACTS[0], [3]]))
    backend.gate.set()
    assert [alone([CONTRACTS[0], [0]], 4), alone([CONTRACTS[0], [2]]), alone([CONTRACTS[0], [3]])] == [
        request.result() for request in waiting
    ]


def test_late_ones_end_and_the_others_go_on(batching: Callable[..., Scheduler]) -> None:
    """What is done after its deadline is not done; only who had a slot in time is late by the engine's fault."""
    backend, clock = HashBackend(1), [0]
    scheduler = batching(backend, now_ms=lambda: clock[0])
    backend.gate.clear()
    late = scheduler.start(make([[1], [1]], 1), [[1], [1]], 100)
    assert backend.waits.wait(10)
    queued = scheduler.start(make([[1], [2]], 3), [[1], [2]], 100)
    going = start(scheduler, [CONTRACTS[0], [0]])
    clock[0] = 107
    backend.gate.set()
    found = []
    for request in (late, queued):
        assert request._ended.wait(10)
        with pytest.raises(ModelError, match="7 ms past its deadline") as raised:
            request.result()
        found.append((type(raised.value), raised.value.reason_code))
    assert [(ModelError, "DEADLINE_EXCEEDED"), (QueueTimeoutError, "DEADLINE_EXCEEDED")] == found
    assert alone([CONTRACTS[0], [0]]) == going.result()
    until(lambda: not scheduler._running)


def test_a_decision_on_the_last_millisecond_counts(batching: Callable[..., Scheduler]) -> None:
    scheduler = batching(HashBackend(1), now_ms=lambda: 100)
    assert alone([[1], [2]]) == scheduler.submit(make([[1], [2]], 3), [[1], [2]], 100)


@pytest.mark.parametrize("now_ms", [lambda: int(time.monotonic() * 1000), lambda: 100])
def test_no_caller_waits_for_the_end_of_a_pass_that_outlasts_its_deadline(
    batching: Callable[..., Scheduler], now_ms: Callable[[], int]
) -> None:
    backend = HashBackend(1)
    scheduler = batching(backend, now_ms=now_ms)
    backend.gate.clear()
    with pytest.raises(ModelError, match="past its deadline"):
        scheduler.submit(make([[1], [2]], 3), [[1], [2]], scheduler.now_ms() + 20)
    assert not backend.gate.is_set()


def test_cancelling_in_the_middle_frees_the_slot_and_drops_the_forks(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(1)
    scheduler = batching(backend)
    ready = threading.Event()

    def endless(_: object, slot: int) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
        backend.prefill([], slot=slot)
        fork = backend.fork(slot)
        try:
            while True:
                yield [Row(fork, [1])]
                ready.set()
        finally:
            backend.drop(fork)

    request = scheduler.start(endless, [[1]], FAR)
    assert ready.wait(10)
    assert 1 == backend.forks_open
    request.cancel()
    assert alone([[1], [2]]) == scheduler.submit(make([[1], [2]], 3), [[1], [2]], FAR)
    assert 0 == backend.forks_open
    with pytest.raises(ModelError, match="was cancelled") as found:
        request.result()
    assert "CANCELLED" == found.value.reason_code


def test_a_failed_pass_fails_those_scheduled_in_it_and_all_others_begin_again(
    batching: Callable[..., Scheduler],
) -> None:
    backend = HashBackend(3, pass_tokens_max=4)
    scheduler = batching(backend)
    backend.fails_at = {1}
    first = held_up(backend, scheduler)  # one token in the second pass
    others = [start(scheduler, [CONTRACTS[1], [n] * 3]) for n in (1, 2)]  # the first of them rides, the second waits
    backend.gate.set()
    for request in (first, others[0]):
        with pytest.raises(ModelError, match="the model could not be run") as found:
            request.result()
        assert ("BACKEND_FAILED", "look at the memory") == (found.value.reason_code, found.value.hint)
    assert alone([CONTRACTS[1], [2] * 3]) == others[1].result()
    assert 1 == others[1].restarts


def test_nobody_goes_on_in_what_another_ones_failed_beginning_has_emptied(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(2)
    scheduler = batching(backend)

    def begins_in_vain(_: object, slot: int) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
        backend._clear()  # as llama.cpp's cache after a pass that failed
        raise BackendError("the model could not be run")
        yield []

    other = held_up(backend, scheduler)
    request = scheduler.start(begins_in_vain, [[9]], FAR)
    backend.gate.set()
    with pytest.raises(ModelError, match="the model could not be run") as found:
        request.result()
    assert "BACKEND_FAILED" == found.value.reason_code
    assert alone([CONTRACTS[0], [0]], 4) == other.result()
    assert 1 == other.restarts


def test_beginning_again_has_a_limit(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(2, pass_tokens_max=4)
    scheduler = batching(backend)

    def broken(_: object, slot: int) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
        yield []
        raise ModelError("the cache is gone", reason_code="BACKEND_FAILED")

    first = held_up(backend, scheduler, length=100)
    others = [scheduler.start(broken, [[n]], FAR) for n in range(RESTARTS_MAX + 1)]
    backend.gate.set()
    for request in others:
        with pytest.raises(ModelError, match="the cache is gone"):
            request.result()
    with pytest.raises(ModelError, match="failed too often in the passes of this decision"):
        first.result()


@pytest.mark.parametrize("at", ["made", "begun", "passed"])
@pytest.mark.parametrize(
    "error",
    [
        ModelError("no logits", reason_code="LOGITS_INVALID"),
        LanguageError("too large"),
        ValueError("a bug"),
        Panic("no `Exception`"),
    ],
)
def test_what_goes_wrong_in_one_decision_is_its_own(
    batching: Callable[..., Scheduler], at: str, error: BaseException
) -> None:
    backend = HashBackend(2)
    scheduler = batching(backend)

    def broken(_: object, slot: int) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
        if at == "made":
            raise error
        return later(slot)

    def later(slot: int) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
        if at == "begun":
            raise error
        backend.prefill([], slot=slot)
        yield [Row(slot, [1])]
        raise error

    other = held_up(backend, scheduler)
    request = scheduler.start(broken, [[9]], FAR)
    backend.gate.set()
    with pytest.raises(type(error) if isinstance(error, SdsError) else ModelError) as found:
        request.result()
    expected = error if isinstance(error, SdsError) else f"the decision failed unexpectedly: {type(error).__name__}"
    assert str(expected) == str(found.value)
    assert alone([CONTRACTS[0], [0]], 4) == other.result()
    assert 0 == other.restarts


class Slipping(HashBackend):
    """Fails once at what is told, and goes on."""

    slips = ""

    def _slip(self, at: str) -> bool:
        slips, self.slips = self.slips == at, "" if self.slips == at else self.slips
        return slips

    def defragment(self) -> None:
        if self._slip("defragment"):
            raise BackendError("the cells could not be cut")
        super().defragment()

    def is_cached(self, sections: Sequence[Sequence[int]]) -> bool:
        if self._slip("keeps"):
            raise BackendError("nobody knows")
        return super().is_cached(sections)

    def run(self, rows: Sequence[Row]) -> list[Logits]:
        if self._slip("panic"):
            raise Panic("no `Exception`")
        found = super().run(rows)
        return [np.zeros((1, 5), np.float32) for _ in found] if self._slip("shape") else found


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("defragment", "the cells could not be cut"),
        ("keeps", ""),
        ("panic", "the model failed unexpectedly"),
        ("shape", "the decision failed unexpectedly: ValueError"),
    ],
)
def test_one_slip_of_the_backend_costs_one_decision_at_most(
    batching: Callable[..., Scheduler], at: str, message: str
) -> None:
    backend = Slipping(2, pass_tokens_max=4, wear_max=1 if at == "defragment" else 1 << 30)
    scheduler = batching(backend)
    sections = [[1, 2, 3], [7] * 6]
    expected = alone(sections)
    assert expected == start(scheduler, sections).result()
    backend.slips = at
    request = start(scheduler, [[2, 3, 1], [7] * 6])
    if message:
        with pytest.raises(ModelError, match=message):
            request.result()
    else:
        request.result()
    assert [expected] * 2 == [start(scheduler, sections).result() for _ in range(2)]


def test_the_tokenizer_is_a_decisions_own_except_during_a_pass(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(1)
    scheduler = batching(backend)
    held: list[bool] = []

    def looks(_: object, slot: int) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
        held.append(is_held(scheduler._tokenizer))
        backend.prefill([], slot=slot)
        yield [Row(slot, [1])]
        held.append(is_held(scheduler._tokenizer))
        return ()

    backend.gate.clear()
    request = scheduler.start(looks, [[1]], FAR)
    assert backend.waits.wait(10)
    assert scheduler._tokenizer.acquire(timeout=5)
    scheduler._tokenizer.release()
    backend.gate.set()
    request.result()
    assert [True, True] == held


def test_when_the_worker_dies_everybody_is_told(
    batching: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = HashBackend(1)
    scheduler = batching(backend)
    waiting = [held_up(backend, scheduler), start(scheduler, [[1], [2]])]

    def dies() -> None:
        raise SystemExit

    monkeypatch.setattr(scheduler, "_expire", dies)
    backend.gate.set()
    for request in waiting:
        with pytest.raises(ModelError, match="the batch worker failed: SystemExit"):
            request.result()
    with pytest.raises(ModelError, match="the batch worker failed: SystemExit"):
        start(scheduler, [[1], [2]])


@pytest.mark.parametrize("slots", [1, 3])
def test_closing_lets_what_runs_finish_and_ends_what_waits(batching: Callable[..., Scheduler], slots: int) -> None:
    backend = HashBackend(slots)
    scheduler = batching(backend)
    running = held_up(backend, scheduler)
    waiting = [start(scheduler, [CONTRACTS[0], [n]]) for n in range(1, slots + 1)]
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    until(lambda: all(request.ended for request in waiting))
    with pytest.raises(ModelError, match="the engine is closed"):
        start(scheduler, [CONTRACTS[0], [9]])
    assert not running.ended
    backend.gate.set()
    assert alone([CONTRACTS[0], [0]], 4) == running.result()
    for request in waiting:
        with pytest.raises(ModelError, match="the engine is closed"):
            request.result()
    closing.join(5)
    assert backend.closed


def test_closing_ends_all_and_closes_the_model_once_its_pass_is_over(
    batching: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = HashBackend(1)
    scheduler = batching(backend)
    waiting = [held_up(backend, scheduler), start(scheduler, [[1], [2]])]
    monkeypatch.setattr("sds.engines.scheduler.CLOSE_S_MAX", 0.05)
    scheduler.close()
    assert not backend.closed
    for request in waiting:
        with pytest.raises(ModelError, match="the engine is closed"):
            request.result()
    with pytest.raises(ModelError, match="the engine is closed"):
        start(scheduler, [[1], [2]])
    backend.gate.set()
    monkeypatch.setattr("sds.engines.scheduler.CLOSE_S_MAX", 10)
    scheduler.close()
    assert backend.closed


def test_whoever_is_left_after_any_mix_of_cancels_and_failures_decides_as_if_alone(
    batching: Callable[..., Scheduler],
) -> None:
    rng = seeded(11)
    for _ in range(scale(20, 400)):
        backend = HashBackend(rng.randint(1, 5), pass_tokens_max=rng.choice([4, 12, 512]))
        scheduler = batching(backend)
        backend.fails_at = {rng.randrange(60) for _ in range(rng.randint(0, 2))}
        asked = []
        for n in range(24):
            case = ([CONTRACTS[rng.randrange(3)], [n % 17] * rng.randint(1, 6)], rng.randint(1, 6), rng.randint(0, 3))
            asked.append((case, start(scheduler, *case)))
            if rng.random() < 0.2:
                rng.choice(asked)[1].cancel()
            if rng.random() < 0.3:
                time.sleep(rng.random() / 1000)
        ended = [outcome(case, request) for case, request in asked]
        assert set(ended) <= {"as alone", "CANCELLED", "BACKEND_FAILED"}
        scheduler.close()
        assert 0 == backend.forks_open
        if not backend.fails_at:
            assert "BACKEND_FAILED" not in ended


def outcome(case: tuple[list[list[int]], int, int], request: Request[tuple[int, ...]]) -> str:
    try:
        return "as alone" if request.result() == alone(*case) else "another"
    except ModelError as error:
        return error.reason_code
