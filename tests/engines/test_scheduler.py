"""Many decisions over one model: each as if it were alone, who rides in which pass, and none waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from sds.engines.request import Running
from sds.engines.scheduler import PASSES_SKIPPED_MAX, Scheduler
from sds.models.protocol import Row
from tests.engines.batches import CONTRACTS, FAR, alone, held_up, make, start
from tests.engines.hashing import HashBackend, Logits
from tests.scale import scale, seeded


def test_sixteen_threads_get_what_each_would_get_alone(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(4)
    scheduler = batching(backend)
    cases = [([CONTRACTS[n % 3], [n % 17, 7]], 2 + n % 5, n % 4) for n in range(scale(64, 640))]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda case: scheduler.submit(make(*case), case[0], FAR), cases))
    assert [alone(*case) for case in cases] == found
    assert max(len({row.slot for row in rows}) for rows in backend.passes) > 1
    assert 0 == backend.forks_open


def test_those_who_want_a_pass_at_the_same_time_share_it(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(4)
    scheduler = batching(backend)
    waiting = [held_up(backend, scheduler), *(start(scheduler, [CONTRACTS[0], [n]], 4) for n in (1, 2, 3))]
    backend.gate.set()
    assert [alone([CONTRACTS[0], [n]], 4) for n in range(4)] == [request.result() for request in waiting]
    assert [1, 4, 4, 4, 3] == [len(rows) for rows in backend.passes]
    assert [(1, 1), (1, 4), (1, 4), (1, 4)] == waiting[0].rows


def test_one_that_ends_frees_its_slot_for_the_next_pass(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(2)
    scheduler = batching(backend)
    waiting = [held_up(backend, scheduler, length=2), *(start(scheduler, [CONTRACTS[0], [n]], 2) for n in (1, 2))]
    backend.gate.set()
    for request in waiting:
        request.result()
    assert [[0], [0, 1], [0, 1], [0]] == [sorted(row.slot for row in rows) for rows in backend.passes]


def test_a_stream_of_newcomers_delays_nobody_who_has_begun(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(3, pass_tokens_max=8)
    scheduler = batching(backend)
    first = held_up(backend, scheduler, length=12)
    others = [start(scheduler, [CONTRACTS[n % 3], [n] * 8], 2) for n in range(20)]
    backend.gate.set()
    first.result()
    rode = [n for n, rows in enumerate(backend.passes) if any(row.slot == 0 for row in rows)][:12]
    assert 12 + 11 * (PASSES_SKIPPED_MAX + backend.slots) > rode[-1]
    assert rode[-1] - rode[0] < 11 * 2  # under way it rides in nearly every pass
    assert [alone([CONTRACTS[n % 3], [n] * 8], 2) for n in range(20)] == [request.result() for request in others]


@pytest.mark.parametrize("rows_may_be_cut", [True, False])
def test_nobody_is_left_out_of_more_passes_than_the_limit_and_one_for_each_slot(
    rows_may_be_cut: bool, batching: Callable[..., Scheduler]
) -> None:
    rng = seeded(3)
    backend = HashBackend(6, pass_tokens_max=9, rows_may_be_cut=rows_may_be_cut)
    scheduler = batching(backend)
    cases = [([CONTRACTS[0], [n] * rng.randint(1, 9)], rng.randint(1, 9), rng.randint(0, 6)) for n in range(40)]
    held_up(backend, scheduler)
    waiting = [(case, start(scheduler, *case)) for case in cases]
    passes_skipped, turn = [], scheduler._schedule

    def scheduled() -> Any:
        passes_skipped.extend(running.passes_skipped for running in scheduler._running)
        return turn()

    scheduler._schedule = scheduled  # type: ignore[method-assign]
    backend.gate.set()
    assert [alone(*case) for case, _ in waiting] == [request.result() for _, request in waiting]
    assert PASSES_SKIPPED_MAX + backend.slots >= max(passes_skipped) > 0


@pytest.mark.parametrize("may_be_cut", [True, False])
@pytest.mark.parametrize(
    ("slots", "room", "begun", "newcomer"), [(6, 9, 9, 9), (16, 2048, 700, 1500), (64, 2048, 170, 300)]
)
def test_a_newcomer_comes_in_beside_those_who_fill_every_pass_for_ever(
    slots: int, room: int, begun: int, newcomer: int, may_be_cut: bool
) -> None:
    backend: Any = HashBackend(slots, pass_tokens_max=room, rows_may_be_cut=may_be_cut)
    scheduler = object.__new__(Scheduler)
    scheduler._backend, scheduler._pass_tokens_max = backend, room
    none: Any = None
    scheduler._running = [
        Running(none, n, none, reads=False, rows=[Row(n, [1] * begun)], begun=True) for n in range(slots - 1)
    ]
    last = Running(none, slots - 1, none, reads=False, rows=[Row(slots - 1, [1] * newcomer)])
    scheduler._running.append(last)
    for _ in range(PASSES_SKIPPED_MAX + slots):
        scheduled = scheduler._schedule()
        assert room >= sum(len(row.tokens) for _, rows in scheduled for row in rows)
        for running in scheduler._running:
            running.passes_skipped += 1
        for running, _ in scheduled:
            running.passes_skipped = 0
        if not last.passes_skipped:
            return
    pytest.fail("it never came in")


def test_a_pass_holds_no_more_tokens_than_the_backend_takes(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(4, pass_tokens_max=10)
    scheduler = batching(backend)
    waiting = [held_up(backend, scheduler), *(start(scheduler, [CONTRACTS[0], [n] * 6], 3, 4) for n in range(8))]
    backend.gate.set()
    for request in waiting:
        request.result()
    assert 10 >= max(sum(len(row.tokens) for row in rows) for rows in backend.passes) > 6


def test_a_newcomers_row_is_cut_to_what_those_under_way_leave_of_a_pass(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(2, pass_tokens_max=8)
    scheduler = batching(backend)
    first = held_up(backend, scheduler, length=5)
    second = start(scheduler, [CONTRACTS[0], [5] * 20], 2)
    backend.gate.set()
    assert [alone([CONTRACTS[0], [0]], 5), alone([CONTRACTS[0], [5] * 20], 2)] == [first.result(), second.result()]
    assert [[1], [1, 7], [1, 7], [1, 6], [1, 1]] == [[len(row.tokens) for row in rows] for rows in backend.passes]
    assert [(7, 2), (7, 2), (6, 2), (1, 2)] == second.rows


def test_rows_are_cut_only_where_they_are_longer_than_a_pass_if_the_backend_fills_none(
    batching: Callable[..., Scheduler],
) -> None:
    """Where a row is cut then depends on itself alone, whatever company it has."""
    backend = HashBackend(4, pass_tokens_max=8, rows_may_be_cut=False)
    scheduler = batching(backend)
    cases = {100 + n: [100 + n] * n for n in (20, 6, 2, 3, 9)}  # of tokens that nobody writes
    first = held_up(backend, scheduler, length=9)
    waiting = [start(scheduler, [CONTRACTS[0], case], 2) for case in cases.values()]
    backend.gate.set()
    assert [alone([CONTRACTS[0], case], 2) for case in cases.values()] == [request.result() for request in waiting]
    first.result()
    read = [row.tokens for rows in backend.passes for row in rows]
    found = {case: [len(tokens) for tokens in read if tokens[0] == case] for case in cases}
    assert {120: [8, 8, 4], 106: [6], 102: [2], 103: [3], 109: [8, 1]} == found
    assert 8 >= max(sum(len(row.tokens) for row in rows) for rows in backend.passes)
    assert max(len(rows) for rows in backend.passes) > 1


def test_one_who_waits_for_the_rest_of_a_row_goes_before_other_newcomers(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(3, pass_tokens_max=8)
    scheduler = batching(backend)
    waiting = [held_up(backend, scheduler, length=1), *(start(scheduler, [CONTRACTS[0], [n] * 12], 1) for n in (1, 2))]
    backend.gate.set()
    for request in waiting:
        request.result()
    assert [[1], [8], [4, 4], [8]] == [[len(row.tokens) for row in rows] for rows in backend.passes]


@pytest.mark.parametrize("outputs", range(7))
def test_a_row_that_was_cut_has_the_outputs_of_the_whole(batching: Callable[..., Scheduler], outputs: int) -> None:
    rows = [([1, 2, 3, 4, 5, 6], outputs), ([7, 8, 9], 3)]

    def reads(backend: HashBackend, slot: int) -> Generator[list[Row], list[Logits], list[Logits]]:
        backend.prefill([], slot=slot)
        forks = [backend.fork(slot) for _ in rows]
        found = yield [Row(fork, *row) for fork, row in zip(forks, rows, strict=True)]
        for fork in forks:
            backend.drop(fork)
        return found

    cut, whole = batching(HashBackend(2, pass_tokens_max=4)), batching(HashBackend(2))
    pairs = zip(whole.submit(reads, [[1]], FAR), cut.submit(reads, [[1]], FAR), strict=True)
    assert [True, True] == [np.array_equal(expected, found) for expected, found in pairs]
    assert [[4], [2, 2], [1]] == [[len(row.tokens) for row in found] for found in cut._backend.passes]  # type: ignore[attr-defined]


def test_a_worn_backend_rests_when_all_under_way_have_ended_and_before_the_next(
    batching: Callable[..., Scheduler],
) -> None:
    rng = seeded(31)
    backend = HashBackend(4, pass_tokens_max=12, wear_max=60)
    scheduler = batching(backend)
    cases = [([CONTRACTS[n % 3], [n % 17] * rng.randint(1, 9)], rng.randint(1, 6), n % 4) for n in range(60)]
    held_up(backend, scheduler)
    waiting = [start(scheduler, *case) for case in cases]
    backend.gate.set()
    assert [alone(*case) for case in cases] == [request.result() for request in waiting]
    read = sum(len(row.tokens) for rows in backend.passes for row in rows)
    assert read / 60 >= backend.rests > read / 60 / 4
    assert 0 == sum(request.restarts for request in waiting)


def test_first_come_first_served(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(1)
    scheduler = batching(backend)
    waiting = [
        held_up(backend, scheduler, length=1),
        *(start(scheduler, [CONTRACTS[n % 3], [n]], 1) for n in range(1, 9)),
    ]
    backend.gate.set()
    for request in waiting:
        request.result()
    assert list(range(9)) == [rows[0].tokens[0] for rows in backend.passes]


def test_a_newcomer_gets_the_slot_that_holds_its_sections_and_else_the_one_least_recently_used(
    batching: Callable[..., Scheduler],
) -> None:
    backend = HashBackend(2)
    scheduler = batching(backend)
    for contract in (0, 1, 0, 1, 1, 0, 2, 0, 1):
        start(scheduler, [CONTRACTS[contract], [5]]).result()
    slots = [slot for slot, _, _ in backend.begun]
    assert [0, 1, 0, 1, 1, 0, 1, 0, 1] == slots
    assert [0, 0, 1, 1, 1, 1, 0, 1, 0] == [kept for _, kept, _ in backend.begun]


def test_a_decision_that_asks_no_model_leaves_a_slot_as_it_was(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(2)
    scheduler = batching(backend)
    for contract in (0, 1):
        start(scheduler, [CONTRACTS[contract], [5]]).result()
    assert (7,) == scheduler.submit(settled, [CONTRACTS[0], [5]], FAR)
    start(scheduler, [CONTRACTS[0], [5]]).result()
    assert [0, 1, 0] == [slot for slot, _, _ in backend.begun]


def settled(_: object, slot: int) -> Generator[list[Row], list[Logits], tuple[int, ...]]:
    yield from ()
    return (7,)


def test_after_a_failed_pass_shared_sections_are_read_again_by_one(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(4)
    scheduler = batching(backend)
    backend.fails_at = {0}
    first = held_up(backend, scheduler)
    others = [start(scheduler, [CONTRACTS[n], [n]], 9) for n in (0, 1)]
    backend.gate.set()
    for request in others:
        request.result()
    assert first.ended
    assert [1, 1, 2] == [len(rows) for rows in backend.passes[:3]]


def test_of_those_whose_sections_must_be_read_one_joins_between_two_passes(batching: Callable[..., Scheduler]) -> None:
    backend = HashBackend(8)
    scheduler = batching(backend)
    waiting = [held_up(backend, scheduler, length=9)]
    waiting += [start(scheduler, [CONTRACTS[n], [n]], 9) for n in (0, 1, 1, 2, 0)]
    backend.gate.set()
    for request in waiting:
        request.result()
    assert [1, 4, 6] == [len(rows) for rows in backend.passes[:3]]
    assert 3 == sum(read for _, _, read in backend.begun)
