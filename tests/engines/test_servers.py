"""Models behind a server: a real one is driven with the exact language; one that misbehaves costs a decision, no more."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sds.engines.text import END_TOKENS, TextEngine, grammar_of
from sds.grammars.emit import gbnf as emit_gbnf
from sds.grammars.emit import json_schema
from sds.grammars.language import language
from sds.kernel.decision.packet import ALTERNATIVES_UNAVAILABLE
from sds.kernel.envelope.proposal import Proposal, parse_proposal
from sds.kernel.errors import ModelError
from sds.models.protocol import BackendError
from sds.models.text.http import BODY_BYTES_MAX, Address, post
from sds.models.text.protocol import Form, Server
from sds.models.text.servers import FORMS, RemoteWriter
from tests.engines.conftest import decide, running_ms
from tests.engines.servers import (
    FAULTS,
    HANG_S,
    LlamaServer,
    Misdeed,
    body_of,
    completion,
    free_port,
    hang,
    misbehaving,
    reply,
)
from tests.kernel.durable import World, contract, deny
from tests.model_fixtures import refund_language
from tests.scale import scale, seeded
from tests.strategies import random_envelope

pytestmark = pytest.mark.usefixtures("libraries_imported")

NONCE = "5eed" * 16
DEADLINE_MS = 700
GRACE_MS = 1500  # for a busy machine: the record's transaction, threads that wait for a core
REAL: tuple[tuple[Server, Form | None], ...] = (("llama-server", None), ("openai", "gbnf"))


def engine_of(url: str, kind: Server = "llama-server", form: Form | None = None) -> TextEngine:
    writer = RemoteWriter(kind, url=url, model="tiny", form=form)
    return TextEngine("served", writer, nonce=lambda: NONCE, now_ms=running_ms)


def unproved(url: str, monkeypatch: pytest.MonkeyPatch, kind: Server = "llama-server") -> TextEngine:
    """Return an engine whose server was well when it was proved, and is not any more."""
    with monkeypatch.context() as patch:
        patch.setattr(TextEngine, "prove", lambda _self, _deadline_ms: None)
        return engine_of(url, kind)


@pytest.mark.parametrize(("kind", "form"), REAL)
def test_a_real_llama_cpp_server_decides_inside_every_envelope(
    server: LlamaServer, kind: Server, form: Form | None
) -> None:
    rng = seeded(7)
    writer = RemoteWriter(kind, url=server.url, model="tiny", form=form)
    for _ in range(scale(8, 64)):
        envelope = random_envelope(rng.randint)
        said = language(envelope, f"{rng.getrandbits(256):064x}")
        grammar = grammar_of(said, "gbnf")
        found = writer.write("Decide.", "A claim.", grammar, tokens_max=grammar.bytes_max + 8, timeout_s=60)
        proposal = parse_proposal(found.data)
        assert isinstance(proposal, Proposal), found.data
        assert [] == envelope.objections(proposal), (envelope, found.data)
        assert said.context_ref == proposal.context_ref


@pytest.mark.parametrize(("kind", "form"), REAL)
def test_a_decision_of_a_real_server_is_recorded_with_its_engine_and_without_alternatives(
    server: LlamaServer, world: World, kind: Server, form: Form | None
) -> None:
    engine = engine_of(server.url, kind, form)
    answer = decide(world, engine)
    assert answer.outcome in ("ACCEPTED", "ESCALATED")
    assert answer.action in ("COMPENSATE", "REFUND_TICKET", "GOODWILL", "DENY", "ESCALATE")
    sql = "SELECT model, alternatives, confidence, tokens > 100 FROM policy_proposals WHERE dfid = ?"
    assert [("served/tiny", f'"{ALTERNATIVES_UNAVAILABLE}"', None, 1)] == list(world.store.rows(sql, (answer.dfid,)))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_ignores_the_grammar_it_is_sent_is_refused_at_the_start(
    server: LlamaServer, kind: Server
) -> None:
    """llama.cpp's server does not know the parameters of others, and answers unconstrained."""
    with pytest.raises(ModelError, match="the engine `served` does not constrain its model") as refused:
        engine_of(server.url, kind)
    assert "MASK_FAILED" == refused.value.reason_code


def test_no_two_proofs_are_the_same_request() -> None:
    """Between us and the server may be one that keeps answers."""
    nonces = ["5eed" * 16, "ab12" * 16]
    left = iter(nonces)

    def answer(connection: socket.socket, request: bytes) -> None:
        (nonce,) = (nonce for nonce in nonces if nonce.encode() in request)
        reply(connection, completion(_only_sentence(nonce)))

    with misbehaving(answer) as (url, requests):
        writer = RemoteWriter("llama-server", url=url, model="m")
        engine = TextEngine("box", writer, nonce=lambda: next(left), now_ms=running_ms)
        engine.prove(running_ms() + 20_000)
        assert [True, True] == [nonce.encode() in sent for nonce, sent in zip(nonces, requests, strict=True)]


def _only_sentence(nonce: str) -> str:
    return f'{{"action":"ESCALATE","reason":"HUMAN_REVIEW","context_ref":"{nonce}"}}'


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_misbehaves_escalates_within_the_deadline(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = escalates_in_time(tmp_path, FAULTS[fault], lambda url: unproved(url, monkeypatch))
    assert reason in ("BACKEND_FAILED", "DEADLINE_EXCEEDED")


@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind != "llama-server"])
@pytest.mark.parametrize("fault", ["hangs", "drips its body", "redirects", "fails", "answers half", "answers a number"])
def test_the_same_through_every_model_of_outlines(
    kind: Server, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert escalates_in_time(tmp_path, FAULTS[fault], lambda url: unproved(url, monkeypatch, kind))


@pytest.mark.parametrize("kind", FORMS)
def test_a_dead_server_escalates_at_once(kind: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = f"http://127.0.0.1:{free_port()}/v1"
    seconds, answer = timed(tmp_path, unproved(dead, monkeypatch, kind), deadline_ms=20_000)
    assert ("ESCALATED", "BACKEND_FAILED", None) == answer
    assert seconds < 10


@pytest.mark.parametrize("kind", FORMS)
def test_a_legal_decision_about_another_packet_is_never_carried_out(
    kind: Server, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has cached an answer, or that somebody replays: what it says was right, for the claim before."""
    world.tickets.put("T1")
    old = deny(world.kernel.preview(world.event("C0"))).decode()

    def replay(connection: socket.socket, _request: bytes) -> None:
        reply(connection, json.dumps({"generated_text": old}).encode() if kind == "tgi" else completion(old))

    world.tickets.put("T1", mood="angry")
    with misbehaving(replay) as (url, requests):
        answer = decide(world, unproved(url, monkeypatch, kind))
    assert ("ESCALATED", "REPEATED_PROPOSAL", None) == (answer.state, answer.reason_code, answer.execution)
    (first,) = world.column("SELECT reasons FROM attempts WHERE dfid = ? AND attempt_number = 1", answer.dfid)
    assert ["STALE_CONTEXT"] == [code for _gate, code, *_ in json.loads(str(first))]
    assert (2, []) == (len(requests), world.column("SELECT dfid FROM execution_log"))


def test_the_proof_leaves_room_for_a_model_that_spells_byte_by_byte() -> None:
    sentence = f'{{"action":"ESCALATE","reason":"HUMAN_REVIEW","context_ref":"{NONCE}"}}'
    with misbehaving(lambda connection, _request: reply(connection, completion(sentence))) as (url, requests):
        engine_of(url)
    assert body_of(requests[0])["max_tokens"] == len(sentence) + END_TOKENS


Timed = tuple[float, tuple[str, str | None, str | None]]


def escalates_in_time(folder: Path, misdeed: Misdeed, engine_at: Callable[[str], TextEngine]) -> str | None:
    """Decide until the server was asked, and the answer came in time: on a busy machine the deadline may pass before, or the
    answer come later. It is ESCALATED each time, and the server asked once at most. Return the reason.
    """
    for number in range(10):
        (folder / str(number)).mkdir()
        with misbehaving(misdeed) as (url, requests):
            seconds, (state, reason, execution) = timed(folder / str(number), engine_at(url))
            assert ("ESCALATED", None) == (state, execution)
            assert len(requests) <= 1, "no library may try again"
            if requests and seconds * 1000 < DEADLINE_MS + GRACE_MS:
                return reason
    raise AssertionError("the server was never asked, or the answer always late")


def timed(folder: Path, engine: TextEngine, *, deadline_ms: int = DEADLINE_MS) -> Timed:
    world = World(folder, terms=contract(("ttl_ms: 30000", f"ttl_ms: {deadline_ms}")))
    world.clock = running_ms  # type: ignore[assignment]  # a clock that nobody moves
    world.kernel = world.open_kernel()
    began = time.monotonic()
    answer = decide(world, engine)
    took = time.monotonic() - began
    world.close()
    return took, (answer.state, answer.reason_code, answer.execution)


def test_each_kind_of_server_is_sent_the_exact_language_in_its_own_parameter_and_told_not_to_think() -> None:
    said = refund_language()
    regex, gbnf, schema = said.regex(), emit_gbnf.to_gbnf(said), json_schema.emit(said)
    sent = {kind: _sent(kind) for kind in FORMS}
    assert gbnf == sent["llama-server"]["grammar"]
    assert {"regex": f"({regex})"} == sent["vllm"]["structured_outputs"]
    assert f"({regex})" == sent["sglang"]["regex"]
    assert {"type": "regex", "value": f"({regex})"} == sent["tgi"]["parameters"]["grammar"]  # type: ignore[index]  # a mapping
    for kind in ("ollama", "lmstudio", "openai"):
        assert schema == sent[kind]["response_format"]["json_schema"]["schema"]  # type: ignore[index]  # a mapping
    assert gbnf == _sent("openai", "gbnf")["grammar"]
    assert [1.0, 1.0] == [body["repeat_penalty"] for body in (sent["llama-server"], _sent("openai", "gbnf"))]
    assert [1.0, 1.0] == [sent[kind]["repetition_penalty"] for kind in ("vllm", "sglang")]
    off = {"enable_thinking": False, "thinking": False}
    assert [off, off, off] == [sent[kind]["chat_template_kwargs"] for kind in ("llama-server", "vllm", "sglang")]
    assert "none" == sent["ollama"]["reasoning_effort"]
    for kind in FORMS:
        options = sent[kind]["parameters"] if kind == "tgi" else sent[kind]
        assert (0, 40) == (options.get("temperature", 0), options.get("max_tokens", options.get("max_new_tokens")))  # type: ignore[attr-defined]  # a mapping


def _sent(kind: Server, form: Form | None = None) -> dict[str, object]:
    def answer(connection: socket.socket, _request: bytes) -> None:
        reply(connection, b'{"generated_text": "yes"}' if kind == "tgi" else completion("yes"))

    with misbehaving(answer) as (url, requests):
        writer = RemoteWriter(kind, url=url, model="m", form=form)
        found = writer.write("s", "u", grammar_of(refund_language(), writer.form), tokens_max=40, timeout_s=20)
        assert b"yes" == found.data
        return body_of(requests[0])


@pytest.mark.parametrize("kind", FORMS)
def test_the_key_travels_in_a_header_and_shows_nowhere_else(kind: Server) -> None:
    def answer(connection: socket.socket, _request: bytes) -> None:
        reply(connection, b'{"generated_text": "yes"}' if kind == "tgi" else completion("yes"))

    with misbehaving(answer) as (url, requests):
        writer = RemoteWriter(kind, url=url, model="m", api_key="secret-1")
        writer.write("s", "u", grammar_of(refund_language(), writer.form), tokens_max=40, timeout_s=20)
        assert [b"Bearer secret-1"] == re.findall(rb"(?i)authorization: ([^\r]*)", requests[0])
        assert "secret-1" not in repr(writer)
        assert "secret-1" not in writer.name


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with misbehaving(hang) as (proxy, asked):
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "https_proxy"):
            monkeypatch.setenv(name, proxy)
        assert "m" == _sent("openai")["model"]
        assert [] == asked


def test_a_name_look_up_that_hangs_is_left_behind_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()

    def hanging(*_: object, **__: object) -> None:
        let_go.wait(HANG_S)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    began = time.monotonic()
    with pytest.raises(BackendError, match="the server did not answer within 200 ms"):
        post(Address("http://nowhere.example/v1"), "/x", b"{}", {}, timeout_s=0.2)
    assert time.monotonic() - began < HANG_S / 4
    let_go.set()


def test_an_answer_longer_than_the_limit_is_refused() -> None:
    def long(connection: socket.socket, _request: bytes) -> None:
        reply(connection, b" " * (BODY_BYTES_MAX + 1))

    with pytest.raises(BackendError, match=f"longer than {BODY_BYTES_MAX} bytes"):
        _written(long)


@pytest.mark.parametrize("announced", ["Content-Length: 1000\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n3e8\r\n"])
def test_an_answer_shorter_than_announced_is_refused(announced: str) -> None:
    def short(connection: socket.socket, _request: bytes) -> None:
        connection.sendall(f"HTTP/1.1 200 OK\r\n{announced}".encode() + completion("NO"))

    with pytest.raises(BackendError, match="the server's answer is incomplete"):
        _written(short)


def test_what_a_failing_server_says_is_shown_on_one_line() -> None:
    def angry(connection: socket.socket, _request: bytes) -> None:
        reply(connection, b"no such\r\n\x1b[31mmodel", "404 Not Found")

    with pytest.raises(BackendError, match=re.escape("the server answered with status 404: no such [31mmodel")):
        _written(angry)


def _written(misdeed: Misdeed, kind: Server = "llama-server") -> None:
    with misbehaving(misdeed) as (url, _):
        writer = RemoteWriter(kind, url=url, model="m")
        writer.write("s", "u", grammar_of(refund_language(), FORMS[kind]), tokens_max=40, timeout_s=20)


def test_a_connection_that_is_reset_is_said_in_plain_words() -> None:
    def reset(connection: socket.socket, _request: bytes) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with pytest.raises(BackendError, match=r"^the server closed the connection before it had answered$"):
        _written(reset)


@pytest.mark.parametrize("kind", ["llama-server", "vllm", "openai"])
@pytest.mark.parametrize("body", [b"", b"<h1>Welcome</h1>", b"[]", b"{}", b'{"choices": []}', b'{"choices": [7]}'])
def test_a_reply_that_is_no_answer_is_said_in_plain_words(kind: Server, body: bytes) -> None:
    with pytest.raises(BackendError, match=r"^the server's answer (is not a chat completion|holds no text)$"):
        _written(lambda connection, _: reply(connection, body), kind)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:80", "ftp://a/b", "http://", "http://me:word@host/v1", "http://a:b/", "http://a/?q=1"]
)
def test_an_address_of_another_shape_is_refused(url: str) -> None:
    with pytest.raises(BackendError, match="the url"):
        Address(url)
