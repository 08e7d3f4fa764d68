"""The state source: what it tells of a payment, and how its version moves with the bank and with the holds."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from sds.gates.fraud.holds import CHALLENGE, MINUTE_MS, HoldOrder, Holds, holds_path
from sds.gates.fraud.source import PaymentSource
from sds.gates.fraud.world.bank import bank_path, compromise_account
from sds.kernel.envelope.state import StateRead
from sds.kernel.errors import StateError
from tests.gates.fraud.one_payment import ORDINARY, PAYMENT, Clock, one_payment

HOLD = HoldOrder("a" * 64, "flow-1", CHALLENGE, PAYMENT, 10)


def read(source: PaymentSource) -> StateRead:
    found = source.read(PAYMENT)
    assert found is not None
    return found


def change(folder: Path, sql: str) -> None:
    with closing(sqlite3.connect(bank_path(folder), timeout=5)) as db, db:
        db.execute(sql)


def test_every_field_is_read_in_its_type(tmp_path: Path) -> None:
    found = read(one_payment(tmp_path))
    assert {**ORDINARY, "payment.open_minor": 2_500, "payment.held": False} == dict(found.fields)
    assert {bool} == {type(found.fields[name]) for name in ("payment.online", "payment.held")}


@pytest.mark.parametrize("key", ["PAY-3", "", "PAY-1\x00", "\ud800", "' OR 1=1 --", "P" * 10_000, "pay-1"])
def test_an_unknown_payment_is_none(tmp_path: Path, key: str) -> None:
    assert one_payment(tmp_path).read(key) is None


@pytest.mark.parametrize("name", ["bank.db", "holds.db"])
def test_a_missing_or_damaged_file_is_one_line(tmp_path: Path, name: str) -> None:
    source = one_payment(tmp_path)
    read(source)
    for path in tmp_path.glob(f"{name}*"):
        path.unlink()
    with pytest.raises(StateError, match=rf"^the payments in `.*{name}` cannot be read: no such file"):
        source.read(PAYMENT)
    (tmp_path / name).write_bytes(b"not a database at all, whatever its name says" * 100)
    with pytest.raises(StateError, match="file is not a database"):
        source.read(PAYMENT)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE payments SET account_status = 'closed'",
        "UPDATE payments SET account_limit_minor = 1, version = 1",
        "UPDATE payments SET customer_count_1d = 3, version = version",
    ],
)
def test_any_change_at_the_bank_is_another_version(tmp_path: Path, sql: str) -> None:
    source = one_payment(tmp_path)
    versions = [read(source).version]
    for _ in range(2):
        change(tmp_path, sql)
        versions.append(read(source).version)
    assert 3 == len(set(versions))


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM payments",
        "INSERT OR REPLACE INTO payments SELECT * FROM payments",
        "UPDATE payments SET payment_id = 'PAY-9' WHERE payment_id = 'PAY-1'",
        "UPDATE payments SET account_status = 'frozen'",
        "UPDATE payments SET payment_amount_minor = -1",
        "UPDATE payments SET payment_amount_minor = 'much'",
    ],
)
def test_a_version_never_comes_back_with_other_contents(tmp_path: Path, sql: str) -> None:
    source = one_payment(tmp_path)
    before = read(source)
    with pytest.raises(sqlite3.IntegrityError):
        change(tmp_path, sql)
    assert before == read(source)


def test_a_hold_is_seen_until_it_runs_out_and_each_is_another_version(tmp_path: Path) -> None:
    clock = Clock()
    source, holds = one_payment(tmp_path, clock), Holds(holds_path(tmp_path), clock)
    states = [read(source)]
    holds.order(HOLD, lambda: "")
    states.append(read(source))
    clock.ms += 10 * MINUTE_MS - 1
    assert states[-1] == read(source)
    clock.ms += 1
    states.append(read(source))
    assert [False, True, False] == [state.fields["payment.held"] for state in states]
    assert 3 == len({state.version for state in states})


@pytest.mark.parametrize("end", ["release", "refuse"])
def test_a_payment_that_was_confirmed_or_refused_is_open_no_more(tmp_path: Path, end: str) -> None:
    source, holds = one_payment(tmp_path), Holds(holds_path(tmp_path), Clock())
    holds.order(HOLD, lambda: "")
    held = read(source)
    assert getattr(holds, end)(HOLD.key)
    ended = read(source)
    assert (0, False) == (ended.fields["payment.open_minor"], ended.fields["payment.held"])
    assert held.version != ended.version


def test_a_hold_of_one_payment_is_none_of_another(tmp_path: Path) -> None:
    source, holds = one_payment(tmp_path), Holds(holds_path(tmp_path), Clock())
    before = source.read("PAY-2")
    holds.order(HOLD, lambda: "")
    assert before == source.read("PAY-2")


def test_many_threads_read_one_state_for_a_version_while_it_moves(tmp_path: Path) -> None:
    source = one_payment(tmp_path)

    def limit(turn: int) -> tuple[str, object]:
        if turn % 40 == 0:
            change(tmp_path, f"UPDATE payments SET account_limit_minor = {turn + 1}")
        found = read(source)
        return found.version, found.fields["account.limit_minor"]

    with ThreadPoolExecutor(8) as pool:
        seen = set(pool.map(limit, range(400)))
    assert len(seen) == len({version for version, _ in seen})
    source.close()


def test_reading_never_writes(tmp_path: Path) -> None:
    source = one_payment(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.db")}
    read(source)
    assert before == {path.name: path.read_bytes() for path in tmp_path.glob("*.db")}


def test_a_compromised_account_is_so_for_every_payment_of_it_and_once(tmp_path: Path) -> None:
    source = one_payment(tmp_path)
    assert compromise_account(bank_path(tmp_path), "PAY-2")
    assert "compromised" == read(source).fields["account.status"]
    assert not compromise_account(bank_path(tmp_path), PAYMENT)
    assert not compromise_account(bank_path(tmp_path), "PAY-9")


def test_compromising_in_a_missing_file_makes_none(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot be changed"):
        compromise_account(bank_path(tmp_path), PAYMENT)
    assert [] == list(tmp_path.iterdir())
