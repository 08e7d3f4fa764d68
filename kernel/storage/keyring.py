"""The keys under which the texts of cases lie: a random one for each case, wrapped under the kernel's. Pure but for chance.

AES-256-GCM (NIST SP 800-38D) by the package `cryptography`. A ciphertext is bound to its case and column, not to its
flow: a case may have several flows. What is sealed is marked, so that what an older version left in clear can be recognised.
"""

from __future__ import annotations

import hmac
import secrets
from base64 import b64decode, b64encode
from collections.abc import Callable
from hashlib import sha256
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sds.kernel.canonical import canonical
from sds.kernel.errors import CaseKeyError, StoreError

KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
TEXT_MARK, DATA_MARK = "enc1:", b"\x00enc1:"
_WRAPPING, _RECOGNISING = "sds/case-key/1", "sds/event/1"  # what the kernel's key is derived for

Random = Callable[[int], bytes]


class DerivesKeys(Protocol):
    """Holds the kernel's keys: see `executor.protocol.Signer`."""

    def generation(self) -> int:
        """Take over keys that were made since; return how often there were any."""
        ...

    def derived(self, purpose: str) -> tuple[bytes, ...]:
        """Return a key of 32 bytes for a purpose of each key that it holds, the one in use first."""
        ...


def is_sealed(data: bytes) -> bool:
    return data.startswith(DATA_MARK)


def is_sealed_text(text: object, bytes_max: int) -> bool:
    """Tell whether this has the form of a sealed text of so many bytes at most. Raises ValueError when it has none."""
    if not isinstance(text, str) or not text.startswith(TEXT_MARK):
        return False
    return len(b64decode(text.removeprefix(TEXT_MARK), validate=True)) <= NONCE_BYTES + bytes_max + TAG_BYTES


class CaseKey:
    """The key of one case: seals and opens what stands in one of its columns. `open` raises StoreError: it is altered."""

    def __init__(self, gate: str, event_id: str, key: bytes, *, random: Random) -> None:
        self._case, self._aead, self._random = (gate, event_id), AESGCM(key), random

    def __repr__(self) -> str:
        return "CaseKey(key=***)"

    def seal(self, column: str, data: bytes) -> bytes:
        """Return the ciphertext of a BLOB; nothing stays nothing."""
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
        return StoreError(f"a text of event `{self._case[1]}` is not what was sealed", hint="sds ledger verify")


class Keyring:
    """What is derived of the kernel's key, and of those it had before: to wrap the keys of cases, to recognise events."""

    def __init__(self, keys: DerivesKeys, *, random: Random = secrets.token_bytes) -> None:
        self._keys, self._random = keys, random
        self._derive(keys.generation())

    def __repr__(self) -> str:
        return "Keyring(keys=***)"

    def _derive(self, generation: int) -> None:
        self._wrapping = tuple(AESGCM(key) for key in self._keys.derived(_WRAPPING))
        self._recognising = self._keys.derived(_RECOGNISING)
        self._generation = generation

    def _renew(self) -> bool:
        """Take over keys that were made since; return whether there are any."""
        generation = self._keys.generation()
        if changed := generation != self._generation:
            self._derive(generation)
        return changed

    def new(self, gate: str, event_id: str) -> tuple[CaseKey, bytes]:
        """Return a fresh key for a case, and the same wrapped, as the record keeps it."""
        self._renew()
        key, nonce = self._random(KEY_BYTES), self._random(NONCE_BYTES)
        wrapped = nonce + self._wrapping[0].encrypt(nonce, key, canonical([gate, event_id]))
        return CaseKey(gate, event_id, key, random=self._random), wrapped

    def unwrap(self, gate: str, event_id: str, wrapped: bytes) -> CaseKey:
        """Return the key of a case. Raises CaseKeyError when it was wrapped under no key of this kernel."""
        for aead in self._wrapping:
            try:
                key = aead.decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], canonical([gate, event_id]))
            except (InvalidTag, ValueError):
                continue
            return CaseKey(gate, event_id, key, random=self._random)
        if self._renew():  # another process has wrapped it under a key that is new here
            return self.unwrap(gate, event_id, wrapped)
        raise CaseKeyError(f"the key of event `{event_id}` is not wrapped under the kernel's", hint="sds ledger verify")

    def fingerprints(self, text: str) -> tuple[str, ...]:
        """Return what a text is recognised by, 64 hexadecimal digits: the first is for writing down, one for each key."""
        self._renew()
        return tuple(hmac.new(key, text.encode(), sha256).hexdigest() for key in self._recognising)
