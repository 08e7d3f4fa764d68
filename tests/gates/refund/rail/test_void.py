"""Making a key void at the rail: from then on it never pays, and what it did before stays told."""

from __future__ import annotations

import sqlite3
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sds.gates.refund.rail.client import RailProcess
from sds.gates.refund.rail.store import Order, PayoutStore
from sds.kernel.executor.protocol import Receipt
from tests.gates.refund.rail.orders import SOON_S, key_of, pay, post, wait_until_at_work
from tests.gates.refund.rail.payouts import payouts

VOID = Receipt("rejected", detail="the key was made void")


class Breaking(sqlite3.Connection):
    """A connection whose commits fail while it is told so, as on a full disk."""

    broken = False

    def execute(self, sql: str, values: object = (), /) -> sqlite3.Cursor:
        if sql == "COMMIT" and self.broken:
            raise sqlite3.OperationalError("disk I/O error")
        return super().execute(sql, values)  # type: ignore[arg-type]  # passed on as it came


@pytest.fixture
def breaking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[PayoutStore, Breaking]:
    made: list[Breaking] = []
    real = sqlite3.connect

    def connect(path: Path, **options: Any) -> sqlite3.Connection:
        made.append(real(path, **options, factory=Breaking))
        return made[0]

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", connect)
        return PayoutStore(tmp_path / "rail.db", lambda: 0), made[0]


def order(name: str) -> Order:
    return Order(key_of(name), "VOUCHER", 500, f"TKT-{name}", name)


def test_a_void_key_never_pays(rail: RailProcess) -> None:
    assert VOID == rail.executor().void(key_of("void"), SOON_S)
    assert VOID == pay(rail.executor(), "void")
    assert VOID == rail.executor().lookup(key_of("void"), SOON_S) == rail.executor().void(key_of("void"), SOON_S)
    assert 0 == payouts(rail, "TKT-void")["settled"]


def test_a_key_that_has_paid_stays_settled(rail: RailProcess) -> None:
    paid = pay(rail.executor(), "before")

    assert "settled" == paid.status
    assert paid == rail.executor().void(key_of("before"), SOON_S) == pay(rail.executor(), "before")


def test_a_key_that_was_declined_stays_declined(rail: RailProcess) -> None:
    rail.misbehave(refuse=1.0)
    declined = pay(rail.executor(), "no")

    assert declined == rail.executor().void(key_of("no"), SOON_S)


def test_a_payment_being_made_is_unknown_and_then_settled(rail: RailProcess) -> None:
    rail.misbehave(delay_ms=1_000)
    with ThreadPoolExecutor(1) as pool:
        paying = pool.submit(pay, rail.executor(), "flight")
        wait_until_at_work(rail.executor(), "flight")
        during = rail.executor().void(key_of("flight"), SOON_S)
        paid = paying.result()

    assert Receipt("unknown", detail="the rail is still at work") == during
    assert paid == rail.executor().void(key_of("flight"), SOON_S)
    assert "settled" == paid.status


def test_sixteen_threads_that_pay_and_void_one_key_agree_in_the_end(rail: RailProcess) -> None:
    outcomes: Counter[str] = Counter()
    with ThreadPoolExecutor(16) as pool:
        for turn in range(20):
            name = f"race-{turn}"

            def once(n: int, name: str = name) -> str:
                executor = rail.executor()
                return (pay(executor, name) if n % 2 else executor.void(key_of(name), SOON_S)).status

            seen = set(pool.map(once, range(16))) - {"unknown"}
            end = rail.executor().void(key_of(name), SOON_S).status
            assert {end} == seen
            assert (end == "settled") == payouts(rail, f"TKT-{name}")["settled"]
            outcomes[end] += 1

    assert 20 == outcomes["settled"] + outcomes["rejected"]


def test_a_void_outlives_a_kill(tmp_path: Path) -> None:
    rail = RailProcess(tmp_path / "rail.db")
    rail.start()
    voided = rail.executor().void(key_of("kept"), SOON_S)
    rail.kill()
    dead = rail.executor().void(key_of("kept"), SOON_S)
    rail.start()
    after = pay(rail.executor(), "kept")
    rail.stop()

    assert (VOID, "unknown", VOID) == (voided, dead.status, after)


def test_a_rail_file_from_before_voids_existed_can_be_used(tmp_path: Path) -> None:
    PayoutStore(tmp_path / "rail.db", lambda: 0).pay(order("old"))
    with closing(sqlite3.connect(tmp_path / "rail.db")) as db:
        db.execute("DROP TABLE voided")
    store = PayoutStore(tmp_path / "rail.db", lambda: 0)

    assert ("settled", "rejected") == (store.void(key_of("old")).status, store.void(key_of("new")).status)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"key":7}', b'{"key":"short"}', b'{"key":null,"more":1}'])
def test_a_malformed_void_is_refused(rail: RailProcess, body: bytes) -> None:
    assert 400 == post(rail.port, "/void", body)


def test_a_refused_void_is_unknown_because_nothing_was_made_void(rail: RailProcess) -> None:
    assert "unknown" == rail.executor().void("not a key", SOON_S).status
    assert "unknown" == rail.executor().void(key_of("late"), -1.0).status
    assert "absent" == rail.executor().lookup(key_of("late"), SOON_S).status


def test_a_commit_that_fails_leaves_nothing_and_the_next_order_works(
    breaking: tuple[PayoutStore, Breaking],
) -> None:
    store, connection = breaking
    for act in (lambda: store.pay(order("disk")), lambda: store.void(key_of("disk"))):
        connection.broken = True
        with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
            act()
        connection.broken = False
        assert "absent" == store.find(key_of("disk")).status

    assert "settled" == store.pay(order("disk")).status == store.find(key_of("disk")).status
    assert ["settled"] == [line.status for line in store.statement(0, 1 << 53, 0)]
