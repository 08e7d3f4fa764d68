"""The airline's database: the state that the kernel does not own, in one SQLite file.

Triggers in the file raise a ticket's version by one with any change of the ticket or of its flight, whoever writes.
Tickets are never deleted or replaced, so a version never comes back with other contents.
"""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from random import Random

from sds.gates.databases import changing, never_replaced, new_database, versioned

from .flights import CONDITIONS
from .tickets import AS_OF_AT, World, is_due


def airline_path(folder: Path) -> Path:
    """Return the path of the airline's database in the gate's folder."""
    return folder / "airline.db"


_SCHEMA = f"""
PRAGMA journal_mode = WAL;
CREATE TABLE about (one INTEGER PRIMARY KEY CHECK (one = 1), as_of_at INTEGER NOT NULL) STRICT;
CREATE TABLE flights (
    flight_id TEXT PRIMARY KEY,
    carrier TEXT NOT NULL,
    number INTEGER NOT NULL,
    origin TEXT NOT NULL,
    dest TEXT NOT NULL,
    sched_dep_at INTEGER NOT NULL,
    dep_delay_min INTEGER,
    arr_delay_min INTEGER CHECK (arr_delay_min IS NULL OR dep_delay_min IS NOT NULL),
    distance_m INTEGER NOT NULL CHECK (distance_m > 0),
    weather TEXT NOT NULL CHECK (weather IN ({", ".join(f"'{name}'" for name in CONDITIONS)})),
    due INTEGER NOT NULL CHECK (due IN (0, 1))
) STRICT, WITHOUT ROWID;
CREATE TABLE tickets (
    ticket_id TEXT PRIMARY KEY,
    flight_id TEXT NOT NULL REFERENCES flights,
    customer TEXT NOT NULL,
    fare_minor INTEGER NOT NULL CHECK (fare_minor > 0),
    refunded_minor INTEGER NOT NULL CHECK (refunded_minor BETWEEN 0 AND fare_minor),
    compensated INTEGER NOT NULL CHECK (compensated IN (0, 1)),
    voucher_issued INTEGER NOT NULL CHECK (voucher_issued IN (0, 1)),
    version INTEGER NOT NULL DEFAULT 1
) STRICT, WITHOUT ROWID;
CREATE INDEX tickets_by_flight ON tickets (flight_id);
{versioned("tickets", "ticket")}
CREATE TRIGGER flight_moves AFTER UPDATE ON flights BEGIN
    UPDATE tickets SET version = version + 1 WHERE flight_id IN (OLD.flight_id, NEW.flight_id);
END;
{never_replaced("flights", "flight")}"""


def write_airline(path: Path, world: World) -> None:
    """Write a world to a new file. Raises StateError when the file exists or cannot be written."""
    flights = [(*astuple(flight), is_due(flight)) for flight in world.flights]
    tickets = [astuple(ticket) for ticket in world.tickets]
    with new_database(path, _SCHEMA) as db:
        db.execute("INSERT INTO about VALUES (1, ?)", (AS_OF_AT,))
        db.executemany("INSERT INTO flights VALUES (?,?,?,?,?,?,?,?,?,?,?)", flights)
        db.executemany("INSERT INTO tickets VALUES (?,?,?,?,?,?,?,1)", tickets)


def move_ticket(path: Path, ticket_id: str, rng: Random) -> str | None:
    """Change something about a ticket that matters to its claim, as the airline's other clerks might.

    One of: more of the fare is refunded, the ticket is compensated, its voucher is issued, its recorded delay is
    corrected. Return one line that says what, or None when there is no such ticket or nothing left to change.
    """
    with changing(path) as db:
        db.execute("BEGIN IMMEDIATE")
        row = db.execute(_MOVABLE, (ticket_id,)).fetchone()
        moves = _moves(row, rng) if row else []
        if not moves:
            return None
        sql, value, text = rng.choice(moves)
        db.execute(sql, (value, ticket_id))
        return text


_MOVABLE = """
SELECT fare_minor, refunded_minor, compensated, voucher_issued,
       CASE WHEN due AND (SELECT count(*) FROM tickets WHERE flight_id = f.flight_id) = 1 THEN arr_delay_min END
FROM tickets JOIN flights AS f USING (flight_id) WHERE ticket_id = ?
"""
_TICKET = "UPDATE tickets SET {} = ? WHERE ticket_id = ?"
_FLIGHT = "UPDATE flights SET {} = ? WHERE flight_id = (SELECT flight_id FROM tickets WHERE ticket_id = ?)"
_Move = tuple[str, int, str]


def _moves(row: tuple[int, int, int, int, int | None], rng: Random) -> list[_Move]:
    fare, refunded, compensated, voucher_issued, arr_delay_min = row
    moves: list[_Move] = []
    if refunded < fare:
        more = rng.randint(refunded + 1, fare)
        moves.append((_TICKET.format("refunded_minor"), more, f"refunded_minor {refunded} -> {more}"))
    if not compensated:
        moves.append((_TICKET.format("compensated"), 1, "compensated no -> yes"))
    if not voucher_issued:
        moves.append((_TICKET.format("voucher_issued"), 1, "voucher_issued no -> yes"))
    if arr_delay_min is not None:
        corrected = rng.choice([minutes for minutes in (0, 45, 130, 260) if minutes != arr_delay_min])
        moves.append((_FLIGHT.format("arr_delay_min"), corrected, f"arr_delay_min {arr_delay_min} -> {corrected}"))
    return moves
