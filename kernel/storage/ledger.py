"""The append-only ledger: a hash chain. Each entry holds the facts of one step of one decision. Beside it this module keeps
its checkpoints, and the places where the clock was set back.

Kinds: DECIDED (exactly one for every flow), RESERVED, SETTLED, UNKNOWN, VOIDING, RESOLVED, CONTRADICTED, HUMAN, SAGA,
REVERSAL, RATIONALE, LABEL, ADOPTED (of an order the record did not know); and, for operators, ERASED, CONTRACT, REVOKED,
REFUSED (a registration), AGENT, HALT, RESUME, ARTIFACT, RETENTION, OPERATOR. Triggers of the store refuse anything but the
next entry; `verify_chain` finds what went past them.

Checkpoints are heads of the ledger, signed (Ed25519), in a table of their own. The chain alone proves nothing to somebody
who can write the file: its hashes can be computed anew. A checkpoint covers every entry up to its own, so to rewrite the
ledger takes the key. Checkpoints are not entries: they prove entries and decide nothing, and older records have none.

The first entry written with a key is signed, then every CHECKPOINT_EVERY-th entry, in the transaction that writes it. When
a store that has written something is closed, the head is signed. A checkpoint names the one before it, so none can be
removed but the newest ones. A key says after which entry it began to sign, so not all of them can be removed either.

The clock was set back at every entry whose time is more than `BACK_MS` before that of the entry before it. A smaller step
is usual: two writers read the clock and wait for each other, and time servers correct by seconds. The trigger
`clock_was_set_back` writes each such step into a table. It derives from the ledger alone, and is verified against it.
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
# The agent that an entry without a flow is about, else its act. The index `ledger_acts` has the same expression.
ABOUT = "CASE WHEN json_valid(body) THEN COALESCE(body ->> '$.agent_id', body ->> '$.act') END"
# The last entry that says that the kernel's keys were lost and new ones made (`sds keys rotate --lost`); NULL: none does.
KEYS_LOST = f"SELECT MAX(idx) FROM ledger WHERE dfid = '' AND kind = 'OPERATOR' AND {ABOUT} = 'KEYS_LOST'"


@dataclass(frozen=True, slots=True)
class Head:
    """The last entry's index and hash. Whoever keeps it elsewhere notices when the ledger is cut off or rewritten."""

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
    """Append one entry inside the caller's transaction; return it. `after`: the last entry, where that was read already."""
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
    """Yield all entries by index, `READ_AT_ONCE` in memory at a time. `reader` must show one moment of the ledger."""
    page = reader.rows(f"SELECT {COLUMNS} FROM ledger ORDER BY idx LIMIT {READ_AT_ONCE}")
    while page:
        yield from page
        page = reader.rows(
            f"SELECT {COLUMNS} FROM ledger WHERE idx > ? ORDER BY idx LIMIT {READ_AT_ONCE}", page[-1][:1]
        )


def rows_digest(rows: list[Row]) -> str:
    """Return the SHA-256 of table rows as Python's `ascii` writes them, which is different for any two different rows."""
    return hashlib.sha256(ascii(rows).encode()).hexdigest()


def verify_chain(entries: Iterable[Row], last: Head = Head(0, GENESIS)) -> tuple[list[str], Head]:
    """Return every broken place of the chain after `last`, each with its index, and the last head that was reached."""
    faults: list[str] = []
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
    """The entry that is signed, the entry of the checkpoint before it, when it was signed, and the public key (hex)."""

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
        """Whether the key that it names has signed it. Whose key that is, is another question."""
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.public_key))
            key.verify(bytes.fromhex(self.signature), self.signed_bytes())
        except (InvalidSignature, TypeError, ValueError):  # a damaged row may have any form
            return False
        return True


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """What verification needs: every public key that has signed (hex), newest first, and the head when signing began."""

    keys: tuple[str, ...]
    since: Head


class LedgerKey:
    """Signs checkpoints. `seed`: 32 bytes, the private key. `older`: public keys that have signed before it."""

    def __init__(self, seed: bytes, since: Head, older: tuple[str, ...] = ()) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = PublicKeys((self._key.public_key().public_bytes_raw().hex(), *older), since)

    def __repr__(self) -> str:
        return f"LedgerKey({self.public.keys[0][:_SHOWN]}, seed=***)"

    def signed(self, head: Head, last: Checkpoint | None, at_ms: int) -> Checkpoint:
        """Return the checkpoint of a head, which comes after the checkpoint `last`."""
        prev_idx = last.idx if last else self.public.since.idx
        made = Checkpoint(head.idx, head.entry_hash, prev_idx, at_ms, self.public.keys[0])
        return replace(made, signature=self._key.sign(made.signed_bytes()).hex())


def read_checkpoints(store: Reader) -> list[Checkpoint]:
    return [Checkpoint(*row) for row in store.rows(f"SELECT {CHECKPOINT_COLUMNS} FROM checkpoints ORDER BY idx")]


def newest_checkpoint(store: Reader) -> Checkpoint | None:
    row = store.row(f"SELECT {CHECKPOINT_COLUMNS} FROM checkpoints WHERE idx = (SELECT max(idx) FROM checkpoints)")
    return Checkpoint(*row) if row else None


def refuse_altered_ledger(store: Reader, public: PublicKeys) -> None:
    """Raise StoreError when the ledger is not what was signed last: nothing should be added to it.

    This looks at one entry only. `audit.verify` tells whether the whole ledger is intact.
    """
    last = newest_checkpoint(store)
    if wrong := _altered(store, last, head(store), public):
        hint = "run `sds ledger verify`, and restore a backup"
        if last is None:
            hint += '; if the record is from before it was signed, run: sds keys rotate --reason "..."'
        raise StoreError(f"the ledger differs from what was signed: {wrong}", hint=hint)


def _altered(store: Reader, last: Checkpoint | None, before: Head, public: PublicKeys) -> str:
    """Return why a ledger whose newest checkpoint is `last` must not be signed again; "" when it may be.

    `before`: the ledger's head before the entry that is to be signed.
    """
    if last is not None:
        stored = store.value("SELECT entry_hash FROM ledger WHERE idx = ?", (last.idx,))
        return _checkpoint_fault(last, stored, public)
    return "" if before == public.since else f"it has no checkpoint, and signing began after entry {public.since.idx}"


def _checkpoint_fault(checkpoint: Checkpoint, stored: str | None, public: PublicKeys | None) -> str:
    """Return what is wrong with one checkpoint, given the hash of the entry it names; "" when nothing is."""
    if stored != checkpoint.entry_hash:
        return f"checkpoint {checkpoint.idx}: the entry is not the one that was signed"
    return forged(checkpoint, f"checkpoint {checkpoint.idx}", public)


def forged(checkpoint: Checkpoint, name: str, public: PublicKeys | None) -> str:
    """Return why none of these keys has signed a checkpoint; "" when one has. Without keys: why its own key has not."""
    if public is not None and checkpoint.public_key not in public.keys:
        return f"{name}: signed with another key, `{str(checkpoint.public_key)[:_SHOWN]}`"
    return "" if checkpoint.genuine else f"{name}: its signature does not match its key"


def checkpoint_faults(
    checkpoints: list[Checkpoint],
    hashes: Mapping[int, str],
    head: Head,
    public: PublicKeys | None,
    *,
    after: int | None = None,
) -> list[str]:
    """Return what is wrong with a ledger's checkpoints. `hashes`: those of its entries, by index.

    `after`: the entry of the checkpoint before these, where they are those of a part of the ledger that ends with `head`.
    Without keys only this is found: whether they fit the ledger and each other. Anybody's key could have signed them.
    """
    found = (
        [] if public is None or after is not None else _start_faults(hashes, head, public.since, none=not checkpoints)
    )
    last = public.since.idx if public else checkpoints[0].prev_idx if checkpoints else 0
    last = last if after is None else after
    for each in checkpoints:
        if wrong := _checkpoint_fault(each, hashes.get(each.idx), public):
            found.append(wrong)
        if each.prev_idx != last:
            found.append(f"checkpoint {each.idx}: the one before it, of entry {each.prev_idx}, is missing")
        elif each.idx - last > CHECKPOINT_EVERY:
            found.append(_unsigned(last, each.idx))
        last = each.idx
    return [*found, _unsigned(last, head.idx)] if public and head.idx - last > CHECKPOINT_EVERY else found


def _start_faults(hashes: Mapping[int, str], head: Head, since: Head, *, none: bool) -> list[str]:
    """Return what is wrong with the place where signing began."""
    if hashes.get(since.idx, GENESIS) != since.entry_hash:
        return [f"entry {since.idx}: not the one after which signing began"]
    if none and head.idx > since.idx:
        return [f"entries {since.idx + 1} to {head.idx}: none has a checkpoint, although signing had begun"]
    return []


def _unsigned(last: int, idx: int) -> str:
    return f"entries {last + 1} to {idx}: more than {CHECKPOINT_EVERY} without a checkpoint"


class CheckpointWitness:
    """Signs what one store writes.

    `key_of` returns the key, or None when it cannot be had. Its argument is the head after which signing begins, or None
    when signing has begun already and there must be a key.

    An entry that cannot be signed is written all the same: a halt must not wait for a key. An entry after an altered ledger
    is not signed, so that nothing is proved by it. `checkpoint_faults` finds both.
    """

    def __init__(self, key_of: Callable[[Head | None], LedgerKey | None], now_ms: Callable[[], int]) -> None:
        self._key_of, self._now_ms = key_of, now_ms
        self._key: LedgerKey | None = None
        self._wrote = False  # True: there may be something to sign when the store is closed
        self._begun = False  # True: the ledger has a checkpoint, so only every CHECKPOINT_EVERY-th entry needs a look

    def appended(self, store: Store, idx: int, entry_hash: str, prev_hash: str) -> None:
        """Sign an entry if it is its turn, inside the transaction that has written it."""
        self._wrote = True
        if idx % CHECKPOINT_EVERY and self._begun:
            return
        last = newest_checkpoint(store)
        self._begun = last is not None
        if last is None or idx % CHECKPOINT_EVERY == 0:
            self._sign(store, last, Head(idx - 1, prev_hash), Head(idx, entry_hash))

    def closing(self, store: Store) -> None:
        """Sign the head if this store has written anything. Raises nothing: the entries are durable already."""
        if not self._wrote:
            return
        self._wrote = False
        with suppress(StoreError), store.transaction():
            now, last = head(store), newest_checkpoint(store)
            if last is not None and last.idx < now.idx:
                self._sign(store, last, now, now)

    def _sign(self, store: Store, last: Checkpoint | None, before: Head, added: Head) -> None:
        """Sign the head `added`, if the key is here and the ledger up to `before` is what was signed."""
        key = self._key
        if key is None or (last is not None and last.public_key not in key.public.keys):  # another process has a newer
            self._key = key = self._key_of(None if last else before)
        if key is None or _altered(store, last, before, key.public):
            self._begun = True  # the next entry could not be signed either
            return
        _write_checkpoint(store, key.signed(added, last, self._now_ms()))


def sign_head(store: Store, key: LedgerKey, now_ms: int) -> Checkpoint | None:
    """Return the head's checkpoint, made unless it exists. None: there is no entry. Raises StoreError: it is altered."""
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


BACK_MS = 60_000  # the trigger `clock_was_set_back` has the same number
_SECOND_MS, _MINUTE_MS, _HOUR_MS = 1_000, 60_000, 3_600_000

# The last entry `l`, and whether the clock was ever set back: columns for statements that read more than that.
LAST = "l.idx, l.at_ms, EXISTS (SELECT 1 FROM clock_steps)"
_NEAR = "SELECT idx, was_ms, now_ms FROM clock_steps WHERE was_ms > ? AND now_ms < ?"


@dataclass(frozen=True, slots=True)
class Step:
    """The clock was set back: it showed `was_ms` at the entry before `idx`, and `now_ms` at `idx`."""

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
    """Return the steps that may matter to a window of up to `within_ms` around `at_ms`. `last`: the columns `LAST` as read.

    A step that the ledger has not seen yet is among them: the clock shows less now than at its last entry.
    """
    idx, last_ms, any_there = last if last[0] is not None else (0, at_ms, last[2])
    found = store.rows(_NEAR, (at_ms - within_ms, at_ms + within_ms)) if any_there else []
    if last_ms > at_ms + BACK_MS:
        found.append((idx + 1, last_ms, at_ms))
    return [Step(*row) for row in found]


def steps_of(entries: Iterable[Row]) -> Iterator[Step]:
    """Yield the steps of a whole ledger. `entries`: rows with the columns `COLUMNS`."""
    for (_, was_ms, *_), (idx, now_ms, *_) in pairwise(entries):
        if now_ms < was_ms - BACK_MS:
            yield Step(idx, was_ms, now_ms)


def clock_faults(store: Reader, known: Iterable[Step]) -> list[str]:
    """Return where the recorded steps are not those of the ledger."""
    recorded = {Step(*row) for row in store.rows("SELECT idx, was_ms, now_ms FROM clock_steps")}
    return [
        f"clock step at entry {step.idx}: the table and the ledger differ"
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
