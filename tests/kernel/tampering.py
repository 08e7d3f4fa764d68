"""A record with one of everything in it, and a stranger at it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from sds.kernel.audit import verify
from sds.kernel.context import artifacts
from sds.kernel.envelope.state import Value
from sds.kernel.human.review import HumanReview, Resolution
from sds.kernel.operations import erasure, recovery
from sds.kernel.operations.labels import record_label
from sds.kernel.registry import registry
from sds.kernel.storage import ledger
from sds.kernel.storage.ledger import BACK_MS, GENESIS, Checkpoint, Head, LedgerKey, entry_hash
from tests.kernel.authority import halt, reactivate, suspend
from tests.kernel.durable import (
    LEASE_MS,
    PUBLIC,
    SEED,
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
from tests.stores.opened import SQLITE, Chosen
from tests.stores.records import Kept, Stranger, kept, put_back, tampering_with

MONITORED = (
    "escalation: {per_hour: 1000000}",
    """escalation: {per_hour: 1000000}
aggregate_thresholds:
  - {name: often, of: approval_rate, window: {last: 10}, warn: 0.9}
  - {name: minute, of: paid_sum_minor, window: {minutes: 1}, warn: 1000000}
  - {name: calibrated, of: calibration, window: {last: 10}, warn: 0.5}
""",
)


def full_record(folder: Path) -> World:
    """Return a record with one of everything: paid, refused, unknown, denied, escalated, aborted, restarted, open, a saga,
    a clock set back. It is made once a process and copied."""
    once = _once(Chosen.kind)
    put_back(folder / "kernel.db", once.record)
    (folder / "rail.db").write_bytes(once.rail)
    copied = World(folder, terms=terms(MONITORED), now_ms=once.now_ms)
    copied.tickets.rows, copied.tickets.versions = deepcopy((once.rows, once.versions))
    copied.rail.blind = True
    return copied


@dataclass(frozen=True)
class _Once:
    record: Kept
    rail: bytes
    now_ms: int
    rows: dict[str, dict[str, Value]]
    versions: dict[str, int]


@cache
def _once(_kind: str) -> _Once:
    """Return a full record with its rail, the time on its clock, and its tickets with their versions."""
    with TemporaryDirectory() as folder, closing(_made(Path(folder))) as made:
        with closing(sqlite3.connect(made.folder / "rail.db")) as rail:
            data = rail.serialize()
        return _Once(kept(made.path), data, made.clock(), made.tickets.rows, made.tickets.versions)


def _made(folder: Path) -> World:
    made = World(folder, terms=terms(MONITORED))
    for number in range(2, 9):
        made.tickets.put(f"T{number}", mood="angry")
    run(made.kernel, made, Script(step_2=deny, compensation=REVERT), event="half settled")
    sign(made)
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
    HumanReview(made.kernel, now_ms=made.clock).resolve(case, Resolution("MODIFY", "ada", "a look", denial))
    packet = made.packet("exhausted", "T7")
    for _ in range(3):
        made.kernel.decide(packet, nonsense(packet))
    packet = made.packet("drifted", "T8")
    made.tickets.put("T8", refundable_minor=1)
    made.kernel.decide(packet, refund()(packet))
    see_through(made.kernel, made.event("drifted", "T8"), refund("0.01"))
    made.kernel.decide(packet := made.kernel.open(made.event("in time", "T5"), deadline_ms=made.clock()), deny(packet))
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
    made.decide(deny, "erased", "T5")
    erasure.erase(made.store, made.contract.gate, "erased", who="desk", reason="asked for", now_ms=made.clock())
    made.clock.advance(-2 * BACK_MS)
    made.decide(escalate, "by a clock set back", "T6")
    made.clock.advance(2 * BACK_MS)
    for number in range(8):  # a chunk of a window, and sixtieths of another
        made.clock.advance(1_500)
        judged = made.decide(deny, f"monitored {number}", "T6", confidence=0.75)
        record_label(made.store, judged.dfid, right=True, by="desk", now_ms=made.clock())
    made.packet("still open", "T5")
    made.kernel.decide(packet := made.packet("open, once rejected", "T6"), nonsense(packet))
    sign(made)
    assert () == faults(made)
    return made


def sign(world: World) -> Checkpoint:
    """Sign the head, as closing the store would."""
    made = ledger.sign_head(world.store, LedgerKey(SEED, PUBLIC.since), world.clock())
    assert made is not None
    return made


def faults(world: World, expected: Head | Checkpoint | None = None) -> tuple[str, ...]:
    return verify.verify(world.store, expected, PUBLIC).faults


@contextmanager
def tampering(world: World) -> Iterator[Stranger]:
    """Let a stranger at the record, and restore it afterwards."""
    with tampering_with(world.path) as stranger:
        yield stranger


def found_after(
    world: World, *statements: tuple[str, tuple[Any, ...]], expected: Head | Checkpoint | None = None
) -> tuple[str, ...]:
    with tampering(world) as db:
        for sql, values in statements:
            db.execute(sql, values)
        db.hide()
        return faults(world, expected)


def chained(db: Stranger) -> None:
    """Chain the ledger anew from the start, with all hashes right."""
    prev = GENESIS
    for idx, at_ms, kind, dfid, body in db.execute(
        "SELECT idx, at_ms, kind, dfid, body FROM ledger ORDER BY idx"
    ).fetchall():
        own = entry_hash(idx, at_ms, kind, dfid, body, prev)
        db.execute("UPDATE ledger SET prev_hash = ?, entry_hash = ? WHERE idx = ?", (prev, own, idx))
        prev = own


def rewritten(db: Stranger) -> None:
    """Write the ledger anew from the start, an hour earlier, with all hashes right."""
    db.execute("UPDATE ledger SET at_ms = at_ms - 3600000")
    chained(db)
    db.execute("UPDATE execution_log SET executed_at_ms = executed_at_ms - 3600000")
    db.execute("UPDATE contract_revocations SET revoked_at_ms = revoked_at_ms - 3600000")
    db.execute("UPDATE artifacts SET ended_at_ms = ended_at_ms - 3600000")
    db.execute("UPDATE erasures SET erased_at_ms = erased_at_ms - 3600000")
    db.execute("UPDATE clock_steps SET was_ms = was_ms - 3600000, now_ms = now_ms - 3600000")


def resigned(db: Stranger, key: LedgerKey) -> None:
    """Put in the place of every checkpoint one that fits the ledger, signed by this key."""
    last: Checkpoint | None = None
    for idx, at_ms in db.execute("SELECT idx, at_ms FROM checkpoints ORDER BY idx").fetchall():
        (own,) = db.execute("SELECT entry_hash FROM ledger WHERE idx = ?", (idx,)).fetchone()
        last = key.signed(Head(idx, own), last, at_ms)
        values = (last.entry_hash, last.prev_idx, last.public_key, last.signature, idx)
        sql = "UPDATE checkpoints SET entry_hash = ?, prev_idx = ?, public_key = ?, signature = ? WHERE idx = ?"
        db.execute(sql, values)


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
    if isinstance(value, str) and Chosen.kind != SQLITE and not data[place]:
        data[place] = 127  # no text there has a NUL
    return bytes(data) if isinstance(value, bytes) else data.decode()
