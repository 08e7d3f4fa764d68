"""One canonical form for everything that is hashed or signed, and the two hashes made from it."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping

import orjson

_VERSION, _VARIANT = 0xF << 76, 0b11 << 62  # where a UUID has them


def canonical(data: object) -> bytes:
    """Return compact JSON with sorted keys. Integers beyond 64 bits raise TypeError, as does anything not JSON."""
    return orjson.dumps(data, option=orjson.OPT_SORT_KEYS)


def digest(data: object) -> str:
    """Return the SHA-256 of the canonical form as 64 hexadecimal digits."""
    return hashlib.sha256(canonical(data)).hexdigest()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def one_line(text: object, chars_max: int) -> str:
    """Return foreign text as the record can keep it: one line, printable, cut to `chars_max`."""
    kept = "".join(c if c.isprintable() else " " for c in str(text)[: 4 * chars_max])
    return " ".join(kept.split())[:chars_max]


def in_words(error: Exception) -> str:
    """Return what an error says; where it says nothing, or a foreign one fails at that as well, the name of its type."""
    try:
        return str(error) or type(error).__name__
    except Exception:  # noqa: BLE001  there is an error all the same
        return type(error).__name__


def idempotency_key(dfid: str, step_id: str, params: Mapping[str, object]) -> str:
    """Return SHA-256 of `dfid:step_id:sorted-json(params)` (DIR 4.5). Neither attempt nor context is part of it."""
    payload = f"{dfid}:{step_id}:{json.dumps(params, sort_keys=True)}"
    return hashlib.sha256(payload.encode("utf-8")).hexdigest()


def flow_id(gate: str, event_id: str, body_hash: str, restarts: int) -> str:
    """Return the id of the flow that decides an event for the `restarts`-th time after the first: a UUID by name.

    RFC 9562, version 8, of SHA-256. The same event has the same id in a record that was restored, or lost, too, so its
    order has the same idempotency key, and whoever has carried it out already recognises it.
    """
    named = int.from_bytes(hashlib.sha256(canonical([gate, event_id, body_hash, restarts])).digest()[:16])
    return str(uuid.UUID(int=(named & ~_VERSION & ~_VARIANT) | 0x8 << 76 | 0b10 << 62))
