"""Checkpoints: heads of the ledger, signed (Ed25519), in a table of their own.

The chain alone proves nothing to whoever can write the file: its hashes can be computed anew. A checkpoint covers every
entry up to its own, so a ledger that was written anew needs the key. Checkpoints are no entries of the ledger: they
prove entries and decide nothing, older records have none, and an entry's index stays what it was.

The first entry that is written with a key is signed, then every EVERY-th, in the transaction that writes the entry, and
the head when a store is closed that wrote something. A checkpoint names the one before it, so none can be dropped but
the newest ones; and a key says after which entry it began, so neither can all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sds.kernel.canonical import canonical
from sds.kernel.errors import StoreError
from sds.kernel.storage.ledger import GENESIS, Head, head
from sds.kernel.storage.store import Reader, Store

EVERY = 100  # entries from one checkpoint to the next, at most
COLUMNS = "idx, entry_hash, prev_idx, at_ms, public_key, signature"
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


def read_all(store: Reader) -> list[Checkpoint]:
    return [Checkpoint(*row) for row in store.rows(f"SELECT {COLUMNS} FROM checkpoints ORDER BY idx")]


def newest(store: Reader) -> Checkpoint | None:
    row = store.row(f"SELECT {COLUMNS} FROM checkpoints WHERE idx = (SELECT max(idx) FROM checkpoints)")
    return Checkpoint(*row) if row else None


def refuse_altered_ledger(store: Reader, public: PublicKeys) -> None:
    """Raise StoreError when the ledger is not what was signed last: nobody should go on with it.

    One look at one entry. Whether all of it is whole, `audit.verify` tells.
    """
    last = newest(store)
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
        return f"{name}: signed with another key, `{checkpoint.public_key[:_SHOWN]}`"
    return "" if checkpoint.genuine else f"{name}: its signature is not that of its key"


def faults(
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
        elif each.idx - last > EVERY:
            found.append(_stretch(last, each.idx))
        last = each.idx
    return [*found, _stretch(last, head.idx)] if public and head.idx - last > EVERY else found


def _before(hashes: Mapping[int, str], head: Head, since: Head, *, none: bool) -> list[str]:
    """Return what is wrong with where signing began."""
    if hashes.get(since.idx, GENESIS) != since.entry_hash:
        return [f"entry {since.idx}: not the one after which signing began"]
    if none and head.idx > since.idx:
        return [f"entries {since.idx + 1} to {head.idx}: none has a checkpoint, and each was written under a key"]
    return []


def _stretch(last: int, idx: int) -> str:
    return f"entries {last + 1} to {idx}: more than {EVERY} without a checkpoint"


class CheckpointWitness:
    """Signs what one store writes.

    `key_of` returns the key, or None where it cannot be had. It is given the head after which signing begins, or None
    where it has begun and there must be a key.

    What cannot be signed is written all the same: a halt must not wait for a key. What follows an altered ledger is
    not signed, so that nothing is proved by it. `faults` finds both.
    """

    def __init__(self, key_of: Callable[[Head | None], LedgerKey | None], now_ms: Callable[[], int]) -> None:
        self._key_of, self._now_ms = key_of, now_ms
        self._key: LedgerKey | None = None
        self._wrote = False  # there may be something to sign when the store is closed
        self._begun = False  # the ledger is known to have a checkpoint: only every EVERY-th entry needs a look

    def appended(self, store: Store, idx: int, entry_hash: str, prev_hash: str) -> None:
        """Sign an entry if it is its turn, inside the transaction that has just written it."""
        self._wrote = True
        if idx % EVERY and self._begun:
            return
        last = newest(store)
        self._begun = last is not None
        if last is None or idx % EVERY == 0:
            self._sign(store, last, Head(idx - 1, prev_hash), Head(idx, entry_hash))

    def closing(self, store: Store) -> None:
        """Sign the head if this store has written anything. Raises nothing: the entries are there."""
        if not self._wrote:
            return
        self._wrote = False
        with suppress(StoreError), store.transaction():
            now, last = head(store), newest(store)
            if last is not None and last.idx < now.idx:
                self._sign(store, last, now, now)

    def _sign(self, store: Store, last: Checkpoint | None, before: Head, added: Head) -> None:
        key = self._key
        if key is None or (last is not None and last.public_key not in key.public.keys):  # another process has a newer
            self._key = key = self._key_of(None if last else before)
        if key is None or _altered(store, last, before, key.public):
            self._begun = True  # it will not be otherwise with the next entry
            return
        _write(store, key.signed(added, last, self._now_ms()))


def sign_head(store: Store, key: LedgerKey, now_ms: int) -> Checkpoint | None:
    """Return the head's checkpoint, made unless it is there; None: there is no entry. Raises StoreError: it is altered."""
    with store.transaction():
        refuse_altered_ledger(store, key.public)
        now, last = head(store), newest(store)
        if now.idx == (last.idx if last else 0):
            return last
        made = key.signed(now, last, now_ms)
        _write(store, made)
    return made


def _write(store: Store, made: Checkpoint) -> None:
    store.insert("checkpoints", **asdict(made))
