"""What a service replies, read: an answer, a page, a change; or one error, with its reason code, its hint and its flow.

    UsageError   your mistake: the key, the gate, the event. The same call fails again
    WorldError   not your mistake: the service is full, draining, cannot be reached, or what lies behind it fails.
                 `retryable` says whether the same call may do later

Whatever comes of the network is foreign: it is read strictly, cut to one line, and never a traceback.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sds.kernel.canonical import one_line
from sds.kernel.errors import NOT_AS_WRITTEN, SdsError, UsageError, WorldError
from sds.kernel.flow.states import Answer

LINE_CHARS_MAX = 500
REPLY_BYTES_MAX = 16 << 20
_PROBLEM = "application/problem+json"
# What the service refuses before anything is done: an act of a person may be sent again
_NOTHING_DONE = frozenset({(429, "RATE_LIMITED"), (503, "DRAINING"), (503, "QUEUE_FULL"), (503, "OVERLOADED")})
# Where a reply is no problem of the service (a balancer's page): what may be better a moment later
_AGAIN = frozenset({408, 425, 429, 502, 503, 504})


@dataclass(frozen=True)
class HttpReply:
    """What came. `headers`: by lower-case names."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def retry_after_s(self) -> float:
        """Return how long the service asks to wait; 0: it does not, or in no whole number of seconds."""
        given = self.headers.get("retry-after", "").strip()
        return float(given) if given.isascii() and given.isdecimal() and len(given) <= 6 else 0.0


@dataclass(frozen=True)
class Lost:
    """No reply came. `sent`: the request may have arrived all the same."""

    why: str
    sent: bool = True
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class Changed:
    """What changed in a record. `id`: from where to go on (`last_event_id`); `data`: as the service sent it."""

    id: str
    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class ListPage:
    """Part of a list. `after`: the cursor behind it; None: it is the last."""

    items: tuple[Mapping[str, Any], ...]
    after: str | None


def failure(said: HttpReply | Lost) -> SdsError | None:
    """Return the error that a reply is, or None for one of success."""
    if isinstance(said, Lost):
        hint = "is it running, and is this its address?"
        message = f"the service did not answer: {one_line(said.why, LINE_CHARS_MAX)}"
        return WorldError(message, reason_code="SERVICE_UNREACHABLE", hint=hint, retryable=True)
    if 200 <= said.status < 300:
        return None
    if 300 <= said.status < 400:
        where = one_line(said.headers.get("location", ""), LINE_CHARS_MAX)
        message = f"the service is elsewhere: `{where}`; a key is not carried there"
        return UsageError(message, reason_code="SERVICE_MOVED", hint="give that address")
    return _problem(said)


def act_failure(said: HttpReply | Lost) -> SdsError | None:
    """Return the error that a reply to an act of a person is, which is not to be done twice; None for one of success.

    It is `retryable` only where the service says that it refused before anything was done, or nothing was sent. Where nobody
    knows whether it was done (no reply, 408, or 500 and above from wherever), the error says to look first.
    """
    error = failure(said)
    if error is None or (isinstance(said, Lost) and not said.sent):
        return error
    if isinstance(said, HttpReply) and (_refused_first(said, error) or (said.status < 500 and said.status != 408)):
        error.retryable = _refused_first(said, error)
        return error
    why = one_line(said.why if isinstance(said, Lost) else str(error), LINE_CHARS_MAX)
    return WorldError(
        f"nobody knows whether it was done: {why}",
        reason_code=error.reason_code,
        hint="look first, then ask again",
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
    kind = UsageError if 400 <= reply.status < 500 and not retryable else WorldError
    return kind(
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
    """Return the answer that a reply holds; what a newer service says besides is left out. Raises WorldError: it is none."""
    try:
        known = {f.name: data[f.name] for f in fields(Answer) if f.name in data}  # type: ignore[operator,index]
        known["reasons"] = tuple(known.get("reasons", ()))
        known["params"] = dict(known.get("params") or {})
        return Answer(**known)
    except NOT_AS_WRITTEN as error:
        raise unreadable("no answer") from error


def data_of(reply: HttpReply) -> Any:
    """Return the JSON of a reply. Raises WorldError: it is none."""
    try:
        return json.loads(reply.body)
    except (ValueError, RecursionError) as error:
        raise unreadable("no JSON") from error


def unreadable(why: str) -> WorldError:
    hint = "is this the address of a decision service, and not of something before it?"
    return WorldError(f"the service's reply is {why}", reason_code="SERVICE_REPLY_INVALID", hint=hint)


def page_of(data: object, name: str) -> ListPage:
    """Return one page of a list, which stands under its name beside `next`. Raises WorldError: it is none."""
    items, after = items_of(data, name), data.get("next") if isinstance(data, dict) else None
    if not (after is None or isinstance(after, str)):
        raise unreadable("no page")
    return ListPage(items, after)


def items_of(data: object, name: str) -> tuple[Mapping[str, Any], ...]:
    """Return a list of objects that stands under a name. Raises WorldError: there is none."""
    found = data.get(name) if isinstance(data, dict) else None
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise unreadable("no list")
    return tuple(found)


def object_of(data: object) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise unreadable("no object")
    return data
