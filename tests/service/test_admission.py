"""Admission: before anything is written, a request that cannot be answered in time is refused, and says when to come again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from sds.service.admission import LOOKED_AT, RECENT_S, SERVICE_MS_FIRST, Admission, Latencies
from sds.service.problems import Problem
from tests.service.engines import Held, Slow
from tests.service.testbed import EVENT, Bed, check, opened_bed


def test_what_waits_before_it_is_weighed_against_the_time_left() -> None:
    admission = Admission(parallel=2, queue_max=100)
    for took_ms in (100.0, 100.0, 5_000.0):  # one that was slow does not count for more than one
        admission.took("a", took_ms)
    assert 100 == admission.service_ms("a")
    leave = [admission.enter("a", 10_000) for _ in range(9)]
    assert (9, 500) == (admission.in_hand, admission.expected_ms("a"))
    with pytest.raises(Problem) as refused:
        admission.enter("a", 998)
    assert ("OVERLOADED", 0.001) == (refused.value.code, refused.value.retry_after_s)
    leave[0]()
    admission.enter("a", 998)


def test_a_queue_that_is_full_takes_nothing_however_much_time_there_is() -> None:
    admission = Admission(parallel=1, queue_max=1)
    leave = admission.enter("a", 1e9)
    with pytest.raises(Problem) as refused:
        admission.enter("b", 1e9)
    detail = "1 decisions, the limit, wait or run in this process already: nothing was written"
    assert ("QUEUE_FULL", detail) == (refused.value.code, refused.value.detail)
    leave()
    admission.enter("b", 1e9)


def test_each_gate_has_its_own_service_time_and_a_place_is_counted_by_it() -> None:
    admission = Admission(parallel=1, queue_max=100)
    admission.took("slow", 1_000.0)
    admission.took("fast", 1.0)
    admission.enter("slow", 1e9)
    assert 1_001 == admission.expected_ms("fast")
    assert SERVICE_MS_FIRST == admission.service_ms("unknown")


def test_one_is_let_in_where_nothing_is_in_hand_or_nobody_would_learn_that_it_is_quick_again() -> None:
    admission = Admission(parallel=1, queue_max=100)
    admission.took("a", 60_000.0)
    admission.enter("a", 10)()
    with pytest.raises(Problem):
        admission.enter("a", 1e9) and admission.enter("a", 10)


class Machine:
    """Decisions of some 22 ms that share two cores, by a clock of its own: three at once do less than one alone."""

    def __init__(self, *, share: tuple[float, ...] = (1.0, 0.7, 0.3), seed: int = 34) -> None:
        self.now_s, self._share, self._random = 0.0, share, Random(seed)
        self.admission = Admission(parallel=len(share), queue_max=256, now_s=lambda: self.now_s)
        self._under_way = list[
            tuple[list[float], float, Callable[[], None]]
        ]()  # work left, in seconds; since when; leave
        self.took_ms, self.refused = list[float](), 0

    def run(self, per_s: float, seconds: float, left_ms: float) -> None:
        """Offer decisions at random moments for so long."""
        until_s, next_s = self.now_s + seconds, self.now_s
        while (next_s := next_s + self._random.expovariate(per_s)) < until_s:
            self._work(next_s)
            try:
                leave = self.admission.enter("a", left_ms)
            except Problem:
                self.refused += 1
            else:
                work_s = self._random.lognormvariate(-3.82, 0.12) + 0.02 * (self._random.random() < 0.02)
                self._under_way.append(([work_s], self.now_s, leave))

    def _work(self, until_s: float) -> None:
        while self.now_s < until_s:
            deciding = self._under_way[: len(self._share)]
            share = self._share[len(deciding) - 1]
            step_s = min([until_s - self.now_s, *(left[0] / share for left, _, _ in deciding)])
            self.now_s += step_s
            for each in deciding:
                each[0][0] -= share * step_s
                if each[0][0] <= 1e-9:
                    self._under_way.remove(each)
                    self.took_ms.append(1_000 * (self.now_s - each[1]))
                    self.admission.took("a", self.took_ms[-1])
                    each[2]()

    @property
    def p99_ms(self) -> float:
        return sorted(self.took_ms)[int(0.99 * len(self.took_ms))]


@pytest.mark.parametrize("seed", range(3))
def test_of_what_is_let_in_under_ten_times_the_load_99_in_100_end_in_their_time(seed: int) -> None:
    """And no fewer are decided than where there is room for two alone, less what it takes to see whether three would do."""
    machine = Machine(seed=seed)
    machine.run(250, 40, left_ms=88)
    assert machine.p99_ms <= 88
    assert len(machine.took_ms) >= 40 * 48


def test_where_cores_are_free_as_many_are_let_in_as_they_take() -> None:
    machine = Machine(share=(1.0, 1.0, 1.0))
    machine.run(500, 20, left_ms=88)
    assert machine.p99_ms <= 88
    assert len(machine.took_ms) >= 20 * 120


def test_a_calm_service_refuses_nothing_nor_does_one_with_time_enough() -> None:
    calm, burst = Machine(), Machine()
    calm.run(4, 60, left_ms=88)
    burst.run(1_000, 0.2, left_ms=30_000)
    assert (0, 0) == (calm.refused, burst.refused)


def test_as_many_as_were_too_many_are_tried_again_by_one() -> None:
    now_s = 0.0
    admission = Admission(parallel=2, queue_max=256, now_s=lambda: now_s)
    alone = admission.enter("a", 70)
    for took_ms in [20.0] * LOOKED_AT + [45.0] * 2:
        admission.took("a", took_ms)
    beside = admission.enter("a", 70)
    for took_ms in (90.0, 90.0):
        admission.took("a", took_ms)
    beside()
    refused = admission.refusal("a", 70)
    assert ("OVERLOADED", 0.02) == (refused and (refused.code, refused.retry_after_s))
    now_s += RECENT_S + 0.1
    for took_ms in (45.0, 45.0):
        admission.took("a", took_ms)
    beside = admission.enter("a", 70)  # this one tries
    beside()
    assert "OVERLOADED" == getattr(admission.refusal("a", 70), "code", None)
    admission.took("a", 65.0)
    assert admission.refusal("a", 70) is None
    alone()


def test_what_is_late_alone_as_well_is_not_refused_for_its_company() -> None:
    admission = Admission(parallel=2, queue_max=256, now_s=lambda: 0.0)
    leave = admission.enter("a", 70)
    for took_ms in [20.0] * LOOKED_AT + [90.0] * 2:
        admission.took("a", took_ms)
    admission.enter("a", 70)()
    leave()


def test_nor_is_there_room_for_any_company_where_a_few_are_late_alone() -> None:
    now_s = 0.0
    admission = Admission(parallel=2, queue_max=256, now_s=lambda: now_s)
    admission.enter("a", 100)
    for took_ms in [20.0] * LOOKED_AT + [110.0] * 3:
        admission.took("a", took_ms)
        now_s += took_ms / 1_000
    beside = admission.enter("a", 100)
    for took_ms in [110.0] * 3 + [20.0] * LOOKED_AT:
        admission.took("a", took_ms)
    beside()
    assert admission.refusal("a", 100) is None
    beside = admission.enter("a", 100)
    admission.took("a", 110.0)
    beside()
    assert "OVERLOADED" == getattr(admission.refusal("a", 100), "code", None)


def test_what_waits_for_others_is_late_for_them_also_where_only_one_is_decided_at_a_time() -> None:
    latencies = Latencies(parallel=1)
    for _ in range(100):
        latencies.add(1, 20.0, now_s=0.0)
    assert [True, True, False] == [latencies.in_time(1, 80.0, wait_ms, 0.0) for wait_ms in (0.0, 60.0, 61.0)]


@pytest.mark.timeout(60)
def test_a_service_that_is_full_says_503_at_once_writes_nothing_and_still_answers_what_it_knows(home: Path) -> None:
    engine = Held()
    with opened_bed(home, engine, queue_max=1) as bed, ThreadPoolExecutor(1) as pool:
        engine.let_go.set()
        known = bed.post({**EVENT, "trip_id": "known"})
        engine.let_go.clear()
        first = pool.submit(bed.post)
        assert engine.entered.acquire(timeout=10)
        assert engine.entered.acquire(timeout=10)
        refused = bed.post({**EVENT, "trip_id": "T-2"}, headers={"Idempotency-Key": "k"})
        assert check(refused, 503, "QUEUE_FULL")["retryable"]
        assert int(refused.headers["retry-after"]) >= 1
        assert not first.done()  # at once, not after it
        assert known.content == bed.post({**EVENT, "trip_id": "known"}).content
        assert 2 == bed.gate.store.value("SELECT count(*) FROM decision_flows")
        engine.let_go.set()
        assert 200 == first.result(10).status_code
        assert 200 == bed.post({**EVENT, "trip_id": "T-2"}, headers={"Idempotency-Key": "k"}).status_code


def test_a_service_that_drains_decides_nothing_new_and_says_so(bed: Bed) -> None:
    bed.service.stopping = bed.service.draining = True
    check(bed.post(), 503, "DRAINING")
    assert (503, "DRAINING") == ((asked := bed.client.get("/readyz")).status_code, asked.json()["checks"]["draining"])
    assert 200 == bed.client.get("/livez").status_code
    assert 0 == bed.gate.store.value("SELECT count(*) FROM decision_flows")


@pytest.mark.timeout(60)
def test_what_is_under_way_when_the_gates_close_is_answered_not_decided(home: Path) -> None:
    engine = Held()
    with opened_bed(home, engine) as bed, ThreadPoolExecutor(1) as pool:
        first = pool.submit(bed.post)
        assert engine.entered.acquire(timeout=10)
        bed.service.draining = True
        bed.gates.close(0.0)
        bed.service.gates_closed = True
        problem = check(first.result(10), 503, "DRAINING")
        assert problem["dfid"]
        assert problem["retryable"]
        check(bed.client.get("/v1/decisions"), 503, "DRAINING")
        engine.let_go.set()


def test_what_was_known_teaches_nothing_of_how_long_a_decision_takes(home: Path) -> None:
    with opened_bed(home, Slow(0.1)) as bed:
        assert 200 == bed.post().status_code
        assert {200} == {bed.post().status_code for _ in range(LOOKED_AT + 1)}
        assert bed.service.admission.service_ms("toll") >= 100
