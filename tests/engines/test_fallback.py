"""A chain of engines: whoever is well answers, and a dead first choice costs its own time, not the decision."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sds.engines.fallback import COOL_DOWN_MS_MAX, LINKS_MAX, FallbackEngine, Link
from sds.engines.native import NativeEngine
from sds.engines.protocol import Engine
from sds.engines.text import TextEngine
from sds.gate import Gate
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.errors import LanguageError, ModelError, UsageError
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import Row
from sds.models.text.servers import RemoteWriter
from tests.engines.conftest import decide, running_ms
from tests.engines.scripted import Scripted, answered, chain, opens, still
from tests.engines.servers import HANG_S, LlamaServer, completion, free_port, hang, misbehaving, reply
from tests.hostile import Panic
from tests.kernel.durable import Rail, Tickets, World, contract

__all__ = ["still"]

NONCE = "5eed" * 16
TTL_MS = 1_200
GRACE_MS = 2_000  # one pass is never cut short; and a busy machine


def test_the_first_engine_answers_while_it_is_well(still: World) -> None:
    first, last = Scripted("first"), Scripted("last")
    engine, logged = chain(still, first, last)
    packet = still.packet()
    assert ["first"] * 3 == [answered(engine, packet) for _ in range(3)]
    assert (0, []) == (last.asked, logged)


@pytest.mark.parametrize(
    "failure", [ModelError("gone", reason_code="BACKEND_FAILED"), RuntimeError("bug"), Panic("no `Exception`")]
)
def test_a_failing_engine_rests_for_its_cool_down_then_is_probed_and_comes_back(
    still: World, failure: BaseException
) -> None:
    first, last = Scripted("first"), Scripted("last")
    engine, logged = chain(still, first, last)
    packet = still.packet()
    first.failure = failure
    assert ["last", "last"] == [answered(engine, packet), answered(engine, packet)]
    assert 1 == first.asked
    still.clock.advance(1_000)
    assert "last" == answered(engine, packet)
    assert 2 == first.asked
    still.clock.advance(1_999)
    assert ("last", 2) == (answered(engine, packet), first.asked)
    first.failure = None
    still.clock.advance(1)
    assert ("first", 3) == (answered(engine, packet), first.asked)
    down = [facts["cool_down_ms"] for event, facts in logged if event == "engine.down"]  # type: ignore[index]  # facts
    assert ([1_000, 2_000], ("engine.up", {"dfid": packet.dfid, "engine": "first"})) == (down, logged[-1])


def test_a_clock_that_steps_back_during_a_probe_does_not_leave_the_engine_for_ever(still: World) -> None:
    first, last = Scripted("first", still.clock), Scripted("last")
    engine, _ = chain(still, first, last)
    packet = still.packet()
    first.failure = ModelError("gone")
    assert "last" == answered(engine, packet)
    still.clock.advance(1_000)
    first.takes_ms = -5
    assert ("last", 2) == (answered(engine, packet), first.asked)
    first.failure, first.takes_ms = None, 0
    assert ("last", 2) == (answered(engine, packet), first.asked)
    still.clock.advance(5)
    assert ("first", 3) == (answered(engine, packet), first.asked)


def test_a_clock_set_back_to_before_an_engine_went_down_does_not_keep_it_down(still: World) -> None:
    first, last = Scripted("first"), Scripted("last")
    engine, _ = chain(still, first, last)
    packet = still.packet()
    first.failure = ModelError("gone")
    assert "last" == answered(engine, packet)
    first.failure = None
    still.clock.advance(-3_600_000)
    assert ("first", 2) == (answered(engine, packet), first.asked)


def test_the_cool_down_has_a_limit(still: World) -> None:
    first, last = Scripted("first"), Scripted("last")
    engine, logged = chain(still, first, last)
    first.failure = ModelError("gone")
    packet = still.packet()
    for _ in range(40):
        answered(engine, packet)
        still.clock.advance(COOL_DOWN_MS_MAX)
        packet = still.kernel.preview(still.event("C9"))
    assert COOL_DOWN_MS_MAX == max(facts["cool_down_ms"] for _, facts in logged)  # type: ignore[index]  # facts


def test_when_all_are_down_a_human_decides(still: World) -> None:
    first, last = Scripted("first"), Scripted("last")
    engine, _ = chain(still, first, last)
    first.failure = last.failure = ModelError("gone", reason_code="BACKEND_FAILED")
    assert "BACKEND_FAILED" == decide(still, engine, "C1").reason_code
    answer = decide(still, engine, "C2")
    assert ("ESCALATED", "MODEL_UNAVAILABLE") == (answer.state, answer.reason_code)
    assert (1, 1) == (first.asked, last.asked)


def test_each_engine_gets_its_own_time_less_what_the_next_ones_need(still: World) -> None:
    first, last = Scripted("first", still.clock), Scripted("last", still.clock)
    packet = still.packet()
    began, expires = still.clock(), packet.expires_at_ms
    assert 30_000 == expires - began
    engine, _ = chain(still, first, last, timeout_ms=8_000)
    first.failure, first.takes_ms = ModelError("late"), 8_000
    assert "last" == answered(engine, packet)
    assert [began + 8_000] == first.deadlines
    assert [expires] == last.deadlines
    greedy, _ = chain(still, Scripted("first"), last, timeout_ms=20_000)
    assert "first" == answered(greedy, packet)
    assert expires - 20_000 == greedy._links[0].engine.deadlines[0]  # type: ignore[union-attr]  # scripted


def test_an_engine_for_which_no_time_is_left_is_passed_over_and_stays_well(still: World) -> None:
    first, last = Scripted("first"), Scripted("last")
    engine, logged = chain(still, first, last, timeout_ms=40_000)
    assert "last" == answered(engine, still.packet())
    assert (0, []) == (first.asked, logged)


@pytest.mark.parametrize(
    "failure", [ModelError("tokens", reason_code="TOKEN_BUDGET_EXCEEDED"), LanguageError("too large")]
)
def test_what_is_wrong_with_the_packet_is_not_held_against_the_engine(still: World, failure: Exception) -> None:
    first, last = Scripted("first"), Scripted("last")
    engine, logged = chain(still, first, last)
    first.failure = failure
    packet = still.packet()
    assert ["last", "last"] == [answered(engine, packet), answered(engine, packet)]
    assert (2, []) == (first.asked, logged)


def test_a_chain_counts_tokens_with_the_engines_that_can(still: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = Scripted("first"), Scripted("last")
    engine, _ = chain(still, first, last)

    def fails(_: str) -> int:
        raise ModelError("closed")

    monkeypatch.setattr(first, "count_tokens", fails)
    assert 3 == engine.count_tokens("abc")
    monkeypatch.setattr(last, "count_tokens", fails)
    with pytest.raises(ModelError, match="closed"):
        engine.count_tokens("abc")


def test_an_interrupted_probe_is_no_probe(still: World) -> None:
    """Whoever interrupts a program in which an engine is embedded may go on with it."""
    first, last = Scripted("first"), Scripted("last")
    engine, logged = chain(still, first, last)
    packet = still.packet()
    first.failure = ModelError("gone")
    assert "last" == answered(engine, packet)
    still.clock.advance(1_000)
    first.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        answered(engine, packet)
    first.failure = None
    assert ("first", ["engine.down", "engine.up"]) == (answered(engine, packet), [event for event, _ in logged])


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (ModelError("nobody is there"), "nobody is there"),
        (OSError("no"), "first: the engine failed: OSError"),
        (Panic("no"), "first: the engine failed: Panic"),
    ],
)
def test_a_chain_opens_while_only_its_last_engine_does_and_says_so(
    still: World, failure: BaseException, why: str
) -> None:
    last = Scripted("last")
    up = False

    def open_first() -> Engine:
        if not up:
            raise failure
        return Scripted("first")

    links = [Link("first", open_first, 8_000, 1_000), Link("last", opens(last), 8_000, 1_000)]
    engine = FallbackEngine(links, now_ms=still.clock)
    assert (f"engine `first` is down, so the next one is used: {why}",) == engine.notices
    assert "first (down) > last" == engine.model
    packet = still.packet()
    assert "last" == answered(engine, packet)
    up = True
    still.clock.advance(1_000)
    assert ("first", "first > last") == (answered(engine, packet), engine.model)


def test_a_chain_whose_last_engine_does_not_open_closes_what_was_open(still: World) -> None:
    first = Scripted("first")

    def never() -> Engine:
        raise ModelError("no weights")

    with pytest.raises(ModelError, match="no weights"):
        FallbackEngine([Link("a", opens(first), 1, 1), Link("b", never, 1, 1)], now_ms=still.clock)
    assert first.closed


def test_a_chain_has_a_limit(still: World) -> None:
    for count in (0, LINKS_MAX + 1):
        links = [Link(f"e{n}", opens(Scripted("x")), 1, 1) for n in range(count)]
        with pytest.raises(UsageError, match=f"a chain must have 1 to {LINKS_MAX} engines, got {count}"):
            FallbackEngine(links, now_ms=still.clock)


def served(server_url: str, *, timeout_ms: int) -> Link:
    def open_it() -> Engine:
        writer = RemoteWriter("llama-server", url=server_url, model="tiny")
        return TextEngine("box", writer, nonce=lambda: NONCE, now_ms=running_ms, proof_timeout_ms=timeout_ms)

    return Link("box", open_it, timeout_ms, 300)


def test_a_server_that_dies_in_mid_run_is_replaced_by_the_local_model_and_comes_back(
    server: LlamaServer, world: World, tiny: LlamaBackend
) -> None:
    mortal = LlamaServer(server.model, server.log)
    mortal.start()
    local = NativeEngine(tiny, now_ms=running_ms)
    engine = FallbackEngine(
        [served(mortal.url, timeout_ms=20_000), Link("here", opens(local), 5_000, 300)], now_ms=running_ms
    )
    try:
        answers = [decide(world, engine, "C1")]
        mortal.kill()
        answers.append(decide(world, engine, "C2"))
        mortal.start()
        time.sleep(0.4)
        answers.append(decide(world, engine, "C3"))
    finally:
        mortal.kill()
    models = [world.column("SELECT model FROM policy_proposals WHERE dfid = ?", a.dfid)[0] for a in answers]
    assert ["box/tiny", local.model, "box/tiny"] == models
    assert {"ACCEPTED", "ESCALATED"} >= {answer.outcome for answer in answers}


def test_a_hanging_server_leaves_the_local_model_the_time_to_answer(
    tmp_path: Path, tiny: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = NativeEngine(tiny, now_ms=running_ms)
    with misbehaving(hang) as (url, _), monkeypatch.context() as patch:
        patch.setattr(TextEngine, "prove", lambda _self, _deadline_ms: None)  # it hangs only later
        links = [served(url, timeout_ms=400), Link("here", opens(local), 9_000, 300)]
        engine = FallbackEngine(links, now_ms=running_ms)
        with Gate(
            contract(),
            _tickets(),
            Rail(tmp_path / "rail.db"),
            folder=tmp_path / "gate",
            engine=engine,
            now_ms=running_ms,
        ) as gate:
            began = time.monotonic()
            answer = gate.decide({"claim_id": "C1", "ticket_id": "T1", "text": "please"})
            took_s = time.monotonic() - began
            found = gate.store.value("SELECT model FROM policy_proposals WHERE dfid = ?", (answer.dfid,))
        assert local.model == found
        assert 0.4 <= took_s < HANG_S / 2
        assert '"engine": "box"' in (tmp_path / "gate" / "log.jsonl").read_text()


def test_a_chain_all_of_whose_links_fail_escalates_within_the_deadline(
    tmp_path: Path, tiny: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server hangs, the next one is dead, and the local model is too slow."""
    for number in range(10):  # on a busy machine the time of a link may pass before it is asked
        (tmp_path / str(number)).mkdir()
        found = _where_all_fail(tmp_path / str(number), tiny, monkeypatch)
        if found == ([1, 1, 1], 1, True):
            break
    assert ([1, 1, 1], 1, True) == found


def _where_all_fail(folder: Path, tiny: LlamaBackend, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], int, bool]:
    """Have a chain decide; return how often each link failed, how often the server was asked, and whether it was in time."""
    local, run = NativeEngine(tiny, now_ms=running_ms), tiny.run

    def slow(rows: list[Row]) -> object:
        time.sleep(1.0)
        return run(rows)

    with misbehaving(hang) as (url, asked), monkeypatch.context() as patch:
        patch.setattr(TextEngine, "prove", lambda _self, _deadline_ms: None)  # they fail only later
        patch.setattr(tiny, "run", slow)
        links = [served(url, timeout_ms=300), served(f"http://127.0.0.1:{free_port()}/v1", timeout_ms=200)]
        engine = FallbackEngine([*links, Link("here", opens(local), 400, 300)], now_ms=running_ms)
        terms = contract(("ttl_ms: 30000", f"ttl_ms: {TTL_MS}"))
        rail = Rail(folder / "rail.db")
        with Gate(terms, _tickets(), rail, folder=folder / "gate", engine=engine, now_ms=running_ms) as gate:
            began = time.monotonic()
            answer = gate.decide({"claim_id": "C1", "ticket_id": "T1", "text": "please"})
            took_ms = (time.monotonic() - began) * 1000
    assert ("ESCALATED", "DEADLINE_EXCEEDED", None) == (answer.state, answer.reason_code, answer.execution)
    return [link.failures for link in engine._links], len(asked), took_ms < TTL_MS + GRACE_MS


def _tickets() -> Tickets:
    tickets = Tickets()
    tickets.put("T1")
    return tickets


def test_a_server_that_comes_back_unconstrained_is_not_asked(still: World) -> None:
    """Proved once, it failed once; what answers at its address now ignores the grammar."""
    well = [True]

    def answer(connection: socket.socket, request: bytes) -> None:
        said = f'{{"action":"ESCALATE","reason":"HUMAN_REVIEW","context_ref":"{NONCE}"}}'
        reply(connection, completion(said if well[0] else "Of course, I will pay!"))

    last = Scripted("last")
    with misbehaving(answer) as (url, requests):
        writer = RemoteWriter("llama-server", url=url, model="m")
        box = TextEngine("box", writer, nonce=lambda: NONCE, now_ms=still.clock)
        engine = FallbackEngine(
            [Link("box", opens(box), 8_000, 1_000), Link("last", opens(last), 8_000, 1_000)], now_ms=still.clock
        )
        engine._went_down(engine._links[0], ModelError("it was away"), dfid=None)
        well[0] = False
        still.clock.advance(1_000)
        assert "last" == answered(engine, still.packet())
        assert 2 == len(requests)


class Late(Scripted):
    """Its first answer comes after another decision has found it dead."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.meanwhile: Callable[[], object] | None = None

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        if (meanwhile := self.meanwhile) is not None:
            self.meanwhile, self.failure = None, ModelError("gone")
            meanwhile()
            self.failure = None
        return super().propose(packet, tokens_max=tokens_max)


def test_an_answer_to_what_was_asked_before_it_fell_brings_no_engine_back(still: World) -> None:
    first, last = Late("first"), Scripted("last")
    engine, logged = chain(still, first, last)
    packet = still.packet()
    first.meanwhile = lambda: answered(engine, packet)
    assert "first" == answered(engine, packet)
    assert ["engine.down"] == [event for event, _ in logged]
    assert ("last", 2) == (answered(engine, packet), first.asked)
    still.clock.advance(1_000)
    assert ("first", ["engine.down", "engine.up"]) == (answered(engine, packet), [event for event, _ in logged])


def test_a_chain_that_is_closed_while_an_engine_opens_closes_that_too(still: World) -> None:
    first, last = Scripted("first"), Scripted("last")
    doors = iter([ModelError("not yet"), None])

    def opened() -> Engine:
        if (error := next(doors)) is not None:
            raise error
        engine.close()
        return first

    engine = FallbackEngine(
        [Link("first", opened, 8_000, 1_000), Link("last", opens(last), 8_000, 1_000)], now_ms=still.clock
    )
    still.clock.advance(1_000)
    assert "last" == answered(engine, still.packet())
    assert (True, True) == (first.closed, last.closed)


def test_closing_a_chain_closes_all_of_it_whatever_one_raises(still: World) -> None:
    class Stuck(Scripted):
        def close(self) -> None:
            raise RuntimeError("stuck")

    first, last = Scripted("first"), Stuck("last")
    engine, _ = chain(still, first, last)
    with pytest.raises(RuntimeError, match="stuck"):
        engine.close()
    assert first.closed
