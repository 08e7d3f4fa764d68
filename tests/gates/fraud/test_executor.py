"""The executor: one effect for a key, one release and one hold for a payment, whatever comes twice or stops half way."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sds.gates.fraud.executor import HoldExecutor
from sds.gates.fraud.holds import ALLOW, CHALLENGE, MINUTE_MS, holds_path
from sds.gates.fraud.world.bank import bank_path, compromise_account
from sds.kernel.errors import ExecutorError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from tests.gates.fraud.one_payment import NOW_MS, PAYMENT, Clock, one_payment

FOREVER_MS = 10**15


class World:
    """One payment, its executor and a clock."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.source = one_payment(folder, self.clock)
        self.executor = HoldExecutor(holds_path(folder), self.source.version, self.clock)

    def intent(
        self, key: str, kind: str = CHALLENGE, quantity: int = 10, version: str | None = None
    ) -> ExecutionIntent:
        name = "amount" if kind == ALLOW else "minutes"
        version = version or self.source.version(PAYMENT) or ""
        return ExecutionIntent(f"flow-{key}", key * 64, kind, ((name, quantity),), PAYMENT, version)

    def send(self, intent: ExecutionIntent) -> Receipt:
        return self.executor.dispatch(intent, intent.idempotency_key, 1.0)

    def listed(self) -> list[tuple[str, str, int | None, str]]:
        lines = self.executor.statement(0, FOREVER_MS)
        return [(line.key[:1], line.kind, line.amount_minor, line.outcome) for line in lines]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_same_order_again_is_answered_as_before_and_has_one_effect(world: World) -> None:
    order = world.intent("a")
    first = world.send(order)
    assert ("settled", "ORD-00000001") == (first.status, first.reference)
    assert first == world.send(order) == world.executor.lookup(order.idempotency_key, 1.0)
    assert [("a", CHALLENGE, None, "settled")] == world.listed()


def test_another_order_under_a_key_is_refused(world: World) -> None:
    world.send(world.intent("a"))
    assert Receipt("rejected", detail="the key belongs to another order; nothing was done") == world.send(
        world.intent("a", quantity=15)
    )
    assert 1 == len(world.listed())


def test_a_payment_passes_once(world: World) -> None:
    assert "settled" == world.send(world.intent("a", ALLOW, 2_500)).status
    assert Receipt("rejected", detail="the payment has passed or was refused; nothing was done") == world.send(
        world.intent("b", ALLOW, 2_500)
    )
    assert [("a", ALLOW, 2_500, "settled"), ("b", ALLOW, 2_500, "rejected")] == world.listed()


def test_a_payment_is_held_once_until_the_hold_runs_out(world: World) -> None:
    world.send(world.intent("a"))
    assert Receipt("rejected", detail="the payment is held; nothing was done") == world.send(world.intent("b"))
    assert "rejected" == world.send(world.intent("c", ALLOW, 2_500)).status
    world.clock.ms += 10 * MINUTE_MS
    assert "settled" == world.send(world.intent("d")).status


def test_many_threads_with_orders_of_their_own_hold_a_payment_once(world: World) -> None:
    orders = [world.intent(key) for key in "0123456789abcdef"]
    with ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(world.send, orders))
    assert 1 == sum(receipt.status == "settled" for receipt in receipts)


def test_a_payment_that_has_moved_is_left_alone(world: World, tmp_path: Path) -> None:
    order = world.intent("a", ALLOW, 2_500)
    compromise_account(bank_path(tmp_path), PAYMENT)
    refused = Receipt("rejected", detail="the payment has changed; nothing was done")
    assert [refused] * 2 == [world.send(order), world.executor.lookup(order.idempotency_key, 1.0)]


def test_a_payment_that_cannot_be_read_is_left_alone(world: World, tmp_path: Path) -> None:
    order = world.intent("a", ALLOW, 2_500)
    bank_path(tmp_path).unlink()
    refused = world.send(order)
    assert "rejected" == refused.status
    assert "cannot be read" in refused.detail


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (ALLOW, ()),
        (ALLOW, (("minutes", 5),)),
        (CHALLENGE, (("amount", 5),)),
        (CHALLENGE, (("minutes", 5), ("more", 1))),
        (CHALLENGE, (("minutes", 0),)),
        ("BLOCK", ()),
        ("BLOCK", (("amount", 5),)),
    ],
)
def test_an_order_of_another_form_is_refused_and_leaves_nothing(
    world: World, kind: str, params: tuple[tuple[str, int], ...]
) -> None:
    receipt = world.send(ExecutionIntent("flow", "a" * 64, kind, params, PAYMENT, "1.0.0"))
    assert "rejected" == receipt.status
    assert [] == world.listed()


def test_an_unknown_key_is_absent_and_a_voided_one_never_acts(world: World) -> None:
    order = world.intent("a")
    assert Receipt("absent") == world.executor.lookup(order.idempotency_key, 1.0)
    void = Receipt("rejected", detail="the key was made void; nothing was done")
    assert [void] * 4 == [
        world.executor.void(order.idempotency_key, 1.0),
        world.executor.void(order.idempotency_key, 1.0),
        world.send(order),
        world.executor.lookup(order.idempotency_key, 1.0),
    ]
    assert [] == world.listed()


def test_what_is_done_cannot_be_voided(world: World) -> None:
    order = world.intent("a")
    assert "settled" == world.send(order).status == world.executor.void(order.idempotency_key, 1.0).status


@pytest.mark.parametrize("end", ["release", "refuse"])
def test_a_hold_is_ended_once_by_its_key(world: World, end: str) -> None:
    holds = world.executor.holds
    order = world.intent("a")
    assert not getattr(holds, end)(order.idempotency_key)
    world.send(order)
    assert [True, False] == [getattr(holds, end)(order.idempotency_key) for _ in range(2)]
    assert "rejected" == world.send(world.intent("b", ALLOW, 2_500)).status


def test_a_hold_that_has_run_out_and_a_release_cannot_be_ended(world: World) -> None:
    hold, release = world.intent("a"), world.intent("b", ALLOW, 2_500)
    world.send(hold)
    world.clock.ms += 10 * MINUTE_MS
    assert not world.executor.holds.release(hold.idempotency_key)
    world.send(world.intent("b", ALLOW, 2_500))
    assert not world.executor.holds.refuse(release.idempotency_key)


def test_the_statement_lists_a_time_with_both_its_ends(world: World) -> None:
    world.send(world.intent("a"))
    counts = [
        len(list(world.executor.statement(since, until)))
        for since, until in ((NOW_MS, NOW_MS), (NOW_MS + 1, FOREVER_MS), (0, NOW_MS - 1))
    ]
    assert [1, 0, 0] == counts
    (line,) = world.executor.statement(0, FOREVER_MS)
    assert ("flow-a", {"minutes": 10}, PAYMENT, "ORD-00000001") == (
        line.dfid,
        dict(line.params),
        line.resource_key,
        line.reference,
    )


def test_a_statement_that_cannot_be_read_is_one_line(world: World, tmp_path: Path) -> None:
    for path in tmp_path.glob("holds.db*"):
        path.unlink()
    with pytest.raises(ExecutorError, match=r"^the holds cannot be read: no such table: orders$"):
        list(world.executor.statement(0, FOREVER_MS))


def test_an_order_that_stops_anywhere_is_done_whole_or_not_at_all(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail the first statement to the holds, the second, ... until none is left to fail; each time the order is sent again,
    and there is one hold.
    """
    found = []
    for failing in range(20):
        order = world.intent(f"{failing:x}"[-1])
        with monkeypatch.context() as patched:
            patched.setattr(sqlite3, "connect", _failing_at(failing, holds_path(tmp_path)))
            try:
                world.send(order)
                answered = True
            except sqlite3.OperationalError:
                answered = False
        found.append(world.executor.holds.find(order.idempotency_key).outcome)
        assert "settled" == world.send(order).status
        assert 1 == sum(line[0] == order.idempotency_key[0] for line in world.listed())
        world.clock.ms += 10 * MINUTE_MS
        if answered:
            break
    assert answered
    assert ["absent", "settled", "settled"] == found[-3:]  # before the commit, after it, and answered
    assert {"absent"} == set(found[:-2])


def _failing_at(failing: int, holds: Path) -> Callable[..., Any]:
    connect = sqlite3.connect

    def connected(path: object, **options: Any) -> object:
        db = connect(path, **options)  # type: ignore[arg-type]
        return _Failing(db, failing) if path == holds else db

    return connected


class _Failing:
    """A connection whose statement number `failing` is executed and then not answered."""

    def __init__(self, db: sqlite3.Connection, failing: int) -> None:
        self._db, self._left = db, failing

    def execute(self, sql: str, values: Any = ()) -> sqlite3.Cursor:
        done = self._db.execute(sql, values)
        self._left -= 1
        if self._left < 0:
            raise sqlite3.OperationalError("the machine stopped")
        return done

    def close(self) -> None:
        self._db.close()
