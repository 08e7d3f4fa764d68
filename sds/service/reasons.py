"""Every reason code of the service's problems, with its HTTP status, its meaning and its hint.

`docs/errors.md` is written from this list: `python -m sds.service.reasons`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sds.kernel.errors import SdsError, UsageError, WorldError


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason code. `retryable`: whether the same request may succeed later; `hint`: how to correct the error."""

    status: int
    title: str
    meaning: str
    hint: str
    retryable: bool = False


_AGAIN = "send the same request again, after `Retry-After`"

REASONS: dict[str, Reason] = {
    "EVENT_INVALID": Reason(
        400, "The event is malformed", "The body is no event of the gate.", "GET /v1/gates names the fields of an event"
    ),
    "HEADER_INVALID": Reason(
        400, "A header cannot be used", "A header of the request has no value that it may have.", "see docs/service.md"
    ),
    "DEADLINE_INVALID": Reason(
        400,
        "The deadline cannot be kept",
        "The deadline is no number, not above 0, or longer than the gate's contract gives a decision.",
        "give milliseconds from now, at most `deadline_ms_max` of GET /v1/gates",
    ),
    "CURSOR_INVALID": Reason(
        400, "The cursor is not one of ours", "A page goes on where `next` of the page before says.", "leave it out"
    ),
    "USAGE": Reason(400, "The request cannot be used", "A parameter or field is not what it may be.", "/openapi.json"),
    "UNAUTHENTICATED": Reason(
        401,
        "No key, or none that is good",
        "The request names no key, or one that is unknown or revoked.",
        "send `Authorization: Bearer sds_...`; `sds keys add` makes one",
    ),
    "ROLE_MISSING": Reason(
        403,
        "The key may not do this",
        "The key lacks the role that is needed.",
        "`sds keys add --role ...` makes another",
    ),
    "GATE_FORBIDDEN": Reason(
        403, "The key is not for this gate", "The key names other gates.", "`sds keys add --gate ...` makes another"
    ),
    "NOT_FOUND": Reason(404, "There is nothing here", "No resource has this address.", "see /openapi.json"),
    "GATE_UNKNOWN": Reason(404, "There is no such gate", "This service serves no gate of that name.", "GET /v1/gates"),
    "DFID_UNKNOWN": Reason(
        404,
        "There is no such decision",
        "No record that this key may read has it. One that waits for its turn, which `Location` of a 409 may name, is not on"
        " record yet, and never will be where it is let go before.",
        "GET /v1/decisions lists them; of one that waits: look again, or send its event again, after `Retry-After`",
        retryable=True,
    ),
    "METHOD_NOT_ALLOWED": Reason(405, "Not with this method", "The resource has other methods.", "see `Allow`"),
    "TOO_SLOW": Reason(
        408,
        "The request came too slowly",
        "The body was not there in time.",
        "send the whole request at once",
        retryable=True,
    ),
    "FLOW_IN_PROGRESS": Reason(
        409,
        "It is being decided",
        "Another request, or another process, is deciding this event or will, and the deadline of this one passed meanwhile.",
        "look at `Location`, or send the same request again, after `Retry-After`",
        retryable=True,
    ),
    "CONFLICT": Reason(
        409,
        "Not in this state",
        "What is asked does not fit the state that this is in.",
        "look at it again, then ask again",
    ),
    "ACKNOWLEDGEMENT_REQUIRED": Reason(
        409,
        "It is of HIGH impact",
        "What was decided cannot be undone outside, and that was not acknowledged. Nothing has changed.",
        "if that is what you want, send it with `acknowledge`: true",
    ),
    "STATE_DRIFT_DETECTED": Reason(
        409,
        "The state has moved",
        "The case is no longer as the human saw it. Nothing has changed.",
        "look at the case again, and send what its `now.id` is as `seen`",
    ),
    "ERASED": Reason(
        410, "The text was erased", "The key was destroyed under which the texts lay.", "none: it is final"
    ),
    "BODY_TOO_LARGE": Reason(413, "The body is too large", "A body has 65,536 bytes at most.", "send less"),
    "MEDIA_TYPE": Reason(
        415,
        "Not with this media type",
        "A body is JSON in UTF-8, without a content encoding.",
        "send `Content-Type: application/json`",
    ),
    "EVENT_CONFLICT": Reason(
        422,
        "The event was seen with another body",
        "One event id names one event, for ever: `dfid` is what was made of the first.",
        "send what was sent first, or give the event an id of its own",
    ),
    "KEY_CONFLICT": Reason(
        422,
        "The idempotency key was used with another body",
        "One key stands for one request: `dfid` is what was made of the first.",
        "send what was sent first, or take another key",
    ),
    "RATE_LIMITED": Reason(
        429, "Too many requests", "The key has asked more often than it may.", _AGAIN, retryable=True
    ),
    "INTERNAL": Reason(
        500, "A fault of this service", "Nobody foresaw this. The log has a line with the same `instance`.", "report it"
    ),
    "OVERLOADED": Reason(
        503,
        "No decision within the time left",
        "What waits before it would take longer than this request has: nothing was written.",
        _AGAIN,
        retryable=True,
    ),
    "QUEUE_FULL": Reason(
        503, "The queue is full", "As many decisions wait as may: nothing was written.", _AGAIN, retryable=True
    ),
    "DRAINING": Reason(
        503, "The service is being stopped", "It ends what is under way, and takes nothing new.", _AGAIN, retryable=True
    ),
    "NOT_READY": Reason(
        503, "Send no requests here now", "`checks` says what is not as it has to be.", "`sds doctor`", retryable=True
    ),
    "STORE_UNAVAILABLE": Reason(
        503,
        "The record cannot be used",
        "The store is down, full or damaged: nothing was acknowledged.",
        "`sds doctor` says what is wrong with it",
        retryable=True,
    ),
    "MODEL_UNAVAILABLE": Reason(
        503, "The model cannot be used", "Weights, engine or server do not answer.", "`sds doctor`", retryable=True
    ),
    "STATE_UNAVAILABLE": Reason(
        503, "The state cannot be read", "The source of the gate's state does not answer.", _AGAIN, retryable=True
    ),
    "EXECUTOR_REFUSED": Reason(
        503, "The executor cannot be asked", "What carries out orders does not answer.", _AGAIN, retryable=True
    ),
    "UNAVAILABLE": Reason(503, "Not now", "Something that is needed cannot be used now.", _AGAIN, retryable=True),
    "NOT_DECIDED": Reason(
        504,
        "Not decided within the deadline",
        "Nobody has decided it and nothing was sent; the flow of `dfid` ended NOT_DECIDED, charged to nobody.",
        "send the same request again, with more time",
        retryable=True,
    ),
}


_AS = {
    "TRANSITION_FORBIDDEN": "CONFLICT",
    "FLOW_CLOSED": "CONFLICT",
    "HALTED": "CONFLICT",
    "RECORD_DAMAGED": "STORE_UNAVAILABLE",
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
        "Every error is `application/problem+json` (RFC 9457): `type` is its place on this page, beside `title`, `status` and",
        "`detail` stand `reason_code`, `retryable` (whether the same request may succeed later), `hint` and, where a decision",
        "is meant, its `dfid`. Codes never change their meaning. This page is generated: `python -m sds.service.reasons`.",
        "",
    ]
    for code, reason in REASONS.items():
        again = "retryable" if reason.retryable else "not retryable"
        lines += [f"## {code}", "", f"{reason.status}, {again}. {reason.title}. {reason.meaning}", ""]
        lines += [f"Mend: {reason.hint}.", ""]
    return "\n".join(lines[:-1]) + "\n"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201  what this module is run for
