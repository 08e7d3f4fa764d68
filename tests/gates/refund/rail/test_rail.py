"""The payment rail, a real process over real sockets: it pays once for a key, and its client never guesses."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from sds.gates.refund.rail.client import RailProcess
from sds.gates.refund.rail.server import BODY_BYTES_MAX
from sds.kernel.errors import ExecutorError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from tests.gates.refund.rail.orders import SOON_S, elsewhere, intent_for, key_of, pay, post, raw, wait_until_at_work
from tests.gates.refund.rail.payouts import payouts


def order(name: str, **changes: object) -> dict[str, object]:
    whole = {"key": key_of(name), "kind": "VOUCHER", "amount_minor": 500, "ticket_id": f"TKT-{name}", "dfid": name}
    return {**whole, **changes}


class TestIdempotency:
    def test_a_payment_settles_and_is_found_by_its_key(self, rail: RailProcess) -> None:
        receipt = pay(rail.executor(), "once")

        assert "settled" == receipt.status
        assert receipt.reference.startswith("PAY-")
        assert receipt == rail.executor().lookup(key_of("once"), SOON_S)

    def test_sixteen_threads_with_one_key_pay_once(self, rail: RailProcess) -> None:
        with ThreadPoolExecutor(16) as pool:
            receipts = set(pool.map(lambda _: pay(rail.executor(), "crowd"), range(64)))

        assert 1 == len(receipts)
        assert {"settled": 1, "paid_minor": 25_000} == {
            name: payouts(rail, "TKT-crowd")[name] for name in ("settled", "paid_minor")
        }

    def test_many_keys_at_once_are_each_paid_once(self, rail: RailProcess) -> None:
        before = payouts(rail)["settled"]
        with ThreadPoolExecutor(16) as pool:
            receipts = list(pool.map(lambda n: pay(rail.executor(), f"many-{n % 40}"), range(160)))

        assert {"settled"} == {r.status for r in receipts}
        assert 40 == len({r.reference for r in receipts}) == payouts(rail)["settled"] - before

    @pytest.mark.parametrize("changed", ["amount", "kind", "ticket", "dfid"])
    def test_a_key_with_another_order_is_rejected_and_pays_nothing(self, rail: RailProcess, changed: str) -> None:
        name = f"conflict-{changed}"
        pay(rail.executor(), name)
        intent = {
            "amount": intent_for(name, 1),
            "kind": intent_for(name, kind="VOUCHER"),
            "ticket": ExecutionIntent(f"dfid-{name}", "", "COMPENSATE", (("amount", 25_000),), "TKT-other", "1"),
            "dfid": ExecutionIntent("dfid-other", "", "COMPENSATE", (("amount", 25_000),), f"TKT-{name}", "1"),
        }[changed]
        receipt = rail.executor().dispatch(intent, key_of(name), SOON_S)

        assert Receipt("rejected", detail="the key belongs to another order") == receipt
        assert 25_000 == payouts(rail, f"TKT-{name}")["paid_minor"]

    def test_an_unused_key_is_absent(self, rail: RailProcess) -> None:
        assert Receipt("absent") == rail.executor().lookup(key_of("never"), SOON_S)

    def test_the_summary_sees_a_flow_paid_twice_under_two_keys(self, tmp_path: Path) -> None:
        with RailProcess(tmp_path / "rail.db") as rail:
            for key in ("one", "two"):
                rail.executor().dispatch(intent_for("same"), key_of(key), SOON_S)

            assert (1, 1) == tuple(payouts(rail)[n] for n in ("dfids_paid_twice", "tickets_paid_twice_in_kind"))
            assert {"COMPENSATE": {"settled": 2, "paid_minor": 50_000}} == payouts(rail)["by_kind"]


class TestFaults:
    @pytest.mark.parametrize("fault", ["lose", "cut"])
    def test_a_lost_reply_is_unknown_and_then_found_settled(self, rail: RailProcess, fault: str) -> None:
        rail.misbehave(**{f"{fault}_replies": 1.0})
        lost = pay(rail.executor(), fault)

        assert "unknown" == lost.status
        assert "settled" == rail.executor().lookup(key_of(fault), SOON_S).status
        rail.misbehave()
        assert "settled" == pay(rail.executor(), fault).status
        assert 1 == payouts(rail, f"TKT-{fault}")["settled"]

    @pytest.mark.parametrize("fault", ["drop", "down"])
    def test_a_dropped_order_is_unknown_and_then_absent(self, rail: RailProcess, fault: str) -> None:
        rail.misbehave(**{fault: 1.0})

        assert "unknown" == pay(rail.executor(), fault).status
        assert "absent" == rail.executor().lookup(key_of(fault), SOON_S).status

    def test_a_declined_payment_is_rejected_for_good(self, rail: RailProcess) -> None:
        rail.misbehave(refuse=1.0)
        declined = pay(rail.executor(), "declined")
        rail.misbehave()

        assert Receipt("rejected", detail="the rail declined the payment") == declined
        assert declined == pay(rail.executor(), "declined")
        assert declined == rail.executor().lookup(key_of("declined"), SOON_S)
        assert 0 == payouts(rail, "TKT-declined")["paid_minor"]

    def test_a_delay_past_the_deadline_is_unknown_and_never_absent(self, rail: RailProcess) -> None:
        rail.misbehave(delay_ms=1_200)
        late = pay(rail.executor(), "late", deadline_s=0.6)
        ends = time.monotonic() + SOON_S
        seen = [rail.executor().lookup(key_of("late"), SOON_S).status]
        while "settled" not in seen and time.monotonic() < ends:
            seen.append(rail.executor().lookup(key_of("late"), SOON_S).status)

        assert ("unknown", "unknown") == (late.status, seen[0])  # it was not waited for
        assert ["unknown", "settled"] == list(dict.fromkeys(seen))

    def test_an_order_that_was_not_read_yet_is_not_absent(self, rail: RailProcess) -> None:
        body = json.dumps(order("unread")).encode()
        head = f"POST /pay HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", rail.port), timeout=SOON_S) as connection:
            connection.sendall(head.encode() + body[:-1])
            before = rail.executor().lookup(key_of("unread"), SOON_S)
            connection.sendall(body[-1:])
            connection.recv(4096)

        assert "unknown" == before.status
        assert "settled" == rail.executor().lookup(key_of("unread"), SOON_S).status

    def test_faults_are_drawn_from_their_seed(self, rail: RailProcess) -> None:
        def run(prefix: str, seed: int) -> list[str]:
            rail.misbehave(lose_replies=0.3, refuse=0.3, drop=0.3, seed=seed)
            return [pay(rail.executor(), f"{prefix}-{n}").status for n in range(40)]

        first, second, other = run("a", 5), run("b", 5), run("c", 6)
        assert first == second != other
        assert {"settled", "rejected", "unknown"} == set(first)

    def test_whatever_the_rail_does_nothing_is_paid_twice(self, rail: RailProcess) -> None:
        rail.misbehave(lose_replies=0.3, drop=0.3, refuse=0.1, delay_ms=2, seed=1)

        def until_known(n: int) -> str:
            while (receipt := pay(rail.executor(), f"storm-{n}")).status == "unknown":
                if (found := rail.executor().lookup(key_of(f"storm-{n}"), SOON_S)).status != "absent":
                    return found.status
            return receipt.status

        with ThreadPoolExecutor(8) as pool:
            statuses = Counter(pool.map(until_known, range(80)))
        paid = sum(payouts(rail, f"TKT-storm-{n}")["settled"] for n in range(80))

        assert {"settled", "rejected"} == set(statuses)
        assert statuses["settled"] == paid
        assert 0 == payouts(rail)["dfids_paid_twice"]


class TestProcess:
    def test_what_was_paid_outlives_a_kill(self, tmp_path: Path) -> None:
        rail = RailProcess(tmp_path / "rail.db")
        rail.start()
        executor = rail.executor()
        paid = pay(executor, "kept")
        rail.kill()

        assert "unknown" == pay(executor, "kept").status == executor.lookup(key_of("kept"), SOON_S).status
        rail.start()
        assert paid == executor.lookup(key_of("kept"), SOON_S)
        assert "absent" == executor.lookup(key_of("new"), SOON_S).status
        rail.stop()

    def test_a_kill_in_the_middle_of_a_payment_is_unknown(self, tmp_path: Path) -> None:
        rail = RailProcess(tmp_path / "rail.db")
        rail.start()
        rail.misbehave(delay_ms=20_000)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(pay, rail.executor(), "middle")
            wait_until_at_work(rail.executor(), "middle")
            rail.kill()

            assert "unknown" == waiting.result().status

    def test_the_rail_ends_with_its_parent(self, tmp_path: Path) -> None:
        script = (
            "import sys, time; from pathlib import Path; from sds.gates.refund.rail.client import RailProcess\n"
            f"rail = RailProcess(Path({str(tmp_path / 'rail.db')!r})); rail.start(); print(rail.port, flush=True)\n"
            "time.sleep(60)"
        )
        parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert parent.stdout is not None
        port = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
        executor, ends = elsewhere(port), time.monotonic() + SOON_S
        while executor.lookup(key_of("x"), 0.5).status == "absent" and time.monotonic() < ends:
            time.sleep(0.02)

        assert "unknown" == executor.lookup(key_of("x"), 0.5).status

    def test_the_rail_listens_on_the_local_address_only(self, rail: RailProcess) -> None:
        with pytest.raises(OSError), socket.create_connection(("127.0.0.2", rail.port), timeout=1):
            pass

    def test_the_rails_file_is_strict_and_its_keys_are_unique(self, tmp_path: Path) -> None:
        with RailProcess(tmp_path / "rail.db") as rail:
            pay(rail.executor(), "kept")
            with closing(sqlite3.connect(tmp_path / "rail.db")) as db, pytest.raises(sqlite3.IntegrityError):
                db.execute(
                    "INSERT INTO payouts SELECT number + 1, key, kind, 1, ticket_id, dfid, status, 0 FROM payouts"
                )

    def test_a_rail_that_cannot_start_is_told_and_not_left_behind(self, tmp_path: Path) -> None:
        with pytest.raises(ExecutorError, match="the payment rail ended at its start"):
            RailProcess(tmp_path / "missing" / "rail.db").start()
        with pytest.raises(ExecutorError, match="the payment rail did not start in time"):
            RailProcess(tmp_path / "rail.db", ready_s=0).start()

    def test_controlling_a_dead_rail_is_an_error(self, tmp_path: Path) -> None:
        with RailProcess(tmp_path / "rail.db") as rail:
            rail.kill()
            with pytest.raises(ExecutorError, match="the payment rail does not answer"):
                rail.misbehave()


class TestMalformedInput:
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b"\xff\xfe",
            b"[" * 4000,
            json.dumps(order("bad", key="short")).encode(),
            json.dumps(order("bad", key=7)).encode(),
            json.dumps(order("bad", amount_minor=0)).encode(),
            json.dumps(order("bad", amount_minor=-5)).encode(),
            json.dumps(order("bad", amount_minor=True)).encode(),
            json.dumps(order("bad", amount_minor=1.0)).encode(),
            json.dumps(order("bad", amount_minor=float("nan"))).encode(),
            json.dumps(order("bad", amount_minor=10**30)).encode(),
            json.dumps(order("bad", amount_minor="5")).encode(),
            json.dumps(order("bad", ticket_id="a b")).encode(),
            json.dumps(order("bad", extra=1)).encode(),
            json.dumps({"key": key_of("bad")}).encode(),
        ],
    )
    def test_a_malformed_order_is_refused(self, rail: RailProcess, body: bytes) -> None:
        assert 400 == post(rail.port, "/pay", body)
        assert "absent" == rail.executor().lookup(key_of("bad"), SOON_S).status

    @pytest.mark.parametrize("body", [{"refuse": 2}, {"refuse": True}, {"delay_ms": -1}, {"seed": 0.5}, {"no": 1}, []])
    def test_malformed_faults_are_refused(self, rail: RailProcess, body: object) -> None:
        assert 400 == post(rail.port, "/faults", json.dumps(body).encode())

    def test_a_large_or_foreign_body_is_refused_unread(self, rail: RailProcess) -> None:
        good = json.dumps(order("size")).encode()

        assert 400 == post(rail.port, "/pay", b"", length=str(BODY_BYTES_MAX + 1))
        assert 400 == post(rail.port, "/pay", b"", length="9" * 5000)
        assert 400 == post(rail.port, "/pay", good, length="000000009999999")
        assert 400 == post(rail.port, "/pay", good, length="-1")
        assert 400 == post(rail.port, "/pay", good, kind="text/plain")
        assert 400 == post(rail.port, "/other", good)
        assert 200 == post(rail.port, "/pay", good)

    @pytest.mark.parametrize(
        "data", [b"", b"\r\n", b"nonsense\r\n\r\n", b"GET /pay/short HTTP/1.0\r\n\r\n", b"\x00" * 99]
    )
    def test_nonsense_leaves_the_rail_at_work(self, rail: RailProcess, data: bytes) -> None:
        raw(rail.port, data)

        assert "absent" == rail.executor().lookup(key_of("never"), SOON_S).status
