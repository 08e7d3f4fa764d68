"""The keys of one record, in a file of the gate's folder that only its user can read: `kernel.key`.

There are two kinds. Order keys (32 bytes, HMAC-SHA256) sign what leaves the kernel; ledger keys (Ed25519) sign
checkpoints. The newest key of each kind signs. Signatures of older keys still verify; only the public half of an older
ledger key is stored. `ledger.pub` beside the file holds the public halves, to hand out.

Until version 0.1 `kernel.key` was 32 bytes and nothing else: one order key.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sds.kernel.errors import SdsError, StoreError, UsageError, cause_of
from sds.kernel.storage.keyring import Signer, key_name, name_in
from sds.kernel.storage.ledger import KEYS_LOST, Head, LedgerKey, PublicKeys, newest_checkpoint
from sds.kernel.storage.private_files import OTHERS, replace_private_file
from sds.kernel.storage.store import Reader

KEY_BYTES = 32
KEYS_MAX = 1_000  # of each kind; enough for a new one every month for 83 years
KEY_FILE, PUBLIC_FILE = "kernel.key", "ledger.pub"
FILE_BYTES_MAX = 1 << 20
_MAGIC = b"sds keys 1\n"
SAY_LOST = 'sds keys rotate --gate GATE --lost --reason "..."'
LOST = f"restore the key from a backup; if there is none: {SAY_LOST}"
_MOVE_AWAY = f"restore the key from a backup; if there is none, move this file away, then {SAY_LOST}"

SHOWN_CHARS = 16  # of a public key, in a message
# The signature of the newest order, and whether the record says that keys were lost after it.
_NEWEST_SIGNATURE = (
    "SELECT e.signature, EXISTS (SELECT 1 FROM ledger l WHERE l.dfid = e.dfid AND l.kind IN ('RESERVED', 'ADOPTED')"
    f" AND l.idx < ({KEYS_LOST})) FROM execution_log e WHERE e.signature LIKE '%:%' ORDER BY e.reserved_at_ms DESC LIMIT 1"
)

Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Key = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){32,}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class OrderKey(_Strict):
    """One order key. `made_ms` is None where the time was not recorded."""

    key: Key = Field(repr=False)
    made_ms: int | None = None


class Public(_Strict):
    key: Hex64
    made_ms: int | None = None


class PublicFile(_Strict):
    """The content of `ledger.pub`: the head when signing began, and every key that has signed since, the newest first."""

    since_entry: int = Field(ge=0)
    since_hash: Hex64
    keys: tuple[Public, ...] = Field(min_length=1, max_length=KEYS_MAX)

    @property
    def public(self) -> PublicKeys:
        return PublicKeys(tuple(each.key for each in self.keys), Head(self.since_entry, self.since_hash))


class Ring(_Strict):
    """All keys of a record, the newest first. `seed` is the private half of the first ledger key."""

    orders: tuple[OrderKey, ...] = Field(default=(), max_length=KEYS_MAX)
    seed: Hex64 | None = Field(default=None, repr=False)
    ledger: PublicFile | None = None

    def follows(self, before: Ring) -> bool:
        """Tell whether this is a later state of the same record's keys: no order key is gone, or, where they were lost and
        new ones made, no public key of the ledger.
        """
        signed, kept = (set(ring.ledger.public.keys) if ring.ledger else set[str]() for ring in (before, self))
        return {*before.secrets} <= {*self.secrets} or (bool(signed) and signed <= kept)

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """The order keys, the newest first."""
        return tuple(bytes.fromhex(each.key) for each in self.orders)


def signer_of(folder: Path) -> Signer:
    """Return a signer with a folder's existing keys. It also takes up keys that another process makes later, but not those of
    another record: what they sign or seal would be lost when the right file is put back.
    """
    path = folder / KEY_FILE
    known = read_ring(path)

    def read_again() -> tuple[bytes, ...] | None:
        nonlocal known
        try:
            found = read_ring(path)
        except SdsError:
            return None  # it goes on with the known keys; the next opening, and the service's check, report the fault
        if not found.follows(known):
            return None
        known = found
        return found.secrets

    return Signer(*known.secrets, read_again=read_again, stamp=partial(os.stat, path))


def refuse_other_keys(folder: Path, record: Reader) -> None:
    """Raise StoreError where a record was signed with keys that are not in this folder's file.

    Two processes with different keys would leave each other's orders UNKNOWN. This checks the newest checkpoint and the
    newest order. The record may say that the key of that order is lost (`sds keys rotate --lost`).
    """
    refuse_other_ledger_keys(folder, record)
    if name := unknown_key(_read_or_none(folder) or Ring(), record):
        raise _other_keys(folder / KEY_FILE, f"its newest order was signed with `{name}`", LOST)


def refuse_other_ledger_keys(folder: Path, record: Reader) -> None:
    """Raise StoreError where a record's newest checkpoint was signed with a key that is not in this folder's file."""
    ring, last = _read_or_none(folder) or Ring(), newest_checkpoint(record)
    if last is not None and last.public_key not in (ring.ledger.public.keys if ring.ledger else ()):
        raise _other_keys(
            folder / KEY_FILE, f"the ledger was signed with `{last.public_key[:SHOWN_CHARS]}`", _MOVE_AWAY
        )


def unknown_key(ring: Ring, record: Reader) -> str:
    """Return the name of the key that signed a record's newest order; "" where the ring has it or its loss is recorded."""
    signature, is_lost = record.row(_NEWEST_SIGNATURE) or ("", False)
    name = name_in(signature)
    return "" if is_lost or name in map(key_name, ring.secrets) else name


def _other_keys(path: Path, signed: str, mend: str) -> StoreError:
    message = f"`{path}` is another record's, or older than its own: {signed}"
    if not path.exists():
        message, mend = f"the key `{path}` is gone, but its record is there", LOST
    hint = f"copy the key that the record's other processes use, or {mend}"
    return StoreError(message, hint=hint, retryable=False)


def order_keys(folder: Path, *, now_ms: int) -> tuple[bytes, ...]:
    """Return the order keys, the newest first. The first call makes one. Raises StoreError, UsageError."""
    with _locked(folder):
        ring = _read_or_none(folder) or Ring()
        if not ring.orders:
            ring = ring.model_copy(update={"orders": (_new_order_key(now_ms),)})
            _save(folder, ring)
    return ring.secrets


def ledger_key(folder: Path, since: Head | None, *, now_ms: int) -> LedgerKey:
    """Return the key that signs the ledger. The first call makes it and records that it began after `since`.

    Raises StoreError where there is no key and `since` is None: something was signed with a key that is lost.
    """
    with _locked(folder):
        ring = _read_or_none(folder) or Ring()
        if ring.seed is None and since is not None:
            ring = _with_ledger_key(ring, since, (), now_ms)
            _save(folder, ring)
        _save_public(folder, ring)
    return _signing_key(ring)


def renew(folder: Path, since: Head, *, older: tuple[str, ...], now_ms: int) -> Ring:
    """Make a new key of each kind; return the ring. `since`, `older`: of the ledger's public keys so far."""
    with _locked(folder):
        ring = _read_or_none(folder) or Ring()
        if max(len(ring.orders), len(older)) >= KEYS_MAX:
            raise UsageError(f"there are {KEYS_MAX} keys already")
        ring = ring.model_copy(update={"orders": (_new_order_key(now_ms), *ring.orders)})
        known = {each.key: each for each in ring.ledger.keys} if ring.ledger else {}
        ring = _with_ledger_key(ring, since, tuple(known.get(key, Public(key=key)) for key in older), now_ms)
        _save(folder, ring)
    return ring


def _new_order_key(now_ms: int) -> OrderKey:
    return OrderKey(key=secrets.token_bytes(KEY_BYTES).hex(), made_ms=now_ms)


def _with_ledger_key(ring: Ring, since: Head, older: tuple[Public, ...], now_ms: int) -> Ring:
    seed = secrets.token_bytes(KEY_BYTES)
    made = Public(key=LedgerKey(seed, since).public.keys[0], made_ms=now_ms)
    public = PublicFile(since_entry=since.idx, since_hash=since.entry_hash, keys=(made, *older))
    return ring.model_copy(update={"seed": seed.hex(), "ledger": public})


def _signing_key(ring: Ring) -> LedgerKey:
    if ring.seed is None or ring.ledger is None:
        raise StoreError("the key that signs the ledger is lost", hint=LOST)
    public = ring.ledger.public
    return LedgerKey(bytes.fromhex(ring.seed), public.since, public.keys[1:])


def read_ring(path: Path) -> Ring:
    """Read a key file. Raises StoreError when it is gone or damaged, UsageError when other users can read it."""
    try:
        if path.stat().st_mode & OTHERS:
            raise UsageError(f"other users can read `{path}`", hint=f"chmod 600 {path}")
        raw = _read_bytes(path)
    except OSError as error:
        raise StoreError(
            f"`{path}` cannot be used: {cause_of(error)}", hint="check that this user can read it"
        ) from error
    if raw.startswith(_MAGIC):
        try:
            ring = Ring.model_validate_json(raw.removeprefix(_MAGIC))
            if ring.seed is not None:
                _check_pair(ring)
        except (ValidationError, ValueError) as error:
            raise StoreError(f"`{path}` is damaged: its keys cannot be read", hint=_MOVE_AWAY) from error
        return ring
    if len(raw) < KEY_BYTES:
        raise StoreError(f"`{path}` is damaged: it has {len(raw)} bytes, but a key has {KEY_BYTES}", hint=_MOVE_AWAY)
    return Ring(orders=(OrderKey(key=raw.hex()),))


def _check_pair(ring: Ring) -> None:
    public = _signing_key(ring).public
    if ring.ledger is None or public != ring.ledger.public:
        raise ValueError("the private key does not match the public key")


def read_public(path: Path) -> PublicKeys:
    """Read a file of public keys. Raises UsageError when it cannot be read or holds none."""
    try:
        return PublicFile.model_validate_json(_read_bytes(path)).public
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {cause_of(error)}") from error
    except ValidationError as error:
        hint = f"name a copy of a gate's `{PUBLIC_FILE}`"
        raise UsageError(f"`{path}` is not a file of public keys", hint=hint) from error


def _read_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(FILE_BYTES_MAX)


def _read_or_none(folder: Path) -> Ring | None:
    path = folder / KEY_FILE
    return read_ring(path) if path.exists() else None


def _save(folder: Path, ring: Ring) -> None:
    """Write the keys first, then their public halves, which can be made again from the keys."""
    path = folder / KEY_FILE
    try:
        replace_private_file(path, _MAGIC + ring.model_dump_json().encode() + b"\n")
    except OSError as error:
        raise StoreError(f"`{path}` cannot be written: {cause_of(error)}") from error
    _save_public(folder, ring)


def _save_public(folder: Path, ring: Ring) -> None:
    """Write the public halves, unless they are there: a crash may have come between the two files."""
    if ring.ledger is None:
        return
    path, data = folder / PUBLIC_FILE, ring.ledger.model_dump_json().encode() + b"\n"
    try:
        if not path.exists() or _read_bytes(path) != data:
            replace_private_file(path, data)
    except OSError as error:
        raise StoreError(f"`{path}` cannot be written: {cause_of(error)}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder's keys for a block, against other processes and threads."""
    with ExitStack() as opened:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise StoreError(f"`{folder}` cannot be used: {cause_of(error)}") from error
        yield
