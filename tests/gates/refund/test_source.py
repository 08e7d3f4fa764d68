"""The airline's database: what the source tells of it, how its versions move, and how drift moves a ticket."""

from __future__ import annotations

import random
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from sds.gates.refund.source import TicketSource
from sds.gates.refund.world.airline import move_ticket, write_airline
from sds.gates.refund.world.flights import Flight
from sds.gates.refund.world.tickets import AS_OF_AT, Ticket, World
from sds.kernel.envelope.state import Value
from sds.kernel.errors import StateError

LATE = Flight("AA1-JFK-1", "AA", 1, "JFK", "MIA", 1_360_000_000, 190, 200, 1_752_576, "snow")


def one_ticket(path: Path, flight: Flight = LATE, **changes: object) -> TicketSource:
    ticket = replace(Ticket("TKT-1", flight.flight_id, "cust-1", 20_000), **changes)  # type: ignore[arg-type]
    write_airline(path / "airline.db", World((flight,), (ticket,), ()))
    return TicketSource(path / "airline.db")


def fields_of(source: TicketSource) -> dict[str, Value]:
    state = source.read("TKT-1")
    assert state is not None
    return dict(state.fields)


class TestSource:
    def test_every_field_is_told(self, tmp_path: Path) -> None:
        source = one_ticket(tmp_path, refunded_minor=5_000)

        assert {
            "flight.carrier": "AA",
            "flight.number": 1,
            "flight.origin": "JFK",
            "flight.dest": "MIA",
            "flight.cancelled": False,
            "flight.due": True,
            "flight.arr_delay_min": 200,
            "flight.dep_delay_min": 190,
            "flight.distance_m": 1_752_576,
            "flight.sched_dep_at": 1_360_000_000,
            "weather.condition": "snow",
            "ticket.customer": "cust-1",
            "ticket.fare_minor": 20_000,
            "ticket.refundable_minor": 15_000,
            "ticket.compensations_left": 1,
            "ticket.vouchers_left": 1,
        } == fields_of(source)

    def test_values_have_their_declared_types(self, tmp_path: Path) -> None:
        fields = fields_of(one_ticket(tmp_path))
        names = {kind: {n for n, value in fields.items() if type(value) is kind} for kind in (bool, str)}

        assert {"flight.cancelled", "flight.due"} == names[bool]
        assert {f"flight.{n}" for n in ("carrier", "origin", "dest")} < names[str]
        assert {"weather.condition", "ticket.customer"} < names[str]
        assert all(type(fields[name]) is int for name in fields.keys() - names[bool] - names[str])

    def test_a_cancelled_flight_has_no_delays(self, tmp_path: Path) -> None:
        fields = fields_of(one_ticket(tmp_path, replace(LATE, dep_delay_min=None, arr_delay_min=None)))

        assert (True, 0, 0) == tuple(fields[f"flight.{n}"] for n in ("cancelled", "arr_delay_min", "dep_delay_min"))

    def test_a_departed_flight_without_arrival_delay_lacks_the_field(self, tmp_path: Path) -> None:
        fields = fields_of(one_ticket(tmp_path, replace(LATE, arr_delay_min=None)))

        assert "flight.arr_delay_min" not in fields
        assert (False, 190) == (fields["flight.cancelled"], fields["flight.dep_delay_min"])

    @pytest.mark.parametrize("delay", [190, None])
    def test_nothing_is_told_of_a_flight_not_yet_due(self, tmp_path: Path, delay: int | None) -> None:
        future = replace(LATE, sched_dep_at=AS_OF_AT, dep_delay_min=delay, arr_delay_min=delay)
        fields = fields_of(one_ticket(tmp_path, future))

        assert (False, False, 0, 0, "unknown") == tuple(
            fields[name]
            for name in (
                "flight.due",
                "flight.cancelled",
                "flight.arr_delay_min",
                "flight.dep_delay_min",
                "weather.condition",
            )
        )

    def test_what_was_given_before_is_not_left(self, tmp_path: Path) -> None:
        fields = fields_of(one_ticket(tmp_path, refunded_minor=20_000, compensated=True, voucher_issued=True))

        assert (0, 0, 0) == tuple(
            fields[f"ticket.{name}"] for name in ("refundable_minor", "compensations_left", "vouchers_left")
        )

    @pytest.mark.parametrize("key", ["TKT-2", "", "TKT-1\x00", "\ud800", "' OR 1=1 --", "T" * 10_000])
    def test_an_unknown_ticket_is_none(self, tmp_path: Path, key: str) -> None:
        assert one_ticket(tmp_path).read(key) is None

    def test_a_missing_database_is_a_one_line_error(self, tmp_path: Path) -> None:
        with pytest.raises(StateError, match=r"^the tickets in `.*airline.db` cannot be read: no such file"):
            TicketSource(tmp_path / "airline.db").read("TKT-1")

    def test_a_damaged_database_is_a_one_line_error(self, tmp_path: Path) -> None:
        (tmp_path / "airline.db").write_bytes(b"not a database at all, whatever its name says" * 100)

        with pytest.raises(StateError, match=r"^the tickets in `.*airline.db` cannot be read: file is not a database$"):
            TicketSource(tmp_path / "airline.db").read("TKT-1")

    def test_a_database_that_was_removed_or_replaced_is_not_read_from_memory(self, tmp_path: Path) -> None:
        source = one_ticket(tmp_path)
        fields_of(source)
        (tmp_path / "airline.db").unlink()
        with pytest.raises(StateError):
            source.read("TKT-1")
        one_ticket(tmp_path, refunded_minor=19_999)

        assert 1 == fields_of(source)["ticket.refundable_minor"]

    def test_reading_never_writes(self, tmp_path: Path) -> None:
        source = one_ticket(tmp_path)
        with source._readers.connection() as db, pytest.raises(sqlite3.OperationalError, match="readonly"):
            db.execute("UPDATE tickets SET compensated = 1")

    def test_many_threads_read_while_the_ticket_moves(self, tmp_path: Path) -> None:
        source = one_ticket(tmp_path)

        def read(turn: int) -> tuple[int, Value]:
            if turn % 50 == 0:
                change(tmp_path, f"UPDATE tickets SET refunded_minor = {turn}")
            state = source.read("TKT-1")
            assert state is not None
            return int(state.version), state.fields["ticket.refundable_minor"]

        with ThreadPoolExecutor(8) as pool:
            seen = set(pool.map(read, range(400)))

        # One version never shows two different states.
        assert len(seen) == len({version for version, _ in seen})
        source.close()


def change(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path / "airline.db", timeout=5)) as db, db:
        db.execute(sql)


def version(source: TicketSource) -> int:
    return int(source.version("TKT-1") or 0)


class TestVersions:
    @pytest.mark.parametrize(
        "sql",
        [
            "UPDATE tickets SET refunded_minor = 1",
            "UPDATE tickets SET compensated = 1, version = version",
            "UPDATE tickets SET compensated = 1, version = 1",
            "UPDATE flights SET arr_delay_min = 10",
            "UPDATE flights SET weather = 'clear'",
        ],
    )
    def test_any_update_raises_the_version_by_one(self, tmp_path: Path, sql: str) -> None:
        source = one_ticket(tmp_path)
        before = version(source)
        change(tmp_path, sql)
        change(tmp_path, sql)

        assert before + 2 == version(source)

    @pytest.mark.parametrize(
        "sql",
        [
            "DELETE FROM tickets",
            "INSERT OR REPLACE INTO tickets SELECT * FROM tickets",
            "INSERT OR REPLACE INTO flights SELECT * FROM flights",
            "UPDATE tickets SET ticket_id = 'TKT-2'",
            "UPDATE tickets SET refunded_minor = fare_minor + 1",
            "UPDATE tickets SET refunded_minor = 'much'",
        ],
    )
    def test_a_version_never_comes_back_with_other_contents(self, tmp_path: Path, sql: str) -> None:
        source = one_ticket(tmp_path)
        before = source.read("TKT-1")
        with pytest.raises(sqlite3.IntegrityError):
            change(tmp_path, sql)

        assert before == source.read("TKT-1")

    def test_an_existing_database_is_not_overwritten(self, tmp_path: Path) -> None:
        one_ticket(tmp_path)
        with pytest.raises(StateError, match="already exists"):
            one_ticket(tmp_path)


class TestDrift:
    def test_each_move_changes_a_field_and_the_version(self, tmp_path: Path) -> None:
        source = one_ticket(tmp_path)
        rng = random.Random(11)
        moves: list[str] = []
        while True:
            before = source.read("TKT-1")
            text = move_ticket(tmp_path / "airline.db", "TKT-1", rng)
            after = source.read("TKT-1")
            assert before is not None
            assert after is not None
            assert text is not None
            assert before.fields != after.fields
            assert int(before.version) + 1 == int(after.version)
            moves.append(text.split()[0])
            if {"refunded_minor", "compensated", "voucher_issued", "arr_delay_min"} == set(moves):
                break

    def test_nothing_is_left_to_move_on_a_cancelled_ticket_given_everything(self, tmp_path: Path) -> None:
        cancelled = replace(LATE, dep_delay_min=None, arr_delay_min=None)
        one_ticket(tmp_path, cancelled, refunded_minor=20_000, compensated=True, voucher_issued=True)

        assert move_ticket(tmp_path / "airline.db", "TKT-1", random.Random(0)) is None

    def test_an_unknown_ticket_does_not_move(self, tmp_path: Path) -> None:
        one_ticket(tmp_path)

        assert move_ticket(tmp_path / "airline.db", "TKT-2", random.Random(0)) is None

    def test_moving_in_a_missing_database_makes_none(self, tmp_path: Path) -> None:
        with pytest.raises(StateError, match="cannot be changed"):
            move_ticket(tmp_path / "airline.db", "TKT-1", random.Random(0))

        assert [] == list(tmp_path.iterdir())
