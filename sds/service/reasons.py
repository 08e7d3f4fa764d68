"""Every reason code of the service's problems, with its HTTP status, its meaning and its hint.

`docs/errors.md` is generated from this list: `python -m sds.service.reasons > docs/errors.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sds.kernel.errors import SdsError, UsageError, WorldError


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason code. `retryable`: whether the same request may succeed later; `hint`: what to do."""

    status: int
    title: str
    meaning: str
    hint: str
    retryable: bool = False


_AGAIN = "send the same request again, after `Retry-After`"

REASONS: dict[str, Reason] = {
    "EVENT_INVALID": Reason(
        400,
        "The event is invalid",
        "The body is not an event of this gate: a JSON object with exactly the fields that the gate names, all of them strings.",
        "look up the event's fields: /openapi.json has them for each gate",
    ),
    "HEADER_INVALID": Reason(
        400,
        "A header is invalid",
        "A request header has an invalid value. `Idempotency-Key` has 1 to 255 printable ASCII characters, and is sent once.",
        "correct the header that `detail` names, or leave it out",
    ),
    "DEADLINE_INVALID": Reason(
        400,
        "The deadline is invalid",
        "The deadline is not a whole number of milliseconds from 1 to the gate's limit, or it is given twice.",
        "give one whole number of milliseconds; /openapi.json has the maximum of each gate",
    ),
    "CURSOR_INVALID": Reason(
        400,
        "The cursor is invalid",
        "This service did not issue the cursor or `Last-Event-ID`, or it is ahead of a restored record.",
        "leave it out, to begin with the newest decisions or with the next change",
    ),
    "USAGE": Reason(
        400,
        "The request is invalid",
        "A parameter or a field of the body is missing, unknown or invalid, or the gate refuses what it asks for.",
        "correct what `detail` names; /openapi.json describes every request",
    ),
    "UNAUTHENTICATED": Reason(
        401,
        "No valid key",
        "The request has no key, or a key that is unknown or revoked.",
        "send `Authorization: Bearer KEY`; `sds keys add` makes a key",
    ),
    "ROLE_MISSING": Reason(
        403,
        "The key lacks a role",
        "The key lacks the role that this request needs.",
        "use a key that has the role; `sds keys add NAME --role ROLE --gate GATE` makes one",
    ),
    "GATE_FORBIDDEN": Reason(
        403,
        "The key is not for this gate",
        "The key is for other gates.",
        "use a key for this gate; `sds keys add NAME --role ROLE --gate GATE` makes one",
    ),
    "NOT_FOUND": Reason(
        404, "Not found", "No resource has this address.", "/openapi.json lists the addresses of this service"
    ),
    "GATE_UNKNOWN": Reason(
        404,
        "There is no such gate",
        "This service does not serve a gate of that name.",
        "GET /v1/gates lists the gates",
    ),
    "DFID_UNKNOWN": Reason(
        404,
        "There is no such decision",
        "No record that this key may read has a decision with this id. `Location` of a 409 may name a decision before it is"
        " on record: its event waits for its turn, and never comes on record if every request for it stops waiting.",
        "GET /v1/decisions lists the decisions; if a 409 named this one, send its event again, after `Retry-After`",
        retryable=True,
    ),
    "METHOD_NOT_ALLOWED": Reason(
        405,
        "The method is not allowed",
        "The resource does not support this HTTP method.",
        "use a method that the header `Allow` names",
    ),
    "TOO_SLOW": Reason(
        408,
        "The request came too slowly",
        "The whole body of the request did not arrive in time.",
        "send the whole request at once",
        retryable=True,
    ),
    "FLOW_IN_PROGRESS": Reason(
        409,
        "The event is being decided",
        "Another request or process is deciding this event, or will decide it. This request's deadline passed meanwhile.",
        "read the decision at `Location`, or send the same request again, after `Retry-After`",
        retryable=True,
    ),
    "CONFLICT": Reason(
        409,
        "The present state does not permit this",
        "The present state does not permit this request: the case is closed, say, or an operator has halted the system.",
        "read the resource again, and decide then whether to ask again",
    ),
    "ACKNOWLEDGEMENT_REQUIRED": Reason(
        409,
        "HIGH impact must be acknowledged",
        "The human's decision cannot be undone, and the request does not acknowledge that. Nothing has changed.",
        "if the decision is meant, send it again with `acknowledge`: true",
    ),
    "STATE_DRIFT_DETECTED": Reason(
        409,
        "The state has changed",
        "The case has changed since the human looked at it. Nothing was carried out.",
        "read the case again, and send the new `now.id` as `seen`",
    ),
    "ERASED": Reason(
        410,
        "The text was erased",
        "The key that encrypted the texts was destroyed.",
        "do not ask again: erased texts cannot be restored",
    ),
    "BODY_TOO_LARGE": Reason(
        413, "The body is too large", "A body may have at most 65,536 bytes.", "send a smaller body"
    ),
    "MEDIA_TYPE": Reason(
        415,
        "The media type is not supported",
        "The body must be JSON in UTF-8, without a content encoding.",
        "send `Content-Type: application/json`",
    ),
    "EVENT_CONFLICT": Reason(
        422,
        "The event was seen with another body",
        "This event id was used before, with another body. It names one event for ever; `dfid` is the first event's decision.",
        "send the first body again, or give this event an id of its own",
    ),
    "KEY_CONFLICT": Reason(
        422,
        "The idempotency key was used with another body",
        "This key was used before, with another body. It stands for one request; `dfid` is the first request's decision.",
        "send the first body again, or use another key",
    ),
    "RATE_LIMITED": Reason(
        429,
        "Too many requests",
        "The key has sent more requests than its rate permits, or has too many event streams open.",
        _AGAIN,
        retryable=True,
    ),
    "INTERNAL": Reason(
        500,
        "A fault of this service",
        "A fault of the service itself ended this request, which may have taken effect before that. If this problem has an"
        " `instance`, the service's log has a line with the same `instance`.",
        "report the `instance` to the operator of the service; look whether the request took effect before you repeat it",
    ),
    "OVERLOADED": Reason(
        503,
        "No decision within the time left",
        "With the decisions in hand, this one might not be ready within the request's deadline. Nothing was written.",
        _AGAIN,
        retryable=True,
    ),
    "QUEUE_FULL": Reason(
        503,
        "The queue is full",
        "Too many events wait: in this process, for its model, or for another process that decides them. This request wrote"
        " nothing or, if there is a `dfid`, its flow ended NOT_DECIDED.",
        _AGAIN,
        retryable=True,
    ),
    "DRAINING": Reason(
        503,
        "The service is being stopped",
        "The service accepts nothing new. Decisions under way that do not end in time end NOT_DECIDED.",
        _AGAIN,
        retryable=True,
    ),
    "NOT_READY": Reason(
        503,
        "This process is not ready",
        "`/readyz` answers this while the process should get no requests. `checks` lists what is wrong. A request for a decision gets"
        " it where the record has a newer version of the gate's contract than this process, where the ledger was altered, or where"
        " `kernel.key` is lost: nothing was written. A human's decision that would send an order gets it in the last two cases, and"
        " nothing has changed.",
        "look up the checks that are not `ok` in service.md of the documentation, Health; `sds doctor` examines store and model",
        retryable=True,
    ),
    "STORE_UNAVAILABLE": Reason(
        503,
        "The store cannot be used",
        "The store is down, full or damaged. Nothing was acknowledged.",
        "`sds doctor --gate GATE` says what is wrong with the store",
        retryable=True,
    ),
    "MODEL_UNAVAILABLE": Reason(
        503,
        "The model cannot be used",
        "The model's weights, its engine or its server failed. A few failures in a row open a breaker: then nothing is decided"
        " until the model answers a probe. This request wrote nothing or, if there is a `dfid`, its flow ended NOT_DECIDED.",
        "`sds doctor --gate GATE` says what is wrong with the model",
        retryable=True,
    ),
    "STATE_UNAVAILABLE": Reason(
        503, "The state cannot be read", "The source of the gate's state does not answer.", _AGAIN, retryable=True
    ),
    "EXECUTOR_REFUSED": Reason(
        503,
        "The executor does not answer",
        "The executor, which carries out orders, does not answer.",
        _AGAIN,
        retryable=True,
    ),
    "UNAVAILABLE": Reason(
        503,
        "Something is unavailable",
        "Something else that the request needs is unavailable, for example room for one more event stream.",
        _AGAIN,
        retryable=True,
    ),
    "NOT_DECIDED": Reason(
        504,
        "Not decided within the deadline",
        "Nobody decided the event within its deadline, and nothing was sent. If there is a `dfid`, its flow ended"
        " NOT_DECIDED and is charged to no agent.",
        "send the same request again, with a longer deadline",
        retryable=True,
    ),
}

_AS = {
    "TRANSITION_FORBIDDEN": "CONFLICT",
    "FLOW_CLOSED": "CONFLICT",
    "ALREADY_ORDERED": "CONFLICT",
    "HALTED": "CONFLICT",
    "RECORD_DAMAGED": "STORE_UNAVAILABLE",
    "LEDGER_ALTERED": "NOT_READY",
    "KEY_LOST": "NOT_READY",
    "DEADLINE_EXCEEDED": "NOT_DECIDED",
    "CANCELLED": "NOT_DECIDED",
}


def code_of(error: SdsError) -> str:
    """Return the code of `REASONS` for an error: its own where it is listed, else one for the error's class."""
    code = _AS.get(error.reason_code, error.reason_code)
    if code in REASONS:
        return code
    if isinstance(error, UsageError):
        return "USAGE"
    return "UNAVAILABLE" if isinstance(error, WorldError) else "INTERNAL"


def page() -> str:
    """Return docs/errors.md."""
    lines = [
        "# Errors of the service",
        "",
        "Every error response is a problem document, `application/problem+json` (RFC 9457). Its `type` leads to a section of this",
        "page. Besides `title`, `status` and `detail` it has `reason_code`, `retryable`, `hint` and, if the error is about a decision,",
        "its `dfid`. `retryable` tells whether the same request may succeed later.",
        "",
        "Each section gives the status, whether the code is retryable, the title, what the code means, and its usual hint. A code",
        "never changes its meaning. This page is generated: `python -m sds.service.reasons`.",
        "",
    ]
    for code, reason in REASONS.items():
        again = "retryable" if reason.retryable else "not retryable"
        lines += [f"## {code}", "", f"{reason.status}, {again}. *{reason.title}.*", ""]
        lines += [reason.meaning, "", f"Hint: {reason.hint}.", ""]
    return "\n".join(lines[:-1]) + "\n"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201  what this module is run for
