"""The kernel's keys: they sign orders, and protect the texts of cases, which are sealed under a random key for each case.

A signature carries the name of its key. A case's key is wrapped under one that is derived from the kernel's. Texts are
sealed by AES-256-GCM (NIST SP 800-38D) of the package `cryptography`. A ciphertext is bound to its case and column, not to
its flow: a case may have several. A mark tells sealed texts from those that an older version left in clear.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from hashlib import sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sds.kernel.canonical import canonical
from sds.kernel.errors import CaseKeyError, ExecutorError, StoreError

KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
NAME_CHARS = 8
TEXT_MARK, DATA_MARK = "enc1:", b"\x00enc1:"
_WRAPPING, _RECOGNISING = "sds/case-key/1", "sds/event/1"  # the purposes of keys derived from the kernel's

Random = Callable[[int], bytes]


def is_sealed(data: bytes) -> bool:
    return data.startswith(DATA_MARK)


def is_sealed_text(text: object, bytes_max: int) -> bool:
    """Tell whether a text has the form of a sealed text of at most `bytes_max` bytes. Raises ValueError for bad base64."""
    if not isinstance(text, str) or not text.startswith(TEXT_MARK):
        return False
    return len(b64decode(text.removeprefix(TEXT_MARK), validate=True)) <= NONCE_BYTES + bytes_max + TAG_BYTES


class CaseKey:
    """The key of one case: it seals and opens the texts in its columns. Opening raises StoreError: the text was altered."""

    def __init__(self, gate: str, event_id: str, key: bytes, *, random: Random) -> None:
        self._case, self._aead, self._random = (gate, event_id), AESGCM(key), random

    def __repr__(self) -> str:
        return "CaseKey(key=***)"

    def seal(self, column: str, data: bytes) -> bytes:
        """Return the ciphertext for a BLOB column; b"" stays b""."""
        return DATA_MARK + self._encrypt(column, data) if data else b""

    def seal_text(self, column: str, text: str) -> str:
        return TEXT_MARK + b64encode(self._encrypt(column, text.encode())).decode()

    def open(self, column: str, sealed: bytes) -> bytes:
        return self._decrypt(column, sealed.removeprefix(DATA_MARK))

    def open_text(self, column: str, sealed: str) -> str:
        try:
            return self._decrypt(column, b64decode(sealed.removeprefix(TEXT_MARK), validate=True)).decode()
        except ValueError as error:
            raise self._altered() from error

    def _encrypt(self, column: str, data: bytes) -> bytes:
        nonce = self._random(NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, data, self._bound_to(column))

    def _decrypt(self, column: str, sealed: bytes) -> bytes:
        try:
            return self._aead.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], self._bound_to(column))
        except (InvalidTag, ValueError) as error:
            raise self._altered() from error

    def _bound_to(self, column: str) -> bytes:
        return canonical([*self._case, column])

    def _altered(self) -> StoreError:
        return StoreError(f"a text of event `{self._case[1]}` differs from what was sealed", hint="sds ledger verify")


class Signer:
    """Signs orders with HMAC-SHA256 under a key of at least 32 bytes that only the kernel holds.

    A signature is `NAME:MAC`, with the name of its key (`key_name`). Signatures by an `older` key, and those of an older
    version without a name, are still verified. `read_again` returns the keys as they are stored now, the newest first, or
    None; it is called when `stamp` returns another value than before. So keys that another process has made are found.
    """

    def __init__(
        self,
        key: bytes,
        *older: bytes,
        read_again: Callable[[], tuple[bytes, ...] | None] = lambda: None,
        stamp: Callable[[], object] = tuple,
    ) -> None:
        self._read_again, self._stamp = read_again, stamp
        self._stamped: object = None  # the first call reads the keys again: they may have changed while they were read
        self._generation, self._reading = 0, threading.Lock()
        self._keys = _checked((key, *older))

    def __repr__(self) -> str:
        return "Signer(key=***)"

    def generation(self) -> int:
        """Take over keys that were made since. Return how often there were any."""
        with self._reading:
            try:
                if (stamp := self._stamp()) == self._stamped:
                    return self._generation
            except OSError:  # the file is gone: the known keys stay in use
                return self._generation
            if (found := self._read_again()) is None:  # the next call asks again
                return self._generation
            keys = _checked(tuple(dict.fromkeys((*found, *self._keys))))
            if keys != self._keys:
                self._keys, self._generation = keys, self._generation + 1
            self._stamped = stamp
            return self._generation

    def derived(self, purpose: str) -> tuple[bytes, ...]:
        """Return a key of 32 bytes for a purpose (HKDF-SHA256, RFC 5869) from each key, first from the one that signs."""
        info = purpose.encode()
        return tuple(HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=info).derive(key) for key in self._keys)

    def sign(self, data: bytes) -> str:
        self.generation()
        key = self._keys[0]
        return f"{key_name(key)}:{_mac(key, data)}"

    def verify(self, data: bytes, signature: bytes) -> bool:
        """Tell whether this kernel signed exactly this data."""
        before = self._generation
        return self._verified(data, signature) or (self.generation() != before and self._verified(data, signature))

    def missing(self, signature: str) -> str:
        """Return the name of the key in a signature when that key is not here, else ""."""
        name = name_in(signature)
        return "" if name in {"", *map(key_name, self._keys)} else name

    def _verified(self, data: bytes, signature: bytes) -> bool:
        name, between, mac = signature.rpartition(b":")
        keys = [key for key in self._keys if not between or key_name(key).encode() == name]
        return any(hmac.compare_digest(_mac(key, data).encode(), mac) for key in keys)


def key_name(key: bytes) -> str:
    """Return the name of a key in signatures: the first digits of its SHA-256, as `sds keys show` lists it."""
    return sha256(key).hexdigest()[:NAME_CHARS]


def name_in(signature: str) -> str:
    """Return the name of the key in a signature, "" when it has none."""
    return signature.rpartition(":")[0][:NAME_CHARS]


def _checked(keys: tuple[bytes, ...]) -> tuple[bytes, ...]:
    if min(map(len, keys)) < KEY_BYTES:
        raise ExecutorError("the kernel's signing key is shorter than 32 bytes")
    return keys


def _mac(key: bytes, data: bytes) -> str:
    return hmac.digest(key, data, "sha256").hex()


class Keyring:
    """Keys derived from the kernel's key and from its older ones. They wrap the keys of cases, and recognise events."""

    def __init__(self, keys: Signer, *, random: Random = secrets.token_bytes) -> None:
        self._keys, self._random = keys, random
        self._derive(keys.generation())

    def __repr__(self) -> str:
        return "Keyring(keys=***)"

    def _derive(self, generation: int) -> None:
        self._wrapping = tuple(AESGCM(key) for key in self._keys.derived(_WRAPPING))
        self._recognising = self._keys.derived(_RECOGNISING)
        self._generation = generation

    def _renew(self) -> bool:
        """Take over keys that were made since. Return whether there are any."""
        generation = self._keys.generation()
        if changed := generation != self._generation:
            self._derive(generation)
        return changed

    def new(self, gate: str, event_id: str) -> tuple[CaseKey, bytes]:
        """Return a fresh key for a case, and the same key wrapped, as the record keeps it."""
        self._renew()
        key, nonce = self._random(KEY_BYTES), self._random(NONCE_BYTES)
        wrapped = nonce + self._wrapping[0].encrypt(nonce, key, canonical([gate, event_id]))
        return CaseKey(gate, event_id, key, random=self._random), wrapped

    def unwrap(self, gate: str, event_id: str, wrapped: bytes) -> CaseKey:
        """Return the key of a case. Raises CaseKeyError when it is wrapped under no key of this kernel."""
        for aead in self._wrapping:
            try:
                key = aead.decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], canonical([gate, event_id]))
            except (InvalidTag, ValueError):
                continue
            return CaseKey(gate, event_id, key, random=self._random)
        if self._renew():  # another process may have wrapped it under a key that was new here
            return self.unwrap(gate, event_id, wrapped)
        raise CaseKeyError(f"the key of event `{event_id}` opens with no key of this kernel", hint="sds ledger verify")

    def fingerprints(self, text: str) -> tuple[str, ...]:
        """Return the keyed hashes of a text, 64 hexadecimal digits, one for each key. Write the first; recognise by any."""
        self._renew()
        return tuple(_mac(key, text.encode()) for key in self._recognising)
