"""What a request for a decision says beside its event: how long it may take, whether to wait, under which key it may be repeated."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.requests import Request

from sds.service.problems import Problem

DEADLINE_HEADER, DEADLINE_QUERY = "Deadline-Ms", "deadline_ms"
KEY_CHARS_MAX = 255
_NUMBER = re.compile(r"[0-9]{1,12}")
_BARE = re.compile(rf"[ -~]{{1,{KEY_CHARS_MAX}}}")
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')  # a string of structured fields (RFC 9651)
_ESCAPED = re.compile(r'\\(["\\])')


@dataclass(frozen=True, slots=True)
class Terms:
    """`deadline_ms`: from the request's arrival; None: what the contract gives. `key`: the idempotency key, unquoted.

    `traceparent`: as it was sent (W3C); what is none counts for nothing.
    """

    deadline_ms: int | None
    respond_async: bool
    key: str | None
    traceparent: str = ""


def terms_of(request: Request, deadline_ms_max: int) -> Terms:
    """Read headers and query of a request. Raises Problem: 400."""
    return Terms(
        _deadline(request, deadline_ms_max),
        _responds_async(request),
        _key(request),
        request.headers.get("traceparent", ""),
    )


def _deadline(request: Request, most: int) -> int | None:
    given = [*request.headers.getlist(DEADLINE_HEADER), *request.query_params.getlist(DEADLINE_QUERY)]
    if not given:
        return None
    if len(given) > 1:
        raise Problem("DEADLINE_INVALID", "the deadline is given twice")
    if not _NUMBER.fullmatch(given[0].strip()) or not 1 <= int(given[0]) <= most:
        raise Problem("DEADLINE_INVALID", f"the deadline is no whole number of milliseconds from 1 to {most}")
    return int(given[0])


def _responds_async(request: Request) -> bool:
    preferences = ",".join(request.headers.getlist("Prefer")).split(",")
    return any(each.partition(";")[0].strip().lower() == "respond-async" for each in preferences)


def _key(request: Request) -> str | None:
    given = request.headers.getlist("Idempotency-Key")
    if not given:
        return None
    key = given[0].strip(" \t") if len(given) == 1 else ""
    if key.startswith('"'):
        quoted = _QUOTED.fullmatch(key)
        key = _ESCAPED.sub(r"\1", quoted[1]) if quoted else ""
    if not _BARE.fullmatch(key):
        why = f"`Idempotency-Key` is not one of 1 to {KEY_CHARS_MAX} printable characters, quoted or bare"
        raise Problem("HEADER_INVALID", why)
    return key
