"""The append-only ledger: a hash chain whose every entry names the facts of one step of one decision; and what is kept beside
it: its checkpoints, and where the clock was set back.

Kinds: DECIDED (exactly one for every flow), RESERVED, SETTLED, UNKNOWN, VOIDING, RESOLVED, CONTRADICTED, HUMAN, SAGA, REVERSAL,
RATIONALE, LABEL, ADOPTED (of an order the record did not know); and, for operators, ERASED, CONTRACT, REVOKED, REFUSED (a
registration), AGENT, HALT, RESUME, ARTIFACT, RETENTION, OPERATOR. SQLite triggers refuse anything but the next entry;
`verify_chain` finds what went past them.

Checkpoints are heads of the ledger, signed (Ed25519), in a table of their own. The chain alone proves nothing to whoever can
write the file: its hashes can be computed anew. A checkpoint covers every entry up to its own, so a ledger that was written
anew needs the key. Checkpoints are no entries of the ledger: they prove entries and decide nothing, older records have none,
and an entry's index stays what it was.

The first entry that is written with a key is signed, then every CHECKPOINT_EVERY-th, in the transaction that writes the entry,
and the head when a store is closed that wrote something. A checkpoint names the one before it, so none can be dropped but
the newest ones; and a key says after which entry it began, so neither can all of them.

A clock was set back at every entry whose time is more than `BACK_MS` before that of the entry before it. Less is usual: two
writers read the clock and wait for each other, and time servers correct by seconds. The trigger `clock_was_set_back` writes
each such step; it is derived from the ledger alone, and verified against it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sds.kernel.canonical import canonical
from sds.kernel.errors import StoreError
from sds.kernel.storage.store import Reader, Row, Store

GENESIS = "0" * 64
READ_AT_ONCE = 1_000
COLUMNS = "idx, at_ms, kind, dfid, body, prev_hash, entry_hash"
# Which agent an entry of no flow is about, else which act it is: as the index `ledger_acts` has it.
ABOUT = "CASE WHEN json_valid(body) THEN COALESCE(body ->> '$.agent_id', body ->> '$.act') END"
# The entry that says the kernel's keys were lost and new ones made (`sds keys rotate --lost`), the last such; none: NULL.
KEYS_LOST = f"SELECT MAX(idx) FROM ledger WHERE dfid = '' AND kind = 'OPERATOR' AND {ABOUT} = 'KEYS_LOST'"


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


CHECKPOINT_EVERY = 100  # entries from one checkpoint to the next, at most
CHECKPOINT_COLUMNS = "idx, entry_hash, prev_idx, at_ms, public_key, signature"
_SHOWN = 16  # digits of a key in a message


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The entry that is signed, the entry of the checkpoint before, when it was signed, with which key (hex)."""

    idx: int
    entry_hash: str
    prev_idx: int
    at_ms: int
    public_key: str
    signature: str = ""

    def __str__(self) -> str:
        fields = (self.idx, self.entry_hash, self.prev_idx, self.at_ms, self.public_key, self.signature)
        return ":".join(str(field) for field in fields)

    def signed_bytes(self) -> bytes:
        return canonical(["sds checkpoint 1", self.idx, self.entry_hash, self.prev_idx, self.at_ms, self.public_key])

    @property
    def genuine(self) -> bool:
        """Whether the key it names has signed it. Whose key that is, is another question."""
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.public_key))
            key.verify(bytes.fromhex(self.signature), self.signed_bytes())
        except (InvalidSignature, TypeError, ValueError):  # of whatever form a row is
            return False
        return True


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """What it takes to verify: every key that has signed (hex), the newest first, and the head when signing began."""

    keys: tuple[str, ...]
    since: Head


class LedgerKey:
    """Signs checkpoints. `seed`: 32 bytes, the private key; `older`: public keys that have signed before it."""

    def __init__(self, seed: bytes, since: Head, older: tuple[str, ...] = ()) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = PublicKeys((self._key.public_key().public_bytes_raw().hex(), *older), since)

    def __repr__(self) -> str:
        return f"LedgerKey({self.public.keys[0][:_SHOWN]}, seed=***)"

    def signed(self, head: Head, last: Checkpoint | None, at_ms: int) -> Checkpoint:
        """Return the checkpoint of a head that comes after `last`."""
        prev_idx = last.idx if last else self.public.since.idx
        made = Checkpoint(head.idx, head.entry_hash, prev_idx, at_ms, self.public.keys[0])
        return replace(made, signature=self._key.sign(made.signed_bytes()).hex())


def read_checkpoints(store: Reader) -> list[Checkpoint]:
    return [Checkpoint(*row) for row in store.rows(f"SELECT {CHECKPOINT_COLUMNS} FROM checkpoints ORDER BY idx")]


def newest_checkpoint(store: Reader) -> Checkpoint | None:
    row = store.row(f"SELECT {CHECKPOINT_COLUMNS} FROM checkpoints WHERE idx = (SELECT max(idx) FROM checkpoints)")
    return Checkpoint(*row) if row else None


def refuse_altered_ledger(store: Reader, public: PublicKeys) -> None:
    """Raise StoreError when the ledger is not what was signed last: nobody should go on with it.

    One look at one entry. Whether all of it is whole, `audit.verify` tells.
    """
    last = newest_checkpoint(store)
    if wrong := _altered(store, last, head(store), public):
        hint = "sds ledger verify, and restore a backup"
        if last is None:
            hint += '; if it is one from before it was signed: sds keys rotate --reason "..."'
        raise StoreError(f"the ledger is not what was signed: {wrong}", hint=hint)


def _altered(store: Reader, last: Checkpoint | None, before: Head, public: PublicKeys) -> str:
    """Return why a ledger whose newest checkpoint is `last` must not be signed again; empty when it may be.

    `before`: its head, before whatever is to be signed.
    """
    if last is not None:
        stored = store.value("SELECT entry_hash FROM ledger WHERE idx = ?", (last.idx,))
        return _wrong(last, stored, public)
    return "" if before == public.since else f"it has no checkpoint, and signing began after entry {public.since.idx}"


def _wrong(checkpoint: Checkpoint, stored: str | None, public: PublicKeys | None) -> str:
    """Return what is wrong with one checkpoint beside the entry it names; empty when nothing is."""
    if stored != checkpoint.entry_hash:
        return f"checkpoint {checkpoint.idx}: the entry is not the one that was signed"
    return forged(checkpoint, f"checkpoint {checkpoint.idx}", public)


def forged(checkpoint: Checkpoint, name: str, public: PublicKeys | None) -> str:
    """Return why a checkpoint is none of these keys'; empty when it is. Without keys: why it is not even its own's."""
    if public is not None and checkpoint.public_key not in public.keys:
        return f"{name}: signed with another key, `{str(checkpoint.public_key)[:_SHOWN]}`"
    return "" if checkpoint.genuine else f"{name}: its signature is not that of its key"


def checkpoint_faults(
    checkpoints: list[Checkpoint], hashes: Mapping[int, str], head: Head, public: PublicKeys | None
) -> list[str]:
    """Return what is wrong with the checkpoints of a ledger, whose entries' hashes are given by index.

    Without keys it is only found whether they fit the ledger and each other: anybody's key could have signed them.
    """
    found = [] if public is None else _before(hashes, head, public.since, none=not checkpoints)
    last = public.since.idx if public else checkpoints[0].prev_idx if checkpoints else 0
    for each in checkpoints:
        if wrong := _wrong(each, hashes.get(each.idx), public):
            found.append(wrong)
        if each.prev_idx != last:
            found.append(f"checkpoint {each.idx}: the one before it, of entry {each.prev_idx}, is missing")
        elif each.idx - last > CHECKPOINT_EVERY:
            found.append(_stretch(last, each.idx))
        last = each.idx
    return [*found, _stretch(last, head.idx)] if public and head.idx - last > CHECKPOINT_EVERY else found


def _before(hashes: Mapping[int, str], head: Head, since: Head, *, none: bool) -> list[str]:
    """Return what is wrong with where signing began."""
    if hashes.get(since.idx, GENESIS) != since.entry_hash:
        return [f"entry {since.idx}: not the one after which signing began"]
    if none and head.idx > since.idx:
        return [f"entries {since.idx + 1} to {head.idx}: none has a checkpoint, and each was written under a key"]
    return []


def _stretch(last: int, idx: int) -> str:
    return f"entries {last + 1} to {idx}: more than {CHECKPOINT_EVERY} without a checkpoint"


class CheckpointWitness:
    """Signs what one store writes.

    `key_of` returns the key, or None where it cannot be had. It is given the head after which signing begins, or None
    where it has begun and there must be a key.

    What cannot be signed is written all the same: a halt must not wait for a key. What follows an altered ledger is
    not signed, so that nothing is proved by it. `checkpoint_faults` finds both.
    """

    def __init__(self, key_of: Callable[[Head | None], LedgerKey | None], now_ms: Callable[[], int]) -> None:
        self._key_of, self._now_ms = key_of, now_ms
        self._key: LedgerKey | None = None
        self._wrote = False  # there may be something to sign when the store is closed
        self._begun = False  # the ledger is known to have a checkpoint: few entries need a look

    def appended(self, store: Store, idx: int, entry_hash: str, prev_hash: str) -> None:
        """Sign an entry if it is its turn, inside the transaction that has just written it."""
        self._wrote = True
        if idx % CHECKPOINT_EVERY and self._begun:
            return
        last = newest_checkpoint(store)
        self._begun = last is not None
        if last is None or idx % CHECKPOINT_EVERY == 0:
            self._sign(store, last, Head(idx - 1, prev_hash), Head(idx, entry_hash))

    def closing(self, store: Store) -> None:
        """Sign the head if this store has written anything. Raises nothing: the entries are there."""
        if not self._wrote:
            return
        self._wrote = False
        with suppress(StoreError), store.transaction():
            now, last = head(store), newest_checkpoint(store)
            if last is not None and last.idx < now.idx:
                self._sign(store, last, now, now)

    def _sign(self, store: Store, last: Checkpoint | None, before: Head, added: Head) -> None:
        key = self._key
        if key is None or (last is not None and last.public_key not in key.public.keys):  # another process has a newer
            self._key = key = self._key_of(None if last else before)
        if key is None or _altered(store, last, before, key.public):
            self._begun = True  # it will not be otherwise with the next entry
            return
        _write_checkpoint(store, key.signed(added, last, self._now_ms()))


def sign_head(store: Store, key: LedgerKey, now_ms: int) -> Checkpoint | None:
    """Return the head's checkpoint, made unless it is there; None: there is no entry. Raises StoreError: it is altered."""
    with store.transaction():
        refuse_altered_ledger(store, key.public)
        now, last = head(store), newest_checkpoint(store)
        if now.idx == (last.idx if last else 0):
            return last
        made = key.signed(now, last, now_ms)
        _write_checkpoint(store, made)
    return made


def _write_checkpoint(store: Store, made: Checkpoint) -> None:
    store.insert("checkpoints", **asdict(made))


BACK_MS = 60_000  # as the trigger has it
_SECOND_MS, _MINUTE_MS, _HOUR_MS = 1_000, 60_000, 3_600_000

# Of the last entry `l`, and whether there are steps at all: for statements that read more than that.
LAST = "l.idx, l.at_ms, EXISTS (SELECT 1 FROM clock_steps)"
_NEAR = "SELECT idx, was_ms, now_ms FROM clock_steps WHERE was_ms > ? AND now_ms < ?"


@dataclass(frozen=True, slots=True)
class Step:
    """The clock showed `was_ms` at the entry before `idx`, and `now_ms` at `idx`."""

    idx: int
    was_ms: int
    now_ms: int

    @property
    def by_ms(self) -> int:
        return self.was_ms - self.now_ms

    def __str__(self) -> str:
        was, now = (_time(ms) for ms in (self.was_ms, self.now_ms))
        return f"entry {self.idx}: the clock was set back by {_duration(self.by_ms)}, from {was} to {now}"


def steps(store: Reader, last: Row, at_ms: int, within_ms: int) -> list[Step]:
    """Return the steps that can bear on a window of up to `within_ms` around `at_ms`. `last`: what was read as `LAST`.

    What the ledger has not seen yet is one as well: the clock shows less now than at its last entry.
    """
    idx, last_ms, any_there = last if last[0] is not None else (0, at_ms, last[2])
    found = store.rows(_NEAR, (at_ms - within_ms, at_ms + within_ms)) if any_there else []
    if last_ms > at_ms + BACK_MS:
        found.append((idx + 1, last_ms, at_ms))
    return [Step(*row) for row in found]


def steps_of(entries: Iterable[Row]) -> Iterator[Step]:
    """Yield the steps of a whole ledger, given in its columns' order."""
    for (_, was_ms, *_), (idx, now_ms, *_) in pairwise(entries):
        if now_ms < was_ms - BACK_MS:
            yield Step(idx, was_ms, now_ms)


def clock_faults(store: Reader, known: Iterable[Step]) -> list[str]:
    """Return where the recorded steps are not those of the ledger."""
    recorded = {Step(*row) for row in store.rows("SELECT idx, was_ms, now_ms FROM clock_steps")}
    return [
        f"clock step at entry {step.idx}: the table does not say what the ledger does"
        for step in sorted(recorded ^ set(known), key=lambda step: step.idx)
    ]


def _time(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms // _SECOND_MS, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{ms} ms"


def _duration(ms: int) -> str:
    hours, minutes = divmod(ms // _MINUTE_MS, _HOUR_MS // _MINUTE_MS)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
