"""Which reviewer has taken which case, for the others to see. It locks nothing: the kernel decides a case exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from sds.service.database import Database, taken

KEPT_MS = 30 * 60_000  # after this time a taken case is free again


@dataclass(frozen=True, slots=True)
class Taken:
    """Who took a case, the digest of their key, and when in milliseconds since 1970."""

    who: str
    key_digest: str
    at_ms: int


def of_gate(database: Database, gate: str, now_ms: int) -> Mapping[str, Taken]:
    """Return the cases of a gate that are taken now, by dfid."""
    with database.reading() as connection:
        rows = connection.execute(sa.select(taken).where(taken.c.gate == gate, taken.c.at_ms > now_ms - KEPT_MS)).all()
    return {row.dfid: Taken(row.who, row.key_digest, row.at_ms) for row in rows}


def take(database: Database, gate: str, dfid: str, by: Taken, holder: str = "") -> bool:
    """Take a case that nobody has, or that `holder` has; return False where somebody else has it. Entries older than `KEPT_MS`
    are deleted.
    """
    with database.transaction() as connection:
        connection.execute(taken.delete().where(taken.c.at_ms <= by.at_ms - KEPT_MS))
        mine = {"key_digest": by.key_digest, "who": by.who, "at_ms": by.at_ms}
        made = database.insert(taken).values(gate=gate, dfid=dfid, **mine)
        known = sa.or_(taken.c.key_digest == by.key_digest, taken.c.who == holder)
        place = (taken.c.gate, taken.c.dfid)
        done = made.on_conflict_do_update(index_elements=place, set_=mine, where=known).returning(taken.c.dfid)
        return connection.execute(done).first() is not None


def give_back(database: Database, gate: str, dfid: str, key_digest: str) -> None:
    """Give a case back, unless somebody else has taken it over."""
    with database.transaction() as connection:
        mine = (taken.c.gate == gate, taken.c.dfid == dfid, taken.c.key_digest == key_digest)
        connection.execute(taken.delete().where(*mine))


def free(database: Database, gate: str, dfid: str) -> None:
    """Forget who has taken a case."""
    with database.transaction() as connection:
        connection.execute(taken.delete().where(taken.c.gate == gate, taken.c.dfid == dfid))
