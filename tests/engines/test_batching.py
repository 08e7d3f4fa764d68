"""Many decisions over one model: each as if it were alone, none waits for ever, and what fails fails alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from sds.engines.batching import LEFT_OUT_MAX, RESTARTS_MAX, Batcher, Pending
from sds.kernel.errors import LanguageError, ModelError
from sds.models.protocol import BackendError, Row
from tests.engines.hashing import HashBackend, Logits, writing
from tests.scale import scale, seeded

FAR = 1 << 60
CONTRACTS = [[1, 2, 3], [4, 5], [6]]

Make = Callable[[Any, int], Generator[list[Row], list[Logits], tuple[int, ...]]]


@pytest.fixture
def opened() -> Iterator[Callable[..., Batcher]]:
    batchers: list[Batcher] = []

    def open_one(backend: HashBackend, **options: Any) -> Batcher:
        batchers.append(Batcher(backend, now_ms=options.pop("now_ms", lambda: 0), words=threading.Lock(), **options))
        return batchers[-1]

    yield open_one
    for batcher in batchers:
        batcher._backend.gate.set()  # type: ignore[attr-defined]
        batcher.close()


def make(sections: list[list[int]], length: int, forks: int = 0) -> Make:
    return partial(writing, sections=sections, length=length, forks=forks)


def start(batcher: Batcher, sections: list[list[int]], length: int = 3, forks: int = 0) -> Pending[tuple[int, ...]]:
    return batcher.start(make(sections, length, forks), sections, FAR)


def alone(sections: list[list[int]], length: int = 3, forks: int = 0) -> tuple[int, ...]:
    backend = HashBackend(1)
    passes = make(sections, length, forks)(backend, 0)
    rows = next(passes)
    while True:
        try:
            rows = passes.send(backend.run(rows))
        except StopIteration as finished:
            result: tuple[int, ...] = finished.value
            return result


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 10
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def held_up(backend: HashBackend, batcher: Batcher, case: int = 0, length: int = 4) -> Pending[tuple[int, ...]]:
    """Start one and hold its first pass up, so that what is started next waits."""
    backend.gate.clear()
    first = start(batcher, [CONTRACTS[0], [case]], length)
    assert backend.waits.wait(10)
    return first


def test_sixteen_threads_get_what_each_would_get_alone(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(4)
    batcher = opened(backend)
    cases = [([CONTRACTS[n % 3], [n % 17, 7]], 2 + n % 5, n % 4) for n in range(scale(64, 640))]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda case: batcher.submit(make(*case), case[0], FAR), cases))
    assert [alone(*case) for case in cases] == found
    assert max(len({row.slot for row in rows}) for rows in backend.passes) > 1
    assert 0 == backend.forks_open


def test_those_who_want_a_pass_at_the_same_time_share_it(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(4)
    batcher = opened(backend)
    waiting = [held_up(backend, batcher), *(start(batcher, [CONTRACTS[0], [n]], 4) for n in (1, 2, 3))]
    backend.gate.set()
    assert [alone([CONTRACTS[0], [n]], 4) for n in range(4)] == [pending.result() for pending in waiting]
    assert [1, 4, 4, 4, 3] == [len(rows) for rows in backend.passes]
    assert [(1, 1), (1, 4), (1, 4), (1, 4)] == waiting[0].rows


def test_one_that_ends_frees_its_slot_for_the_next_pass(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(2)
    batcher = opened(backend)
    waiting = [held_up(backend, batcher, length=2), *(start(batcher, [CONTRACTS[0], [n]], 2) for n in (1, 2))]
    backend.gate.set()
    for pending in waiting:
        pending.result()
    assert [[0], [0, 1], [0, 1], [0]] == [sorted(row.slot for row in rows) for rows in backend.passes]


def test_a_stream_of_newcomers_delays_nobody_who_has_begun(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(3, pass_tokens_max=8)
    batcher = opened(backend)
    first = held_up(backend, batcher, length=12)
    others = [start(batcher, [CONTRACTS[n % 3], [n] * 8], 2) for n in range(20)]
    backend.gate.set()
    first.result()
    rode = [n for n, rows in enumerate(backend.passes) if any(row.slot == 0 for row in rows)][:12]
    assert 12 + 11 * (LEFT_OUT_MAX + backend.slots) > rode[-1]
    assert rode[-1] - rode[0] < 11 * 2  # under way it rides in nearly every pass
    assert [alone([CONTRACTS[n % 3], [n] * 8], 2) for n in range(20)] == [pending.result() for pending in others]


def test_nobody_is_left_out_of_more_passes_than_the_limit_and_one_for_each_slot(
    opened: Callable[..., Batcher],
) -> None:
    rng = seeded(3)
    backend = HashBackend(6, pass_tokens_max=9)
    batcher = opened(backend)
    cases = [([CONTRACTS[0], [n] * rng.randint(1, 9)], rng.randint(1, 9), rng.randint(0, 6)) for n in range(40)]
    held_up(backend, batcher)
    waiting = [(case, start(batcher, *case)) for case in cases]
    left_out, turn = [], batcher._riders

    def riders() -> Any:
        left_out.extend(running.left_out for running in batcher._running)
        return turn()

    batcher._riders = riders  # type: ignore[method-assign]
    backend.gate.set()
    assert [alone(*case) for case, _ in waiting] == [pending.result() for _, pending in waiting]
    assert LEFT_OUT_MAX + backend.slots >= max(left_out) > 0


def test_a_pass_holds_no_more_tokens_than_the_backend_takes(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(4, pass_tokens_max=10)
    batcher = opened(backend)
    waiting = [held_up(backend, batcher), *(start(batcher, [CONTRACTS[0], [n] * 6], 3, 4) for n in range(8))]
    backend.gate.set()
    for pending in waiting:
        pending.result()
    assert 10 >= max(sum(len(row.tokens) for row in rows) for rows in backend.passes) > 6


def test_a_newcomers_row_is_cut_to_what_those_under_way_leave_of_a_pass(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(2, pass_tokens_max=8)
    batcher = opened(backend)
    first = held_up(backend, batcher, length=5)
    second = start(batcher, [CONTRACTS[0], [5] * 20], 2)
    backend.gate.set()
    assert [alone([CONTRACTS[0], [0]], 5), alone([CONTRACTS[0], [5] * 20], 2)] == [first.result(), second.result()]
    assert [[1], [1, 7], [1, 7], [1, 6], [1, 1]] == [[len(row.tokens) for row in rows] for rows in backend.passes]
    assert [(7, 2), (7, 2), (6, 2), (1, 2)] == second.rows


def test_one_who_waits_for_the_rest_of_a_row_goes_before_other_newcomers(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(3, pass_tokens_max=8)
    batcher = opened(backend)
    waiting = [held_up(backend, batcher, length=1), *(start(batcher, [CONTRACTS[0], [n] * 12], 1) for n in (1, 2))]
    backend.gate.set()
    for pending in waiting:
        pending.result()
    assert [[1], [8], [4, 4], [8]] == [[len(row.tokens) for row in rows] for rows in backend.passes]


@pytest.mark.parametrize("outputs", range(7))
def test_a_row_that_was_cut_has_the_outputs_of_the_whole(opened: Callable[..., Batcher], outputs: int) -> None:
    rows = [([1, 2, 3, 4, 5, 6], outputs), ([7, 8, 9], 3)]

    def reads(backend: HashBackend, slot: int) -> Generator[list[Row], list[Logits], list[Logits]]:
        backend.begin([], slot=slot)
        forks = [backend.fork(slot) for _ in rows]
        found = yield [Row(fork, *row) for fork, row in zip(forks, rows, strict=True)]
        for fork in forks:
            backend.drop(fork)
        return found

    cut, whole = opened(HashBackend(1, pass_tokens_max=4)), opened(HashBackend(1))
    pairs = zip(whole.submit(reads, [[1]], FAR), cut.submit(reads, [[1]], FAR), strict=True)
    assert [True, True] == [np.array_equal(expected, found) for expected, found in pairs]
    assert [[4], [2, 2], [1]] == [[len(row.tokens) for row in found] for found in cut._backend.passes]  # type: ignore[attr-defined]


def test_a_worn_backend_rests_when_all_under_way_have_ended_and_before_the_next(opened: Callable[..., Batcher]) -> None:
    rng = seeded(31)
    backend = HashBackend(4, pass_tokens_max=12, wear_max=60)
    batcher = opened(backend)
    cases = [([CONTRACTS[n % 3], [n % 17] * rng.randint(1, 9)], rng.randint(1, 6), n % 4) for n in range(60)]
    held_up(backend, batcher)
    waiting = [start(batcher, *case) for case in cases]
    backend.gate.set()
    assert [alone(*case) for case in cases] == [pending.result() for pending in waiting]
    read = sum(len(row.tokens) for rows in backend.passes for row in rows)
    assert read / 60 >= backend.rests > read / 60 / 4
    assert 0 == sum(pending.restarts for pending in waiting)


def test_first_come_first_served(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(1)
    batcher = opened(backend)
    waiting = [held_up(backend, batcher, length=1), *(start(batcher, [CONTRACTS[n % 3], [n]], 1) for n in range(1, 9))]
    backend.gate.set()
    for pending in waiting:
        pending.result()
    assert list(range(9)) == [rows[0].tokens[0] for rows in backend.passes]


def test_a_newcomer_gets_the_slot_that_holds_its_sections_and_else_the_one_least_recently_used(
    opened: Callable[..., Batcher],
) -> None:
    backend = HashBackend(2)
    batcher = opened(backend)
    for contract in (0, 1, 0, 1, 1, 0, 2, 0, 1):
        start(batcher, [CONTRACTS[contract], [5]]).result()
    slots = [slot for slot, _, _ in backend.begun]
    assert [0, 1, 0, 1, 1, 0, 1, 0, 1] == slots
    assert [0, 0, 1, 1, 1, 1, 0, 1, 0] == [kept for _, kept, _ in backend.begun]


def test_a_decision_that_asks_no_model_leaves_a_slot_as_it_was(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(2)
    batcher = opened(backend)
    for contract in (0, 1):
        start(batcher, [CONTRACTS[contract], [5]]).result()
    assert (7,) == batcher.submit(settled, [CONTRACTS[0], [5]], FAR)
    start(batcher, [CONTRACTS[0], [5]]).result()
    assert [0, 1, 0] == [slot for slot, _, _ in backend.begun]


def settled(_: object, slot: int) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
    yield from ()
    return (7,)


def test_after_a_failed_pass_shared_sections_are_read_again_by_one(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(4)
    batcher = opened(backend)
    backend.fails_at = {0}
    first = held_up(backend, batcher)
    others = [start(batcher, [CONTRACTS[n], [n]], 9) for n in (0, 1)]
    backend.gate.set()
    for pending in others:
        pending.result()
    assert first.ended
    assert [1, 1, 2] == [len(rows) for rows in backend.passes[:3]]


def test_of_those_whose_sections_must_be_read_one_joins_between_two_passes(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(8)
    batcher = opened(backend)
    waiting = [held_up(backend, batcher, length=9)]
    waiting += [start(batcher, [CONTRACTS[n], [n]], 9) for n in (0, 1, 1, 2, 0)]
    backend.gate.set()
    for pending in waiting:
        pending.result()
    assert [1, 4, 6] == [len(rows) for rows in backend.passes[:3]]
    assert 3 == sum(read for _, _, read in backend.begun)


def test_a_full_queue_refuses_and_has_room_again_when_somebody_gives_up(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(1)
    batcher = opened(backend, queue_max=2)
    waiting = [held_up(backend, batcher), *(start(batcher, [CONTRACTS[0], [n]]) for n in (1, 2))]
    with pytest.raises(ModelError, match="2 decisions wait already") as refused:
        start(batcher, [CONTRACTS[0], [3]])
    assert "QUEUE_FULL" == refused.value.reason_code
    waiting.pop(1).cancel()
    waiting.append(start(batcher, [CONTRACTS[0], [3]]))
    backend.gate.set()
    assert [alone([CONTRACTS[0], [0]], 4), alone([CONTRACTS[0], [2]]), alone([CONTRACTS[0], [3]])] == [
        pending.result() for pending in waiting
    ]


def test_a_late_one_ends_and_the_others_go_on(opened: Callable[..., Batcher]) -> None:
    backend, clock = HashBackend(2), [0]
    batcher = opened(backend, now_ms=lambda: clock[0])
    backend.gate.clear()
    going = start(batcher, [CONTRACTS[0], [0]])
    late = batcher.start(make([CONTRACTS[0], [1]], 3), [CONTRACTS[0], [1]], 100)
    queued = batcher.start(make([CONTRACTS[0], [2]], 3), [CONTRACTS[0], [2]], 100)
    assert backend.waits.wait(10)
    clock[0] = 107
    backend.gate.set()
    for pending in (late, queued):
        with pytest.raises(ModelError, match="7 ms past its deadline") as found:
            pending.result()
        assert "DEADLINE_EXCEEDED" == found.value.reason_code
    assert alone([CONTRACTS[0], [0]]) == going.result()
    until(lambda: not batcher._running)


def test_what_is_done_after_its_deadline_is_not_done(opened: Callable[..., Batcher]) -> None:
    backend, clock = HashBackend(1), [0]
    batcher = opened(backend, now_ms=lambda: clock[0])
    backend.gate.clear()
    late = batcher.start(make([[1], [2]], 1), [[1], [2]], 100)
    assert backend.waits.wait(10)
    clock[0] = 101
    backend.gate.set()
    until(lambda: late.ended)
    with pytest.raises(ModelError, match="1 ms past its deadline"):
        late.result()


def test_no_caller_waits_for_the_end_of_a_pass_that_outlasts_its_deadline(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(1)
    batcher = opened(backend, now_ms=lambda: int(time.monotonic() * 1000))
    backend.gate.clear()
    with pytest.raises(ModelError, match="past its deadline"):
        batcher.submit(make([[1], [2]], 3), [[1], [2]], batcher.now_ms() + 20)
    assert not backend.gate.is_set()


def test_cancelling_in_the_middle_frees_the_slot_and_drops_the_forks(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(1)
    batcher = opened(backend)
    ready = threading.Event()

    def endless(_: object, slot: int) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
        backend.begin([], slot=slot)
        fork = backend.fork(slot)
        try:
            while True:
                yield [Row(fork, [1])]
                ready.set()
        finally:
            backend.drop(fork)

    pending = batcher.start(endless, [[1]], FAR)
    assert ready.wait(10)
    assert 1 == backend.forks_open
    pending.cancel()
    assert alone([[1], [2]]) == batcher.submit(make([[1], [2]], 3), [[1], [2]], FAR)
    assert 0 == backend.forks_open
    with pytest.raises(ModelError, match="was cancelled") as found:
        pending.result()
    assert "CANCELLED" == found.value.reason_code


def test_a_failed_pass_fails_those_who_rode_in_it_and_all_others_begin_again(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(3, pass_tokens_max=4)
    batcher = opened(backend)
    backend.fails_at = {1}
    first = held_up(backend, batcher)  # one token in the second pass
    others = [start(batcher, [CONTRACTS[1], [n] * 3]) for n in (1, 2)]  # the first of them rides, the second waits
    backend.gate.set()
    for pending in (first, others[0]):
        with pytest.raises(ModelError, match="the model could not be run") as found:
            pending.result()
        assert ("BACKEND_FAILED", "look at the memory") == (found.value.reason_code, found.value.hint)
    assert alone([CONTRACTS[1], [2] * 3]) == others[1].result()
    assert 1 == others[1].restarts


def test_nobody_goes_on_in_what_another_ones_failed_beginning_has_emptied(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(2)
    batcher = opened(backend)

    def begins_in_vain(_: object, slot: int) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
        backend._clear()  # as llama.cpp's cache after a pass that failed
        raise BackendError("the model could not be run")
        yield []

    other = held_up(backend, batcher)
    pending = batcher.start(begins_in_vain, [[9]], FAR)
    backend.gate.set()
    with pytest.raises(ModelError, match="the model could not be run") as found:
        pending.result()
    assert "BACKEND_FAILED" == found.value.reason_code
    assert alone([CONTRACTS[0], [0]], 4) == other.result()
    assert 1 == other.restarts


def test_beginning_again_has_a_limit(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(2, pass_tokens_max=4)
    batcher = opened(backend)

    def broken(_: object, slot: int) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
        yield []
        raise ModelError("the cache is gone", reason_code="BACKEND_FAILED")

    first = held_up(backend, batcher, length=100)
    others = [batcher.start(broken, [[n]], FAR) for n in range(RESTARTS_MAX + 1)]
    backend.gate.set()
    for pending in others:
        with pytest.raises(ModelError, match="the cache is gone"):
            pending.result()
    with pytest.raises(ModelError, match="failed too often beside this decision"):
        first.result()


@pytest.mark.parametrize("at", ["made", "begun", "passed"])
@pytest.mark.parametrize("error", [ModelError("no logits", reason_code="LOGITS_INVALID"), ValueError("a bug")])
def test_what_goes_wrong_in_one_decision_is_its_own(opened: Callable[..., Batcher], at: str, error: Exception) -> None:
    backend = HashBackend(2)
    batcher = opened(backend)

    def broken(_: object, slot: int) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
        if at == "made":
            raise error
        return later(slot)

    def later(slot: int) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
        if at == "begun":
            raise error
        backend.begin([], slot=slot)
        yield [Row(slot, [1])]
        raise error

    other = held_up(backend, batcher)
    pending = batcher.start(broken, [[9]], FAR)
    backend.gate.set()
    with pytest.raises(ModelError) as found:
        pending.result()
    expected = error if isinstance(error, ModelError) else "the decision failed unexpectedly: ValueError"
    assert str(expected) == str(found.value)
    assert alone([CONTRACTS[0], [0]], 4) == other.result()
    assert 0 == other.restarts


def test_a_language_that_cannot_be_made_is_told_as_what_it_is(opened: Callable[..., Batcher]) -> None:
    def broken(_: object, slot: int) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
        raise LanguageError("too large")

    with pytest.raises(LanguageError, match="too large"):
        opened(HashBackend(1)).submit(broken, [[1]], FAR)


def test_the_backends_words_are_a_decisions_own_except_during_a_pass(opened: Callable[..., Batcher]) -> None:
    backend = HashBackend(1)
    batcher = opened(backend)
    held: list[bool] = []

    def looks(_: object, slot: int) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
        held.append(batcher._words.locked())
        backend.begin([], slot=slot)
        yield [Row(slot, [1])]
        held.append(batcher._words.locked())
        return ()

    backend.gate.clear()
    pending = batcher.start(looks, [[1]], FAR)
    assert backend.waits.wait(10)
    assert batcher._words.acquire(timeout=5)
    batcher._words.release()
    backend.gate.set()
    pending.result()
    assert [True, True] == held


def test_when_the_worker_dies_everybody_is_told(
    opened: Callable[..., Batcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = HashBackend(1)
    batcher = opened(backend)
    waiting = [held_up(backend, batcher), start(batcher, [[1], [2]])]

    def dies() -> None:
        raise SystemExit

    monkeypatch.setattr(batcher, "_clear", dies)
    backend.gate.set()
    for pending in waiting:
        with pytest.raises(ModelError, match="the batch worker failed: SystemExit"):
            pending.result()
    with pytest.raises(ModelError, match="the batch worker failed: SystemExit"):
        start(batcher, [[1], [2]])


def test_closing_ends_all_and_closes_the_model_once_its_pass_is_over(
    opened: Callable[..., Batcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = HashBackend(1)
    batcher = opened(backend)
    waiting = [held_up(backend, batcher), start(batcher, [[1], [2]])]
    monkeypatch.setattr("sds.engines.batching.CLOSE_S_MAX", 0.05)
    batcher.close()
    assert not backend.closed
    for pending in waiting:
        with pytest.raises(ModelError, match="the engine is closed"):
            pending.result()
    with pytest.raises(ModelError, match="the engine is closed"):
        start(batcher, [[1], [2]])
    backend.gate.set()
    monkeypatch.setattr("sds.engines.batching.CLOSE_S_MAX", 10)
    batcher.close()
    assert backend.closed


def test_whoever_is_left_after_any_mix_of_cancels_and_failures_decides_as_if_alone(
    opened: Callable[..., Batcher],
) -> None:
    rng = seeded(11)
    for _ in range(scale(20, 400)):
        backend = HashBackend(rng.randint(1, 5), pass_tokens_max=rng.choice([4, 12, 512]))
        batcher = opened(backend)
        backend.fails_at = {rng.randrange(60) for _ in range(rng.randint(0, 2))}
        asked = []
        for n in range(24):
            case = ([CONTRACTS[rng.randrange(3)], [n % 17] * rng.randint(1, 6)], rng.randint(1, 6), rng.randint(0, 3))
            asked.append((case, start(batcher, *case)))
            if rng.random() < 0.2:
                rng.choice(asked)[1].cancel()
            if rng.random() < 0.3:
                time.sleep(rng.random() / 1000)
        ended = [outcome(case, pending) for case, pending in asked]
        assert set(ended) <= {"as alone", "CANCELLED", "BACKEND_FAILED"}
        batcher.close()
        assert 0 == backend.forks_open
        if not backend.fails_at:
            assert "BACKEND_FAILED" not in ended


def outcome(case: tuple[list[list[int]], int, int], pending: Pending[tuple[int, ...]]) -> str:
    try:
        return "as alone" if pending.result() == alone(*case) else "another"
    except ModelError as error:
        return error.reason_code
