"""Canonical forms: of data that is hashed or signed, of text from outside, and of the names of events and their keys, so
that what is found and counted by a name is one thing.

Names that look the same must be the same: no blanks around a name, Unicode's composed form (NFC), no invisible characters,
and no digits but 0 to 9, because most programs read other digits as the same number. Letters that look alike (upper and
lower case, full width, another script's) make different names, here and for the systems that the names belong to.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
import uuid
from collections.abc import Mapping

import orjson

from sds.kernel.errors import EventError, UsageError

ID_CHARS_MAX = 128
REASON_CHARS_MAX = 500  # of the reason that a person gives for an act

# Invisible characters that Python calls printable: Unicode's Default_Ignorable_Code_Point (joiners, fillers, variation
# selectors), the Braille pattern without a dot, and two more that are empty.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U00016fe4\U0001d159\U000e0100-\U000e01ef]"
)
# What controls a terminal or turns the direction of a text (Unicode's Cc but tab and line feed, Bidi_Control, its line and
# paragraph separators), and surrogates, which no file or record can hold
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_NOT_ASCII = re.compile(r"[^\n -~]")
# Latin letters that Unicode does not take apart, and marks of typography, in ASCII
_UNACCENTED = {
    **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032", "'"), **dict.fromkeys("\u201c\u201d\u201e\u201f\xab\xbb\u2033", '"'),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"), "…": "...", "€": "EUR", "\u0131": "i",
    "ß": "ss", "ẞ": "SS", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L",
    "đ": "d", "Đ": "D", "ð": "d", "Ð": "D", "þ": "th", "Þ": "Th",
}  # fmt: skip
_VERSION, _VARIANT = 0xF << 76, 0b11 << 62  # the bits of a UUID that hold them
_SORTED = json.JSONEncoder(sort_keys=True)  # DIR's sorted JSON: with blanks, and in ASCII


def canonical(data: object) -> bytes:
    """Return compact JSON with sorted keys. Raises TypeError for integers beyond 64 bits and for what is not JSON."""
    return orjson.dumps(data, option=orjson.OPT_SORT_KEYS)


def digest(data: object) -> str:
    """Return the SHA-256 of the canonical form as 64 hexadecimal digits."""
    return hashlib.sha256(canonical(data)).hexdigest()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def one_line(text: object, chars_max: int) -> str:
    """Return foreign text as the record keeps it: one line, printable, cut to `chars_max` characters."""
    kept = "".join(c if c.isprintable() else " " for c in str(text)[: 4 * chars_max])
    return " ".join(kept.split())[:chars_max]


def kept_whole(what: str, text: str, chars_max: int) -> str:
    """Return what a person typed as the record keeps it: as `one_line` does. Raises UsageError where that would cut it."""
    kept = one_line(text, len(text))
    if len(kept) > chars_max:
        raise UsageError(f"the {what} has {len(kept)} characters, and the record keeps {chars_max}", hint="shorten it")
    return kept


def reason_line(text: str) -> str:
    """Return a person's reason as the record keeps it, on one line; "" where nothing of it can be seen, or it is no text. Raises
    UsageError where it is longer than `REASON_CHARS_MAX`.
    """
    kept = kept_whole("reason", text, REASON_CHARS_MAX) if isinstance(text, str) else ""  # a program may hand on None
    return kept if _UNSEEN.sub("", kept).strip() else ""


def in_words(error: BaseException) -> str:
    """Return an error's message; the name of its type when it has none, or when a foreign error fails to give it."""
    try:
        return str(error) or type(error).__name__
    except Exception:  # noqa: BLE001  the first error must be reported all the same
        return type(error).__name__


def idempotency_key(dfid: str, step_id: str, params: Mapping[str, object]) -> str:
    """Return SHA-256 of `dfid:step_id:sorted-json(params)` (DIR 4.5). Neither attempt nor context is part of it."""
    payload = f"{dfid}:{step_id}:{_SORTED.encode(params)}"
    return hashlib.sha256(payload.encode("utf-8")).hexdigest()


def flow_id(gate: str, event_id: str, body_hash: str, restarts: int) -> str:
    """Return the id of the flow that decides an event for the `restarts`-th time after the first: a UUID made from names.

    It is a UUID of RFC 9562, version 8, made with SHA-256. The same event gets the same id again in a record that was
    restored or lost. So its order has the same idempotency key, and an executor that has carried it out recognises it.
    """
    named = int.from_bytes(hashlib.sha256(canonical([gate, event_id, body_hash, restarts])).digest()[:16])
    return str(uuid.UUID(int=(named & ~_VERSION & ~_VARIANT) | 0x8 << 76 | 0b10 << 62))


def unaccented(text: str) -> str:
    """Return a text with its Latin letters and its marks of typography in ASCII: `café` as `cafe`. What else it holds stays.

    Each character stands for itself, so a text may be cut before or after.
    """
    return text if text.isascii() else "".join(map(_unaccented, text))


def _unaccented(char: str) -> str:
    letter = unicodedata.normalize("NFD", char)[0]
    if letter.isascii() and letter.isalpha():
        return letter
    return "" if "\u0300" <= char <= "\u036f" else _UNACCENTED.get(char, char)


def check_identifier(name: str, text: str) -> None:
    """Raise EventError when the text of the field `name` is no identifier."""
    if not 1 <= len(text) <= ID_CHARS_MAX or not text.isprintable():
        raise EventError(f"`{name}` is not 1 to {ID_CHARS_MAX} printable characters")
    if unseen := _UNSEEN.search(text):
        raise EventError(f"`{name}` has a character that cannot be seen, {_code(unseen[0])}", hint="leave it out")
    if text != text.strip() or not unicodedata.is_normalized("NFC", text):
        raise EventError(f"`{name}` has blanks around it, or is not in Unicode's composed form (NFC)")
    if digit := next((char for char in text if char.isdigit() and not char.isascii()), ""):
        raise EventError(f"`{name}` has a digit that is not 0 to 9, {_code(digit)}", hint="write numbers with 0 to 9")


def is_seen(char: str) -> bool:
    return char.isprintable() and not _UNSEEN.match(char)


def seen_text(text: str, kept: str = "") -> str:
    """Return a text with each invisible character, but those `kept`, as an escape."""
    return "".join(char if is_seen(char) or char in kept else ascii(char)[1:-1] for char in text)


def seen_json(text: str) -> str:
    """Return JSON with each invisible character as an escape: terminals obey some that JSON need not escape."""
    return _NOT_ASCII.sub(lambda found: found[0] if is_seen(found[0]) else _escape(found[0]), text)


def _escape(char: str) -> str:
    return f"\\u{ord(char):04x}" if char < "\U00010000" else json.dumps(char)[1:-1]


def control_in(text: str) -> str:
    """Return the code of the first character that controls a terminal or turns a text, such as `U+202E`; "" without one."""
    found = _CONTROL.search(text)
    return _code(found[0]) if found else ""


def person(text: str, chars_max: int) -> str:
    """Return a user's name as the record keeps it: one line, and one spelling for names that look the same; "" for no text. Raises
    UsageError where it is longer than that.
    """
    seen = _UNSEEN.sub("", text) if isinstance(text, str) else ""
    return kept_whole("name", unicodedata.normalize("NFC", seen), chars_max)


def _code(char: str) -> str:
    return f"U+{ord(char):04X}"


def no_number(text: str) -> float:
    """Refuse NaN and Infinity, which JSON does not have: `json.loads(..., parse_constant=no_number)`."""
    raise ValueError(f"{text} is not a number")
