"""An order at a gateway by HTTP: what is certain is told, and everything else is unknown."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sds.executors.http import HttpExecutor
from sds.executors.sandbox.faults import parse_faults
from sds.executors.sandbox.server import GatewayServer
from sds.kernel.executor.protocol import Lists, Receipt, Voids
from tests.engines.servers import free_port
from tests.executors.gateways import connected, held, order
from tests.executors.wires import GOOD, KEY, answering, http

DEADLINE_S = 20.0
WHERE = 'where: {status: settled, amount: "{params.amount}", currency: "{currency}"}'
CLOSED = "no whole answer from the gateway: the executor was closed while it waited for an answer"


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
        ("lose-replies=1", "no whole answer from the gateway: RemoteProtocolError"),
        ("cut-replies=1", "no whole answer from the gateway: RemoteProtocolError"),
        ("drop=1", "no whole answer from the gateway: RemoteProtocolError"),
        ("fail=1", "the gateway answered 500, but the answer does not name this order's key"),
        ("down=1", "the gateway answered 503, but the answer does not name this order's key"),
    ],
)
def test_what_is_not_certain_is_unknown(
    executor: HttpExecutor, gateway: GatewayServer, faults: str, detail: str
) -> None:
    gateway.misbehave(parse_faults(faults))
    found = executor.dispatch(order(), KEY, DEADLINE_S)
    assert ("unknown", detail) == (found.status, found.detail[: len(detail)])
    assert "unknown" == executor.lookup(KEY, DEADLINE_S).status


def test_the_same_still_under_way_is_unknown(executor: HttpExecutor, gateway: GatewayServer) -> None:
    gateway.begin(KEY)
    assert "unknown" == executor.dispatch(order(), KEY, DEADLINE_S).status
    assert "unknown" == executor.lookup(KEY, DEADLINE_S).status


def test_a_second_copy_of_a_reply_is_not_taken_for_the_answer_about_another_key(
    executor: HttpExecutor, gateway: GatewayServer
) -> None:
    """It lies in the connection where the next answer is expected, and says `settled`: of the first key."""
    gateway.misbehave(parse_faults("answer-twice=1"))
    met = set[str]()
    for number in range(100):  # until one was there in time: on a busy machine most come too late and meet nothing
        if "unknown" in met:
            break
        paid, other = f"{number:064}", f"x{number:063}"
        assert executor.dispatch(order(paid), paid, DEADLINE_S).status in ("unknown", "settled")
        met.add(executor.lookup(other, DEADLINE_S).status)
    assert "unknown" in met <= {"unknown", "absent"}


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


def test_an_answer_that_is_too_long_is_said_to_be(tmp_path: Path) -> None:
    reply = http("201 Created", json.dumps(GOOD | {"pad": "x" * 70_000}).encode())
    with answering(reply) as url, connected(tmp_path, url) as executor:
        told = executor.dispatch(order(), KEY, DEADLINE_S).detail
    assert "no whole answer from the gateway: the answer is longer than 65536 bytes" == told


def test_the_same_answer_made_well_is_settled(tmp_path: Path) -> None:
    with answering(http("201 Created", json.dumps(GOOD).encode())) as url, connected(tmp_path, url) as executor:
        assert Receipt("settled", "p-1") == executor.dispatch(order(), KEY, DEADLINE_S)


def test_an_answer_that_fits_rules_of_two_outcomes_is_none(tmp_path: Path) -> None:
    both = ("[{status: [402], where: {status: rejected}}]", "[{status: [201]}]")
    with answering(http("201 Created", json.dumps(GOOD).encode())) as url, connected(tmp_path, url, both) as executor:
        assert Receipt(
            "unknown", detail="the gateway answered 201: rules of two outcomes fit the answer"
        ) == executor.dispatch(order(), KEY, DEADLINE_S)


def test_a_key_is_sent_and_expected_in_the_form_of_the_file_and_looked_up_in_it(tmp_path: Path) -> None:
    asked = list[bytes]()
    uuid = "kkkkkkkk-kkkk-4kkk-akkk-kkkkkkkkkkkk"
    edits = ("currency: EUR", "currency: EUR\nkey_form: uuid"), ('reference: "{dfid}"', 'reference: "{whole_key}"')

    def answer(request: bytes) -> bytes:
        asked.append(request)
        return http("201 Created", json.dumps(GOOD | {"key": uuid}).encode())

    with answering(answer) as url, connected(tmp_path, url, *edits) as executor:
        assert "settled" == executor.dispatch(order(), KEY, DEADLINE_S).status
        executor.lookup_order(order(), "", DEADLINE_S)
    assert f"Idempotency-Key: {uuid}\r\n".encode() in asked[0]
    assert asked[-1].startswith(f"GET /payments/{uuid} ".encode())
    with answering(http("201 Created", json.dumps(GOOD).encode())) as url, connected(tmp_path, url, *edits) as executor:
        assert "unknown" == executor.dispatch(order(), KEY, DEADLINE_S).status


def test_an_answer_may_name_the_key_in_a_header(tmp_path: Path) -> None:
    where = ("reply: {key: key,", "reply: {key_header: X-Key,")
    for header, status in ((f"X-Key: {KEY}", "settled"), ("X-Key: other", "unknown"), ("X-No: 1", "unknown")):
        reply = http("201 Created", json.dumps(GOOD | {"key": "of something else"}).encode(), header)
        with answering(reply) as url, connected(tmp_path, url, where) as executor:
            assert status == executor.dispatch(order(), KEY, DEADLINE_S).status


def test_who_cannot_be_reached_was_certainly_sent_nothing_but_a_look_up_that_fails_tells_nothing(
    tmp_path: Path,
) -> None:
    with connected(tmp_path, f"http://127.0.0.1:{free_port()}") as executor:
        found = executor.dispatch(order(), KEY, DEADLINE_S)
        assert Receipt("unsent", detail="nothing was sent: ConnectError: All connection attempts failed") == found
        assert {"unknown"} == {executor.lookup(KEY, DEADLINE_S).status, executor.void(KEY, DEADLINE_S).status}


def test_a_value_of_another_type_fits_no_rule(tmp_path: Path) -> None:
    rule = (f"settled: [{{status: [201], {WHERE}}}]", "settled: [{status: [201], where: {ok: true}}]")
    for ok, status in ((True, "settled"), (1, "unknown")):
        reply = http("201 Created", json.dumps(GOOD | {"ok": ok}).encode())
        with answering(reply) as url, connected(tmp_path, url, rule) as executor:
            assert status == executor.dispatch(order(), KEY, DEADLINE_S).status


@pytest.mark.parametrize(
    ("amount", "status"),
    [
        ("1.2", "settled"),
        ("1.20", "settled"),
        ("12E-1", "settled"),
        ("1.2000000000000000000000000001", "unknown"),  # as a float it is 1.2
        ("1.21", "unknown"),
        ("120", "unknown"),
        ('"1.20"', "unknown"),
        ("true", "unknown"),
        ("1e99999999999999999999", "unknown"),
        ("1e-99999999999999999999", "unknown"),
    ],
)
def test_a_number_with_decimals_is_compared_exactly(tmp_path: Path, amount: str, status: str) -> None:
    rule = (
        f"settled: [{{status: [201], {WHERE}}}]",
        'settled: [{status: [201], where: {amount: "{params.amount:2n}"}}]',
    )
    reply = http("201 Created", f'{{"key": "{KEY}", "id": "p-1", "amount": {amount}}}'.encode())
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
    monkeypatch.setattr(executor._client._exchange, "_clock", lambda: next(times, 1e9))
    found = executor.dispatch(order(), KEY, DEADLINE_S)
    assert Receipt("unsent", detail="nothing was sent: the deadline has passed") == found
    assert 0 == gateway.books.totals()["settled"]


def test_a_gateway_that_does_not_answer_is_not_waited_for(executor: HttpExecutor, gateway: GatewayServer) -> None:
    with held(gateway):
        tries = (executor.dispatch(order(), KEY, 0.2) for _ in range(100))
        found = next(each for each in tries if each.status != "unsent")  # a busy machine may send nothing in time
        assert ("unknown", "no whole answer from the gateway") == (found.status, found.detail[:32])
        assert gateway.is_at_work(KEY)


def test_who_closes_it_waits_for_no_gateway_and_an_order_under_way_is_unknown(
    executor: HttpExecutor, gateway: GatewayServer
) -> None:
    with ThreadPoolExecutor(1) as pool, held(gateway):
        sent = pool.submit(executor.dispatch, order(), KEY, 60.0)
        while not gateway.is_at_work(KEY):
            time.sleep(0.01)
        executor.close()
        assert Receipt("unknown", detail=CLOSED) == sent.result(20)
        assert gateway.is_at_work(KEY)


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
