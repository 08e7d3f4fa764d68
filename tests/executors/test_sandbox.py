"""The sandbox gateway: what it does, and each way in which it misbehaves. Storms count by it what was paid twice."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict
from itertools import count
from pathlib import Path

import httpx2
import pytest

from sds.executors.sandbox.books import Books
from sds.executors.sandbox.faults import GatewayFaults, fate, parse_faults, read_faults
from sds.kernel.errors import UsageError
from tests.executors.gateways import asked, held, in_process, in_thread

ORDER = {"amount": 120, "account": "A-1"}


def test_the_same_key_is_paid_once_and_its_answer_is_repeated(tmp_path: Path) -> None:
    with in_thread(tmp_path) as gateway:
        first = asked(gateway.url, "POST", "/payments", ORDER, "k-1")
        with httpx2.Client(trust_env=False) as client:
            again = client.post(f"{gateway.url}/payments", json=ORDER, headers={"Idempotency-Key": "k-1"})
        assert (
            (201, {"key": "k-1", "status": "settled", "id": "pay_00000001", "amount": 120})
            == first
            == (again.status_code, again.json())
        )
        assert "true" == again.headers["Idempotent-Replayed"]
        assert 422 == asked(gateway.url, "POST", "/payments", {"amount": 121}, "k-1")[0]
        assert (120, []) == _paid(gateway.url)


@pytest.mark.parametrize("length", ["65537", "1" * 10, "0" * 9 + "1" * 10, "0" * 9 + "70000"])
def test_a_body_that_says_to_be_too_long_is_not_waited_for(length: str, tmp_path: Path) -> None:
    asking = f"POST /payments HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\nContent-Length: {length}\r\n\r\n"
    with in_thread(tmp_path) as gateway, socket.create_connection(("127.0.0.1", gateway.server_port), 5) as connection:
        connection.sendall(asking.encode())
        assert connection.recv(1_024).startswith(b"HTTP/1.1 400 ")


def test_a_void_key_is_never_paid_and_a_paid_one_not_voided(tmp_path: Path) -> None:
    with in_thread(tmp_path) as gateway:
        assert (404, "absent") == _status(asked(gateway.url, "GET", "/payments/k-1"))
        assert (200, "rejected") == _status(asked(gateway.url, "POST", "/payments/k-1/void"))
        assert (402, "rejected") == _status(asked(gateway.url, "POST", "/payments", ORDER, "k-1"))
        asked(gateway.url, "POST", "/payments", ORDER, "k-2")
        assert (200, "settled") == _status(asked(gateway.url, "POST", "/payments/k-2/void"))
        assert (120, []) == _paid(gateway.url)


def test_what_it_has_forgotten_it_calls_absent_and_pays_again(tmp_path: Path) -> None:
    with in_thread(tmp_path, "forget-keys-ms=50") as gateway:
        asked(gateway.url, "POST", "/payments", ORDER, "k-1")
        time.sleep(0.06)
        assert (404, "absent") == _status(asked(gateway.url, "GET", "/payments/k-1"))
        asked(gateway.url, "POST", "/payments", ORDER, "k-1")
        assert (240, ["k-1"]) == _paid(gateway.url)


@pytest.mark.parametrize(("fault", "paid"), [("lose-replies=1", 120), ("cut-replies=1", 120), ("drop=1", 0)])
def test_replies_are_lost_before_or_after_the_work(fault: str, paid: int, tmp_path: Path) -> None:
    with in_thread(tmp_path, fault) as gateway:
        with pytest.raises(httpx2.RemoteProtocolError):
            asked(gateway.url, "POST", "/payments", ORDER, "k-1")
        assert (paid, []) == _paid(gateway.url)


def test_a_reply_that_comes_twice_meets_the_next_question(tmp_path: Path) -> None:
    with (
        in_thread(tmp_path, "answer-twice=1") as gateway,
        httpx2.Client(base_url=gateway.url, trust_env=False) as client,
    ):
        client.post("/payments", json=ORDER, headers={"Idempotency-Key": "k-1"})
        assert "k-1" == client.get("/payments/k-2").json()["key"]


def test_of_one_key_at_once_one_is_at_work_and_the_others_are_told(tmp_path: Path) -> None:
    with in_thread(tmp_path) as gateway, ThreadPoolExecutor(3) as pool:
        with held(gateway):
            sent = [pool.submit(asked, gateway.url, "POST", "/payments", ORDER, "k-1") for _ in range(3)]
            told = as_completed(sent, 20)
            assert [409, 409] == [next(told).result()[0] for _ in range(2)]
            assert "pending" == asked(gateway.url, "GET", "/payments/k-1")[1]["status"]
        assert 201 == next(told).result()[0]


def test_declined_down_and_failing(tmp_path: Path) -> None:
    with in_thread(tmp_path) as gateway:
        for faults, code in (({"refuse": 1}, 402), ({"down": 1}, 503), ({"fail": 1}, 500)):
            asked(gateway.url, "POST", "/faults", faults)
            assert code == asked(gateway.url, "POST", "/payments", ORDER, f"k-{code}")[0]
        assert 400 == asked(gateway.url, "POST", "/faults", {"fial": 1})[0]


def test_an_order_is_only_accepted_for_a_while_and_then_has_its_end(tmp_path: Path) -> None:
    with in_thread(tmp_path, "accept-ms=60000") as gateway:
        first = asked(gateway.url, "POST", "/payments", ORDER, "k-1")
        assert (202, "accepted", "pay_00000001") == (first[0], first[1]["status"], first[1]["id"])
        assert "accepted" == asked(gateway.url, "GET", "/payments/k-1")[1]["status"]
        assert "accepted" == asked(gateway.url, "POST", "/payments/k-1/void", {})[1]["status"]
        (line,) = asked(gateway.url, "GET", "/statement?since=0&until=99999999999999")[1]["lines"]
        assert "accepted" == line["status"]
        asked(gateway.url, "POST", "/faults", {})
        assert "settled" == asked(gateway.url, "GET", "/payments/k-1")[1]["status"]


def test_an_order_is_settled_also_while_the_clock_is_behind_it(tmp_path: Path) -> None:
    ticks = count(10, -1)
    with closing(Books(tmp_path / "gateway.db", lambda: next(ticks))) as books:
        assert "settled" == books.pay("k-1", ORDER).status == books.find("k-1").status


def test_the_statement_comes_in_pages(tmp_path: Path) -> None:
    with in_thread(tmp_path) as gateway:
        for number in range(101):
            gateway.books.pay(f"k-{number}", ORDER)
        first = asked(gateway.url, "GET", "/statement?since=0&until=99999999999999")[1]
        rest = asked(gateway.url, "GET", f"/statement?since=0&until=99999999999999&after={first['next']}")[1]
        assert (100, 1, "k-100") == (len(first["lines"]), len(rest["lines"]), rest["lines"][0]["key"])


def test_without_its_token_it_answers_nothing(tmp_path: Path) -> None:
    with in_thread(tmp_path, token="tok") as gateway:  # noqa: S106  of a sandbox
        assert 401 == asked(gateway.url, "POST", "/payments", ORDER, "k-1")[0]


def test_the_same_seed_gives_each_key_the_same_fate() -> None:
    faults = parse_faults("lose-replies=0.5,delay-ms=7,seed=3")
    assert GatewayFaults(lose_replies=0.5, delay_ms=7, seed=3) == faults
    assert faults == read_faults(asdict(faults))  # as the gateway shows them
    drawn = [fate(faults, f"k-{number}", 1).lose for number in range(200)]
    assert drawn == [fate(faults, f"k-{number}", 1).lose for number in range(200)]
    assert 60 < sum(drawn) < 140


@pytest.mark.parametrize("text", ["lose", "lose-replies=2", "delay-ms=x", "down=nan", "seed=1,seed=2", "fial=1"])
def test_faults_that_are_none_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_faults(text)
    assert "\n" not in str(caught.value)


def test_the_command_keeps_its_books_and_says_what_it_paid(tmp_path: Path) -> None:
    """What was paid stays in the file: a gateway that was killed goes on with it."""
    with in_process(tmp_path) as url:
        assert 201 == asked(url, "POST", "/payments", ORDER, "k-1")[0]
    with in_thread(tmp_path) as again:
        assert (201, "settled") == _status(asked(again.url, "POST", "/payments", ORDER, "k-1"))
        assert (120, []) == _paid(again.url)


def _status(answer: tuple[int, dict[str, object]]) -> tuple[int, object]:
    return answer[0], answer[1]["status"]


def _paid(url: str) -> tuple[int, list[str]]:
    totals = asked(url, "GET", "/payments")[1]
    return totals["total"], totals["paid_twice"]
