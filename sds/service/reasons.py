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

# What the page says in place of `meaning`, where that is too short for a reader without the request at hand.
EXPLANATIONS: dict[str, str] = {
    "EVENT_INVALID": "The body is not a valid event of this gate. An event is a JSON object with exactly the fields"
    " that the gate names, all of them texts.",
    "HEADER_INVALID": "A request header has an invalid value. `Idempotency-Key` has 1 to 255 printable characters,"
    " and is sent once.",
    "DEADLINE_INVALID": "The deadline is not a whole number of milliseconds from 1 to the gate's limit, or it is"
    " given twice.",
    "CURSOR_INVALID": "This service did not issue the cursor or `Last-Event-ID`, or it is ahead of a restored record.",
    "USAGE": "A parameter or a field of the body is missing, unknown or invalid, or the gate refuses what it asks for.",
    "DFID_UNKNOWN": "No record that this key may read has a decision with this id. An event that waits for its turn"
    " is not on record yet, although `Location` of a 409 may already name its decision. It never comes on record if"
    " nobody waits for it any more.",
    "METHOD_NOT_ALLOWED": "The resource does not support this HTTP method.",
    "FLOW_IN_PROGRESS": "Another request or another process is deciding this event, or will decide it. The deadline"
    " of this request passed while it waited.",
    "CONFLICT": "The resource is in a state that does not permit this request: the case is closed, say, or an"
    " operator has halted the system.",
    "ACKNOWLEDGEMENT_REQUIRED": "The human's decision cannot be undone, and the request does not acknowledge that."
    " Nothing has changed.",
    "STATE_DRIFT_DETECTED": "The case has changed since the human looked at it. Nothing was carried out.",
    "ERASED": "The key that encrypted the texts was destroyed.",
    "EVENT_CONFLICT": "This event id was used before, with another body. An event id names one event for ever. `dfid`"
    " is the decision of the first event.",
    "KEY_CONFLICT": "This idempotency key was used before, with another body. A key stands for one request. `dfid` is"
    " the decision of the first request.",
    "RATE_LIMITED": "The key has sent more requests than its rate permits, or has too many event streams open.",
    "INTERNAL": "The service failed in a way that nobody foresaw. If the problem has an `instance`, the log has a"
    " line with the same `instance`.",
    "OVERLOADED": "With the decisions under way, this one might not be ready in the time that the request has left."
    " Nothing was written.",
    "QUEUE_FULL": "As many decisions wait as the service permits. The event was not decided: nothing was written or,"
    " if there is a `dfid`, its flow ended NOT_DECIDED.",
    "DRAINING": "The service accepts nothing new. Decisions under way that do not end in time end undecided.",
    "NOT_READY": "`/readyz` answers this while the process should get no requests. `checks` lists what is wrong.",
    "EXECUTOR_REFUSED": "The executor, which carries out orders, does not answer.",
    "UNAVAILABLE": "Something else that the request needs is unavailable, for example room for one more event stream.",
    "NOT_DECIDED": "Nobody decided the event within its deadline, and nothing was sent. If there is a `dfid`, its"
    " flow ended NOT_DECIDED and is charged to no agent.",
}

_AS = {
    "TRANSITION_FORBIDDEN": "CONFLICT",
    "FLOW_CLOSED": "CONFLICT",
    "ALREADY_ORDERED": "CONFLICT",
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
        lines += [EXPLANATIONS.get(code, reason.meaning), "", f"Hint: {reason.hint}.", ""]
    return "\n".join(lines[:-1]) + "\n"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201  what this module is run for
