"""The names by which the outside says which event, and whose: one spelling for each, so that what is found and counted by
a name is one thing.

What looks the same must be the same: no blanks around, Unicode's composed form (NFC), no character that cannot be seen, no
digits but 0 to 9, which most programs read as the same number. Letters that look alike (upper and lower case, full width,
another script's) are different names, here and by whoever answers for the name.
"""

from __future__ import annotations

import re
import unicodedata

from sds.kernel.canonical import one_line
from sds.kernel.errors import EventError

ID_CHARS_MAX = 128

# What Python calls printable and nobody sees: Unicode's Default_Ignorable_Code_Point (joiners, fillers, variation
# selectors), the Braille pattern without a dot, two more that are empty.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U00016fe4\U0001d159\U000e0100-\U000e01ef]"
)


def check_identifier(name: str, text: str) -> None:
    """Raise EventError where the text of the field `name` is no identifier."""
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


def person(text: str, chars_max: int) -> str:
    """Return a user's name as the record keeps it: one line, and one spelling for what looks the same."""
    return one_line(unicodedata.normalize("NFC", _UNSEEN.sub("", text)), chars_max)


def _code(char: str) -> str:
    return f"U+{ord(char):04X}"
