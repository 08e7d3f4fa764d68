"""A record with one of everything in it, and a stranger at its file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from sds.kernel import artifacts, audit, recovery, registry
from sds.kernel.clock import BACK_MS
from sds.kernel.human import HumanDesk, Resolution
from sds.kernel.ledger import Head
from tests.kernel.authority import halt, reactivate, suspend
from tests.kernel.durable import (
    LEASE_MS,
    World,
    compensate,
    contract,
    deny,
    escalate,
    goodwill,
    nonsense,
    refund,
    see_through,
)
from tests.kernel.sagas import REVERT, Script, run, terms


def full_record(folder: Path) -> World:
    """Return a record with one of everything: paid, refused, unknown, denied, escalated, aborted, restarted, open, a saga,
    a clock set back."""
    made = World(folder, terms=terms())
    for number in range(2, 9):
        made.tickets.put(f"T{number}", mood="angry")
    run(made.kernel, made, Script(step_2=deny, compensation=REVERT), event="half settled")
    made.decide(refund(), "paid", confidence=0.5)
    made.decide(compensate, "compensated")
    made.rail.misfortunes = ["refuse", "drop", "lose"]
    made.decide(refund("3.00"), "refused", "T2")
    made.decide(refund("5.00"), "unknown", "T3")
    made.decide(goodwill("1.00"), "resolved at once", "T4")
    made.decide(deny, "denied", "T5")
    made.decide(escalate, "escalated", "T6")
    case = made.decide(escalate, "resolved", "T6").dfid
    denial = '{"action":"DENY","reason":"NOT_ELIGIBLE"}'
    HumanDesk(made.kernel, now_ms=made.clock).resolve(case, Resolution("MODIFY", "ada", "a look", denial))
    packet = made.packet("exhausted", "T7")
    for _ in range(3):
        made.kernel.decide(packet, nonsense(packet))
    packet = made.packet("drifted", "T8")
    made.tickets.put("T8", refundable_minor=1)
    made.kernel.decide(packet, refund()(packet))
    see_through(made.kernel, made.event("drifted", "T8"), refund("0.01"))
    made.packet("abandoned", "T5")
    made.clock.advance(LEASE_MS)
    made.rail.blind = True
    recovery.recover(made.kernel, now_ms=made.clock())
    suspend(made)
    reactivate(made)
    halt(made)
    halt(made, halted=False)
    other = contract(("gate: claims", "gate: others"), ("agent_id: claims-agent", "agent_id: others-agent"))
    registry.register(made.store, other, by="registry", now_ms=made.clock())
    registry.revoke(made.store, other.hash, who="me", reason="a mistake", now_ms=made.clock())
    made.decide(escalate, "escalated again", "T6")
    for text, reason in (("Fares are net.", "asked for"), ("Fares are gross.", "they were gross")):
        artifacts.put(made.store, "fares", text, who="desk", reason=reason, now_ms=made.clock())
    made.clock.advance(1)
    artifacts.sweep(made.store, days_max=0, who="desk", reason="a try", now_ms=made.clock())
    made.clock.advance(-2 * BACK_MS)
    made.decide(escalate, "by a clock set back", "T6")
    made.clock.advance(2 * BACK_MS)
    made.packet("still open", "T5")
    made.kernel.decide(packet := made.packet("open, once rejected", "T6"), nonsense(packet))
    assert () == audit.verify(made.store).faults
    return made


def faults(world: World, expected: Head | None = None) -> tuple[str, ...]:
    return audit.verify(world.store, expected).faults


class Stranger:
    """A connection that no trigger and no foreign key stops."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        rows = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        self._triggers = dict(rows)
        for name in self._triggers:
            db.execute(f"DROP TRIGGER {name}")

    def execute(self, sql: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        return self._db.execute(sql, values)

    def hide(self) -> None:
        """Put the triggers back, as somebody would who wants to go unnoticed."""
        for sql in self._triggers.values():
            self._db.execute(sql)


@contextmanager
def tampering(world: World) -> Iterator[Stranger]:
    """Let a stranger at the file, and restore it afterwards."""
    with closing(sqlite3.connect(world.path, isolation_level=None)) as db, closing(sqlite3.connect(":memory:")) as kept:
        db.backup(kept)
        yield Stranger(db)
        kept.backup(db)


def found_after(
    world: World, *statements: tuple[str, tuple[Any, ...]], expected: Head | None = None
) -> tuple[str, ...]:
    with tampering(world) as db:
        for sql, values in statements:
            db.execute(sql, values)
        db.hide()
        return faults(world, expected)


def bent(rng: Random, value: Any) -> Any:
    """Return a stored value with one byte changed, of the same type."""
    if value is None:
        return "x"
    if isinstance(value, int):
        return value + rng.choice((-1, 1))
    if isinstance(value, float):
        return value + 1.0
    data = bytearray(value if isinstance(value, bytes) else value.encode())
    if not data:
        return value + (b"x" if isinstance(value, bytes) else "x")
    place = rng.randrange(len(data))
    data[place] = (data[place] + 1 + rng.randrange(126)) % 127 if data[place] < 128 else data[place] ^ 1
    return bytes(data) if isinstance(value, bytes) else data.decode()
