"""The forms of a contract's texts and numbers, and the plain words for what is wrong with one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import date
from difflib import get_close_matches
from typing import Annotated, Any, get_args, get_origin
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from sds.kernel.canonical import is_seen
from sds.kernel.contract.yaml_lines import Lines
from sds.kernel.envelope.envelope import MAGNITUDE_MAX

NOT_TEXT = "must be text"
NOT_DRAWN = "must be the name of a parameter or fill, or a whole number"
MILLIS_MAX = 24 * 3600 * 1000
LEVELS_MAX = 16
WORDS_CHARS_MAX = 64
MAPPING, LISTED = FORMS = "(mapping)", "(list)"  # the forms of a section that has two; no part of a field's path
_WORD = re.compile("[ -~]{1,32}")


def shown(value: str) -> str:
    """Return the beginning of a user's text, in printable characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value[:40])


def text_of(form: str, words: str) -> AfterValidator:
    """Return a check that a text matches the pattern `form`; its message says the form in plain `words`."""

    def check(value: str) -> str:
        if not re.fullmatch(form, value):
            raise ValueError(f"`{shown(value)}` is not {words}")
        return value

    return AfterValidator(check)


def _words(value: str) -> str:
    if not value or len(value) > WORDS_CHARS_MAX or value != value.strip() or not all(map(is_seen, value)):
        raise ValueError(
            f"`{shown(value)}` is not 1 to {WORDS_CHARS_MAX} characters that can be seen, without blanks around them"
        )
    return value


def _date(value: str) -> str:
    try:
        date.fromisoformat(value)
    except ValueError:
        raise ValueError(f"`{value}` is not a date") from None
    return value


def _expression(value: object) -> object:
    """Return an expression's text: YAML reads `when: true` as a truth value and `lo: 1` as a number."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else value


def _drawn(value: object) -> object:
    if type(value) not in (int, str):
        raise ValueError(NOT_DRAWN)
    return value


def _shown(value: object) -> object:
    """Return (field, label) pairs in their order, which the model sees. A plain list labels fields with their own names."""
    if value == {}:
        raise ValueError("names no field: to show all fields, leave `show` out")
    if isinstance(value, dict):
        for path, label in value.items():
            if not isinstance(label, str):
                raise ContradictionError((path,), NOT_TEXT)
        return tuple(value.items())
    if isinstance(value, tuple | list):
        pairs = ((item, item) if isinstance(item, str) else item for item in value)
        return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in pairs)
    raise ValueError("must be a list of fields, or a mapping of fields to labels")


def _levels(value: object) -> object:
    """Check a list of words with the least number of the second between each two."""
    if not isinstance(value, tuple | list):
        raise ValueError("must be a list of words with a whole number between each two")  # noqa: TRY004  as above
    if len(value) < 3 or len(value) % 2 == 0:
        raise ValueError("must be two or more words with a whole number between each two")
    if len(value) > 2 * LEVELS_MAX - 1:
        raise ValueError(f"must have {LEVELS_MAX} or fewer words")
    for index, item in enumerate(value):
        fault = _number_fault(item, value[:index]) if index % 2 else _word_fault(item, value[:index])
        if fault:
            raise ContradictionError((index,), fault)
    return tuple(value)


def _word_fault(word: object, before: Sequence[object]) -> str:
    if not isinstance(word, str):
        return NOT_TEXT
    if not _WORD.fullmatch(word):
        return "is not a word of 1 to 32 printable ASCII characters"
    return f"`{word}` is the word of another level" if word in before else ""


def _number_fault(least: object, before: Sequence[object]) -> str:
    if type(least) is not int:
        return "must be a whole number"
    if abs(least) > MAGNITUDE_MAX:
        return f"must be from {-MAGNITUDE_MAX} to {MAGNITUDE_MAX}"
    lower = [number for number in before if isinstance(number, int)]
    return f"must be more than {lower[-1]}, the number before it" if lower and least <= lower[-1] else ""


def _zone(value: str) -> str:
    """Check a name of the IANA database. A name like `localtime` would be another zone on every machine."""
    try:
        if not re.fullmatch(r"[A-Z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*", value):
            raise ValueError(value)
        ZoneInfo(value)
    except (ValueError, OSError, ZoneInfoNotFoundError):
        alike = get_close_matches(value, available_timezones(), n=1) or ["Europe/Berlin"]
        raise ValueError(f"`{shown(value)}` is not an IANA time zone: write one like {alike[0]}") from None
    return value


Code = Annotated[str, text_of("[A-Z][A-Z0-9_]{0,63}", "a code IN_CAPITALS")]
Name = Annotated[str, text_of("[a-z][a-z0-9_]{0,63}", "a name in_lower_case")]
FieldPath = Annotated[
    str, text_of(r"[a-z][a-z0-9_]{0,31}\.[a-z][a-z0-9_]{0,63}", "two lower-case names with a dot between")
]
SemVer = Annotated[str, text_of(r"[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9}", "a version like 1.0.0")]
Date = Annotated[str, text_of("[0-9]{4}-[0-9]{2}-[0-9]{2}", "a date like 2026-01-31"), AfterValidator(_date)]
AgentId = Annotated[str, text_of("[a-z0-9][a-z0-9_.-]{0,63}", "an id of lower-case letters, digits, `_`, `.` and `-`")]
TimeZone = Annotated[str, Field(max_length=64), AfterValidator(_zone)]
Label = Annotated[str, text_of(r"[ -~]{1,64}", "a label of 1 to 64 printable ASCII characters")]
Shown = Annotated[tuple[tuple[FieldPath, Label], ...], BeforeValidator(_shown)]
Words = Annotated[str, AfterValidator(_words)]
Levels = Annotated[tuple[str | int, ...], BeforeValidator(_levels)]
FieldType = Annotated[
    str,
    text_of(
        r"bool|int|string|timestamp|fixed\([0-6]\)|enum\([A-Za-z0-9_]+(, ?[A-Za-z0-9_]+)*\)",
        "one of bool, int, string, timestamp, fixed(0) to fixed(6), enum(a, b)",
    ),
]
Expression = Annotated[str, BeforeValidator(_expression)]
Drawn = Annotated[Name | Annotated[int, Field(ge=1, le=MAGNITUDE_MAX)], BeforeValidator(_drawn)]
Amount = Annotated[int, Field(ge=0, le=MAGNITUDE_MAX)]
Millis = Annotated[int, Field(ge=1, le=MILLIS_MAX)]


class ContradictionError(ValueError):
    """A contradiction between fields, with the path of the wrong one."""

    def __init__(self, path: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.path = path


_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "is not a known field",
    "string_type": NOT_TEXT,
    "int_type": "must be a whole number",
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have {max_length} or fewer characters",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have {max_length} or fewer entries",
}
_RENAMED = {"rationale_chars_max": "is now `rationale: {{order: before, chars_max: N}}`"}


def say_first(errors: Sequence[Any], lines: Lines, form: type[BaseModel]) -> tuple[int, str]:
    """Return the first of some pydantic errors of a `form`, as `say` does; for an unknown field with the one it may mean.

    An unknown field beside a missing one of a similar name is that one misspelt: the two are one error.
    """
    found = []
    for error in errors:
        place, kind = tuple(error["loc"][:-1]), error["type"]
        twins = {"extra_forbidden": "missing", "missing": "extra_forbidden"}.get(kind, "")
        names = [str(each["loc"][-1]) for each in errors if each["type"] == twins and tuple(each["loc"][:-1]) == place]
        meant = get_close_matches(str(error["loc"][-1]), names, n=1) if names else []
        line, message = say(error, lines)
        if not meant:
            unknown = kind == "extra_forbidden" and error["loc"][-1] not in _RENAMED
            found.append((line, message + _known(form, error["loc"]) if unknown else message))
        elif kind == "extra_forbidden":
            found.append((line, f"{message}: did you mean `{meant[0]}`, which is missing?"))
    return min(found)


def _known(form: type[BaseModel], loc: Sequence[str | int]) -> str:
    """Say which field of its section an unknown field resembles most or, if none, which fields there are."""
    *place, name = (part for part in loc if part not in FORMS)
    fields = sorted({field for section in _sections(form, place) for field in section.model_fields})
    like = get_close_matches(str(name), fields, n=1)
    return f": did you mean `{like[0]}`?" if like else f": the fields here are {', '.join(fields)}"


def _sections(form: Any, place: Sequence[str | int]) -> Iterator[type[BaseModel]]:
    """Yield each section that a type, a section or what contains some, has at a place."""
    if isinstance(form, type) and issubclass(form, BaseModel):
        if not place:
            yield form
        elif field := form.model_fields.get(str(place[0])):
            yield from _sections(field.annotation, place[1:])
        return
    contains = get_origin(form) in (dict, list, tuple)
    for part in get_args(form) if place or not contains else ():
        yield from _sections(part, place[1:] if contains else place)


def say(error: Any, lines: Lines) -> tuple[int, str]:
    """Return the line of a pydantic error, and the error in plain words behind the path of its field."""
    loc, context = tuple(part for part in error["loc"] if part not in FORMS), error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, ContradictionError):
        loc = (*loc, *cause.path)
    plain = _RENAMED.get(loc[-1]) if error["type"] == "extra_forbidden" else None
    plain = plain or _WORDS.get(error["type"])
    message = str(cause) if cause else plain.format(**context) if plain else str(error["msg"])
    known = loc
    while known not in lines:
        known = known[:-1]
    if message in (NOT_TEXT, NOT_DRAWN) and known in lines.misread:
        message = f"{message}: {lines.misread[known]}"
    where = (*known, loc[-1]) if error["type"] == "missing" else known
    return lines[known], f"{'.'.join(map(str, where))}: {message}" if where else message
