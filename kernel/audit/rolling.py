"""Verifies a record a page at a time while it is decided with: in ledger order, from the first entry to the last, again and
again. A page costs the same however long the ledger is.

It finds what is wrong with a page when it reads it: with the chain, the checkpoints, and the rows that an entry seals. That
the newest entry of the look before is gone or another, it finds at the next look. It does not compare what a whole ledger
adds up to (states, sums, counters), and it knows no head from before it began: `audit.verify` does both.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from sds.kernel.audit.tables import seal_faults
from sds.kernel.errors import NOT_AS_WRITTEN
from sds.kernel.flow import decision_record
from sds.kernel.human.decisions import SEALED_HUMAN
from sds.kernel.storage import ledger
from sds.kernel.storage.ledger import CHECKPOINT_COLUMNS, COLUMNS, GENESIS, Checkpoint, Head, PublicKeys
from sds.kernel.storage.store import Reader, Row

PAGE_MAX = 200  # entries of one look
_SEALS = {
    "DECIDED": decision_record.SEALED,
    "HUMAN": SEALED_HUMAN,
    "ADOPTED": decision_record.ADOPTED_ROWS,
    "RESERVED": decision_record.RESERVED,
    "SAGA": decision_record.SAGA,
}
_HEAD = "SELECT l.idx, l.entry_hash, (SELECT entry_hash FROM ledger WHERE idx = ?) FROM ledger l ORDER BY l.idx DESC LIMIT 1"
_PAGE = f"SELECT {COLUMNS} FROM ledger WHERE idx > ? ORDER BY idx LIMIT ?"
_SIGNED = f"SELECT {CHECKPOINT_COLUMNS} FROM checkpoints WHERE idx > ? AND idx <= ? ORDER BY idx"
_SIGNED_BEFORE = "SELECT max(idx) FROM checkpoints WHERE idx <= ?"


class RollingVerification:
    """The verification of one open record; one thread at a time verifies a page.

    It begins anew where another server took the record's place, for a standby may lack the last entries.
    """

    def __init__(self, record: Reader) -> None:
        self._record, self._generation = record, record.generation
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._newest = self._at = Head(0, GENESIS)  # the newest entry that was seen; the last one that was verified

    def faults(self, public_keys: Callable[[], PublicKeys | None]) -> list[str]:
        """Verify the next page and return what is wrong; the next call reads a page with faults again. Raises StoreError.

        `public_keys`: returns the keys that must have signed the checkpoints. It is called once those are read, so that it
        knows a key that was made meanwhile.
        """
        with self._lock:
            return self._faults(public_keys)

    def _faults(self, public_keys: Callable[[], PublicKeys | None]) -> list[str]:
        if (generation := self._record.generation).replaced(self._generation):
            self._begin()
        self._generation = generation
        if not self._saw_all():
            return [f"entry {self._newest.idx}: gone, or not the entry that it was"]
        page = self._record.rows(_PAGE, (self._at.idx, PAGE_MAX))
        faults, last = ledger.verify_chain(page, self._at)
        signed = [Checkpoint(*row) for row in self._record.rows(_SIGNED, (self._at.idx, last.idx))]
        before, public = self._record.value(_SIGNED_BEFORE, (self._at.idx,)), public_keys()
        if before is None:
            before = public.since.idx if public else signed[0].prev_idx if signed else last.idx
        hashes = {row[0]: row[6] for row in page}
        faults += ledger.checkpoint_faults(signed, hashes, last, public, after=before)
        faults += [fault for row in page for fault in self._altered_rows(row)]
        if not faults:
            self._at = last if len(page) == PAGE_MAX else Head(0, GENESIS)
        return faults

    def _saw_all(self) -> bool:
        """Tell whether the newest entry of the look before is still there; remember the one that is the newest now."""
        idx, entry_hash, stored = self._record.row(_HEAD, (self._newest.idx,)) or (0, GENESIS, None)
        if self._newest.idx and stored != self._newest.entry_hash:
            return False
        self._newest = Head(idx, entry_hash)
        return True

    def _altered_rows(self, entry: Row) -> list[str]:
        """Return which rows of its flow are not those that an entry seals."""
        idx, _, kind, dfid, text, _, _ = entry
        try:
            body: dict[str, Any] = json.loads(text) if kind in _SEALS else {}
            return seal_faults(self._record, idx, dfid, _SEALS[kind], body["rows"]) if "rows" in body else []
        except NOT_AS_WRITTEN:
            return [f"entry {idx}: not an entry this program writes"]
