"""The life of a decision flow (DIR 4.3), as a pure table: which state may follow which."""

from __future__ import annotations

from typing import Literal

from sds.kernel.errors import TransitionError

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
NOT_DECIDED, EXECUTOR_DOWN, NOT_SENT, RECORD_BEHIND = "NOT_DECIDED", "EXECUTOR_DOWN", "NOT_SENT", "RECORD_BEHIND"
CONTENTION = "RESOURCE_CONTENTION"
ADOPTED = "ADOPTED"  # and declined, or taken back: an order that the record did not know
WAITING_TAGS = frozenset({ADOPTED, NOT_DECIDED, CONTENTION, EXECUTOR_DOWN, NOT_SENT, RECORD_BEHIND})
UNDECIDED_TAGS = RESTARTABLE_TAGS | WAITING_TAGS
# What ended ABORTED under one of these is decided: by a human, by what a saga's menu chose, by a step that was denied, by
# whoever erased the case, which has no text any more to be decided on.
ERASED = "ERASED"
DECIDED_TAGS = frozenset({"HUMAN_ABORTED", "COMPENSATED", "PARTIAL_SUCCESS_DIRTY", "STEP_DENIED", ERASED})


def may_restart(tag: str | None, restarts: int, restarts_max: int) -> bool:
    """Tell whether what ended for `tag` may have a fresh flow. `restarts`: how many have counted against the limit."""
    return tag in WAITING_TAGS or (tag in RESTARTABLE_TAGS and restarts < restarts_max)


def walk(start: State, *path: State) -> State:
    """Follow `path` from `start`, one permitted step at a time. Raises TransitionError at the first that is not."""
    for state in path:
        if state not in _NEXT[start]:
            raise TransitionError(f"a flow cannot go from {start} to {state}")
        start = state
    return start
