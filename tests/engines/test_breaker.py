"""The circuit breaker of an engine: an outage hands three cases to humans, and every later event waits for a probe."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from sds.engines.breaker import FAILURES_MAX, PROBE_MS, PROBES_MAX, Breaker, EngineDownError
from sds.engines.queueing import QueueTimeoutError
from sds.kernel.decision.packet import NOT_ASKED, DecisionPacket, Decoding
from sds.kernel.errors import LanguageError, ModelError, SdsError
from sds.kernel.flow.states import Answer
from sds.pipeline import Stream
from tests.engines.scripted import Scripted, answered, chain, still
from tests.hostile import Panic
from tests.kernel.durable import World, deny

__all__ = ["still"]

GONE = ModelError("the server does not answer")


@pytest.fixture
def engine() -> Scripted:
    return Scripted("e")


@pytest.fixture
def logged() -> list[tuple[str, Mapping[str, object]]]:
    return []


@pytest.fixture
def breaker(still: World, logged: list[tuple[str, Mapping[str, object]]]) -> Breaker:
    budget = still.contract.budget
    return Breaker(whole_ms=budget.ttl_ms, now_ms=still.clock, log=lambda event, facts: logged.append((event, facts)))


def ask(breaker: Breaker, engine: Scripted, packet: DecisionPacket) -> str:
    """Return `ok`, `down`, or the class of what the engine raised."""
    try:
        breaker.ask(engine, packet, tokens_max=100)
    except EngineDownError:
        return "down"
    except BaseException as error:  # noqa: BLE001  an engine may raise anything
        return type(error).__name__
    return "ok"


@pytest.mark.parametrize("failure", [GONE, ModelError("late", reason_code="DEADLINE_EXCEEDED"), OSError(), Panic()])
def test_an_engine_that_fails_a_few_times_in_a_row_is_down_until_a_probe_is_answered(
    still: World, breaker: Breaker, engine: Scripted, logged: list[tuple[str, object]], failure: BaseException
) -> None:
    packet, engine.failure = still.packet(), failure
    raised = type(failure).__name__
    assert [raised] * FAILURES_MAX == [ask(breaker, engine, packet) for _ in range(FAILURES_MAX)]
    assert (True, PROBE_MS) == (breaker.is_open, breaker.wait_ms)
    assert ("down", FAILURES_MAX) == (ask(breaker, engine, packet), engine.asked)
    still.clock.advance(PROBE_MS - 1)
    assert ("down", FAILURES_MAX, 1) == (ask(breaker, engine, packet), engine.asked, breaker.wait_ms)
    still.clock.advance(1)
    assert 0 == breaker.wait_ms
    assert ("down", FAILURES_MAX + 1) == (ask(breaker, engine, packet), engine.asked)  # the probe failed, too
    assert PROBE_MS == breaker.wait_ms
    still.clock.advance(PROBE_MS)
    engine.failure = None
    assert (["ok", "ok"], False) == ([ask(breaker, engine, packet) for _ in "ab"], breaker.is_open)
    assert ["engine.down", "engine.up"] == [event for event, _ in logged]


def went_down(still: World, breaker: Breaker, engine: Scripted) -> DecisionPacket:
    """Let the engine fail until the breaker opens; return the packet it was asked with."""
    packet, engine.failure = still.packet(), GONE
    for _ in range(FAILURES_MAX):
        ask(breaker, engine, packet)
    return packet


def test_an_answer_in_between_starts_the_count_anew(still: World, breaker: Breaker, engine: Scripted) -> None:
    packet = still.packet()
    for _ in range(5):
        for engine.failure in (GONE, GONE, None):
            ask(breaker, engine, packet)
    assert (15, False) == (engine.asked, breaker.is_open)


@pytest.mark.parametrize(
    "failure",
    [
        LanguageError("too large"),
        ModelError("too long", reason_code="TOKEN_BUDGET_EXCEEDED"),
        ModelError("too close", reason_code="CHOICE_TOO_CLOSE"),
        ModelError("the policy", reason_code="POLICY_FAILED"),
        ModelError("cancelled", reason_code="CANCELLED"),
        QueueTimeoutError("nothing was free"),
        KeyboardInterrupt(),
    ],
)
def test_what_is_a_fault_of_the_packet_or_of_the_load_is_no_failure_of_the_engine(
    still: World, breaker: Breaker, engine: Scripted, failure: BaseException
) -> None:
    packet = still.packet()
    engine.failure = GONE
    assert ["ModelError"] * 2 == [ask(breaker, engine, packet) for _ in "ab"]
    engine.failure = failure
    assert type(failure).__name__ == ask(breaker, engine, packet)
    assert not breaker.is_open
    engine.failure = GONE  # nor does it count as an answer
    assert ("ModelError", True) == (ask(breaker, engine, packet), breaker.is_open)


def test_a_caller_in_a_hurry_says_nothing_about_the_engine(still: World, breaker: Breaker, engine: Scripted) -> None:
    opened = still.kernel.open(still.event(), deadline_ms=still.clock() + 10)
    assert isinstance(opened, DecisionPacket)
    engine.failure = ModelError("late", reason_code="DEADLINE_EXCEEDED")
    assert ["ModelError"] * 5 == [ask(breaker, engine, opened) for _ in range(5)]
    assert not breaker.is_open


def test_a_packet_that_asks_no_model_is_no_probe(still: World, breaker: Breaker, engine: Scripted) -> None:
    packet = went_down(still, breaker, engine)
    still.clock.advance(PROBE_MS)

    class Certain(Scripted):
        def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
            return deny(packet), Decoding(NOT_ASKED)

    assert ("ok", True, 0) == (ask(breaker, Certain("c"), packet), breaker.is_open, breaker.wait_ms)


def test_what_the_record_could_not_keep_is_a_failure(still: World, breaker: Breaker) -> None:
    class Nonsense(Scripted):
        def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
            return "text", Decoding()  # type: ignore[return-value]  # what a careless engine may return

    packet, engine = still.packet(), Nonsense("n")
    assert ["ModelError"] * FAILURES_MAX + ["down"] == [ask(breaker, engine, packet) for _ in range(FAILURES_MAX + 1)]


class Slow(Scripted):
    """Holds each packet until it is let go."""

    def __init__(self, model: str = "slow") -> None:
        super().__init__(model)
        self.entered, self.go = threading.Event(), threading.Event()

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        self.entered.set()
        assert self.go.wait(10)
        return super().propose(packet, tokens_max=tokens_max)


def hung(breaker: Breaker, packet: DecisionPacket) -> tuple[Slow, threading.Thread]:
    """Send a packet to an engine that holds it, in a thread of its own."""
    slow = Slow()
    thread = threading.Thread(target=ask, args=(breaker, slow, packet))
    thread.start()
    assert slow.entered.wait(10)
    return slow, thread


def test_one_probe_at_a_time_and_an_old_answer_closes_nothing(still: World, breaker: Breaker) -> None:
    packet, failing = still.packet(), Scripted("f")
    failing.failure = GONE
    old, with_old = hung(breaker, packet)
    for _ in range(FAILURES_MAX):
        ask(breaker, failing, packet)
    old.go.set()
    with_old.join()
    assert breaker.is_open
    still.clock.advance(PROBE_MS)
    probe, with_probe = hung(breaker, packet)
    still.clock.advance(still.contract.budget.ttl_ms)
    assert ("down", FAILURES_MAX, PROBE_MS) == (ask(breaker, failing, packet), failing.asked, breaker.wait_ms)
    probe.go.set()
    with_probe.join()
    assert not breaker.is_open


def test_after_a_probe_that_hangs_another_is_sent_and_closes_the_breaker(
    still: World, breaker: Breaker, engine: Scripted
) -> None:
    packet = went_down(still, breaker, engine)
    still.clock.advance(PROBE_MS)
    probe, with_probe = hung(breaker, packet)
    still.clock.advance(still.contract.budget.ttl_ms + PROBE_MS - 1)
    assert ("down", 1) == (ask(breaker, engine, packet), breaker.wait_ms)
    still.clock.advance(1)
    engine.failure = None
    assert (["ok", "ok"], False) == ([ask(breaker, engine, packet) for _ in "ab"], breaker.is_open)
    probe.go.set()
    with_probe.join()
    assert not breaker.is_open


def test_an_engine_that_never_answers_holds_a_few_threads_and_then_gets_no_probe_until_one_ends(
    still: World, breaker: Breaker, engine: Scripted
) -> None:
    packet = went_down(still, breaker, engine)
    still.clock.advance(PROBE_MS)
    probes = []
    for _ in range(PROBES_MAX):
        assert 0 == breaker.wait_ms
        probes.append(hung(breaker, packet))
        still.clock.advance(still.contract.budget.ttl_ms + PROBE_MS)
    engine.failure = None
    still.clock.advance(100 * PROBE_MS)
    assert ("down", PROBE_MS, FAILURES_MAX) == (ask(breaker, engine, packet), breaker.wait_ms, engine.asked)
    for probe, with_probe in probes:  # the first answer closes it
        probe.go.set()
        with_probe.join()
        assert not breaker.is_open
    assert "ok" == ask(breaker, engine, packet)


def test_a_reason_code_that_is_no_text_is_a_failure_and_ends_its_probe(
    still: World, breaker: Breaker, engine: Scripted, logged: list[tuple[str, Mapping[str, object]]]
) -> None:
    packet, odd = still.packet(), ModelError("odd")
    odd.reason_code = ["NOT", "TEXT"]  # type: ignore[assignment]  # what a careless engine may raise
    engine.failure = odd
    assert ["ModelError"] * FAILURES_MAX == [ask(breaker, engine, packet) for _ in range(FAILURES_MAX)]
    assert ["MODEL_UNAVAILABLE"] == [facts["reason"] for _, facts in logged]
    for _ in "ab":
        still.clock.advance(PROBE_MS)
        assert "down" == ask(breaker, engine, packet)
    assert FAILURES_MAX + 2 == engine.asked


def test_a_clock_that_is_set_back_delays_the_probe_no_longer_than_usual(
    still: World, breaker: Breaker, engine: Scripted
) -> None:
    packet = went_down(still, breaker, engine)
    still.clock.advance(-60_000)
    engine.failure = None
    assert ("ok", False) == (ask(breaker, engine, packet), breaker.is_open)


def test_an_outage_hands_three_cases_to_humans_and_every_other_event_waits_uncharged(
    still: World, breaker: Breaker, engine: Scripted
) -> None:
    for number in range(20):
        still.tickets.put(f"T{number}")
    stream = Stream(still.kernel, engine, now_ms=still.clock, sleep=lambda _: None, breaker=breaker)

    def decide(number: int) -> Answer:
        return stream.decide(still.event(f"C{number}", f"T{number}"))

    engine.failure = GONE
    answers = [decide(number) for number in range(20)]
    assert ["ESCALATED"] * FAILURES_MAX == [each.state for each in answers[:FAILURES_MAX]]
    waits = {(each.state, each.tag, each.reason_code, each.retryable) for each in answers[FAILURES_MAX:]}
    assert {("ABORTED", "NOT_DECIDED", "MODEL_UNAVAILABLE", True)} == waits
    still.clock.advance(PROBE_MS)
    assert ("ABORTED", "NOT_DECIDED") == ((probe := decide(7)).state, probe.tag)
    assert FAILURES_MAX == int(still.store.value("SELECT count(*) FROM decision_flows WHERE state = 'ESCALATED'"))
    engine.failure = None
    still.clock.advance(PROBE_MS)
    assert ["DENY"] * 17 == [decide(number).action for number in range(FAILURES_MAX, 20)]
    assert [each.state for each in answers[:FAILURES_MAX]] == [decide(number).state for number in range(FAILURES_MAX)]


def test_why_a_packet_was_refused_says_that_the_model_is_down(still: World, breaker: Breaker, engine: Scripted) -> None:
    packet, engine.failure = still.packet(), GONE
    for _ in range(FAILURES_MAX):
        ask(breaker, engine, packet)
    with pytest.raises(SdsError, match="the model is down: its last 3 proposals failed") as refused:
        breaker.ask(engine, packet, tokens_max=100)
    assert ("MODEL_UNAVAILABLE", True) == (refused.value.reason_code, refused.value.retryable)
    still.clock.advance(PROBE_MS)
    with pytest.raises(SdsError, match="the model is down: the server does not answer"):
        breaker.ask(engine, packet, tokens_max=100)


def test_a_probe_that_hangs_leaves_no_engine_of_a_chain_for_ever(still: World) -> None:
    first, last = Slow("first"), Scripted("last")
    first.go.set()
    engine, _ = chain(still, first, last)
    packet, first.failure = still.packet(), ModelError("gone")
    assert "last" == answered(engine, packet)
    still.clock.advance(1_000)
    first.go.clear()
    first.entered.clear()
    first.failure = None
    probe = threading.Thread(target=answered, args=(engine, packet))
    probe.start()
    assert first.entered.wait(10)
    still.clock.advance(8_000 + PROBE_MS - 1)
    fresh = still.kernel.preview(still.event("C9"))
    assert "last" == answered(engine, fresh)
    still.clock.advance(1)
    held, first.go = first.go, threading.Event()
    first.go.set()
    assert ["first", "first"] == [answered(engine, fresh) for _ in "ab"]
    held.set()
    probe.join()


def test_a_reason_code_that_is_no_text_ends_the_probe_of_an_engine_of_a_chain(still: World) -> None:
    first, last = Scripted("first"), Scripted("last")
    engine, logged = chain(still, first, last)
    packet, odd = still.packet(), ModelError("odd")
    odd.reason_code = ["NOT", "TEXT"]  # type: ignore[assignment]  # what a careless engine may raise
    first.failure = odd
    assert "last" == answered(engine, packet)
    still.clock.advance(1_000)
    assert ("last", 2) == (answered(engine, packet), first.asked)
    still.clock.advance(2_000)
    assert ("last", 3) == (answered(engine, packet), first.asked)
    assert {"MODEL_UNAVAILABLE"} == {facts["reason"] for _, facts in logged}  # type: ignore[index]  # facts
