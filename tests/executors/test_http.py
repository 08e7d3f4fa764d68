"""An order at a gateway by HTTP: what is certain is told, and everything else is unknown."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from sds.executors.http import HttpExecutor
from sds.executors.sandbox.faults import parse_faults
from sds.executors.sandbox.server import GatewayServer
from sds.kernel.errors import WorldError
from sds.kernel.executor.protocol import Lists, Receipt, Voids
from sds.kernel.executor.statement import StatementLine, read_statement
from tests.executors.gateways import connected, order

KEY = "k" * 64
DEADLINE_S = 2.0
WHERE = 'where: {status: settled, amount: "{params.amount}", currency: "{currency}"}'
CLOSED = "no answer from the gateway: it was closed while it waited for an answer"


def test_an_order_is_settled_once_and_looked_up_by_its_key(executor: HttpExecutor, gateway: GatewayServer) -> None:
    settled = Receipt("settled", "pay_00000001")
    assert Receipt("absent", detail="the gateway answered 404") == executor.lookup(KEY, DEADLINE_S)
    assert [settled] * 2 == [executor.dispatch(order(), KEY, DEADLINE_S) for _ in range(2)]
    assert settled == executor.lookup_order(order(), "", DEADLINE_S)
    (paid,) = gateway.books.totals()["payments"]
    said = {"amount": 120, "currency": "EUR", "kind": "PAY", "account": "A/1 ü", "reference": "flow-1"}
    assert (KEY, 1, said) == (paid["key"], paid["paid"], paid["order"])


def test_what_is_declined_is_rejected_for_good(executor: HttpExecutor, gateway: GatewayServer) -> None:
    gateway.misbehave(parse_faults("refuse=1"))
    assert "rejected" == executor.dispatch(order(), KEY, DEADLINE_S).status
    assert "rejected" == executor.lookup(KEY, DEADLINE_S).status


def test_a_void_key_is_never_paid_and_a_paid_one_is_told(executor: HttpExecutor, gateway: GatewayServer) -> None:
    assert "rejected" == executor.void(KEY, DEADLINE_S).status
    assert "rejected" == executor.dispatch(order(), KEY, DEADLINE_S).status
    executor.dispatch(order("l" * 64), "l" * 64, DEADLINE_S)
    assert "settled" == executor.void("l" * 64, DEADLINE_S).status
    assert 1 == gateway.books.totals()["settled"]


@pytest.mark.parametrize(
    ("faults", "detail"),
    [
        ("lose-replies=1", "no answer from the gateway: RemoteProtocolError"),
        ("cut-replies=1", "no answer from the gateway: RemoteProtocolError"),
        ("drop=1", "no answer from the gateway: RemoteProtocolError"),
        ("fail=1", "the gateway answered 500, not about this key"),
        ("down=1", "the gateway answered 503, not about this key"),
        ("delay-ms=400", "no answer from the gateway"),
    ],
)
def test_what_is_not_certain_is_unknown(
    executor: HttpExecutor, gateway: GatewayServer, faults: str, detail: str
) -> None:
    gateway.misbehave(parse_faults(faults))
    found = executor.dispatch(order(), KEY, 0.3)
    assert ("unknown", detail) == (found.status, found.detail[: len(detail)])
    if not faults.startswith("delay"):
        assert "unknown" == executor.lookup(KEY, 0.3).status


def test_the_same_still_under_way_is_unknown(executor: HttpExecutor, gateway: GatewayServer) -> None:
    gateway.begin(KEY)
    assert "unknown" == executor.dispatch(order(), KEY, DEADLINE_S).status
    assert "unknown" == executor.lookup(KEY, DEADLINE_S).status


def test_a_second_copy_of_a_reply_is_not_taken_for_the_answer_about_another_key(
    executor: HttpExecutor, gateway: GatewayServer
) -> None:
    """It lies in the connection where the next answer is expected, and says `settled`: of the first key."""
    gateway.misbehave(parse_faults("answer-twice=1"))
    met = set()
    for number in range(10):
        paid, other = f"{number:064}", f"x{number:063}"
        assert executor.dispatch(order(paid), paid, DEADLINE_S).status in ("unknown", "settled")
        met.add(executor.lookup(other, DEADLINE_S).status)
    assert "unknown" in met <= {"unknown", "absent"}


@contextmanager
def answering(reply: bytes | Callable[[bytes], bytes]) -> Iterator[str]:
    """Answer every request with these bytes, and hang up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    asked = connection.recv(65_536)
                    connection.sendall(reply(asked) if callable(reply) else reply)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def http(status: str, body: bytes, *headers: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers])
    return head.encode() + b"\r\n\r\n" + body


GOOD = {"key": KEY, "status": "settled", "id": "p-1", "amount": 120, "currency": "EUR"}


@pytest.mark.parametrize(
    "reply",
    [
        http("201 Created", json.dumps(GOOD | {"key": "l" * 64}).encode()),
        http("201 Created", b'{"status":"settled","id":"p-1"}'),
        http("201 Created", b'{"key":["' + KEY.encode() + b'"],"status":"settled","id":"p-1"}'),
        http("201 Created", json.dumps({"key": KEY, "status": "settled"}).encode()),
        http("201 Created", json.dumps(GOOD | {"id": None}).encode()),
        http("201 Created", json.dumps(GOOD | {"id": True}).encode()),
        http("201 Created", json.dumps(GOOD | {"id": " "}).encode()),
        http("201 Created", json.dumps(GOOD | {"id": "\x00\u202e"}).encode()),
        http("201 Created", json.dumps(GOOD | {"id": "\ud800"}).encode()),
        http("201 Created", json.dumps(GOOD | {"amount": 121}).encode()),
        http("201 Created", json.dumps(GOOD | {"amount": 120.0}).encode()),
        http("201 Created", json.dumps(GOOD | {"amount": "120"}).encode()),
        http("201 Created", json.dumps(GOOD | {"currency": "eur"}).encode()),
        http("201 Created", b""),
        b"HTTP/1.1 204 No Content\r\n\r\n",
        http("201 Created", b"\xef\xbb\xbf" + json.dumps(GOOD).encode()),
        http("201 Created", json.dumps(GOOD).encode("utf-16")),
        http("201 Created", b'{"more":{"a":1,"a":2},' + json.dumps(GOOD).encode()[1:]),
        http("201 Created", b'{"n":' + b"9" * 5_000 + b"," + json.dumps(GOOD).encode()[1:]),
        http("502 Bad Gateway", b"<html>Bad Gateway</html>", "Content-Type: text/html"),
        http("201 Created", json.dumps(GOOD).encode(), "Content-Length: 5"),
        http("201 Created", b"5\r\nhello\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
        b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n" + (b"400\r\n" + b" " * 1024 + b"\r\n") * 100,
        b"HTTP/1.1 201 Created\r\n" + b"X-More: again\r\n" * 10_000,
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 10_000,
        http("200 OK", json.dumps(GOOD).encode()),
        http("201 Created", json.dumps(GOOD | {"status": "maybe"}).encode()),
        http("201 Created", json.dumps(GOOD | {"status": True}).encode()),
        http("500 Oh", json.dumps(GOOD).encode()),
        http("409 Conflict", json.dumps(GOOD).encode()),
        http("302 Found", json.dumps(GOOD).encode(), "Location: http://127.0.0.1:9/payments"),
        http("201 Created", b"[" * 100_000),
        http("201 Created", json.dumps(GOOD).encode()[:-1]),
        http("201 Created", b'{"status":"rejected",' + json.dumps(GOOD).encode()[1:]),
        http("201 Created", b"\xff\xfe" + json.dumps(GOOD).encode()),
        http("201 Created", b'{"n":NaN,' + json.dumps(GOOD).encode()[1:]),
        http("201 Created", json.dumps(GOOD | {"pad": "x" * 70_000}).encode()),
        http("201 Created", json.dumps(GOOD).encode(), "Content-Encoding: gzip"),
        http("201 Created", json.dumps(GOOD).encode())[:-20],
        b"hello\r\n\r\n",
        b"",
    ],
)
def test_an_answer_that_is_not_wholly_understood_is_unknown(reply: bytes, tmp_path: Path) -> None:
    with answering(reply) as url, connected(tmp_path, url) as executor:
        assert "unknown" == executor.dispatch(order(), KEY, DEADLINE_S).status


def test_the_same_answer_made_well_is_settled(tmp_path: Path) -> None:
    with answering(http("201 Created", json.dumps(GOOD).encode())) as url, connected(tmp_path, url) as executor:
        assert Receipt("settled", "p-1") == executor.dispatch(order(), KEY, DEADLINE_S)


@contextmanager
def keeping_connections(replies: Callable[[int], bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """Answer one connection after another, each until its reply number (from 0) is empty; yield the requests, too."""
    asked = list[bytes]()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, connection.makefile("rb") as reading:
                    while request := _request(reading):
                        asked.append(request)
                        if not (reply := replies(len(asked) - 1)):
                            break
                        connection.sendall(reply)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
        server.shutdown(socket.SHUT_RDWR)


def _request(reading: BinaryIO) -> bytes:
    """Return one whole request, b"" at the end."""
    head = b""
    while (line := reading.readline()) not in (b"", b"\r\n"):
        head += line
    length = next((int(each[15:]) for each in head.lower().split(b"\r\n") if each.startswith(b"content-length:")), 0)
    return head + reading.read(length)


def kept(body: bytes, *headers: str) -> bytes:
    return http("201 Created", body, *headers).replace(b"Connection: close", b"Connection: keep-alive")


def test_a_kept_connection_that_is_closed_under_an_order_has_it_sent_once(tmp_path: Path) -> None:
    """Whether the gateway read it before it hung up nobody knows, so no library may send it again."""
    answers = [kept(json.dumps(GOOD).encode()), b"", kept(json.dumps(GOOD).encode())]
    with keeping_connections(lambda n: answers[n]) as (url, asked), connected(tmp_path, url) as executor:
        assert "settled" == executor.dispatch(order(), KEY, DEADLINE_S).status
        assert "unknown" == executor.dispatch(order(), KEY, DEADLINE_S).status
        assert 2 == len(asked)


def test_a_cookie_is_not_kept_for_the_next_order(tmp_path: Path) -> None:
    marked = kept(json.dumps(GOOD).encode(), "Set-Cookie: who=me; Path=/")
    with keeping_connections(lambda _n: marked) as (url, asked), connected(tmp_path, url) as executor:
        for _ in range(2):
            assert "settled" == executor.dispatch(order(), KEY, DEADLINE_S).status
    assert [False, False] == [b"cookie" in request.lower() for request in asked]


def test_an_order_for_which_no_connection_is_free_in_time_was_certainly_not_sent(tmp_path: Path) -> None:
    """Neither where the wait for a connection and the making of one take the whole deadline together."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        held = [socket.create_connection(address)]
        while len(held) < 8:  # nobody accepts these
            held.append(socket.socket())
            held[-1].setblocking(False)
            held[-1].connect_ex(address)
        one = ("currency: EUR", "currency: EUR\nconnections_max: 1")
        with connected(tmp_path, f"http://127.0.0.1:{address[1]}", one) as executor, ThreadPoolExecutor(2) as pool:
            first = pool.submit(executor.dispatch, order(), KEY, 0.5)
            time.sleep(0.1)
            second = pool.submit(executor.dispatch, order(), KEY, 0.5)
            assert ["unsent", "unsent"] == [first.result().status, second.result().status]
        for each in held:
            each.close()


def test_an_answer_that_fits_rules_of_two_outcomes_is_none(tmp_path: Path) -> None:
    both = ("[{status: [402], where: {status: rejected}}]", "[{status: [201]}]")
    with answering(http("201 Created", json.dumps(GOOD).encode())) as url, connected(tmp_path, url, both) as executor:
        assert Receipt("unknown", detail="the gateway answered 201: rules of two outcomes fits") == executor.dispatch(
            order(), KEY, DEADLINE_S
        )


def test_an_answer_may_name_the_key_in_a_header(tmp_path: Path) -> None:
    where = ("reply: {key: key,", "reply: {key_header: X-Key,")
    for header, status in ((f"X-Key: {KEY}", "settled"), ("X-Key: other", "unknown"), ("X-No: 1", "unknown")):
        reply = http("201 Created", json.dumps(GOOD | {"key": "of something else"}).encode(), header)
        with answering(reply) as url, connected(tmp_path, url, where) as executor:
            assert status == executor.dispatch(order(), KEY, DEADLINE_S).status


def test_who_cannot_be_reached_was_certainly_sent_nothing_but_a_look_up_that_fails_tells_nothing(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with connected(tmp_path, f"http://127.0.0.1:{port}") as executor:
        found = executor.dispatch(order(), KEY, DEADLINE_S)
        assert Receipt("unsent", detail="nothing was sent: ConnectError: All connection attempts failed") == found
        assert {"unknown"} == {executor.lookup(KEY, DEADLINE_S).status, executor.void(KEY, DEADLINE_S).status}


def test_once_a_byte_has_left_for_a_proxy_nothing_is_certainly_unsent(tmp_path: Path) -> None:
    with answering(b"HTTP/1.1 200 Connection established\r\n\r\n") as proxy:
        through = ("currency: EUR", f"currency: EUR\nproxy: {proxy}")
        with connected(tmp_path, "https://pay.example", through) as executor:
            assert "unknown" == executor.dispatch(order(), KEY, DEADLINE_S).status


def test_a_redirect_is_not_followed(gateway: GatewayServer, tmp_path: Path) -> None:
    elsewhere = http("307 Temporary Redirect", b"{}", f"Location: {gateway.url}/payments")
    with answering(elsewhere) as url, connected(tmp_path, url) as executor:
        assert "unknown" == executor.dispatch(order(), KEY, DEADLINE_S).status
    assert 0 == gateway.books.totals()["settled"]


def test_a_value_of_another_type_fits_no_rule(tmp_path: Path) -> None:
    rule = (f"settled: [{{status: [201], {WHERE}}}]", "settled: [{status: [201], where: {ok: true}}]")
    for ok, status in ((True, "settled"), (1, "unknown")):
        reply = http("201 Created", json.dumps(GOOD | {"ok": ok}).encode())
        with answering(reply) as url, connected(tmp_path, url, rule) as executor:
            assert status == executor.dispatch(order(), KEY, DEADLINE_S).status


def test_what_comes_too_late_to_the_wire_is_not_sent(executor: HttpExecutor, gateway: GatewayServer) -> None:
    assert "unsent" == executor.dispatch(order(), KEY, -1.0).status
    assert 0 == gateway.books.totals()["settled"]


def test_a_process_that_was_stopped_before_the_first_byte_sends_nothing_when_it_goes_on(
    executor: HttpExecutor, gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock is asked once more when the connection stands and the request is about to be written."""
    executor.lookup(KEY, DEADLINE_S)
    times = iter([0.0, 0.0, 0.0])
    monkeypatch.setattr(executor._exchange, "_clock", lambda: next(times, 1e9))
    found = executor.dispatch(order(), KEY, DEADLINE_S)
    assert Receipt("unsent", detail="nothing was sent: the deadline has passed") == found
    assert 0 == gateway.books.totals()["settled"]


def test_a_gateway_that_drips_its_answer_is_not_waited_for(tmp_path: Path) -> None:
    def drip(_asked: bytes) -> bytes:
        time.sleep(0.5)
        return b""

    with answering(drip) as url, connected(tmp_path, url) as executor:
        began = time.monotonic()
        assert "unknown" == executor.dispatch(order(), KEY, 0.2).status
        assert time.monotonic() - began < 0.45


def test_who_closes_it_waits_for_no_gateway_and_an_order_under_way_is_unknown(
    executor: HttpExecutor, gateway: GatewayServer
) -> None:
    gateway.misbehave(parse_faults("delay-ms=1000"))
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(executor.dispatch, order(), KEY, 5.0)
        while not gateway.is_at_work(KEY):
            time.sleep(0.01)
        began = time.monotonic()
        executor.close()
        assert Receipt("unknown", detail=CLOSED) == sent.result()
        assert time.monotonic() - began < 0.9


def test_the_environments_proxy_is_not_asked(
    executor: HttpExecutor, gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert "settled" == executor.dispatch(order(), KEY, DEADLINE_S).status


def test_an_order_that_the_file_has_no_text_for_is_not_sent(executor: HttpExecutor, gateway: GatewayServer) -> None:
    bare = order()
    object.__setattr__(bare, "params", ())
    found = executor.dispatch(bare, KEY, DEADLINE_S)
    assert Receipt("rejected", detail="the order has no `params.amount`; nothing was sent") == found


def test_what_a_file_does_not_describe_its_executor_does_not_have(tmp_path: Path) -> None:
    text = ("void:\n  path: /payments/{key}/void\n", "# ")
    with connected(tmp_path, "http://127.0.0.1:9") as whole:
        assert isinstance(whole, Voids)
        assert isinstance(whole, Lists)
    start = (tmp_path / "gateway.yaml").read_text(encoding="utf-8")
    bare = start[: start.index(text[0])]
    (tmp_path / "bare.yaml").write_text(bare, encoding="utf-8")
    from sds.executors.http import load_executor

    made = load_executor(tmp_path / "bare.yaml")
    assert (False, False) == (isinstance(made, Voids), isinstance(made, Lists))
    made.close()


def test_its_statement_comes_whole_over_pages(executor: HttpExecutor, gateway: GatewayServer) -> None:
    for number in range(250):
        said = {"amount": number, "kind": "PAY", "account": "A-1", "reference": f"flow-{number}"}
        gateway.books.pay(f"k-{number}", said, refuse=number == 0)
    lines = read_statement(executor.statement, 0, 10**14)
    assert 250 == len(lines)
    (at_ms,) = {line.at_ms for line in lines[:1]}
    declined = StatementLine("k-0", "rejected", at_ms, 0, "pay_00000001", "flow-0", "PAY", {"amount": 0}, "A-1")
    assert (declined, "settled") == (lines[0], lines[1].outcome)
    assert () == read_statement(executor.statement, 0, 1)


def test_amounts_of_a_statement_may_be_texts_with_decimals_and_nothing_else_then(tmp_path: Path) -> None:
    texts = ("    amount_minor: amount\n", "    amount_minor: amount\n    decimals: 2\n")
    line = {"key": "k", "status": "settled", "at_ms": 1, "id": "p", "order": {"account": "A", "kind": "PAY"}}
    line["order"] |= {"reference": "flow-1", "amount": "12.50"}  # type: ignore[operator]
    for amount, read in (("12.50", 1250), ("-0.05", -5), ("12.5", None), ("1250", None), (12.5, None), (1250, None)):
        reply = http("200 OK", json.dumps({"lines": [line | {"amount": amount}]}).encode())
        with answering(reply) as url, connected(tmp_path, url, texts) as executor:
            if read is None:
                with pytest.raises(WorldError, match="no text with 2 decimals `amount`"):
                    read_statement(executor.statement, 0, 10**14)
                continue
            (found,) = read_statement(executor.statement, 0, 10**14)
            assert (read, {"amount": 1250}) == (found.amount_minor, found.params)


def test_a_line_without_a_key_is_somebody_elses_only_where_the_file_says_so(tmp_path: Path) -> None:
    skip = ("    key: key\n", "    key: key\n    skip_without_key: true\n")
    reply = http("200 OK", json.dumps({"lines": [{"id": "by hand"}, {"key": None}]}).encode())
    with answering(reply) as url:
        with connected(tmp_path, url, skip) as executor:
            assert () == read_statement(executor.statement, 0, 10**14)
        with connected(tmp_path, url) as executor, pytest.raises(WorldError, match="cannot be read"):
            read_statement(executor.statement, 0, 10**14)


def test_a_statement_of_pages_without_lines_comes_to_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sds.executors.http.executor.STATEMENT_S_MAX", 0.3)

    def page(number: int) -> bytes:
        return kept(json.dumps({"lines": [], "next": str(number)}).encode()).replace(b"201 Created", b"200 OK")

    with keeping_connections(page) as (url, asked), connected(tmp_path, url) as executor:
        with pytest.raises(WorldError, match="cannot be had: nothing was sent: the deadline has passed"):
            read_statement(executor.statement, 0, 10**14)
        assert len(asked) > 1


@pytest.mark.parametrize(
    "page",
    [
        {"lines": {}},
        {"lines": [{"key": "k"}]},
        {"lines": [], "next": "0"},
        {"lines": [], "next": ["1"]},
        {"lines": [{"key": "k", "status": "lost", "at_ms": 1, "amount": 1, "id": "p", "order": {}}]},
        {"lines": [{"key": "k", "status": "settled", "at_ms": 1.5, "amount": 1, "id": "p", "order": {}}]},
    ],
)
def test_a_statement_that_is_odd_anywhere_is_unreadable(page: object, tmp_path: Path) -> None:
    with answering(http("200 OK", json.dumps(page).encode())) as url, connected(tmp_path, url) as executor:
        with pytest.raises(WorldError) as caught:
            read_statement(executor.statement, 0, 10**14)
        mend = "compare a page of it with `statement` in the gateway's file"
        assert ("STATEMENT_UNREADABLE", mend) == (caught.value.reason_code, caught.value.hint)


@pytest.mark.parametrize(
    ("answer", "mend"),
    [
        (http("404 Not Found", b"{}"), "are the path of `statement` and the secret right in its file?"),
        (http("200 OK", b"{"), "compare a page of it with `statement` in the gateway's file"),
        (b"", "is the gateway up, and its `address` right? then the same again"),
    ],
)
def test_a_statement_that_cannot_be_had_says_what_to_look_at(answer: bytes, mend: str, tmp_path: Path) -> None:
    with answering(answer) as url, connected(tmp_path, url) as executor:
        with pytest.raises(WorldError) as caught:
            read_statement(executor.statement, 0, 10**14)
        assert ("STATEMENT_UNREADABLE", mend) == (caught.value.reason_code, caught.value.hint)
