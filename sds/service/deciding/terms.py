"""Read the terms of a request for a decision from its headers and query: deadline, waiting, idempotency key, trace."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.datastructures import QueryParams
from starlette.types import Scope

from sds.service.problems import Problem, unknown_parameter

DEADLINE_HEADER, DEADLINE_QUERY = "Deadline-Ms", "deadline_ms"
KEY_CHARS_MAX = 255
_NUMBER = re.compile(r"[0-9]{1,12}")
_BARE = re.compile(rf"[ -~]{{1,{KEY_CHARS_MAX}}}")
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')  # a string of structured fields (RFC 9651)
_ESCAPED = re.compile(r'\\(["\\])')


Headers = Mapping[str, Sequence[str]]  # by name in lower case, in the order in which they came


@dataclass(frozen=True, slots=True)
class Terms:
    """`deadline_ms`: from the request's arrival; None: the contract's. `key`: the idempotency key, without quotes.

    `traceparent`: the W3C header as it was sent, not checked; "" without one.
    """

    deadline_ms: int | None
    respond_async: bool
    key: str | None
    traceparent: str = ""


def headers_of(scope: Scope) -> Headers:
    """Return the headers of a request, by name."""
    headers = dict[str, list[str]]()
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    return headers


def terms_of(headers: Headers, query: bytes, deadline_ms_max: int) -> Terms:
    """Read the headers and query of a request. Raises Problem (400)."""
    return Terms(
        _deadline(headers, query, deadline_ms_max),
        _responds_async(headers),
        _key(headers.get("idempotency-key", ())),
        headers.get("traceparent", ("",))[0],
    )


def _deadline(headers: Headers, query: bytes, most: int) -> int | None:
    given = list(headers.get(DEADLINE_HEADER.lower(), ()))
    for name, value in QueryParams(query).multi_items() if query else ():
        if name != DEADLINE_QUERY:
            raise unknown_parameter(name, (DEADLINE_QUERY,))
        given.append(value)
    if not given:
        return None
    if len(given) > 1:
        raise Problem("DEADLINE_INVALID", "the deadline is given twice")
    if not _NUMBER.fullmatch(given[0].strip()) or not 1 <= int(given[0]) <= most:
        raise Problem("DEADLINE_INVALID", f"the deadline must be a whole number of milliseconds from 1 to {most}")
    return int(given[0])


def _responds_async(headers: Headers) -> bool:
    preferences = ",".join(headers.get("prefer", ())).split(",")
    return any(each.partition(";")[0].strip().lower() == "respond-async" for each in preferences)


def _key(given: Sequence[str]) -> str | None:
    if not given:
        return None
    key = given[0].strip(" \t") if len(given) == 1 else ""
    if key.startswith('"'):
        quoted = _QUOTED.fullmatch(key)
        key = _ESCAPED.sub(r"\1", quoted[1]) if quoted else ""
    if not _BARE.fullmatch(key):
        why = (
            f"`Idempotency-Key` must be given once, as 1 to {KEY_CHARS_MAX} printable ASCII characters, quoted or bare"
        )
        raise Problem("HEADER_INVALID", why)
    return key
