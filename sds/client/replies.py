"""Read a service's replies: an answer, a page or a change; or an error, with its reason code, its hint and its dfid.

    UsageError   your mistake: the key, the gate, the event. The same call fails again
    WorldError   not your mistake: the service is full, draining or cannot be reached, or what it depends on fails.
                 `retryable` tells whether the same call may succeed later

Where a gate raises a kind of these for the code (`EventError`, `StoreError`), that kind is raised.

Replies are not trusted: they are read strictly, and their texts are cut to one line. None causes a traceback.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sds.kernel.canonical import one_line
from sds.kernel.errors import (
    NOT_AS_WRITTEN,
    ErasedError,
    EventError,
    ExecutorError,
    ModelError,
    SdsError,
    StateError,
    StoreError,
    UsageError,
    WorldError,
)
from sds.kernel.flow.states import Answer

LINE_CHARS_MAX = 500
REPLY_BYTES_MAX = 16 << 20
_PROBLEM = "application/problem+json"
# The errors that a gate raises with these codes
_KINDS = {
    each.reason_code: each for each in (EventError, ErasedError, StoreError, StateError, ModelError, ExecutorError)
}
_KINDS |= {"EVENT_CONFLICT": EventError}
# Refusals before anything is done: an act of a person may be sent again after them
_NOTHING_DONE = frozenset({(429, "RATE_LIMITED"), (503, "DRAINING"), (503, "QUEUE_FULL"), (503, "OVERLOADED")})
# Statuses after which to try again, where a reply is no problem of the service (a load balancer's page)
_AGAIN = frozenset({408, 425, 429, 502, 503, 504})


@dataclass(frozen=True)
class HttpReply:
    """One HTTP reply. `headers`: by name in lower case."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def retry_after_s(self) -> float:
        """The `Retry-After` in seconds; 0 where there is none, or it is no whole number of up to 6 digits."""
        given = self.headers.get("retry-after", "").strip()
        return float(given) if given.isascii() and given.isdecimal() and len(given) <= 6 else 0.0


@dataclass(frozen=True)
class Lost:
    """No reply came. `sent`: whether the request may have arrived all the same."""

    why: str
    sent: bool = True
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class Changed:
    """One change in a record. `id`: the `last_event_id` to go on after it; `data`: as the service sent it."""

    id: str
    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class ListPage:
    """One page of a list. `after`: the next page's cursor; None: this is the last page."""

    items: tuple[Mapping[str, Any], ...]
    after: str | None


def failure(said: HttpReply | Lost) -> SdsError | None:
    """Return a reply's error; None for a successful reply."""
    if isinstance(said, Lost):
        hint = "check that the service runs, and that the client's `url` is its address"
        message = f"the service did not answer: {one_line(said.why, LINE_CHARS_MAX)}"
        return WorldError(message, reason_code="SERVICE_UNREACHABLE", hint=hint, retryable=True)
    if 200 <= said.status < 300:
        return None
    if 300 <= said.status < 400:
        where = one_line(said.headers.get("location", ""), LINE_CHARS_MAX)
        message = f"the service redirects to `{where}`, and the client does not send its key there"
        return UsageError(message, reason_code="SERVICE_MOVED", hint="if you trust that address, use it as `url`")
    return _problem(said)


def act_failure(said: HttpReply | Lost) -> SdsError | None:
    """Return the error of a reply to an act of a person, which must not be done twice; None for a successful reply.

    The error is `retryable` only where nothing was sent, or the service refused before anything was done. Where it is not
    known whether the act was done (no reply, 408, or 500 and above from anywhere), the error says to look first.
    """
    error = failure(said)
    if error is None or (isinstance(said, Lost) and not said.sent):
        return error
    if isinstance(said, HttpReply) and (_refused_first(said, error) or (said.status < 500 and said.status != 408)):
        error.retryable = _refused_first(said, error)
        return error
    why = one_line(said.why if isinstance(said, Lost) else str(error), LINE_CHARS_MAX)
    return WorldError(
        f"the service may have done this, or not: {why}",
        reason_code=error.reason_code,
        hint="read the present state first; ask again only if it was not done",
        dfid=error.dfid,
        retryable=False,
    )


def _refused_first(reply: HttpReply, error: SdsError) -> bool:
    ours = reply.headers.get("content-type", "").startswith(_PROBLEM)
    return ours and error.retryable and (reply.status, error.reason_code) in _NOTHING_DONE


def _problem(reply: HttpReply) -> SdsError:
    said = _object(reply.body) if reply.headers.get("content-type", "").startswith(_PROBLEM) else {}
    kept = {
        name: one_line(value if isinstance(value := said.get(name), str) else "", LINE_CHARS_MAX)
        for name in ("detail", "title", "reason_code", "hint", "dfid")
    }
    given = said.get("retryable")
    retryable = given if isinstance(given, bool) else reply.status in _AGAIN
    kind: type[SdsError] = UsageError if 400 <= reply.status < 500 and not retryable else WorldError
    named = _KINDS.get(kept["reason_code"], kind)
    return (named if issubclass(named, kind) else kind)(
        kept["detail"] or kept["title"] or f"the service answered with status {reply.status}",
        reason_code=kept["reason_code"] or f"HTTP_{reply.status}",
        hint=kept["hint"],
        dfid=kept["dfid"],
        retryable=retryable,
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def answer_of(data: object) -> Answer:
    """Return a reply's answer, without fields that only a newer service knows. Raises WorldError where it is no answer."""
    try:
        known = {f.name: data[f.name] for f in fields(Answer) if f.name in data}  # type: ignore[operator,index]
        known["reasons"] = tuple(known.get("reasons", ()))
        known["params"] = dict(known.get("params") or {})
        return Answer(**known)
    except NOT_AS_WRITTEN as error:
        raise unreadable("not an answer") from error


def data_of(reply: HttpReply) -> Any:
    """Return a reply's JSON. Raises WorldError where it is no JSON."""
    try:
        return json.loads(reply.body)
    except (ValueError, RecursionError) as error:
        raise unreadable("not JSON") from error


def unreadable(why: str) -> WorldError:
    hint = "check that the client's `url` is that of a decision service; a proxy before it may have replied"
    return WorldError(f"the service's reply is {why}", reason_code="SERVICE_REPLY_INVALID", hint=hint)


def page_of(data: object, name: str) -> ListPage:
    """Return one page of a list: the list under `name`, and the cursor under `next`. Raises WorldError."""
    items, after = items_of(data, name), data.get("next") if isinstance(data, dict) else None
    if not (after is None or isinstance(after, str)):
        raise unreadable("not a page of a list")
    return ListPage(items, after)


def items_of(data: object, name: str) -> tuple[Mapping[str, Any], ...]:
    """Return the list of objects under `name`. Raises WorldError where there is none."""
    found = data.get(name) if isinstance(data, dict) else None
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise unreadable("not a list of objects")
    return tuple(found)


def object_of(data: object) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise unreadable("not an object")
    return data
