"""The rationale after the decision: it comes when all is done, nobody waits for it, and to lose it loses nothing else."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from sds.cli.records.record import audit
from sds.engines.native import NativeEngine
from sds.gate import Gate
from sds.grammars.tokens.text import TextTokens
from sds.host.paths import open_record
from sds.kernel.audit.verify import flow_record, verify
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.kernel.errors import ModelError, UsageError
from sds.kernel.flow.states import Answer, answer
from sds.kernel.registry import registry
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import Row
from sds.pipeline import Stream
from sds.rationale import QUEUE_MAX, Rationales, writer_of
from tests.embedding.elsewhere import is_held
from tests.engines.batches import until
from tests.kernel.durable import START_MS, Propose, Rail, Tickets, World, contract, deny, escalate, nonsense, refund
from tests.kernel.sagas import SAGAS, most
from tests.proposers import Says

CHARS_MAX = 40
RATIONALE = f"rationale: {{order: after, chars_max: {CHARS_MAX}}}\n"
TERMS = contract(("ttl_ms: 30000", "ttl_ms: 300000"), more=RATIONALE)  # more than a busy machine takes
TEXT = re.compile(rf"[ !#-\[\]-~]{{0,{CHARS_MAX}}}")
EVENT = {"claim_id": "C1", "ticket_id": "T1", "text": "please"}
PATIENCE_S = 60.0

Explain = Callable[[DecisionPacket, bytes], str]


class Explaining(Says):
    """An engine that says what it is told to say, before and after."""

    def __init__(self, say: Propose, explain: Explain, model: str = "test") -> None:
        super().__init__(say, Decoding(model, 0.9))
        self._explain = explain

    def explain(self, packet: DecisionPacket, data: bytes, *, chars_max: int, deadline_ms: int) -> str:
        assert chars_max == CHARS_MAX
        return self._explain(packet, data)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, terms=TERMS)
    yield made
    made.close()


def rationales(world: World, engine: Explaining) -> Rationales:
    return Rationales(
        world.kernel, engine, now_ms=world.clock, log=lambda event, facts: world.logged.append((event, facts))
    )


def decide(world: World, engine: Explaining, behind: Rationales, name: str = "C1") -> Answer:
    stream = Stream(world.kernel, engine, now_ms=world.clock, sleep=lambda _s: None, on_decided=behind.ask)
    return stream.decide(world.event(name))


def skipped(world: World) -> list[str]:
    return [facts["reason"] for event, facts in world.logged if event == "rationale.skipped"]  # type: ignore[index]  # a mapping


def entries(gate: Gate | World, dfid: str) -> list[tuple[Any, ...]]:
    return gate.store.rows("SELECT kind, body FROM ledger WHERE dfid = ? ORDER BY idx", (dfid,))


def test_a_real_model_says_why_after_it_has_decided(tmp_path: Path, tiny: LlamaBackend) -> None:
    tickets, rail = Tickets(), Rail(tmp_path / "rail.db")
    tickets.put("T1")
    engine = NativeEngine(tiny, now_ms=lambda: START_MS)

    def open_gate() -> Gate:
        return Gate(TERMS, tickets, rail, folder=tmp_path / "gate", engine=engine, now_ms=lambda: START_MS)

    with open_gate() as gate:
        first = gate.decide(EVENT)
    with open_gate() as gate:
        again = gate.decide(EVENT)
        kinds = [kind for kind, _ in entries(gate, first.dfid)]
        text = (flow_record(gate.store, first.dfid) or {})["rationale"]
        assert (kinds[-1], kinds.count("RATIONALE"), again.dfid) == ("RATIONALE", 1, first.dfid)
        assert TEXT.fullmatch(text)
        assert f"{first.justification}: {text}" == again.justification
        assert () == verify(gate.store).faults


def test_the_order_is_executed_and_settled_before_the_rationale_exists(
    tmp_path: Path, world: World, tiny: LlamaBackend
) -> None:
    writer, paid = writer_of(NativeEngine(tiny, now_ms=world.clock)), list[int]()

    def explain(packet: DecisionPacket, data: bytes) -> str:
        paid.append(len(world.rail.paid()))
        return writer.explain(packet, data, chars_max=CHARS_MAX, deadline_ms=packet.expires_at_ms)

    engine = Explaining(refund(), explain)
    behind = rationales(world, engine)
    decided = decide(world, engine, behind)
    behind.close(PATIENCE_S)
    assert ([1], "SUCCESS") == (paid, decided.execution)
    assert ["RESERVED", "DECIDED", "SETTLED", "RATIONALE"] == [kind for kind, _ in entries(world, decided.dfid)]
    assert [] == skipped(world)
    assert () == verify(world.store).faults


def test_nobody_waits_for_an_engine_that_hangs_and_what_it_says_too_late_is_dropped(world: World) -> None:
    hangs, entered, ended = threading.Event(), threading.Event(), threading.Event()

    def hang(packet: DecisionPacket, data: bytes) -> str:
        entered.set()
        hangs.wait(PATIENCE_S)
        ended.set()
        return "too late"

    engine = Explaining(refund("1.00"), hang)
    behind = rationales(world, engine)
    first = decide(world, engine, behind)
    assert entered.wait(PATIENCE_S)
    second = decide(world, engine, behind, "C2")
    assert ["SUCCESS", "SUCCESS"] == [first.execution, second.execution]
    behind.close(0.01)
    assert ["CLOSED"] == skipped(world)
    hangs.set()
    assert ended.wait(PATIENCE_S)
    behind.close(PATIENCE_S)
    assert ["CLOSED", "CLOSED"] == skipped(world)
    assert [] == world.column("SELECT 1 FROM ledger WHERE kind = 'RATIONALE'")
    assert () == verify(world.store).faults


def test_what_does_not_fit_into_the_queue_is_skipped_and_the_rest_is_written_in_order(world: World) -> None:
    hangs, entered, told = threading.Event(), threading.Event(), list[str]()

    def wait(packet: DecisionPacket, data: bytes) -> str:
        entered.set()
        hangs.wait(PATIENCE_S)
        told.append(packet.dfid)
        return "x"

    engine = Explaining(deny, wait)
    behind = rationales(world, engine)
    first = decide(world, engine, behind)
    assert entered.wait(PATIENCE_S)
    rest = [decide(world, engine, behind, f"D{number}").dfid for number in range(QUEUE_MAX + 2)]
    assert ["QUEUE_FULL"] * 2 == skipped(world)
    hangs.set()
    behind.close(PATIENCE_S)
    assert [first.dfid, *rest[:QUEUE_MAX]] == told
    assert told == world.column("SELECT dfid FROM ledger WHERE kind = 'RATIONALE' ORDER BY idx")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (ModelError("no time", reason_code="DEADLINE_EXCEEDED"), "DEADLINE_EXCEEDED"),
        (RuntimeError("anything"), "RuntimeError"),
        ("x" * (CHARS_MAX + 1), "RATIONALE_REFUSED"),
        ('say "x"', "RATIONALE_REFUSED"),
        (None, "TypeError"),
    ],
)
def test_a_rationale_that_fails_is_logged_and_the_decision_and_the_next_one_stand(
    world: World, said: object, why: str
) -> None:
    answers: Iterator[object] = iter((said, "fine"))

    def explain(packet: DecisionPacket, data: bytes) -> str:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[return-value]  # an engine may return anything

    engine = Explaining(refund("1.00"), explain)
    behind = rationales(world, engine)
    first, second = decide(world, engine, behind), decide(world, engine, behind, "C2")
    behind.close(PATIENCE_S)
    assert [why] == skipped(world)
    assert first == answer(world.store, first.dfid)
    assert "NOT_TRAVELLED: fine" == getattr(answer(world.store, second.dfid), "justification", None)
    assert () == verify(world.store).faults


@pytest.mark.parametrize(
    ("say", "model", "asked"),
    [(deny, "test", 1), (escalate, "test", 1), (escalate, "not asked", 0), (nonsense, "test", 0)],
    ids=["denied", "escalated", "nothing was left to decide", "refused"],
)
def test_only_what_a_model_decided_is_explained(world: World, say: Propose, model: str, asked: int) -> None:
    told: list[str] = []

    def explain(packet: DecisionPacket, data: bytes) -> str:
        told.append(packet.dfid)
        return ""

    engine = Explaining(say, explain, model)
    behind = rationales(world, engine)
    decide(world, engine, behind)
    behind.close(PATIENCE_S)
    assert asked == len(told)


def test_a_stored_answer_is_not_explained_again(world: World) -> None:
    engine = Explaining(deny, lambda packet, data: "once")
    behind = rationales(world, engine)
    for _ in range(2):
        decide(world, engine, behind)
    behind.close(PATIENCE_S)
    assert (1, []) == (len(world.column("SELECT 1 FROM ledger WHERE kind = 'RATIONALE'")), skipped(world))


def test_each_step_of_a_saga_is_explained_as_a_decision_of_its_own(tmp_path: Path) -> None:
    tickets, rail = Tickets(), Rail(tmp_path / "rail.db")
    tickets.put("T1")
    engine = Explaining(most, lambda packet, data: "because")
    with Gate(
        contract(more=SAGAS + RATIONALE),
        tickets,
        rail,
        folder=tmp_path / "gate",
        engine=engine,
        now_ms=lambda: START_MS,
    ) as gate:
        assert "CLOSED" == gate.decide_saga("BOTH", EVENT).answer.state
    with closing(open_record(tmp_path / "gate")) as store:
        explained = store.rows("SELECT dfid FROM ledger WHERE kind = 'RATIONALE' ORDER BY dfid")
        assert explained == store.rows("SELECT dfid FROM execution_log ORDER BY dfid")
        assert (2, ()) == (len(explained), verify(store).faults)


@pytest.mark.parametrize(
    ("order", "words"),
    [("before", "before the decision: she never flew"), ("after", "after the decision: she never flew")],
)
def test_the_record_of_a_decision_shows_the_rationale_whichever_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], order: str, words: str
) -> None:
    tickets, text = Tickets(), "she never flew"
    tickets.put("T1")

    def say(packet: DecisionPacket) -> bytes:
        own = text if packet.envelope.rationale_chars_max else None
        return write_proposal(Proposal("DENY", (), "NOT_ELIGIBLE", packet.snapshot.id, own))

    engine, terms = Explaining(say, lambda packet, data: text), contract(more=RATIONALE.replace("after", order))
    with Gate(
        terms, tickets, Rail(tmp_path / "r.db"), folder=tmp_path / "gate", engine=engine, now_ms=lambda: START_MS
    ) as gate:
        dfid = gate.decide(EVENT).dfid
    with closing(open_record(tmp_path / "gate")) as store:
        assert f"NOT_ELIGIBLE: {text}" == getattr(answer(store, dfid), "justification", None)
    monkeypatch.setenv("SDS_HOME", str(tmp_path))
    audit(dfid, "gate")
    assert f"rationale\n  {words}\n" in capsys.readouterr().out


def test_an_engine_that_cannot_explain_is_refused_before_anything_is_registered(tmp_path: Path) -> None:
    def open_gate(terms: Any) -> Gate:
        return Gate(
            terms, Tickets(), Rail(tmp_path / "rail.db"), folder=tmp_path / "gate", engine=Says(deny, Decoding("mute"))
        )

    with pytest.raises(UsageError, match="the engine `mute` cannot write a rationale after the decision") as refused:
        open_gate(TERMS)
    assert refused.value.hint
    with open_gate(contract()) as gate:
        known = registry.lookup(gate.store, TERMS.agent_id)
        assert known is not None
        assert contract().hash == known.contract_hash


class Watched:
    """A real backend that says of every pass how many decisions and rationales run and wait."""

    def __init__(self, backend: LlamaBackend) -> None:
        self._backend = backend
        self.on_pass: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def run(self, rows: list[Row]) -> Any:
        self.on_pass()
        return self._backend.run(rows)


@pytest.fixture
def watched(world: World, embedded: LlamaBackend) -> Iterator[tuple[Watched, NativeEngine]]:
    backend = Watched(embedded)
    yield backend, (engine := NativeEngine(backend, now_ms=world.clock))  # type: ignore[arg-type]  # a backend, and more
    engine._scheduler._stop(ModelError("the test is over"))  # the backend is of all tests, so it is not closed ...
    engine._scheduler._worker.join()  # ... and the pass under way must be over before the next test has one


def test_a_decision_has_the_next_pass_of_the_model_however_long_a_rationale_is(
    world: World, watched: tuple[Watched, NativeEngine]
) -> None:
    backend, engine = watched
    packet, packets = world.packet("C1"), [world.packet(f"D{number}") for number in range(3)]
    background, decided = list[bool](), list[Future[tuple[bytes, Decoding]]]()

    def come_in_between() -> None:
        background.append(engine._scheduler._running[0].request.background)
        if background[-1] and len(decided) < len(packets) and all(one.done() for one in decided):
            decided.append(pool.submit(engine.propose, packets[len(decided)], tokens_max=4000))
            until(lambda: bool(engine._scheduler._waiting))

    with ThreadPoolExecutor(1) as pool:
        backend.on_pass = come_in_between
        text = writer_of(engine).explain(packet, deny(packet), chars_max=300, deadline_ms=packet.expires_at_ms)
    backend.on_pass = lambda: None
    found = [one.result() for one in decided]
    assert re.fullmatch(r"[ !#-\[\]-~]{0,300}", text)
    own = [len(list(passes)) for rationale, passes in groupby(background) if not rationale]
    assert [measured.passes for _, measured in found] == own, (
        "a decision waits for the pass under way, and for no other"
    )
    assert [engine.propose(each, tokens_max=4000)[0] for each in packets] == [data for data, _ in found]


def test_a_rationale_asks_the_tokenizer_when_nobody_else_does(
    world: World, watched: tuple[Watched, NativeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = watched
    packet, held, read = world.packet(), list[bool](), TextTokens.read

    def looked(text: TextTokens, token: int) -> tuple[str, bool]:
        held.append(is_held(engine._scheduler._tokenizer))
        return read(text, token)

    monkeypatch.setattr(TextTokens, "read", looked)
    writer_of(engine).explain(packet, deny(packet), chars_max=CHARS_MAX, deadline_ms=packet.expires_at_ms)
    assert {True} == set(held)


def test_a_rationale_past_its_deadline_or_of_a_closed_engine_is_given_up(
    world: World, watched: tuple[Watched, NativeEngine]
) -> None:
    backend, engine = watched
    packet, passes = world.packet(), list[int]()

    def explain() -> str:
        return writer_of(engine).explain(packet, deny(packet), chars_max=300, deadline_ms=packet.expires_at_ms)

    def late() -> None:
        passes.append(1)
        world.clock.advance(200_000)

    backend.on_pass = late
    with pytest.raises(ModelError) as skipped:
        explain()
    assert ("DEADLINE_EXCEEDED", 2) == (skipped.value.reason_code, len(passes))
    world.clock.now_ms = START_MS
    backend.on_pass = lambda: engine._scheduler._stop(ModelError("the engine is closed"))
    with pytest.raises(ModelError, match="the engine is closed"):
        explain()
