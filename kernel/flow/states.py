"""The life of a decision flow (DIR 4.3), as a pure table: which state may follow which; and its lease.

A lease is the time in which the holder of a flow may still be at work on it, so that others leave the flow alone. That an
order has its effect at most once does not rest on leases, and so on no clock. A holder whose lease was taken over finds
its flow closed in the transaction that would reserve. What is reserved has one key: recovery looks it up, and sends it
again only under that key, to an executor that honours it; else it voids the key or leaves the order UNKNOWN.
"""

from __future__ import annotations

from typing import Literal

from sds.kernel.errors import TransitionError
from sds.kernel.executor.breaker import EXECUTOR_DOWN
from sds.kernel.executor.wholeness import RECORD_BEHIND

State = Literal["CREATED", "ACTIVE", "VALIDATING", "ACCEPTED", "EXECUTING", "CLOSED", "ABORTED", "ESCALATED"]

_NEXT: dict[State, frozenset[State]] = {
    "CREATED": frozenset({"ACTIVE"}),
    "ACTIVE": frozenset({"VALIDATING", "ABORTED"}),
    "VALIDATING": frozenset({"ACCEPTED", "ABORTED", "ESCALATED", "ACTIVE"}),
    "ACCEPTED": frozenset({"EXECUTING", "ABORTED", "CLOSED"}),
    "EXECUTING": frozenset({"CLOSED", "ABORTED"}),
    "ESCALATED": frozenset({"ACCEPTED", "ABORTED"}),
    "CLOSED": frozenset(),
    "ABORTED": frozenset(),
}

FINAL: frozenset[State] = frozenset({"CLOSED", "ABORTED", "ESCALATED"})

EXECUTION_FAILED = "EXECUTION_FAILED"
# An event whose flow ended ABORTED for one of these may have a fresh flow: nobody has decided the case itself. How often,
# the contract says (`retry.restarts_max`); then it is a human's.
RESTARTABLE_TAGS = frozenset(
    {
        "STATE_DRIFT_DETECTED",
        "SPEND_LIMIT_EXCEEDED",
        "INTERRUPTED",
        "HALTED",
        "AGENT_SUSPENDED",
        "CONTRACT_REVOKED",
        EXECUTION_FAILED,
    }
)
# For these as often as it takes: what stood in the way was the load, another order or the outside, never the case.
NOT_DECIDED, NOT_SENT = "NOT_DECIDED", "NOT_SENT"
CONTENTION = "RESOURCE_CONTENTION"
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"  # why a flow under a deadline ended NOT_DECIDED
ADOPTED = "ADOPTED"  # and declined, or taken back: an order that the record did not know
WAITING_TAGS = frozenset({ADOPTED, NOT_DECIDED, CONTENTION, EXECUTOR_DOWN, NOT_SENT, RECORD_BEHIND})
UNDECIDED_TAGS = RESTARTABLE_TAGS | WAITING_TAGS
# What ended ABORTED under one of these is decided: by a human, by what a saga's menu chose, by a step that was denied, by
# whoever erased the case, which has no text any more to be decided on.
ERASED = "ERASED"
SAGA_DIRTY = "PARTIAL_SUCCESS_DIRTY"
DECIDED_TAGS = frozenset({"HUMAN_ABORTED", "COMPENSATED", SAGA_DIRTY, "STEP_DENIED", ERASED})


def may_restart(tag: str | None, restarts: int, restarts_max: int) -> bool:
    """Tell whether what ended for `tag` may have a fresh flow. `restarts`: how many have counted against the limit."""
    return tag in WAITING_TAGS or (tag in RESTARTABLE_TAGS and restarts < restarts_max)


def transition(start: State, *path: State) -> State:
    """Follow `path` from `start`, one permitted step at a time. Raises TransitionError at the first that is not."""
    for state in path:
        if state not in _NEXT[start]:
            raise TransitionError(f"a flow cannot go from {start} to {state}")
        start = state
    return start


def is_held(begun_ms: int, until_ms: int, now_ms: int) -> bool:
    """Tell whether a lease from `begun_ms` until `until_ms` (milliseconds since 1970) still runs.

    It is over after its end, and also if it begins further ahead than it is long: then the clock was ahead when it was
    written and has been set back, and waiting for that time would hold what is reserved for as long. Up to its own length
    it is waited for: of two who share a record, one may have read the clock a little earlier.
    """
    return begun_ms - (until_ms - begun_ms) <= now_ms <= until_ms
