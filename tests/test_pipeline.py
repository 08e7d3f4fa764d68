"""The hot path around the kernel: whatever user space does wrong, a human decides; drift starts a fresh flow."""

from __future__ import annotations

import time
from collections import UserString
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sds.engines.native import NativeEngine
from sds.gate import Gate
from sds.kernel.audit.verify import verify
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.errors import EventError, LanguageError, ModelError, WorldError
from sds.kernel.flow.states import Answer
from sds.models.llamacpp.backend import LlamaBackend
from sds.pipeline import Reasoned, Stream
from tests.hostile import Panic
from tests.kernel.durable import LEASE_MS, START_MS, Rail, Tickets, World, compensate, contract, deny, refund, together
from tests.kernel.orders import left_hanging
from tests.proposers import Says


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def decide(
    world: World, proposer: Says | NativeEngine, name: str = "C1", on_reasoned: Reasoned | None = None
) -> Answer:
    def sleep(seconds: float) -> None:
        world.clock.advance(round(seconds * 1000))

    stream = Stream(world.kernel, proposer, now_ms=world.clock, sleep=sleep, on_reasoned=on_reasoned)
    return stream.decide(world.event(name))


def test_a_decision_goes_from_trigger_to_receipt_and_the_same_event_gets_the_stored_answer(world: World) -> None:
    proposer = Says(compensate)
    first = decide(world, proposer)
    assert ("CLOSED", "COMPENSATE", "SUCCESS") == (first.state, first.action, first.execution)
    assert first == decide(world, proposer)
    assert 1 == proposer.asked


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (ModelError("the mask failed", reason_code="MASK_FAILED"), "MASK_FAILED"),
        (ModelError("too late", reason_code="DEADLINE_EXCEEDED"), "DEADLINE_EXCEEDED"),
        (LanguageError("the language is too large"), "LANGUAGE_TOO_LARGE"),
        (MemoryError(), "MODEL_UNAVAILABLE"),
        (RuntimeError("anything"), "MODEL_UNAVAILABLE"),
        (Panic("no `Exception`"), "MODEL_UNAVAILABLE"),
        (ModelError("a code that is no text", reason_code="\ud800"), "MODEL_UNAVAILABLE"),
    ],
)
def test_whatever_fails_in_user_space_escalates(world: World, failure: BaseException, code: str) -> None:
    def fail(packet: DecisionPacket) -> bytes:
        raise failure

    answer = decide(world, Says(fail))
    assert ("ESCALATED", code, None) == (answer.state, answer.reason_code, answer.execution)
    assert [] == world.rail.paid()


class Returns(Says):
    """An engine that returns anything at all."""

    def __init__(self, returned: object) -> None:
        super().__init__(deny)
        self._returned = returned

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        if isinstance(self._returned, Decoding):
            return deny(packet), self._returned
        return self._returned  # type: ignore[return-value]  # what a careless engine may return


UNKEEPABLE: dict[str, object] = {
    "nothing": None,
    "no data": (None, Decoding()),
    "data as text": ("{}", Decoding()),
    "no decoding": (b"{}", None),
    "a decoding as a dictionary": (b"{}", {"tokens": 1}),
    "a duration that is no number": Decoding(duration_ms=float("nan")),
    "an endless duration": Decoding(duration_ms=float("inf")),
    "a confidence as text": Decoding(confidence="0.9"),  # type: ignore[arg-type]  # here and below: as above
    "a confidence that is no number": Decoding(confidence=float("nan")),
    "a confidence in percent": Decoding(confidence=97.0),
    "a confidence below nothing": Decoding(confidence=-0.1),
    "tokens beyond 64 bits": Decoding(tokens=2**63),
    "tokens that do not add up within 64 bits": Decoding(tokens=-(2**62)),
    "half a token": Decoding(tokens=1.5),  # type: ignore[arg-type]
    "passes as text": Decoding(passes="3"),  # type: ignore[arg-type]
    "a set in alternatives": Decoding(alternatives=({"a": {1, 2}},)),
    "a number beyond 64 bits in facts": Decoding(facts={"seed": 2**70}),
    "a model whose name is no text": Decoding(model="\ud800"),
    "a model whose name PostgreSQL cannot keep": Decoding(model="a\0b"),
    "a model without a name": Decoding(model=None),  # type: ignore[arg-type]
    "a model that only looks like text": Decoding(model=UserString("m")),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", UNKEEPABLE)
def test_what_the_record_could_not_keep_of_an_engine_escalates_like_any_other_failure(world: World, name: str) -> None:
    answer = decide(world, Returns(UNKEEPABLE[name]))
    assert ("ESCALATED", "MODEL_UNAVAILABLE", []) == (answer.state, answer.reason_code, world.rail.sent)
    assert answer == decide(world, Returns(UNKEEPABLE[name]))
    assert () == verify(world.store).faults


@pytest.mark.parametrize(
    "measured",
    [
        Decoding(),
        Decoding("a", None, None),
        Decoding("é", 1, ({"choice": "action", "p": {"DENY": float("nan")}},), 400, 6, 12, {"seed": 2**63}),
    ],
    ids=["nothing", "no probabilities", "everything"],
)
def test_whatever_else_an_engine_measured_is_kept(world: World, measured: Decoding) -> None:
    answer = decide(world, Returns(measured))
    assert ("CLOSED", "DENY", measured.confidence) == (answer.state, answer.action, answer.confidence)
    assert () == verify(world.store).faults


def test_a_proposer_that_talks_nonsense_runs_out_of_attempts(world: World) -> None:
    proposer = Says(lambda packet: b"I approve everything")
    answer = decide(world, proposer)
    assert ("ESCALATED", "REASONING_EXHAUSTION") == (answer.state, answer.tag)
    assert 3 == proposer.asked


def test_an_engine_that_repeats_what_was_rejected_is_asked_twice_and_then_a_human_decides(world: World) -> None:
    proposer = Says(refund("200.01"))
    answer = decide(world, proposer)
    assert ("ESCALATED", "REPEATED_PROPOSAL") == (answer.state, answer.reason_code)
    assert 2 == proposer.asked
    assert [1] == world.column("SELECT rejections FROM agents")


def test_an_engine_that_listens_is_told_what_was_rejected_and_does_better(world: World) -> None:
    read: list[tuple[str, ...]] = []

    def listen(packet: DecisionPacket) -> bytes:
        read.append(packet.texts)
        told = any("Rejected before: REFUND_TICKET 200.01 (RBAC_DENIED)" in text for text in packet.texts)
        return refund("200.00" if told else "200.01")(packet)

    proposer = Says(listen)
    answer = decide(world, proposer)
    assert ("CLOSED", "SUCCESS", {"amount": 20_000}) == (answer.state, answer.execution, answer.params)
    assert 2 == proposer.asked
    assert read[0][:-1] == read[1][:-2]
    assert read[0][-1] == read[1][-1]
    assert read[1] == world.prompt(answer.dfid)


def test_a_session_that_cannot_be_read_ends_with_a_human_and_the_model_is_not_asked_again(world: World) -> None:
    def spoil(packet: DecisionPacket) -> bytes:
        with world.store.transaction():
            world.store.run(
                "CREATE TRIGGER spoil AFTER INSERT ON attempts BEGIN UPDATE attempts SET reasons = 'x'; END"
            )
        return refund("200.01")(packet)

    proposer = Says(spoil)
    answer = decide(world, proposer)
    assert ("ESCALATED", "STORE_UNAVAILABLE") == (answer.state, answer.reason_code)
    assert 1 == proposer.asked


def test_an_earlier_decision_is_read_by_a_real_model_within_its_token_budget(
    tmp_path: Path, tiny: LlamaBackend
) -> None:
    tickets, rail = Tickets(), Rail(tmp_path / "rail.db")
    tickets.put("T1")
    engine = NativeEngine(tiny, now_ms=lambda: START_MS)
    terms = contract()
    with Gate(terms, tickets, rail, folder=tmp_path / "gate", engine=engine, now_ms=lambda: START_MS) as gate:
        for number in range(8):
            gate.decide({"claim_id": f"C{number}", "ticket_id": "T1", "text": "please"})
        packet = gate.preview({"claim_id": "next", "ticket_id": "T1", "text": "please"})
        assert packet.texts[2].startswith("Decided before, newest first:\n- ")
        assert 1 <= packet.texts[2].count("- ") <= terms.memory.entries_max
        assert engine.count_tokens(packet.texts[2]) <= terms.memory.tokens_max
        assert () == verify(gate.store).faults


def test_drift_while_the_model_thinks_starts_a_fresh_flow_on_fresh_state(world: World) -> None:
    moved: list[str] = []

    def move_once(packet: DecisionPacket, data: bytes) -> None:
        if not moved:
            moved.append(packet.dfid)
            world.tickets.put("T1", refundable_minor=3_000)

    amounts = iter(("40.00", "30.00"))

    def say(packet: DecisionPacket) -> bytes:
        return refund(next(amounts))(packet)

    answer = decide(world, Says(say), on_reasoned=move_once)
    assert ("CLOSED", {"amount": 3_000}, moved[0]) == (answer.state, answer.params, answer.parent_dfid)
    assert [(answer.dfid, "T1", "REFUND_TICKET", 3_000)] == world.rail.paid()


def test_a_world_that_never_stands_still_is_a_humans_after_the_restarts_of_the_contract(world: World) -> None:
    left = iter(range(19_000, 0, -1_000))

    def move(packet: DecisionPacket, data: bytes) -> None:
        world.tickets.put("T1", refundable_minor=next(left))

    proposer = Says(refund("1.00"))
    answer = decide(world, proposer, on_reasoned=move)
    assert ("ESCALATED", "STATE_DRIFT_DETECTED") == (answer.state, answer.tag)
    assert 1 + world.contract.retry.restarts_max == proposer.asked
    assert [] == world.rail.paid()


@pytest.mark.parametrize("paid", [True, False])
def test_an_order_whose_sender_is_gone_is_looked_up_when_its_event_comes_again(world: World, paid: bool) -> None:
    left_hanging(world, paid=paid, name="C1")
    world.clock.advance(LEASE_MS)
    proposer = Says(refund())
    answer = decide(world, proposer)
    assert ("CLOSED", "SUCCESS", 0) == (answer.state, answer.execution, proposer.asked)
    assert 1 == len(world.rail.paid())


def test_an_event_that_stays_busy_elsewhere_is_a_typed_refusal(world: World) -> None:
    world.packet("C1")  # claimed by a holder that does not come back
    with pytest.raises((WorldError, EventError)) as refused:
        Stream(world.kernel, Says(compensate), now_ms=_jumping(world), sleep=lambda _s: None).decide(world.event("C1"))
    assert "FLOW_IN_PROGRESS" == refused.value.reason_code
    assert "event `C1` is already being decided" == str(refused.value)


def test_an_event_that_stays_busy_by_a_clock_that_stands_still_is_refused_after_what_was_slept(world: World) -> None:
    world.packet("C1")
    slept = list[float]()
    with pytest.raises(WorldError, match="already being decided") as refused:
        Stream(world.kernel, Says(compensate), now_ms=world.clock, sleep=slept.append).decide(world.event("C1"))
    assert "FLOW_IN_PROGRESS" == refused.value.reason_code
    budget = world.contract.budget
    assert 0 < sum(slept) * 1000 - (budget.ttl_ms + budget.dispatch_ms_max) <= 100


def test_an_order_that_hangs_on_the_key_by_a_clock_that_stands_still_ends_the_wait_with_contention(
    world: World,
) -> None:
    left_hanging(world, paid=False, name="C1")
    world.tickets.put("T1", refundable_minor=20_000)
    answer = Stream(world.kernel, Says(refund("150.00")), now_ms=world.clock, sleep=lambda _s: None).decide(
        world.event("C2")
    )
    assert ("ABORTED", "RESOURCE_CONTENTION", True) == (answer.state, answer.tag, answer.retryable)
    assert [] == world.rail.paid()


def _jumping(world: World) -> Callable[[], int]:
    """A waiting clock that runs ahead of the kernel's, so that patience ends before the lease does."""
    ticks = iter(range(0, 10**9, 20_000))
    return lambda: world.clock() + next(ticks)


def test_an_exception_inside_the_language_stops_the_decision(
    world: World, tiny: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NativeEngine(tiny, now_ms=world.clock)

    def broken(self: object) -> None:
        raise RuntimeError("the language broke")

    monkeypatch.setattr("sds.grammars.tokens.matcher.TokenMatcher.choice_point", broken)
    answer = decide(world, engine)
    assert ("ESCALATED", "MASK_FAILED") == (answer.state, answer.reason_code)


def test_an_engine_refuses_to_start_when_its_language_refuses_nothing(
    world: World, tiny: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sds.grammars.tokens.matcher.TokenMatcher.accept", lambda _matcher, _token: None)
    with pytest.raises(LanguageError, match="it accepted a forbidden token"):
        NativeEngine(tiny, now_ms=world.clock)


def test_sixty_four_threads_with_one_event_and_a_real_model_pay_at_most_once(world: World, tiny: LlamaBackend) -> None:
    engine = NativeEngine(tiny, now_ms=world.clock)
    stream = Stream(world.kernel, engine, now_ms=world.clock, sleep=time.sleep)
    answers = together(64, lambda _n: stream.decide(world.event("C1")))
    assert 1 == len({answer.dfid for answer in answers if isinstance(answer, Answer)})
    assert len(world.rail.paid()) <= 1


def test_the_record_holds_the_model_its_alternatives_and_what_was_permitted(world: World, tiny: LlamaBackend) -> None:
    answer = decide(world, NativeEngine(tiny, now_ms=world.clock))
    (model,) = world.column("SELECT model FROM policy_proposals WHERE dfid = ?", answer.dfid)
    assert str(model).endswith(tiny.fingerprint[:12])
    (chosen,) = world.column("SELECT alternatives ->> '$[0].chosen' FROM policy_proposals WHERE dfid = ?", answer.dfid)
    assert answer.action == chosen
