"""The append-only ledger: a hash chain whose every entry names the facts of one step of one decision.

Kinds: DECIDED (exactly one for every flow), RESERVED, SETTLED, UNKNOWN, VOIDING, RESOLVED, CONTRADICTED, HUMAN, SAGA, REVERSAL, RATIONALE, LABEL, ADOPTED (of an order the record did not know); and, for operators, ERASED, CONTRACT,
REVOKED, REFUSED (a registration), AGENT, HALT, RESUME, ARTIFACT, RETENTION, OPERATOR. SQLite triggers refuse anything but the next entry; `verify_chain` finds what went past them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sds.kernel.canonical import canonical
from sds.kernel.storage.store import Reader, Row, Store

GENESIS = "0" * 64
READ_AT_ONCE = 1_000
COLUMNS = "idx, at_ms, kind, dfid, body, prev_hash, entry_hash"


@dataclass(frozen=True, slots=True)
class Head:
    """The last entry's index and hash: keep it elsewhere, and truncation and rewriting show."""

    idx: int
    entry_hash: str

    def __str__(self) -> str:
        return f"{self.idx}:{self.entry_hash}"


def entry_hash(idx: int, at_ms: int, kind: str, dfid: str, body: str, prev_hash: str) -> str:
    text = f"{idx}\n{at_ms}\n{kind}\n{dfid}\n{prev_hash}\n{body}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def head(store: Reader) -> Head:
    last = store.row("SELECT idx, entry_hash FROM ledger ORDER BY idx DESC LIMIT 1")
    return Head(last[0], last[1]) if last else Head(0, GENESIS)


def append(
    store: Store, at_ms: int, kind: str, dfid: str, body: Mapping[str, Any], *, after: Head | None = None
) -> Head:
    """Append one entry inside the caller's transaction. `after`: the last one, where that has read it already."""
    last = after or head(store)
    text = canonical(body).decode()
    added = Head(last.idx + 1, entry_hash(last.idx + 1, at_ms, kind, dfid, text, last.entry_hash))
    store.write(
        "INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?)",
        (added.idx, at_ms, kind, dfid, text, last.entry_hash, added.entry_hash),
    )
    if store.witness is not None:
        store.witness.appended(store, added.idx, added.entry_hash, last.entry_hash)
    return added


def entries(reader: Reader) -> Iterator[Row]:
    """Yield all entries by their index, `READ_AT_ONCE` in memory at a time. `reader`: of one moment, that nobody adds to."""
    page = reader.rows(f"SELECT {COLUMNS} FROM ledger ORDER BY idx LIMIT {READ_AT_ONCE}")
    while page:
        yield from page
        page = reader.rows(
            f"SELECT {COLUMNS} FROM ledger WHERE idx > ? ORDER BY idx LIMIT {READ_AT_ONCE}", page[-1][:1]
        )


def rows_digest(rows: list[Row]) -> str:
    """Return the SHA-256 of table rows in the form Python's `ascii` writes them: no two different rows share it."""
    return hashlib.sha256(ascii(rows).encode()).hexdigest()


def verify_chain(entries: Iterable[Row]) -> tuple[list[str], Head]:
    """Return every broken place of the chain, each naming its index, and the head that was reached."""
    faults: list[str] = []
    last = Head(0, GENESIS)
    for idx, at_ms, kind, dfid, body, prev_hash, stored in entries:
        if idx != last.idx + 1:
            faults.append(f"entry {last.idx + 1}: missing (the next entry is {idx})")
        if prev_hash != last.entry_hash:
            faults.append(f"entry {idx}: not chained to entry {last.idx}")
        if entry_hash(idx, at_ms, kind, dfid, body, prev_hash) != stored:
            faults.append(f"entry {idx}: content does not match its hash")
        last = Head(idx, stored)
    return faults, last
